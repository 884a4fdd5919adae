// SPDX-License-Identifier: Apache-2.0
// The first product of a tile.
#pragma once

#include "prefill/config.cuh"
#include "ptx/wgmma.cuh"

namespace attune::prefill {

// Issues S = Q K^T of a group's 64 rows and a tile: blocks of 64 16-bit channels, or of 128 codes, are 128 bytes wide.
template <class Product>
__device__ __forceinline__ void multiply_keys(ptx::Descriptor q, ptx::Descriptor k, float (&s)[Config::kKeys / 2]) {
  ptx::pin(s);
  ptx::fence_products();
#pragma unroll
  for (int i = 0; i < Config::kStepsQk; ++i) {
    const int block = i / 4, within = i % 4 * ptx::kStepK;
    Product::shared(s, q + block * (Config::kRows * 8) + within, k + block * (Config::kKeys * 8) + within,
                    i == 0 ? 0 : 1);
  }
  ptx::commit_products();
}

}  // namespace attune::prefill
