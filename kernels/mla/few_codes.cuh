// SPDX-License-Identifier: Apache-2.0
// Operands of few rows from codes.
//
//   S = sum over groups g of channels  s_g (Q_g C_g^T) + Q_rope K_rope^T,  C codes, s_g a scale of each key
//   O_g += (P s_g) C_g
//
// Codes are exact as fp16, by which the queries are multiplied after each group of each row has been brought near 2^13
// by a power of two; and as bf16, by which weights are, which have the scales in them and so need the range of bf16.
// They are moved by ldmatrix, a lane two at a time where it would hold one element of 16 bits; what place then has
// which channel says tile/operand.cuh.
#pragma once

#include "mla/few_operands.cuh"

namespace attune::mla {

template <>
class FewOperands<true> {
 public:
  struct Scales {
    float of[2][Packed::kGroups];
  };

  // A warp brings a group of channels, and a block of the rope part, of half of the rows to shared memory, from where
  // all take all.
  __device__ __forceinline__ void load_queries(const PrefillParams& p, const FewPlaces& places, const Task& task,
                                               int head_tile) {
    static_assert(2 * kGroups == Few::kMathWarps && kRopeBlocks == kGroups, "a warp has a group of half of the rows");
    static_assert(kBlocks * 512 <= 2 * kGroups * Few::kRows * Few::kKeys * 2, "they pass through where weights are");
    const int warp = few_warp_anew(), group = warp / 2, half = warp % 2;
    const char* const row = few_query(p, task, head_tile, g() + 8 * half);
    uint2 x[kBlocksOfGroup];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kBlocksOfGroup; ++i) {
      x[i] = make_uint2(0, 0);
      if (row != nullptr) x[i] = *reinterpret_cast<const uint2*>(row + 2 * (group * Packed::kGroup + 16 * i + 4 * t()));
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
    if (t() == 0) ptx::store_shared_u32(places.factors(g() + 8 * half) + 4 * group, 254 - up << 23);
#pragma unroll
    for (int i = 0; i < kBlocksOfGroup; ++i) {
      const unsigned at = places.queries(group * kBlocksOfGroup + i, lane()) + 4 * half;
      ptx::store_shared_u32(at, scaled(x[i].x, factor));
      ptx::store_shared_u32(at + 8, scaled(x[i].y, factor));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned two = 0;
      if (row != nullptr)
        two = *reinterpret_cast<const unsigned*>(row + 2 * (Packed::kNope + group * 16 + 8 * i + 2 * t()));
      ptx::store_shared_u32(places.rope_queries(group, lane()) + 8 * i + 4 * half, two);
    }
    meet_few();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) ptx::load_shared_four(places.queries(i, lane()), q_[i]);
  }

