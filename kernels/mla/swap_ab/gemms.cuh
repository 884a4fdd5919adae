// SPDX-License-Identifier: Apache-2.0
// The swap-AB GEMMs over packed rows as they lie in shared memory:
//
//   S^T = sum over scale groups g of channels  s_g (C_g Q_g^T) + K_rope Q_rope^T,  C fp8, s_g a scale of each key
//   O_g^T += C_g^T (P s_g)^T
//
// So M of wgmma is keys, or channels. fp8 is converted once for all rows of queries, to the A operand in registers;
// queries and P are the B operand in shared memory. No code is rounded: fp8 is exact in fp16. Queries become fp16 after
// each scale group of each row is scaled by a power of two to near 2^13. P, with the scales folded in, is fp16 relative
// to a unit of each scale group (mla/swap_ab/scale_units.cuh). If a scale of the tile is far below the unit, fp8
// values, still exact, and P are bf16.
//
// The two softmax warpgroups compute S of every other tile each: a warp has 16 keys and all channels. The PV warpgroup
// has O: a warp has 32 channels of each scale group and all keys.
#pragma once

#include "mla/swap_ab/config.cuh"
#include "mla/swap_ab/scale_units.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "ptx/wgmma.cuh"

namespace attune::mla {

// The warpgroup: 0 and 1 are softmax warpgroups, 2 is the PV warpgroup. And the warp's number within it.
__device__ __forceinline__ int swap_ab_warpgroup() { return consumer_warp() / 4; }
__device__ __forceinline__ int swap_ab_warp() { return consumer_warp() % 4; }
// Synchronises all consumer warps; the softmax warps.
__device__ __forceinline__ void sync_swap_ab_consumers() {
  // With .aligned for 32 rows and new tokens: without it the registers do not suffice, and 136 bytes spill.
  if constexpr (SwapAbConfig::kBlockM == 32 && Config::kDense) {
    ptx::named_barrier_sync(1, 32 * SwapAbConfig::kConsumerWarps);
  } else {
    ptx::named_barrier_sync_unaligned(1, 32 * SwapAbConfig::kConsumerWarps);
  }
}
__device__ __forceinline__ void sync_softmax_warps() { ptx::named_barrier_sync(2, 32 * SwapAbConfig::kSoftmaxWarps); }

// g = lane / 4, t = lane % 4. Element 4 j + 2 h + e of an accumulator: key or channel g + 8 h, row 8 j + 2 t + e.
using SwapAbAccum = float[SwapAbConfig::kBlockM / 2];

class SwapAbQkGemm {
 public:
  __device__ __forceinline__ explicit SwapAbQkGemm(const SwapAbSmem& smem) : smem_(smem) {}

  // Computes the descriptors, in uniform registers.
  __device__ __forceinline__ void begin() { q_ = ptx::uniform(ptx::descriptor_k_major(smem_.q(0))); }

