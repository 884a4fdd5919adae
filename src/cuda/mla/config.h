// SPDX-License-Identifier: Apache-2.0
// Which specialisation of the MLA kernel a problem gets, and what a run hands to it.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.h"
#include "cuda/kernel.h"
#include "cuda/tensor_map.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

struct Config {
  // What the kernel is compiled for.
  int head_dim_qk = 0;
  int32_t dtype = 0, out_dtype = 0;
  kernels::MlaProducer producer = kernels::kMlaTma;
  bool sparse = false, dense = false;  // dense: rows that are not in a cache
  int rows = kernels::kMlaBlockM;      // of queries that a block has at most
  bool m16 = false;                    // the kernel of few rows
  bool swap_ab = false;                // that of half a block of rows, or a quarter

  int heads_of_tile = 1;   // query heads that share a block of rows
  int tokens_of_tile = 1;  // most tokens that do
  int blocks = 1;          // of the grid; all of them run at a time
  int cluster = 1;         // blocks that share the keys they have copied or decode
  int fewest_tiles = 1;    // of a part of a block of rows
  int64_t batch = 0, max_work_tiles = 0;
  int64_t max_row_pairs = 0;  // of rows that are merged
  bool splits = true;         // blocks of rows may be cut along the keys

  unsigned threads() const;
  unsigned combine_blocks(int num_sms) const;  // two a multiprocessor, or as many as there is work for
  size_t shared_bytes() const;
  KernelSpec main_kernel() const;
  KernelSpec schedule_kernel() const;
  KernelSpec combine_kernel() const;
};

// "" if the kernel takes the problem, else what it does not take, where the coverage row cannot say it.
std::string refusal(const Problem& p);
Config choose_config(const Problem& p, int num_sms);

// Throws INVALID_ARGUMENT where the pointers of a run are not aligned as copies of 16 bytes need them.
void check_alignment(const Problem& p);
// And where a run, after its prologue, has strides, pages or a scale that the kernel of its plan does not take.
void check_run(const Problem& p, const Config& c);

// Where the pieces of the workspace begin.
struct WorkspaceLayout {
  size_t list = 0, work_tiles = 0, block_begin = 0, splits_done = 0, split_tiles = 0, stats = 0, out = 0, total = 0;
};
WorkspaceLayout workspace_layout(const Config& c);

kernels::PrefillParams to_params(const Problem& p, const Config& c, void* workspace);

// What the TMA must know of the problem's arrays, in the order of the kernel's parameters; absent ones repeat q's.
struct Maps {
  TensorMapDesc q, k, dense_k;
};
Maps describe_maps(const Problem& p, const Config& c);

}  // namespace attune::cuda::mla
