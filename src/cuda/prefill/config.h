// SPDX-License-Identifier: Apache-2.0
// Which specialisation of the prefill kernel a problem gets, and what a run hands to it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "core/problem.h"
#include "cuda/device.h"
#include "cuda/kernel.h"
#include "cuda/tensor_map.h"
#include "prefill/prefill_params.h"

namespace attune::cuda::prefill {

struct Config {
  // What the kernel is compiled for.
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t dtype = 0, cache_dtype = 0, out_dtype = 0;
  int rows = 128;              // packed, of a block
  int keys = 128, stages = 2;  // of a tile; of the rings of K and of V
  int query_stages = 1;        // of q; with two V has a stage less
  int raw_stages = 0;          // of the ring of codes, where the cache, or everything, has 8 bits
  int score = 0, mask = 0;
  bool low_cap = false;   // softcap alone, and so low that scores are hardly ever small beside it
  bool x_packed = false;  // the cache
  int gather = 0;         // bytes that threads copy at a time from a cache that the TMA does not take; 0: it does
  bool cached = false, dense = false;
  bool token_scales = false;  // K or V of the cache has a scale for each token

  kernels::T5Table t5 = {};  // buckets; the table itself comes with a run
  int heads_of_tile = 1;     // query heads that share a block of rows
  int blocks = 1;            // of the grid; all of them run at a time
  int64_t batch = 0, max_work_tiles = 0;
  bool splits = true;  // blocks of rows may be cut along the keys
  int few_q = 0;       // sequences of no more queries are left to another kernel

  bool fp8() const { return dtype == ATTUNE_FLOAT8_E4M3; }  // kernels/prefill/prefill_fp8.cu
  bool fp32() const { return dtype == ATTUNE_FLOAT32; }     // kernels/prefill/prefill_fp32.cu
  const char* name() const { return fp32() ? "cuda_prefill_fp32" : fp8() ? "cuda_prefill_fp8" : "cuda_prefill"; }
  int threads() const { return 128 + 2 * rows; }
  int tokens_of_tile() const { return rows / heads_of_tile; }
  size_t shared_bytes() const;
  KernelSpec main_kernel() const;
  KernelSpec schedule_kernel() const;
};

// Most work tiles that the schedule lists, and the blocks of the grid that takes them. tokens, heads: of a block of
// rows; splits: blocks of rows may be cut along the keys.
struct WorkLimits {
  int64_t max_work_tiles = 0;
  int blocks = 1;
};
WorkLimits work_limits(const Problem& p, int64_t tokens, int64_t heads, bool splits, int num_sms);

// As many query heads of a KV head as fill the rows of a block best, with so many tokens at most; the more the better.
int choose_heads_of_tile(int64_t group, int rows_of_tile, int64_t most_tokens = std::numeric_limits<int64_t>::max());

// "" if the kernel takes the problem, else what it does not take, where the coverage row cannot say it.
std::string refusal(const Problem& p);
// Of cuda_prefill_fp32, which takes 16-bit queries, too: where the TMA does not take a cache's rows.
std::string refusal_as_fp32(const Problem& p);
// few_q: sequences of at most so many queries are left to another kernel.
Config choose_config(const Problem& p, int num_sms, int few_q = 0);

// Throws INVALID_ARGUMENT where the pointers of a run are not aligned as TMA needs them. fp32 queries are for kernels
// without it. gathered: threads copy the cache.
void check_alignment(const Problem& p, bool gathered = false);
// And where a run, after the launches before it, has rows, a cache, a scale or ranges that the kernel of its plan does
// not take.
void check_run(const Problem& p, const Config& c);

// Where the pieces of the workspace begin.
struct WorkspaceLayout {
  size_t list = 0, work_tiles = 0, block_begin = 0, splits_done = 0, stats = 0, out = 0, total = 0;
};
WorkspaceLayout workspace_layout(const Config& c);

kernels::PrefillParams to_params(const Problem& p, const Config& c, void* workspace);
// Of fp32 queries: which of a run's rows can be loaded four channels at a time.
kernels::Fp32Rows fp32_rows(const Problem& p);

// What the TMA must know of the problem's arrays, in the order of the kernel's parameters; absent ones repeat q's.
struct Maps {
  TensorMapDesc q, k, v, dense_k, dense_v;
};
Maps describe_maps(const Problem& p, const Config& c);

}  // namespace attune::cuda::prefill