  // Called by all softmax warps together: each loads a scale group, and a block of the rope channels, of half of the
  // rows.
  __device__ __forceinline__ void load_q(const WorkTileParams& p, const WorkTile& work, int head_tile) const {
    static_assert(2 * kGroups == SwapAbConfig::kSoftmaxWarps && kRopeBlocks == kGroups,
                  "a warp has a group of half of the rows");
    const int group = recomputed_consumer_warp() / 2, lane = recomputed_lane(), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int n = recomputed_consumer_warp() % 2; n < SwapAbConfig::kBlockM / 8; n += 2) {
      const int query = n * 8 + g;
      const QueryRow row = query_row(p, work, head_tile, query);
      uint2 x[kBlocksOfGroup];
      unsigned largest = 0;
#pragma unroll
      for (int i = 0; i < kBlocksOfGroup; ++i) {
        x[i] = make_uint2(0, 0);
        if (row.exists())
          x[i] = *reinterpret_cast<const uint2*>(row.latent + 2 * (group * Packed::kGroup + 16 * i + 4 * t));
      }
#pragma unroll
      for (int i = 0; i < kBlocksOfGroup; ++i) {
        largest = max(largest, max(x[i].x & 0x7fff0000, x[i].x << 16 & 0x7fff0000));
        largest = max(largest, max(x[i].y & 0x7fff0000, x[i].y << 16 & 0x7fff0000));
      }
      largest = common::quad_max(largest);
      // A power of two brings the largest number near 2^13; its inverse is stored. Infinity and NaN stay what they are.
      const unsigned exponent = max(largest >> 23, 14u), up = exponent == 255 ? 127 : 267 - exponent;
      const float factor = __uint_as_float(up << 23);
      if (t == 0) ptx::store_shared_u32(smem_.q_factor(group, query), 254 - up << 23);
#pragma unroll
      for (int i = 0; i < kBlocksOfGroup; ++i) {
        // The order of channels in which ldmatrix returns fp8: in each 16 channels, positions 2 t and 2 t + 1 have
        // channels 4 t and 4 t + 1, and the positions eight further have the next two.
        const unsigned at = smem_.q(group * 2 + i / 4) + query * 128 + 4 * t;
        ptx::store_shared_u32(at + ((i % 4 * 2) ^ g) * 16, scaled(x[i].x, factor));
        ptx::store_shared_u32(at + ((i % 4 * 2 + 1) ^ g) * 16, scaled(x[i].y, factor));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned two = 0;
        if (row.exists()) two = *reinterpret_cast<const unsigned*>(row.rope + 2 * (group * 16 + 8 * i + 2 * t));
        ptx::store_shared_u32(smem_.q(2 * kGroups) + query * 128 + ((2 * group + i) ^ g) * 16 + 4 * t, two);
      }
    }
    ptx::fence_async_proxy();
    sync_softmax_warps();
  }

