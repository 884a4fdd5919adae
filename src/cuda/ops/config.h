// SPDX-License-Identifier: Apache-2.0
// What the kernels in kernels/rows/ are compiled for, by operation, and their grid. There are few of them: rows that
// vectors cannot move go through one kernel that looks types up at run time.
#pragma once

#include <cstdint>

#include "core/ops.h"
#include "cuda/kernel.h"

namespace attune::cuda::ops {

enum class Entry : uint8_t { kStore, kFetch, kMerge };

struct Config {
  Entry entry = Entry::kStore;
  // What the kernel is compiled for (kernels/rows/plane.cuh).
  int width = 1, lanes = 32, units = 1, rows = 1, blocks_per_sm = 4;
  int row_type = 0, out_type = 0, cache_type = 0;
  int format = 0;    // 0, or bytes of a packed token: 656, 584
  int scales = 0;    // a mode, or kernels::kScalesAtRunTime
  int head_dim = 0;  // of K and V; 0: at run time
  bool prepare = false, prologue = false;
  bool tail_only = false;  // RoPE only, on the last 64 channels of packed rows and q
  bool copies = false;     // outputs are the inputs

  int64_t rows_of_token = 1;
  int64_t groups = 1;  // rows of a token that a block takes at a time: a power of two that divides the heads

  // Packed rows that vectors can move have kernels of their own, kernels/rows/mla_*.cu, which take no prologue but RoPE
  // of the tail.
  bool packed_vectors() const;
  KernelSpec spec() const;
  uint64_t key() const;  // of the specialisation
  // Tokens of a block, where there are `total`.
  int tile_tokens(int64_t total, int num_sms) const;
  // log2 of the rows of a token that such a block takes at a time.
  int groups_shift(int tile_tokens) const;
};

Config choose_store(const PrepareProblem& op);
Config choose_store(const CacheProblem& op);
Config choose_fetch(const CacheProblem& op);
Config choose_merge(const MergeProblem& op);

}  // namespace attune::cuda::ops
