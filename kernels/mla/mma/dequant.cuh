// SPDX-License-Identifier: Apache-2.0
// Dequantizes packed rows: codes in shared memory become a tile of bf16.
#pragma once

#include "mla/mma/config.cuh"
#include "mla/producers/kv_source.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// New tokens are 16-bit rows, also beside a packed cache.
__device__ __forceinline__ bool mma_is_packed(const Tile& tile) {
  return ProblemConfig::kSparse || !ProblemConfig::kDense || tile.cached;
}

// A scale of codes as the sum of two bf16 numbers, each in both halves of a word.
struct MmaFactor {
  unsigned high, low;
  __device__ __forceinline__ explicit MmaFactor(float factor) {
    const unsigned bits = __float_as_uint(factor) & 0xffff0000u;
    const float first = __uint_as_float(bits);
    high = ptx::permute_bytes(bits, 0, 0x3232);
    const float rest = factor == first ? 0.0f : factor - first;  // an infinity has no remainder
    low = ptx::pack_bf16(rest, rest);
  }
};

// The exponent and mantissa bits of an e4m3 code x, placed in those of bf16, read as x * 2^-120: the biases are 7 and
// 127. Multiplying by kMmaUnit, 2^120, is exact. Scales below kMmaSmallScale are multiplied by 2^120 instead, once for
// all of their codes.
constexpr unsigned kMmaUnit = 0x7b807b80u, kMmaMinusZero = 0x80008000u, kMmaNan = 0x7fff7fffu;
constexpr float kMmaSmallScale = 128.0f;

// Whether one of 16 codes is NaN. Then all of them become NaN: the score of their key is NaN in any case.
__device__ __forceinline__ bool mma_has_nan(const unsigned (&codes)[4]) {
  unsigned sevens = 0;  // the carry out of seven ones
#pragma unroll
  for (int k = 0; k < 4; ++k) sevens |= (codes[k] & 0x7f7f7f7fu) + 0x01010101u;
  return (sevens & 0x80808080u) != 0;
}
// Dequantizes codes 8 half .. 8 half + 7 of 16: x * (high + low), rounded to bf16 once. Before that rounding the
// relative error is below 2^-14, from bf16 `low` and x * low. kUnit: multiplies codes by 2^120 first. kExact: low is 0
// and high a power of two.
template <bool kUnit, bool kExact>
__device__ __forceinline__ void mma_dequant_8(const unsigned (&codes)[4], int half, unsigned high, unsigned low,
                                              unsigned (&x)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    // Moves two codes to the halves of a word, with copies of their signs above them.
    const unsigned four = codes[2 * half + k / 2];
    unsigned two = ptx::permute_bytes(four, 0, k % 2 == 0 ? 0x9180 : 0xb3a2) << 4 & 0x87f087f0u;
    if (kUnit) two = ptx::multiply_add_bf16x2(two, kMmaUnit, kMmaMinusZero);
    const unsigned rest = kExact ? kMmaMinusZero : ptx::multiply_add_bf16x2(two, low, kMmaMinusZero);
    x[k] = ptx::multiply_add_bf16x2(two, high, rest);
  }
}

// The chunk of 16 codes that the lane of part `part` of a row dequantizes in step k. The lanes of a shared-memory
// transaction, of eight rows, or of four rows and two parts, store to different banks.
template <int kParts>
__device__ __forceinline__ int mma_chunk_of(int part, int k) {
  static_assert(kParts == 4 || kParts == 8, "a warp has 8 or 4 rows");
  return kParts == 4 ? 8 * part + k : 8 * (part / 2) + 2 * (part % 2) + k % 2 + k / 2 * 4;
}