  // Computes S of a tile. The accumulator of one scale group is added to s while the next one's GEMM runs.
  __device__ __forceinline__ void gemm(int stage, SwapAbAccum& s) const {
    const unsigned from = smem_.row(stage, 0) + k_offset_;
    unsigned fp8[2][4], rope[kRopeBlocks][4];
#pragma unroll
    for (int i = 0; i < kRopeBlocks; ++i) ptx::load_matrix_x4(rope[i], from + Packed::kRope + 32 * i);
    load(from, 0, fp8);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRopeBlocks; ++i)
      ptx::WgmmaBKMajor<SwapAbConfig::kBlockM, ptx::Type::kBf16>::rs(
          s, rope[i], q_ + (2 * kGroups * (SwapAbConfig::kChunkBytes >> 4) + i * ptx::kStepK), i);
    ptx::wgmma_commit();
    SwapAbAccum accum[2];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slice = 2 * group + i;
        unsigned a[4][4];
        if (slice > 0) ptx::wgmma_wait<1>();
        convert_a(fp8, a);
        if (slice < kSlices - 1) load(from, slice + 1, fp8);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          ptx::WgmmaBKMajor<SwapAbConfig::kBlockM, ptx::Type::kF16>::rs(
              accum[group % 2], a[k], q_ + (slice * (SwapAbConfig::kChunkBytes >> 4) + k * ptx::kStepK), i + k);
        ptx::wgmma_commit();
        if (i == 0 && group > 0) scale_and_add<1>(stage, group - 1, accum[(group - 1) % 2], s);
      }
    }
    scale_and_add<0>(stage, kGroups - 1, accum[(kGroups - 1) % 2], s);
  }

  // P, s[4 j + 2 h + e] of key g + 8 h and row 8 j + 2 t + e, times the scales of each scale group.
  using PRegs = unsigned[Packed::kGroups][SwapAbConfig::kBlockM / 16][4];
  template <ptx::Type kType>
  __device__ __forceinline__ void scale_p(int stage, const ScaleUnits& units, const SwapAbAccum& s,
                                          PRegs& p_regs) const {
    unsigned scales[2][4];
    load_scales(stage, scales);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float unit = units.factor(i),
                  of_keys[2] = {__uint_as_float(scales[0][i]) * unit, __uint_as_float(scales[1][i]) * unit};
#pragma unroll
      for (int j = 0; j < SwapAbConfig::kBlockM / 4; ++j) {
        const float x = s[2 * j] * of_keys[j % 2], y = s[2 * j + 1] * of_keys[j % 2];
        p_regs[i][j / 4][j % 4] = kType == ptx::Type::kF16 ? ptx::pack_f16(x, y) : ptx::pack_bf16(x, y);
      }
    }
  }
  __device__ __forceinline__ void store_p(const PRegs& p_regs) const {
    const int lane = recomputed_lane();  // gives stmatrix a row of queries and eight keys
    const unsigned to =
        smem_.p(0) + (lane / 16 * 8 + lane % 8) * 128 + ((swap_ab_warp() * 2 + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < SwapAbConfig::kBlockM / 16; ++j)
        ptx::store_matrix_x4_transposed(to + i * SwapAbConfig::kPBytes + j * (16 * 128), p_regs[i][j]);
    }
  }

 private:
  static constexpr int kSlices = 8;  // of the fp8 channels, 64 channels each
  static constexpr int kGroups = Packed::kGroups, kBlocksOfGroup = Packed::kGroup / 16,
                       kRopeBlocks = (Packed::kHeadDim - Packed::kNope) / 16;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Scales two bf16 numbers by a power of two and converts them to fp16.
  __device__ __forceinline__ static unsigned scaled(unsigned two, float factor) {
    return ptx::pack_f16(__uint_as_float(two << 16) * factor, __uint_as_float(two & 0xffff0000) * factor);
  }
  // 64 fp8 channels, and their A operands.
  using Fp8 = unsigned[2][4];
  __device__ __forceinline__ static void load(unsigned from, int slice, Fp8& fp8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_matrix_x4(fp8[i], from + 64 * slice + 32 * i);
  }
  __device__ __forceinline__ static void convert_a(const Fp8& fp8, unsigned (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 f16x2 = ptx::four_e4m3_to_f16(fp8[i][j]);
        a[2 * i + j / 2][j % 2] = f16x2.x, a[2 * i + j / 2][j % 2 + 2] = f16x2.y;
      }
    }
  }
  // s += a scale group's accumulator times its scales. kPending: GEMMs that were committed after it.
  template <int kPending>
  __device__ __forceinline__ void scale_and_add(int stage, int group, SwapAbAccum& accum, SwapAbAccum& s) const {
    const unsigned from = smem_.row(stage, 0) + scales_at() + 4 * group;
    const unsigned factors = smem_.q_factor(group, recomputed_lane() % 4 * 2);
    float scales[2];  // of the lane's two keys
#pragma unroll
    for (int h = 0; h < 2; ++h) scales[h] = ptx::load_shared(from + h * (8 * SwapAbConfig::kPitch));
    ptx::wgmma_wait<kPending>();
    ptx::fence_operand(accum);
    if (group == 0) ptx::fence_operand(s);
#pragma unroll
    for (int j = 0; j < SwapAbConfig::kBlockM / 8; ++j) {
      const float2 factor = ptx::load_shared_pair(factors + 8 * 4 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const x = s + 4 * j + 2 * h;
        const float* const y = accum + 4 * j + 2 * h;
        x[0] = fmaf(y[0] * factor.x, scales[h], x[0]), x[1] = fmaf(y[1] * factor.y, scales[h], x[1]);
      }
    }
  }
  __device__ __forceinline__ void load_scales(int stage, unsigned (&scales)[2][4]) const {
    const unsigned from = smem_.row(stage, 0) + scales_at();
#pragma unroll
    for (int h = 0; h < 2; ++h) ptx::load_shared_four(from + h * (8 * SwapAbConfig::kPitch), scales[h]);
  }

  // The offset of the scales of the lane's first key, from a tile's first row.
  __device__ __forceinline__ static unsigned scales_at() {
    return (swap_ab_warp() * 16 + recomputed_lane() / 4) * SwapAbConfig::kPitch + Packed::kNope;
  }

  const SwapAbSmem& smem_;
  ptx::Descriptor q_{};
  // The offset that the lane gives to ldmatrix, from a tile's first row.
  const unsigned k_offset_ = ptx::opaque((swap_ab_warp() * 16 + lane() % 16) * SwapAbConfig::kPitch + lane() / 16 * 16);
};

