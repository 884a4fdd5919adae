// SPDX-License-Identifier: Apache-2.0
// Prefill attention on GPUs without wgmma. kernels/prefill/prefill_mma.cu: 16-bit queries over dense keys, a cache of
// their type or of 8 bits, or both. kernels/prefill/prefill_fp32_mma.cu: fp32, and all that cuda_prefill_fp32 takes.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/kernel.h"
#include "cuda/attention/work_tiles.h"
#include "cuda/kernel.h"

namespace attune::cuda {

const Kernel& prefill_mma_kernel();
const Kernel& prefill_fp32_mma_kernel();
const Kernel& prefill_fp8_mma_kernel();  // a launch before turns e4m3 into bf16; then prefill_mma.cu

namespace prefill_mma {

struct Config : attention::WorkTiles {
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t dtype = 0, cache_dtype = 0, out_dtype = 0;
  int score = 0, mask = 0;
  bool cached = false, dense = false;
  bool x_packed = false;         // the cache
  bool token_scales = false;     // K or V of an 8-bit cache has a scale for each token
  int warps = 4, row_tiles = 1;  // of 16 rows, a warp
  int blocks_per_sm = 2;         // that registers allow
  kernels::T5Table t5 = {};

  bool fp32() const { return dtype == ATTUNE_FLOAT32; }
  const char* name() const { return fp32() ? "cuda_prefill_fp32_mma" : "cuda_prefill_mma"; }
  int rows() const { return 16 * warps * row_tiles; }
  int threads() const { return 32 * warps; }
  bool quantized() const { return cache_dtype != dtype && !fp32(); }  // codes are converted in shared memory
  size_t shared_bytes() const;
  KernelSpec kernel() const;
  // Query heads, sequences, row blocks.
  std::array<uint32_t, 3> grid(const Problem& p) const;
};

// "" if cuda_prefill_mma takes the problem, else what it does not take. Only what the coverage row cannot say.
// cuda_prefill_fp32_mma has prefill::refusal_as_fp32() instead.
std::string refusal(const Problem& p);
// q's dtype chooses the kernel. shared_per_sm, shared_a_block: bytes of a multiprocessor, and the most of a block.
Config choose_config(const Problem& p, int64_t shared_per_sm, int64_t shared_a_block);
// Throws INVALID_ARGUMENT where a run has rows that the kernel does not take.
void check_run(const Problem& p, const Config& c);
kernels::WorkTileParams to_params(const Problem& p, const Config& c);

}  // namespace prefill_mma
}  // namespace attune::cuda
