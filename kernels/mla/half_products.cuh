// SPDX-License-Identifier: Apache-2.0
// Products of half a block of rows, of packed rows as they lie in shared memory:
//
//   S^T = sum over groups g of channels  s_g (C_g Q_g^T) + K_rope Q_rope^T,  C codes, s_g a scale of each key
//   O_g^T += C_g^T (P s_g)^T
//
// So keys, and channels, are the rows of a warpgroup's product, codes become its left operand in registers, each once
// for all rows of queries, and those, and weights, are its right operand. As with few rows (few_codes.cuh) nothing is
// rounded here: codes are exact as fp16, by which the queries are multiplied after each group of each row has been
// brought near 2^13 by a power of two. So are weights, which have the scales in them, each group's against a unit
// (half_units.cuh), where no scale of a tile is far below it; else codes become bf16, as exactly, and weights too.
//
// Two groups of four warps have half of the channels each, two of the four that have a scale. Of S^T a warp has 16
// keys; of O^T, in each of its groups, 32 channels.
#pragma once

#include "mla/few_operands.cuh"
#include "mla/half_config.cuh"
#include "mla/half_units.cuh"
#include "ptx/wgmma_along_k.cuh"

namespace attune::mla {

// 0 or 1; and the warp's number in its group.
__device__ __forceinline__ int half_group() { return few_warp() / 4; }
__device__ __forceinline__ int half_warp() { return few_warp() % 4; }

// Lane: g = lane / 4, t = lane % 4. Element 4 j + 2 h + e of a product: key or channel g + 8 h, row 8 j + 2 t + e.
using HalfSums = float[Half::kRows / 2];

// The group's channels of O^T, in blocks of 64: block 2 i + b has, of scale group i, the warp's channels 16 b .. + 15,
// 2 g and 2 g + 1 of them where a product has g and g + 8.
struct HalfOut {
  static constexpr int kBlocks = 4;
  HalfSums blocks[kBlocks];
  // The lane's first channel of a block; the next one is its other.
  __device__ __forceinline__ static int channel(int block) {
    const int warp = few_warp_anew();
    return warp / 4 * 256 + block / 2 * Packed::kGroup + warp % 4 * 32 + block % 2 * 16 + few_lane_anew() / 4 * 2;
  }
};

class HalfProducts {
 public:
  __device__ __forceinline__ explicit HalfProducts(const HalfPlaces& places) : places_(places) {}

  // Descriptors, in registers that a warp shares.
  __device__ __forceinline__ void begin() {
    q_ = ptx::uniform(ptx::descriptor_k_major(places_.q(4 * half_group())));
    rope_ = ptx::uniform(ptx::descriptor_k_major(places_.q(2 * kGroups)) + 2 * half_group() * ptx::kStepK);
    weights_ = ptx::uniform(ptx::descriptor_k_major(places_.weights(2 * half_group())));
  }

  // Where a row of queries lies among those by which a group of warps multiplies its channels: the 16 whose weights it
  // computes come first.
  __device__ __forceinline__ static int query_place(int row, int group) { return row ^ group * Half::kRowsOfWarps; }

  // All math warps together: each brings a group of channels, and a block of the rope part, of half of the rows.
  __device__ __forceinline__ void load_queries(const PrefillParams& p, const Task& task, int head_tile) const {
    static_assert(2 * kGroups == Half::kMathWarps && kRopeBlocks == kGroups, "a warp has a group of half of the rows");
    const int group = few_warp_anew() / 2, lane = few_lane_anew(), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const int query = few_warp_anew() % 2 * 16 + n * 8 + g;
      const char* const row = few_query(p, task, head_tile, query);
      uint2 x[kBlocksOfGroup];
      unsigned largest = 0;
#pragma unroll
      for (int i = 0; i < kBlocksOfGroup; ++i) {
        x[i] = make_uint2(0, 0);
        if (row != nullptr) x[i] = *reinterpret_cast<const uint2*>(row + 2 * (group * Packed::kGroup + 16 * i + 4 * t));
      }
#pragma unroll
      for (int i = 0; i < kBlocksOfGroup; ++i) {
        largest = max(largest, max(x[i].x & 0x7fff0000, x[i].x << 16 & 0x7fff0000));
        largest = max(largest, max(x[i].y & 0x7fff0000, x[i].y << 16 & 0x7fff0000));
      }
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      // What the largest is multiplied with to be near 2^13, and the inverse. What is not finite stays so.
      const unsigned exponent = max(largest >> 23, 14u), up = exponent == 255 ? 127 : 267 - exponent;
      const float factor = __uint_as_float(up << 23);
      const int place = query_place(query, group / 2);
      if (t == 0) ptx::store_shared_u32(places_.factors(group, place), 254 - up << 23);
#pragma unroll
      for (int i = 0; i < kBlocksOfGroup; ++i) {
        // Of each 16 channels places 2 t and 2 t + 1 have 4 t and 4 t + 1, those eight further the next two, as
        // ldmatrix deals codes.
        const unsigned at = places_.q(group * 2 + i / 4) + place * 128 + 4 * t;
        ptx::store_shared_u32(at + ((i % 4 * 2) ^ g) * 16, scaled(x[i].x, factor));
        ptx::store_shared_u32(at + ((i % 4 * 2 + 1) ^ g) * 16, scaled(x[i].y, factor));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned two = 0;
        if (row != nullptr)
          two = *reinterpret_cast<const unsigned*>(row + 2 * (Packed::kNope + group * 16 + 8 * i + 2 * t));
        ptx::store_shared_u32(places_.q(2 * kGroups) + place * 128 + ((2 * group + i) ^ g) * 16 + 4 * t, two);
      }
    }
    ptx::fence_async_proxy();
    meet_few();
  }