// O^T, in blocks of 64 channels. Block 2 i + b has channels 16 b .. 16 b + 15 of the warp's channels in scale group i.
// The rows of A are permuted: where the accumulator layout has channels g and g + 8, a lane has 2 g and 2 g + 1.
struct SwapAbOut {
  static constexpr int kBlocks = 2 * Packed::kGroups;
  SwapAbAccum blocks[kBlocks];
  // The lane's first channel of a block; its second is the next one.
  __device__ __forceinline__ static int channel(int block) {
    return block / 2 * Packed::kGroup + recomputed_consumer_warp() % 4 * 32 + block % 2 * 16 +
           recomputed_lane() / 4 * 2;
  }
};

class SwapAbPvGemm {
 public:
  static constexpr int kSteps = SwapAbConfig::kBlockN / 16 * 2;  // steps of 16 keys and two scale groups

  __device__ __forceinline__ explicit SwapAbPvGemm(const SwapAbSmem& smem) : smem_(smem) {}

  __device__ __forceinline__ void begin() { p_ = ptx::uniform(ptx::descriptor_k_major(smem_.p(0))); }

  using Fp8 = unsigned[2][4];
  __device__ __forceinline__ void load(int stage, int step, Fp8& fp8) const {
    const unsigned from =
        smem_.row(stage, 0) + v_offset_ + step / 2 * (16 * SwapAbConfig::kPitch) + step % 2 * (2 * Packed::kGroup);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_matrix_x4_transposed(fp8[i], from + i * Packed::kGroup);
  }
  // Issues step kStep of o += V of a tile * P, without waiting for it. fp8: of this step on entry, of the next step but
  // one on return.
  // kType: of P.
  template <ptx::Type kType, int kStep>
  __device__ __forceinline__ void gemm(int stage, Fp8& fp8, SwapAbOut& o) const {
    unsigned a[4][4];
    if constexpr (kStep > 1) ptx::wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        // Channels 2 g and 2 g + 1, side by side, of keys 2 t and 2 t + 1; then of the keys eight further.
        const uint2 low = two_keys<kType>(fp8[i][2 * b]), high = two_keys<kType>(fp8[i][2 * b + 1]);
        unsigned(&x)[4] = a[2 * i + b];
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
      }
    }
    if constexpr (kStep + 2 < kSteps) load(stage, kStep + 2, fp8);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::WgmmaBKMajor<SwapAbConfig::kBlockM, kType>::rs(
          o.blocks[kStep % 2 * 4 + i], a[i],
          p_ + ((kStep % 2 * 2 + i / 2) * (SwapAbConfig::kPBytes >> 4) + kStep / 2 * ptx::kStepK), 1);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void pin(SwapAbOut& o) {
#pragma unroll
    for (int i = 0; i < SwapAbOut::kBlocks; ++i) ptx::fence_operand(o.blocks[i]);
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Converts two fp8 channels of one key and of another key, interleaved by channel.
  template <ptx::Type kType>
  __device__ __forceinline__ static uint2 two_keys(unsigned fp8) {
    const uint2 x = ptx::four_e4m3_to_f16(ptx::permute_bytes(fp8, fp8, 0x3120));
    if constexpr (kType == ptx::Type::kF16) return x;
    return make_uint2(to_bf16(x.x), to_bf16(x.y));
  }
  // Two fp16 numbers that were fp8, to bf16: exact.
  __device__ __forceinline__ static unsigned to_bf16(unsigned two) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(two)),
                          ptx::f16_to_float(static_cast<unsigned short>(two >> 16)));
  }

  const SwapAbSmem& smem_;
  ptx::Descriptor p_{};
  // The offset that the lane gives to ldmatrix, from a tile's first row.
  const unsigned v_offset_ = ptx::opaque(lane() % 16 * SwapAbConfig::kPitch + swap_ab_warp() * 32 + lane() / 16 * 16);
};

}  // namespace attune::mla
