// SPDX-License-Identifier: Apache-2.0
// Prefill attention on GPUs without wgmma (kernels/prefill/prefill_mma.cu): 16-bit queries over dense keys, a cache of
// their type or of 8 bits, or both.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/kernel.h"
#include "cuda/attention/work_tiles.h"
#include "cuda/kernel.h"

namespace attune::cuda {

const Kernel& prefill_mma_kernel();

namespace prefill_mma {

struct Config : attention::WorkTiles {
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t dtype = 0, cache_dtype = 0, out_dtype = 0;
  int score = 0, mask = 0;
  bool cached = false, dense = false;
  bool token_scales = false;  // K or V of an 8-bit cache has a scale for each token
  int row_tiles = 1;          // of 16 rows, of each of four warps
  int blocks_per_sm = 2;      // that registers are left for
  kernels::T5Table t5 = {};

  int rows() const { return 64 * row_tiles; }
  bool quantized() const { return cache_dtype != dtype; }
  size_t shared_bytes() const;
  KernelSpec kernel() const;
  // Query heads, sequences, row blocks.
  std::array<uint32_t, 3> grid(const Problem& p) const;
};

inline constexpr unsigned kThreads = 128;

// "" if the kernel takes the problem, else what it does not take, where the coverage row cannot say it.
std::string refusal(const Problem& p);
Config choose_config(const Problem& p, int64_t shared_bytes_per_sm);
// Throws INVALID_ARGUMENT where a run has rows that the kernel does not take.
void check_run(const Problem& p, const Config& c);
kernels::WorkTileParams to_params(const Problem& p, const Config& c);

}  // namespace prefill_mma
}  // namespace attune::cuda
