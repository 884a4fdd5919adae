// SPDX-License-Identifier: Apache-2.0
// Packed rows: from codes, which have come, to a tile of bf16.
#pragma once

#include "mla/mma/config.cuh"
#include "mla/producers/kv_source.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// New tokens are 16-bit rows beside a packed cache.
__device__ __forceinline__ bool mma_is_packed(const Tile& tile) {
  return ProblemConfig::kSparse || !ProblemConfig::kDense || tile.cached;
}

// A scale as the sum of two bf16 numbers, each in both halves of a word.
struct MmaScale {
  unsigned high, low;
  __device__ __forceinline__ explicit MmaScale(float scale) {
    const unsigned bits = __float_as_uint(scale) & 0xffff0000u;
    const float first = __uint_as_float(bits);
    high = ptx::permute_bytes(bits, 0, 0x3232);
    const float rest = scale == first ? 0.0f : scale - first;  // infinity has none
    low = ptx::pack_bf16(rest, rest);
  }
};

// 16 codes times their scale to bf16. The exponents and mantissas of codes are, as bits of bf16, 2^-120 of the numbers;
// times 2^120 that is exact. A NaN among them makes all of them NaN, as it does with the scores of their key.
__device__ __forceinline__ void mma_decode_16(const unsigned (&codes)[4], MmaScale scale, unsigned (&x)[8]) {
  constexpr unsigned kUnit = 0x7b807b80u, kMinusZero = 0x80008000u;  // 2^120
  unsigned sevens = 0;                                               // a carry out of seven ones
#pragma unroll
  for (int k = 0; k < 4; ++k) sevens |= (codes[k] & 0x7f7f7f7fu) + 0x01010101u;
  if ((sevens & 0x80808080u) != 0) scale.high = 0x7fff7fffu;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    // Two codes to halves, with copies of their signs above.
    const unsigned two = ptx::permute_bytes(codes[k / 2], 0, k % 2 == 0 ? 0x9180 : 0xb3a2) << 4 & 0x87f087f0u;
    const unsigned number = ptx::multiply_add_bf16x2(two, kUnit, kMinusZero);
    x[k] = ptx::multiply_add_bf16x2(number, scale.high, ptx::multiply_add_bf16x2(number, scale.low, kMinusZero));
  }
}

// The chunk of 16 codes that part `part` of a row has in step k: lanes that store at a time, those of eight rows, or of
// four and two parts, store to different banks.
template <int kParts>
__device__ __forceinline__ int mma_chunk_of(int part, int k) {
  static_assert(kParts == 4 || kParts == 8, "a warp has 8 or 4 rows");
  return kParts == 4 ? 8 * part + k : 8 * (part / 2) + 2 * (part % 2) + k % 2 + k / 2 * 4;
}

// Part `part` of kParts of a row, by its own thread. New tokens' rows, of which there are few, are loaded here.
template <int kParts>
__device__ __forceinline__ void mma_decode(const WorkTileParams& p, MmaStorage& shared, int i, int stage, int to_tile,
                                           int row, int part) {
  using Layout = MmaConfig::Layout;
  const unsigned from = ptx::shared_address(shared.codes[stage * MmaConfig::kKeys + row]),
                 to = ptx::shared_address(shared.tiles[to_tile]);
  const Tile tile = mma_tile_at(shared.work, i);
  if (!mma_is_packed(tile)) {
    const KvSource source(p, shared.work, shared.kv_head, tile);
    const int key = tile.start + row;
    const char* const at = source.locate(key, source.load_index(key));
#pragma unroll 1
    for (int c = part; c < ProblemConfig::kHeadDimQk / 8; c += kParts) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (at != nullptr) x = *reinterpret_cast<const uint4*>(at + 16 * c);
      const unsigned four[4] = {x.x, x.y, x.z, x.w};
      ptx::store_shared_four(to + Layout::offset(row, c), four);
    }
    return;
  }
  constexpr int kChunks = Packed::kNope / 16, kOfGroup = Packed::kGroup / 16;
  constexpr int kAtATime = MmaConfig::kHasCopiers ? 2 : 1;  // the others' registers are scarce
#pragma unroll kAtATime
  for (int k = 0; k < 32 / kParts; ++k) {
    const int c = mma_chunk_of<kParts>(part, k);
    if (kChunks < 32 && c >= kChunks) break;
    float scale;
    if constexpr (ProblemConfig::kProducer == kernels::kMlaDequant656) {
      scale = ptx::load_shared(from + Packed::kNope + 4 * (c / kOfGroup));
    } else {
      scale = common::e8m0_to_float(ptx::load_shared_u8(from + Packed::kRowBytes + c / kOfGroup));
    }
    unsigned codes[4], x[8];
    ptx::load_shared_four(from + 16 * c, codes);
    mma_decode_16(codes, MmaScale(scale), x);
    ptx::store_shared_four(to + Layout::offset(row, 2 * c), x);
    ptx::store_shared_four(to + Layout::offset(row, 2 * c + 1), x + 4);
  }
#pragma unroll
  for (int c = part; c < (ProblemConfig::kHeadDimQk - Packed::kNope) / 8; c += kParts) {
    unsigned x[4];
    ptx::load_shared_four(from + Packed::kRope + 16 * c, x);
    ptx::store_shared_four(to + Layout::offset(row, Packed::kNope / 8 + c), x);
  }
}

}  // namespace attune::mla
