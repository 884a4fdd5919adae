// SPDX-License-Identifier: Apache-2.0
// The GEMMs of the gradient kernel. Each is issued and committed here; its caller waits.
#pragma once

#include "backward/config.cuh"

namespace attune::backward {

// The offset of the operand of k-step i in units of 16 bytes: in K-major operands with lines of `rows` rows, and in
// operands with K along the rows.
__device__ __forceinline__ constexpr int k_step(int i, int rows) { return i / 4 * (rows * 8) + i % 4 * ptx::kStepK; }
constexpr int kStepOfRows = 16 * 128 >> 4;

// to = resident * tile^T over kSteps k-steps. The resident rows have lines of kBackwardRows rows, the tile of
// Config::kTile.
template <int kSteps, int kHalf>
__device__ __forceinline__ void multiply(ptx::Descriptor resident, unsigned tile, float (&to)[kHalf]) {
  const ptx::Descriptor other = ptx::uniform(ptx::descriptor_k_major(tile));
  ptx::fence_operand(to);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    ptx::Wgmma<2 * kHalf, Config::kMmaType>::ss(to, resident + k_step(i, kBackwardRows),
                                                other + k_step(i, Config::kTile), i == 0 ? 0 : 1);
  }
  ptx::wgmma_commit();
}

// to += left * tile, with left in registers; accumulates in place.
template <int kHalf, int kCount>
__device__ __forceinline__ void accumulate(unsigned tile, unsigned (&left)[kCount], float (&to)[kHalf]) {
  const ptx::Descriptor right = ptx::uniform(ptx::descriptor_mn_major(tile, Config::kTile * 128));
  ptx::fence_operand(to);
  ptx::fence_operand(left);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kTile / 16; ++i)
    ptx::Wgmma<2 * kHalf, Config::kMmaType>::rs(to, left + 4 * i, right + i * kStepOfRows, 1);
  ptx::wgmma_commit();
}

// Registers kFirst .. kFirst + kCount - 1.
template <int kFirst, int kCount, int kAll>
__device__ __forceinline__ float (&slice(float (&x)[kAll]))[kCount] {
  static_assert(kFirst + kCount <= kAll);
  return *reinterpret_cast<float(*)[kCount]>(x + kFirst);
}

// to = left * right for a warpgroup's half of the channels of a head. left [64, kK] is K-major with lines of 64 rows;
// right has a line of kK rows for each 64 channels.
template <int kHeadDim, int kK>
__device__ __forceinline__ void multiply_half(unsigned left, unsigned right, int group,
                                              float (&to)[HalfHead<kHeadDim>::kChannels / 2]) {
  using Half = HalfHead<kHeadDim>;
  constexpr int kLine = kK * 128;
  const ptx::Descriptor a = ptx::uniform(ptx::descriptor_k_major(left));
  const ptx::Descriptor whole =
      ptx::uniform(ptx::descriptor_mn_major(right + group * (Half::kLines / 2 * kLine), kLine));
  const ptx::Descriptor rest =
      ptx::uniform(ptx::descriptor_mn_major(right + (Half::kLines - 1) * kLine + group * 64, kLine));
  ptx::fence_operand(to);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    if constexpr (Half::kWhole > 0) {
      ptx::WgmmaBMnMajor<Half::kWhole, Config::kMmaType>::ss(slice<0, Half::kWhole / 2>(to), a + k_step(i, 64),
                                                             whole + i * kStepOfRows, i > 0 ? 1 : 0);
    }
    if constexpr (Half::kRest > 0) {
      ptx::WgmmaBMnMajor<Half::kRest, Config::kMmaType>::ss(slice<Half::kWhole / 2, Half::kRest / 2>(to),
                                                            a + k_step(i, 64), rest + i * kStepOfRows, i > 0 ? 1 : 0);
    }
  }
  ptx::wgmma_commit();
}

// dq^T = K^T dS^T. A warpgroup has half of the lines of channels with all queries of a tile, and of an odd line half of
// the queries. ds: [lines of 64 keys][queries].
template <int kCount>
__device__ __forceinline__ void multiply_transposed(unsigned k, unsigned ds, int group, float (&to)[kCount]) {
  constexpr int kLines = Config::kLinesQk / 2, kLine = kBackwardRows * 128, kTile = Config::kTile;
  constexpr bool kOdd = Config::kLinesQk % 2 == 1;
  const ptx::Descriptor whole = ptx::uniform(ptx::descriptor_mn_major(k + group * (kLines * kLine), kLine));
  const ptx::Descriptor rest = ptx::uniform(ptx::descriptor_mn_major(k + 2 * kLines * kLine, kLine));
  const ptx::Descriptor all = ptx::uniform(ptx::descriptor_k_major(ds));
  const ptx::Descriptor half = ptx::uniform(ptx::descriptor_k_major(ds + group * (kTile / 2 * 128)));
  ptx::fence_operand(to);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBackwardRows / 16; ++i) {
    if constexpr (kLines > 0) {
      ptx::WgmmaAMnMajor<kTile, Config::kMmaType>::ss(slice<0, kTile / 2>(to), whole + i * kStepOfRows,
                                                      all + k_step(i, kTile), i > 0 ? 1 : 0);
    }
    if constexpr (kOdd) {
      ptx::WgmmaAMnMajor<kTile / 2, Config::kMmaType>::ss(
          slice<kLines * kTile / 2, kTile / 4>(to), rest + i * kStepOfRows, half + k_step(i, kTile), i > 0 ? 1 : 0);
    }
  }
  ptx::wgmma_commit();
}

// dq = dS K, in the layout of Config::DqTile.
template <int kCount>
__device__ __forceinline__ void multiply_dq(unsigned ds, unsigned k, int group, float (&to)[kCount]) {
  if constexpr (Config::DqTile::kTransposed) {
    multiply_transposed(k, ds, group, to);
  } else {
    multiply_half<Config::kHeadDimQk, kBackwardRows>(ds, k, group, to);
  }
}

}  // namespace attune::backward
