// SPDX-License-Identifier: Apache-2.0
// The math of few rows: 16 rows of queries against tiles of 64 cached rows, whose codes become operands in registers.
//
//   S = sum over groups g of channels  s_g (Q_g C_g^T) + Q_rope K_rope^T,   C codes, s_g a scale of each key
//   P = 2^(c (S - r)), c = scale log2 e, r a reference for each row;  O_g = O_g 2^(c (r - r')) + (P s_g) C_g
//
// Warp w computes scores of keys 8 w .. + 7, with all queries in registers, and has channels 64 w .. + 63 of O. Codes are
// exact as fp16, by which the queries are multiplied after each group of each row has been brought near 2^13 by a power
// of two; and as bf16, by which weights are, which have the scales in them and so need the range of bf16.
//
//   warp:   S_1  max_1 >  O += P_0 V_0  > max_1 of all, P_1 >  S_2  max_2 >  O += P_1 V_1 ..
//
// What other warps need of it, maxima and weights, they need a product later, so that they hardly wait.
#pragma once

#include "mla/few_config.cuh"
#include "mla/rows.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

class FewAttend {
 public:
  // Lane: rows g and g + 8 of the queries, with g = lane / 4; keys 2 t and 2 t + 1 of the warp's, with t = lane % 4.
  // max and reference are the same in all warps; sum is of the lane's keys, against reference.
  float highest[2], reference[2], sum[2];
  // Channels 16 b + 4 t + e of the warp's, row g: o[b][e % 2][e / 2]; row g + 8: o[b][e % 2][2 + e / 2].
  static constexpr int kOutBlocks = Few::kChannelsOfWarp / 16;
  float o[kOutBlocks][2][4];

  __device__ __forceinline__ FewAttend(const PrefillParams& p, const FewPlaces& places)
      : p_(p), places_(places), warp_(few_warp()), lane_(threadIdx.x % 32) {}

  // All tiles of a task. All math warps, when they have met after the task before.
  __device__ __forceinline__ void run(const Task& task, int head_tile) {
    load_queries(task, head_tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) highest[h] = reference[h] = -ptx::infinity(), sum[h] = 0;
#pragma unroll
    for (int i = 0; i < kOutBlocks * 8; ++i) o[i / 8][i / 4 % 2][i % 4] = 0;
    const int tiles = task.tile_end - task.tile_begin;
#pragma unroll 1
    for (int i = 0; i <= tiles; ++i) {
      const Ring tile = ring_;
      if (i < tiles) score(tile, count_);
      if (i > 0) take_values(last_, count_ - 1);
      if (i < tiles) {
        weigh(tile, count_);
        last_ = tile.stage;
        ring_.go_on();
        ++count_;
      }
    }
  }