  __device__ __forceinline__ void multiply_keys(const FewPlaces& places, int stage, float (&s)[4]) const {
    const unsigned from = places.row(stage, 0) + keys_at_, rope = places.rope_queries(0, few_lane_anew());
    float products[kGroups + 1][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; i += 4) {
      unsigned codes[4];
      ptx::load_matrix_x4(codes, from + 16 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 halves = ptx::four_e4m3_to_f16(codes[j]);
        ptx::mma_f16(products[i / kBlocksOfGroup], q_[i + j], {halves.x, halves.y});
      }
    }
#pragma unroll
    for (int i = 0; i < kRopeBlocks; i += 2) {
      unsigned keys[4];
      ptx::load_matrix_x4(keys, from + Packed::kRope + 32 * i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        unsigned q[4];
        ptx::load_shared_four(rope + (i + j) * 512, q);
        ptx::mma_bf16(products[kGroups], q, {keys[2 * j], keys[2 * j + 1]});
      }
    }
    const Scales scales = load_scales(places, stage);
    float factors[2][kGroups];
    const unsigned rows = places.factors(few_lane_anew() / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) load_groups(rows + h * (8 * 4 * kGroups), factors[h]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = products[kGroups][i];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) s[i] = fmaf(products[j][i] * factors[i / 2][j], scales.of[i % 2][j], s[i]);
    }
  }

  __device__ __forceinline__ Scales load_scales(const FewPlaces& places, int stage) const {
    Scales scales;
    const unsigned from = places.row(stage, few_warp() * Few::kKeysOfWarp + few_lane_anew() % 4 * 2) + Packed::kNope;
#pragma unroll
    for (int e = 0; e < 2; ++e) load_groups(from + e * Few::kPitch, scales.of[e]);
    return scales;
  }
  __device__ __forceinline__ void store_weights(const FewPlaces& places, unsigned buffer, const Scales& scales,
                                                const float (&weights)[4]) const {
    const unsigned to = places.weights(buffer, 0) + few_weights_of_lane();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::store_shared_u32(to + FewPlaces::kWeightsBytes * i + h * (8 * 128),
                              ptx::pack_bf16(weights[2 * h] * scales.of[0][i], weights[2 * h + 1] * scales.of[1][i]));
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const FewPlaces& places, int stage, unsigned buffer,
                                                  FewOut& o) const {
    static_assert(Packed::kGroup % Few::kChannelsOfWarp == 0, "a warp's channels have one scale");
    const unsigned row = places.weights(buffer, 0), from = places.row(stage, 0) + values_at_;
#pragma unroll
    for (int step = 0; step < Few::kKeys / 16; ++step) {
      unsigned weights[4];
      ptx::load_matrix_x4(weights, row + (weights_at_ ^ 32 * step));
#pragma unroll
      for (int b = 0; b < FewOut::kBlocks; b += 2) {
        unsigned codes[4];
        ptx::load_matrix_x4_transposed(codes, from + step * (16 * Few::kPitch) + 16 * b);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Channels 2 g and 2 g + 1, side by side, of key 2 t and of 2 t + 1; and of the keys eight later.
          const uint2 low = ptx::four_e4m3_to_f16(codes[2 * i]), high = ptx::four_e4m3_to_f16(codes[2 * i + 1]);
          ptx::mma_bf16(o.blocks[b + i][0], weights, {lower(low), lower(high)});
          ptx::mma_bf16(o.blocks[b + i][1], weights, {upper(low), upper(high)});
        }
      }
    }
  }

  // Columns 2 t and 2 t + 1 of the two accumulators are channels 4 t and 4 t + 2, and 4 t + 1 and 4 t + 3.
  __device__ __forceinline__ static void arrange(FewOut& o) {
#pragma unroll
    for (int i = 0; i < 2 * FewOut::kBlocks; ++i) {
      float& x = o.blocks[i / 2][0][i % 2 * 2 + 1];
      float& y = o.blocks[i / 2][1][i % 2 * 2];
      const float kept = x;
      x = y, y = kept;
    }
  }
  // The lane's first of four in a block, when they have been arranged.
  __device__ __forceinline__ static int channel() { return 4 * t(); }

 private:
  static constexpr int kGroups = Packed::kGroups, kBlocks = Packed::kNope / 16, kBlocksOfGroup = Packed::kGroup / 16,
                       kRopeBlocks = (Packed::kHeadDim - Packed::kNope) / 16;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int g() { return lane() / 4; }
  __device__ __forceinline__ static int t() { return lane() % 4; }

  // Two bf16 numbers times a power of two, as fp16.
  __device__ __forceinline__ static unsigned scaled(unsigned two, float factor) {
    return ptx::pack_f16(__uint_as_float(two << 16) * factor, __uint_as_float(two & 0xffff0000) * factor);
  }
  __device__ __forceinline__ static void load_groups(unsigned at, float (&x)[kGroups]) {
    unsigned four[4];
    ptx::load_shared_four(at, four);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) x[i] = __uint_as_float(four[i]);
  }
  // Of two pairs of fp16 numbers the first, or second, of each, as bf16.
  __device__ __forceinline__ static unsigned lower(uint2 x) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(x.x)),
                          ptx::f16_to_float(static_cast<unsigned short>(x.y)));
  }
  __device__ __forceinline__ static unsigned upper(uint2 x) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(x.x >> 16)),
                          ptx::f16_to_float(static_cast<unsigned short>(x.y >> 16)));
  }

  // Where ldmatrix begins, from a tile's first row, and from the weights of the first group.
  const unsigned keys_at_ = ptx::kept((few_warp() * Few::kKeysOfWarp + lane() % 8) * Few::kPitch + lane() / 8 * 16);
  const unsigned values_at_ =
      ptx::kept(lane() % 16 * Few::kPitch + few_warp() * Few::kChannelsOfWarp + lane() / 16 * 16);
  const unsigned weights_at_ =
      ptx::kept(few_warp() * Few::kChannelsOfWarp / Packed::kGroup * FewPlaces::kWeightsBytes + lane() % 16 * 128 +
                (lane() / 16 ^ lane() % 8) * 16);
  unsigned q_[kBlocks][4];  // of codes; those of the rope part lie in shared memory
};

}  // namespace attune::mla