  // The first of the group's channels of a tile's keys: of the rope part, and codes.
  struct Keys {
    unsigned rope[2][4], codes[2][4];
  };
  __device__ __forceinline__ void load_keys(int stage, Keys& keys) const {
    const int group = half_group();
    const unsigned from = places_.row(stage, 0) + keys_at_;
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_matrix_x4(keys.rope[i], from + Packed::kRope + (2 * group + i) * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_matrix_x4(keys.codes[i], from + group * (2 * Packed::kGroup) + 32 * i);
  }
  // Products with a tile's keys over the group's channels, which run on: of the rope part, and of each scale group.
  // tell, ask: when half of them run, and before the last.
  template <class Tell, class Ask>
  __device__ __forceinline__ void multiply_keys(int stage, const Keys& keys, HalfSums& s, HalfSums (&products)[2],
                                                Tell tell, Ask ask) const {
    const int group = half_group();
    const unsigned codes_from = places_.row(stage, 0) + keys_at_ + group * (2 * Packed::kGroup);
    unsigned codes[2][2][4];  // of the next part while those of one are converted
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[0][i][j] = keys.codes[i][j];
    }
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ptx::ProductAlongK<Half::kRows, ptx::Type::kBf16>::registers(s, keys.rope[i], rope_ + i * ptx::kStepK, i);
    ptx::commit_products();
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // 64 channels each
      unsigned a[4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (part < 3) ptx::load_matrix_x4(codes[(part + 1) % 2][i], codes_from + 64 * (part + 1) + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint2 halves = ptx::four_e4m3_to_f16(codes[part % 2][i][j]);
          a[2 * i + j / 2][j % 2] = halves.x, a[2 * i + j / 2][j % 2 + 2] = halves.y;
        }
      }
      if (part > 0) ptx::wait_products<1>();
      if (part == 2) tell();
      if (part == 3) ask();
      ptx::fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::ProductAlongK<Half::kRows, ptx::Type::kF16>::registers(
            products[part / 2], a[i], q_ + (part * (Half::kChunkBytes >> 4) + i * ptx::kStepK), part % 2 + i);
      ptx::commit_products();
    }
  }
  // And their sum, s, when they are done.
  // kPending: committed after them. ask: when their operands' registers are free.
  template <int kPending, class Ask>
  __device__ __forceinline__ void add_keys(int stage, HalfSums& s, HalfSums (&products)[2], Ask ask) const {
    const int group = half_group();
    const unsigned from = places_.row(stage, 0) + scales_at_ + group * 8;
    float2 scales[2];  // of the lane's two keys
#pragma unroll
    for (int h = 0; h < 2; ++h) scales[h] = ptx::load_shared_pair(from + h * (8 * Half::kPitch));
    ptx::wait_products<kPending + 1>();
    ptx::pin(s);
    ptx::pin(products[0]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1) {
        ptx::wait_products<kPending>();
        ptx::pin(products[1]);
        ask();
      }
#pragma unroll
      for (int j = 0; j < Half::kRows / 8; ++j) {
        const float2 factor = ptx::load_shared_pair(factors_at_ + (i * Half::kRows + 8 * j) * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = i == 0 ? scales[h].x : scales[h].y;
          s[4 * j + 2 * h] = fmaf(products[i][4 * j + 2 * h] * factor.x, scale, s[4 * j + 2 * h]);
          s[4 * j + 2 * h + 1] = fmaf(products[i][4 * j + 2 * h + 1] * factor.y, scale, s[4 * j + 2 * h + 1]);
        }
      }
    }
  }

  // The group's weights, s[4 j + 2 h + e] of key g + 8 h and the group's row 8 j + 2 t + e, times the scales of each
  // group of channels.
  using Weights = unsigned[Packed::kGroups][4];
  template <ptx::Type kType>
  __device__ __forceinline__ void scale_weights(int stage, const HalfUnits& units, const float (&s)[8],
                                                Weights& weights) const {
    const unsigned from = places_.row(stage, 0) + scales_at_;
    unsigned scales[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) ptx::load_shared_four(from + h * (8 * Half::kPitch), scales[h]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float unit = units.factor(i), of_keys[2] = {__uint_as_float(scales[0][i]) * unit,
                                                        __uint_as_float(scales[1][i]) * unit};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = s[2 * j] * of_keys[j % 2], y = s[2 * j + 1] * of_keys[j % 2];
        weights[i][j] = kType == ptx::Type::kF16 ? ptx::pack_f16(x, y) : ptx::pack_bf16(x, y);
      }
    }
  }
  __device__ __forceinline__ void store_weights(const Weights& weights) const {
    const unsigned to = places_.weights(0) + weights_at_;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) ptx::store_matrix_x4_transposed(to + i * Half::kWeightsBytes, weights[i]);
  }

  // Of the values of 16 keys.
  using Codes = unsigned[2][4];
  __device__ __forceinline__ void load_values(int stage, int step, Codes& codes) const {
    const unsigned from = places_.row(stage, 0) + values_at_ + step * (16 * Half::kPitch);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_matrix_x4_transposed(codes[i], from + i * Packed::kGroup);
  }
  // o += values of a tile * weights, of 16 keys at a time, which runs on. codes: of those, then of the next 16, but not
  // of the second, as registers are scarce. Operands are in the registers of those of two steps before. kType: of the
  // weights.
  template <ptx::Type kType, int kStep>
  __device__ __forceinline__ void multiply_values(int stage, Codes& codes, HalfOut& o) const {
    unsigned a[HalfOut::kBlocks][4];
    if constexpr (kStep == 0) {
#pragma unroll
      for (int i = 0; i < HalfOut::kBlocks; ++i) ptx::pin(o.blocks[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        // Channels 2 g and 2 g + 1, side by side, of key 2 t and of 2 t + 1; and of the keys eight later.
        const uint2 low = two_keys<kType>(codes[i][2 * b]), high = two_keys<kType>(codes[i][2 * b + 1]);
        unsigned(&x)[4] = a[2 * i + b];
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
      }
    }
    if constexpr (kStep > 0 && kStep < 3) load_values(stage, kStep + 1, codes);
    if constexpr (kStep > 1) ptx::wait_products<1>();
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < HalfOut::kBlocks; ++i)
      ptx::ProductAlongK<Half::kRows, kType>::registers(
          o.blocks[i], a[i], weights_ + (i / 2 * (Half::kWeightsBytes >> 4) + kStep * ptx::kStepK), 1);
    ptx::commit_products();
  }
  __device__ __forceinline__ static void finish_values(HalfOut& o) {
    ptx::wait_products<0>();
#pragma unroll
    for (int i = 0; i < HalfOut::kBlocks; ++i) ptx::pin(o.blocks[i]);
  }

 private:
  static constexpr int kGroups = Packed::kGroups, kBlocksOfGroup = Packed::kGroup / 16,
                       kRopeBlocks = (Packed::kHeadDim - Packed::kNope) / 16;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Two bf16 numbers times a power of two, as fp16.
  __device__ __forceinline__ static unsigned scaled(unsigned two, float factor) {
    return ptx::pack_f16(__uint_as_float(two << 16) * factor, __uint_as_float(two & 0xffff0000) * factor);
  }
  // Codes of two channels of a key, then of another key: as numbers, both keys' of each channel.
  template <ptx::Type kType>
  __device__ __forceinline__ static uint2 two_keys(unsigned codes) {
    const uint2 x = ptx::four_e4m3_to_f16(ptx::permute_bytes(codes, codes, 0x3120));
    if constexpr (kType == ptx::Type::kF16) return x;
    return make_uint2(to_bf16(x.x), to_bf16(x.y));
  }
  // Two fp16 numbers that were codes.
  __device__ __forceinline__ static unsigned to_bf16(unsigned two) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(two)),
                          ptx::f16_to_float(static_cast<unsigned short>(two >> 16)));
  }

  const HalfPlaces& places_;
  ptx::Descriptor q_{}, rope_{}, weights_{};
  // Where ldmatrix and stmatrix begin: from a tile's first row, and from the weights of the first group.
  const unsigned keys_at_ = ptx::kept((half_warp() * 16 + lane() % 16) * Half::kPitch + lane() / 16 * 16);
  const unsigned values_at_ =
      ptx::kept(lane() % 16 * Half::kPitch + half_group() * (2 * Packed::kGroup) + half_warp() * 32 + lane() / 16 * 16);
  // Where the scales of the lane's first key lie, from there too; and the factors of its first two rows of queries.
  const unsigned scales_at_ = ptx::kept((half_warp() * 16 + lane() / 4) * Half::kPitch + Packed::kNope);
  const unsigned factors_at_ = ptx::kept(places_.factors(2 * half_group(), lane() % 4 * 2));
  const unsigned weights_at_ = ptx::kept((half_group() * 16 + lane() / 16 * 8 + lane() % 8) * 128 +
                                         ((half_warp() * 2 + lane() / 8 % 2) ^ lane() % 8) * 16);
};

}  // namespace attune::mla