  // The sum of all keys, of all warps. Nobody needs what the task has used of shared memory any more.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      if (t() == 0) ptx::store_shared_u32(places_.sums(g() + 8 * h) + 4 * warp_, __float_as_uint(sum[h]));
    }
    meet_few();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
      load_eight(places_.sums(g() + 8 * h), x);
      sum[h] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
  }

  // What o is to be multiplied with to be against the maximum, as sum then is. The maximum becomes a score in base 2.
  __device__ __forceinline__ float finish(int h) {
    const float lowered = highest[h] == reference[h] ? 1.0f : ptx::exp2_approx((reference[h] - highest[h]) * c());
    sum[h] *= lowered;
    if (highest[h] != -ptx::infinity()) highest[h] *= c();
    return lowered;
  }

 private:
  static constexpr int kGroups = Few::kGroups, kBlocksOfGroup = Packed::kGroup / 16;
  static constexpr float kSlack = 8;  // weights may exceed 1 by so many powers of 2 before o is multiplied

  // From raw products to scores in base 2.
  __device__ __forceinline__ float c() const { return p_.scale * kLog2e; }
  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int t() const { return lane_ % 4; }
  __device__ __forceinline__ int group_of_warp() const { return warp_ * Few::kChannelsOfWarp / Packed::kGroup; }
  __device__ __forceinline__ static void load_eight(unsigned at, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned four[4];
      ptx::load_shared_four(at + 16 * i, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = __uint_as_float(four[j]);
    }
  }

  // ---- queries

  // Where one of the block's rows begins, null where there is none.
  __device__ __forceinline__ const char* query(const Task& t, int head_tile, int row) const {
    if (row >= p_.heads_of_tile) return nullptr;
    return p_.q + 2 * tile::row_offset(p_, t.batch, t.q_begin, t.token_begin, head_tile * p_.heads_of_tile + row,
                                       p_.q_batch_stride, p_.q_row_stride, p_.q_head_stride);
  }
  // A warp brings a group of channels of half of the rows to shared memory, from where all take all.
  __device__ __forceinline__ void load_queries(const Task& task, int head_tile) {
    static_assert(2 * kGroups == Few::kMathWarps, "a warp has a group of half of the rows");
    const int group = warp_ / 2, half = warp_ % 2;
    const char* const row = query(task, head_tile, g() + 8 * half);
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
    // 2^e of the largest; what it is multiplied with to be 2^13, and the inverse. What is not finite stays so.
    const unsigned exponent = max(largest >> 23, 14u), up = exponent == 255 ? 127 : 267 - exponent;
    const float factor = __uint_as_float(up << 23);
    if (t() == 0)
      ptx::store_shared_u32(places_.factors(g() + 8 * half) + 4 * group, 254 - up << 23);
#pragma unroll
    for (int i = 0; i < kBlocksOfGroup; ++i) {
      const unsigned at = places_.queries(group * kBlocksOfGroup + i, lane_) + 4 * half;
      ptx::store_shared_u32(at, scaled(x[i].x, factor));
      ptx::store_shared_u32(at + 8, scaled(x[i].y, factor));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const char* const from = query(task, head_tile, g() + 8 * h);
#pragma unroll
      for (int i = 0; i < 2 * Few::kRopeBlocks; ++i) {
        unsigned two = 0;
        if (from != nullptr) two = *reinterpret_cast<const unsigned*>(from + 2 * (Packed::kNope + 8 * i + 2 * t()));
        q_[Few::kBlocks + i / 2][i % 2 * 2 + h] = two;
      }
    }
    meet_few();
#pragma unroll
    for (int i = 0; i < Few::kBlocks; ++i) ptx::load_shared_four(places_.queries(i, lane_), q_[i]);
  }
  // Two bf16 numbers times a power of two, as fp16.
  __device__ __forceinline__ static unsigned scaled(unsigned two, float factor) {
    return ptx::pack_f16(__uint_as_float(two << 16) * factor, __uint_as_float(two & 0xffff0000) * factor);
  }

  // ---- scores of the warp's keys

  __device__ __forceinline__ static void load_groups(unsigned at, float (&x)[kGroups]) {
    unsigned four[4];
    ptx::load_shared_four(at, four);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) x[i] = __uint_as_float(four[i]);
  }
  __device__ __forceinline__ void load_scales(int stage, float (&scales)[2][kGroups]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      load_groups(places_.row(stage, warp_ * Few::kKeysOfWarp + 2 * t() + e) + Packed::kNope, scales[e]);
  }

  __device__ __forceinline__ void score(const Ring& tile, unsigned count) {
    ptx::wait_phase(places_.full(tile.stage), tile.parity);
    // Of four neighbouring pieces of 16 bytes of eight rows.
    const unsigned from = places_.row(tile.stage, warp_ * Few::kKeysOfWarp + lane_ % 8) + lane_ / 8 * 16;
    float products[kGroups + 1][4] = {};
#pragma unroll
    for (int i = 0; i < Few::kBlocks; i += 4) {
      unsigned codes[4];
      ptx::load_matrix_x4(codes, from + 16 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 halves = ptx::four_e4m3_to_f16(codes[j]);
        const unsigned keys[2] = {halves.x, halves.y};
        ptx::mma_f16(products[i / kBlocksOfGroup], q_[i + j], keys);
      }
    }
#pragma unroll
    for (int i = 0; i < Few::kRopeBlocks; i += 2) {
      unsigned keys[4];
      ptx::load_matrix_x4(keys, from + Packed::kRope + 32 * i);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        ptx::mma_bf16(products[kGroups], q_[Few::kBlocks + i + j], {keys[2 * j], keys[2 * j + 1]});
    }
    float scales[2][kGroups], factors[2][kGroups];
    load_scales(tile.stage, scales);
#pragma unroll
    for (int h = 0; h < 2; ++h) load_groups(places_.factors(g() + 8 * h), factors[h]);
    const unsigned absent = ptx::load_shared_u8(places_.note(tile.stage) + warp_) >> (2 * t());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s_[i] = products[kGroups][i];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) s_[i] = fmaf(products[j][i] * factors[i / 2][j], scales[i % 2][j], s_[i]);
      if ((absent >> (i % 2) & 1) != 0) s_[i] = -ptx::infinity();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(s_[2 * h], s_[2 * h + 1]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      if (t() == 0) ptx::store_shared_u32(places_.maxima(count % 2, g() + 8 * h) + 4 * warp_, __float_as_uint(top));
    }
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.maxima_full(count % 2));
  }

  // ---- weights of the warp's keys, for all warps

  __device__ __forceinline__ void weigh(const Ring& tile, unsigned count) {
    float scales[2][kGroups];
    load_scales(tile.stage, scales);
    ptx::wait_phase(places_.maxima_full(count % 2), count / 2 % 2);
    float lowered[2];
    const float scale = c();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
      load_eight(places_.maxima(count % 2, g() + 8 * h), x);
      float top = highest[h];
#pragma unroll
      for (int i = 0; i < 8; ++i) top = fmaxf(top, x[i]);
      highest[h] = top;
      lowered[h] = 1.0f;
      if ((top - reference[h]) * scale > kSlack) {
        lowered[h] = ptx::exp2_approx((reference[h] - top) * scale);
        reference[h] = top;
      }
      const float from = reference_of(reference[h]) * scale;
#pragma unroll
      for (int e = 0; e < 2; ++e) s_[2 * h + e] = ptx::exp2_approx(fmaf(s_[2 * h + e], scale, -from));
      sum[h] = fmaf(sum[h], lowered[h], s_[2 * h] + s_[2 * h + 1]);
    }
    const unsigned to = (warp_ ^ g()) * 16 + g() * 128 + t() * 4;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::store_shared_u32(places_.weights(count % 2, i) + to + h * (8 * 128),
                              ptx::pack_bf16(s_[2 * h] * scales[0][i], s_[2 * h + 1] * scales[1][i]));
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.weights_full(count % 2));
    if (__any_sync(0xffffffffu, lowered[0] != 1.0f || lowered[1] != 1.0f)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kOutBlocks * 8; ++i) o[i / 8][i / 4 % 2][i % 4] *= lowered[i / 2 % 2];
    }
  }

  // ---- the warp's channels of all keys

  __device__ __forceinline__ void take_values(int stage, unsigned count) {
    ptx::wait_phase(places_.weights_full(count % 2), count / 2 % 2);
    const unsigned weights_row = places_.weights(count % 2, group_of_warp()) + lane_ % 16 * 128;
    // Lanes 0 to 15 give 16 bytes, codes of 16 channels, of 16 keys; the others the next 16 bytes.
    const unsigned codes_row = places_.row(stage, lane_ % 16) + warp_ * Few::kChannelsOfWarp + lane_ / 16 * 16;
#pragma unroll
    for (int step = 0; step < Few::kKeys / 16; ++step) {
      unsigned weights[4];
      ptx::load_matrix_x4(weights, weights_row + ((2 * step + lane_ / 16) ^ lane_ % 8) * 16);
#pragma unroll
      for (int b = 0; b < kOutBlocks; b += 2) {
        unsigned codes[4];
        ptx::load_matrix_x4_transposed(codes, codes_row + step * (16 * Packed::kRowBytes) + 16 * b);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Of channels 2 g and 2 g + 1, in the halves, keys 2 t and 2 t + 1; and the same eight keys later.
          const uint2 low = ptx::four_e4m3_to_f16(codes[2 * i]), high = ptx::four_e4m3_to_f16(codes[2 * i + 1]);
          ptx::mma_bf16(o[b + i][0], weights, {lower(low), lower(high)});
          ptx::mma_bf16(o[b + i][1], weights, {upper(low), upper(high)});
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.empty(stage));
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

  const PrefillParams& p_;
  const FewPlaces& places_;
  const int warp_, lane_;
  unsigned q_[Few::kBlocks + Few::kRopeBlocks][4];
  float s_[4];                 // scores, then weights, of (row g, keys 2 t, 2 t + 1), then row g + 8
  Ring ring_;                  // of the next tile
  int last_ = 0;               // stage of the one before
  unsigned count_ = 0;         // tiles, of all tasks
};

}  // namespace attune::mla
