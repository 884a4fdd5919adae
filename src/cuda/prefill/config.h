// SPDX-License-Identifier: Apache-2.0
// What the prefill kernels are compiled for, by problem, and the parameters of a run.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.h"
#include "cuda/attention/work_tiles.h"
#include "cuda/kernel.h"
#include "cuda/tensor_map.h"
#include "prefill/prefill_params.h"

namespace attune::cuda::prefill {

struct Config : attention::WorkTiles {
  // What the kernel is compiled for.
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t dtype = 0, cache_dtype = 0, out_dtype = 0;
  int rows = 128;          // packed rows of a block
  int stages = 2;          // of K and V
  int query_stages = 1;    // of Q; with two, V has one stage less
  int raw_stages = 0;      // of 8-bit tiles before they are converted: a quantized cache, or V of fp8
  int cluster = 1;         // blocks that copy keys together
  bool row_pairs = false;  // these are of neighbouring tokens, not of different heads; tokens_of_tile is of one block
  int score = 0, mask = 0;
  bool low_cap = false;   // softcap alone, and so low that scores are hardly ever small beside it
  bool x_packed = false;  // the cache
  int gather = 0;         // bytes of a cp.async, where the TMA cannot copy the cache; else 0
  bool cached = false, dense = false;
  int token_scales = 0;  // KvCache::token_scales()

  kernels::T5Table t5 = {};  // buckets; a run brings the table itself
  int max_decode_q = 0;      // sequences with at most so many queries are left to another kernel

  bool fp8() const { return dtype == ATTUNE_FLOAT8_E4M3; }  // kernels/prefill/prefill_fp8.cu
  bool fp32() const { return dtype == ATTUNE_FLOAT32; }     // kernels/prefill/prefill_fp32.cu
  const char* name() const { return fp32() ? "cuda_prefill_fp32" : fp8() ? "cuda_prefill_fp8" : "cuda_prefill"; }
  int threads() const { return 128 + 2 * rows; }
  size_t shared_bytes() const;
  KernelSpec main_kernel() const;
  KernelSpec schedule_kernel() const;
};

// "" if the kernel takes the problem, else what it does not take. Only what the coverage row cannot say.
std::string refusal(const Problem& p);
// Of cuda_prefill_fp32, which also takes 16-bit queries over caches that the TMA and cp.async cannot copy.
std::string refusal_as_fp32(const Problem& p);
// max_decode_q: sequences with at most so many queries are left to another kernel.
Config choose_config(const Problem& p, int num_sms, int max_decode_q = 0);

// Makes pairs of blocks with neighbouring tokens, as choose_config does for long prompts. The grid has num_blocks
// blocks.
void pair_rows(Config& c, int num_blocks);

// Throws INVALID_ARGUMENT where the TMA cannot copy from the addresses of a run. Kernels of fp32 queries have no TMA.
// gathered: threads copy the cache, from any address.
void check_alignment(const Problem& p, bool gathered = false);
// Also throws where a run, after the launches before it, has rows, a cache, a scale or ranges that the kernel of its
// plan does not take.
void check_run(const Problem& p, const Config& c);

kernels::WorkTileParams to_params(const Problem& p, const Config& c, void* workspace);
// fp32: which rows of a run can be loaded four channels at a time.
kernels::Fp32Rows fp32_rows(const Problem& p);

// The kernel's tensor maps, in the order of its parameters. Rank 0: the kernel does not use this one.
struct Maps {
  TensorMapDesc q, k, v, dense_k, dense_v;
};
Maps describe_maps(const Problem& p, const Config& c);

}  // namespace attune::cuda::prefill