// A thread's chunks in a row of 656 bytes, all of one scale group.
template <int kParts>
class MmaDequant656 {
 public:
  static constexpr int kCount = 32 / kParts;  // chunks
  // from: the row's codes; to: the tile.
  __device__ __forceinline__ MmaDequant656(unsigned from, unsigned to, int row, int part) {
    const int first = mma_chunk_of<kParts>(part, 0);
    from_ = from + 16 * first, to_ = to + MmaConfig::Layout::offset(row, 2 * first);
    scale_ = ptx::load_shared(from + Packed::kNope + 4 * (part / (kParts / Packed::kGroups)));
  }
  // Whether a lane of the warp has a scale of kMmaSmallScale or more.
  __device__ __forceinline__ bool has_large_scale() const {
    return __any_sync(0xffffffffu, !(fabsf(scale_) < kMmaSmallScale));
  }
  __device__ __forceinline__ MmaFactor factor(bool large) const {
    return MmaFactor(large ? scale_ : scale_ * __uint_as_float(kMmaUnit & 0xffff0000u));
  }
  __device__ __forceinline__ void load(int k, unsigned (&codes)[4]) const {
    ptx::load_shared_four(from_ + 16 * mma_chunk_of<kParts>(0, k), codes);
  }
  template <bool kLarge>
  __device__ __forceinline__ void store(int k, const unsigned (&codes)[4], MmaFactor by) const {
    const unsigned high = mma_has_nan(codes) ? kMmaNan : by.high;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned x[4];
      mma_dequant_8<kLarge, false>(codes, half, high, by.low, x);
      ptx::store_shared_four(to_ + 32 * mma_chunk_of<kParts>(0, k) + 16 * half, x);
    }
  }
  // kAtATime: chunks that are in registers at a time.
  template <bool kLarge, int kAtATime>
  __device__ __forceinline__ void run() const {
    const MmaFactor by = factor(kLarge);
#pragma unroll kAtATime == 1 ? 1 : kCount
    for (int k = 0; k < kCount; k += kAtATime) {
      unsigned codes[kAtATime][4];
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) load(k + j, codes[j]);
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) store<kLarge>(k + j, codes[j], by);
    }
  }

 private:
  unsigned from_, to_;
  float scale_;
};

// The same for rows of 584 bytes, whose scales are powers of two.
template <int kParts>
__device__ __forceinline__ void mma_dequant_584(unsigned from, unsigned to, int row, int part) {
  using Layout = MmaConfig::Layout;
  constexpr int kChunks = Packed::kNope / 16, kOfGroup = Packed::kGroup / 16;
  constexpr int kAtATime = MmaConfig::kHasProducerWarps ? 2 : 1;
#pragma unroll kAtATime
  for (int k = 0; k < 32 / kParts; ++k) {
    const int c = mma_chunk_of<kParts>(part, k);
    if (c >= kChunks) break;
    const float scale = common::e8m0_to_float(ptx::load_shared_u8(from + Packed::kRowBytes + c / kOfGroup));
    unsigned codes[4];
    ptx::load_shared_four(from + 16 * c, codes);
    const unsigned high = mma_has_nan(codes) ? kMmaNan : ptx::permute_bytes(__float_as_uint(scale), 0, 0x3232);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned x[4];
      mma_dequant_8<true, true>(codes, half, high, 0, x);
      ptx::store_shared_four(to + Layout::offset(row, 2 * c + half), x);
    }
  }
}

// Copies the channels that are not codes (rope).
template <int kParts>
__device__ __forceinline__ void mma_copy_rope(unsigned from, unsigned to, int row, int part) {
  using Layout = MmaConfig::Layout;
#pragma unroll
  for (int c = part; c < (ProblemConfig::kHeadDimQk - Packed::kNope) / 8; c += kParts) {
    unsigned x[4];
    ptx::load_shared_four(from + Packed::kRope + 16 * c, x);
    ptx::store_shared_four(to + Layout::offset(row, Packed::kNope / 8 + c), x);
  }
}

// Dequantizes part `part` of kParts of a row of tile i, one thread for each part. from: the row's codes; to: a tile of
// bf16. Rows of new tokens, of which there are few, are loaded here.
template <int kParts>
__device__ __forceinline__ void mma_dequant(const WorkTileParams& p, const MmaStorage& shared, int i, unsigned from,
                                            unsigned to, int row, int part) {
  using Layout = MmaConfig::Layout;
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
  if constexpr (ProblemConfig::kProducer == kernels::kMlaDequant656) {
    const MmaDequant656<kParts> row_dequant(from, to, row, part);
    if (row_dequant.has_large_scale()) {
      row_dequant.template run<true, 1>();
    } else {
      // Consumer warps have few registers left.
      row_dequant.template run<false, MmaConfig::kHasProducerWarps ? 4 : 1>();
    }
  } else {
    mma_dequant_584<kParts>(from, to, row, part);
  }
  mma_copy_rope<kParts>(from, to, row, part);
}

}  // namespace attune::mla
