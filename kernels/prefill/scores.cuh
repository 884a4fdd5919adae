// SPDX-License-Identifier: Apache-2.0
// The first product of a tile.
#pragma once

#include "prefill/config.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"

namespace attune::prefill {

// Where the channels of step i of the product lie, in units of 16 bytes: blocks of 64 16-bit channels, or of 128 codes,
// are 128 bytes wide; x-packed keys lie in pieces.
__device__ __forceinline__ constexpr int step_of_rows(int i, int rows) {
  return i / 4 * (rows * 8) + i % 4 * ptx::kStepK;
}
__device__ __forceinline__ int step_of_keys(ptx::Descriptor, int i) { return step_of_rows(i, Config::kKeys); }
template <unsigned kHigh>
__device__ __forceinline__ int step_of_keys(ptx::DescriptorOf<kHigh>, int i) {
  return i * ptx::kStepOfPieces;
}

// Issues S = Q K^T of a group's 64 rows and a tile.
template <class Product, class Keys>
__device__ __forceinline__ void multiply_keys(ptx::Descriptor q, Keys k, float (&s)[Config::kKeys / 2]) {
  ptx::pin(s);
  ptx::fence_products();
#pragma unroll
  for (int i = 0; i < Config::kStepsQk; ++i) {
    Product::shared(s, q + step_of_rows(i, Config::kRows), k + step_of_keys(k, i), i == 0 ? 0 : 1);
  }
  ptx::commit_products();
}

// The warp's 16 rows of q in registers, as the left operand of all its products of a task (Config::kQueriesHeld).
struct HeldQueries {
  unsigned words[4 * Config::kStepsQk];
};

// Where the group's rows lie, once; and what a task's are, if they are held.
__device__ __forceinline__ void find_queries(const Places& places, int stage, int group, ptx::Descriptor& q) {
  q = ptx::uniform(ptx::descriptor_k_major(places.q(stage) + group * 64 * 128));
}
__device__ __forceinline__ void take_queries(const Places&, int, int, ptx::Descriptor&) {}
__device__ __forceinline__ void find_queries(const Places&, int, int, HeldQueries&) {}
__device__ __forceinline__ void take_queries(const Places& places, int stage, int group, HeldQueries& q) {
  const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < Config::kStepsQk; ++i) {
    const int piece = i % 4 * 2 + lane / 16;
    unsigned part[4];
    ptx::load_matrix_x4(part, places.q(stage) + i / 4 * (Config::kRows * 128) + row * 128 + ((piece ^ row % 8) << 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) q.words[4 * i + j] = part[j];
  }
}

template <class Product, class Keys>
__device__ __forceinline__ void multiply_keys(HeldQueries& q, Keys k, float (&s)[Config::kKeys / 2]) {
  ptx::pin(s);
  ptx::pin(q.words);
  ptx::fence_products();
#pragma unroll
  for (int i = 0; i < Config::kStepsQk; ++i)
    Product::registers(s, q.words + 4 * i, k + step_of_keys(k, i), i == 0 ? 0 : 1);
  ptx::commit_products();
}

}  // namespace attune::prefill
