// SPDX-License-Identifier: Apache-2.0
// The online softmax of one warp over 16 keys: scores to P, row_max and row_sum, and the rescaling of O.
//
// A thread holds rows 2t, 2t + 1 of each tile of eight rows and keys g, g + 8 (g = lane / 4, t = lane % 4).
#pragma once

#include "common/row_max.cuh"
#include "decode/config.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/reduce.cuh"

namespace attune::decode {

using common::finite_row_max;

// P, O and row_sum carry a factor of 2^kMaxOffset until the epilogue. In fp16 the largest P is 2^15, so that small
// probabilities, and those of values with small scales, keep their bits.
constexpr float kMaxOffset = Config::kComputeType == common::kFloat16 ? 15 : 0;

// A warp's running result for the rows of a split.
struct AttentionState {
  static constexpr int kN = Config::kRowTiles;

  float o[Config::kBlocksV][kN][4];                // [channel][row], relative to row_max (token scales: pv_max)
  float row_max[kN][2], row_sum[kN][2];            // row_sum: of this thread's keys
  float pv_max[Config::kKeyFactors ? kN : 1][2];  // at least the max of score + log2 |v_scale|
  unsigned v_scale_exponent;                       // the biased exponent of a power of two above all v_scale so far

  // initial_sum: NaN makes all rows NaN (common/stamp.cuh).
  __device__ __forceinline__ void clear(float initial_sum) {
#pragma unroll
    for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][n][j] = 0;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        row_max[n][e] = -ptx::infinity();
        row_sum[n][e] = initial_sum;
        if constexpr (Config::kKeyFactors) pv_max[n][e] = -ptx::infinity(), v_scale_exponent = 1;
      }
    }
  }
};

// Reductions over the eight lanes that hold the same rows.
__device__ __forceinline__ float max_over_keys(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float sum_over_keys(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

class Softmax {
 public:
  static constexpr int kN = Config::kRowTiles, kCompute = Config::kComputeType;

  // s: scores on entry, P in fp32 on return. p_regs: P rounded, as the B fragments of P V. row_sum adds the rounded P.
  __device__ __forceinline__ static void softmax(float (&s)[kN][4], const float (&v_scale)[2],
                                                 unsigned (&p_regs)[Config::kParts][kN][2], AttentionState& state) {
    float o_rescale[kN][2];
    bool rescales = false;
    VScaleUnit unit = {};
    const bool one_unit = Config::kKeyFactors && find_v_scale_unit(v_scale, unit, state);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float row_max = fmaxf(state.row_max[n][e], max_over_keys(fmaxf(s[n][e], s[n][2 + e])));
        const float row_max_ref = finite_row_max(row_max);
        const float rescale = ptx::exp2_approx(state.row_max[n][e] - row_max_ref);
        state.row_max[n][e] = row_max;
        if constexpr (Config::kKeyFactors) {
          o_rescale[n][e] = one_unit ? scaled_p_in_unit(s[n][e], s[n][2 + e], unit, rescale, row_max_ref, n, e, state)
                                     : scaled_p(s[n][e], s[n][2 + e], v_scale, rescale, row_max_ref, n, e, state);
        } else {
          o_rescale[n][e] = rescale;
          state.row_sum[n][e] *= rescale;
          s[n][e] = ptx::exp2_approx(s[n][e] - (row_max_ref - kMaxOffset));
          s[n][2 + e] = ptx::exp2_approx(s[n][2 + e] - (row_max_ref - kMaxOffset));
        }
        rescales |= o_rescale[n][e] != 1.0f;
      }
    }
    // After the first tiles row_max rarely changes.
    if (__any_sync(0xffffffffu, rescales)) rescale_o(o_rescale, state);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float rest[4] = {s[n][0], s[n][1], s[n][2], s[n][3]};
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned rounded = common::pack<kCompute>(rest[2 * half], rest[2 * half + 1]);
          const float low = common::low_half<kCompute>(rounded), high = common::high_half<kCompute>(rounded);
          rest[2 * half] -= low;
          rest[2 * half + 1] -= high;
          if constexpr (!Config::kKeyFactors) {
            state.row_sum[n][0] += low;
            state.row_sum[n][1] += high;
          }
          p_regs[part][n][half] = ptx::transpose_matrix(rounded);
        }
      }
    }
  }

 private:
  // A power of two above all scales of values so far, and the scales of two keys relative to it.
  struct VScaleUnit {
    float scale[2];
    float log2;
  };

  __device__ __forceinline__ static void rescale_o(const float (&o_rescale)[kN][2], AttentionState& state) {
#pragma unroll
    for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state.o[i][n][j] *= o_rescale[n][j % 2];
      }
    }
  }

  // Updates the unit relative to which P times v_scale fits fp16. Returns false if the scales are too far apart for any
  // unit.
  __device__ __forceinline__ static bool find_v_scale_unit(const float (&v_scale)[2], VScaleUnit& unit,
                                                           AttentionState& state) {
    constexpr unsigned kSmallest = 12;  // binary places below the unit that P in fp16 can lose
    const unsigned a = __float_as_uint(fabsf(v_scale[0])), b = __float_as_uint(fabsf(v_scale[1]));
    // In most tiles no scale is above the unit or far below it.
    const unsigned above = state.v_scale_exponent << 23;
    const unsigned below = state.v_scale_exponent > kSmallest ? (state.v_scale_exponent - kSmallest) << 23 : 1;
    bool fits = true;
    if (__any_sync(0xffffffffu, max(a, b) >= above || min(a - 1, b - 1) < below - 1)) {
      const unsigned largest = ptx::max_of_warp(max(a, b));
      const unsigned smallest = ptx::min_of_warp(min(a - 1, b - 1)) + 1;  // 0: all scales are 0
      if (largest < 253u << 23) state.v_scale_exponent = max(state.v_scale_exponent, (largest >> 23) + 1);
      fits = largest < 253u << 23 && (smallest == 0 || (smallest >> 23) + kSmallest >= state.v_scale_exponent);
    }
    const float inverse = __uint_as_float((254 - state.v_scale_exponent) << 23);
    unit.scale[0] = v_scale[0] * inverse, unit.scale[1] = v_scale[1] * inverse;
    unit.log2 = static_cast<float>(static_cast<int>(state.v_scale_exponent) - 127);
    return fits;
  }

  // Turns the scores of two keys into P times v_scale, relative to the unit; returns the rescale factor of O.
  __device__ __forceinline__ static float scaled_p_in_unit(float& s0, float& s1, const VScaleUnit& unit, float rescale,
                                                           float row_max_ref, int n, int e, AttentionState& state) {
    const float old_pv_max = state.pv_max[n][e];
    state.pv_max[n][e] = state.row_max[n][e] + unit.log2;
    const float p0 = ptx::exp2_approx(s0 - (row_max_ref - kMaxOffset)),
                p1 = ptx::exp2_approx(s1 - (row_max_ref - kMaxOffset));
    state.row_sum[n][e] = state.row_sum[n][e] * rescale + p0 + p1;
    s0 = p0 * unit.scale[0], s1 = p1 * unit.scale[1];
    return ptx::exp2_approx(old_pv_max - (row_max_ref + unit.log2));
  }

  // The same for any scales: P times v_scale is relative to a separate max, pv_max.
  __device__ __forceinline__ static float scaled_p(float& s0, float& s1, const float (&v_scale)[2], float rescale,
                                                   float row_max_ref, int n, int e, AttentionState& state) {
    const float a = s0 + ptx::log2_approx(fabsf(v_scale[0])), b = s1 + ptx::log2_approx(fabsf(v_scale[1]));
    const float old_pv_max = state.pv_max[n][e], pv_max = fmaxf(old_pv_max, max_over_keys(fmaxf(a, b)));
    const float pv_max_ref = finite_row_max(pv_max);
    state.pv_max[n][e] = pv_max;
    state.row_sum[n][e] = state.row_sum[n][e] * rescale + ptx::exp2_approx(s0 - (row_max_ref - kMaxOffset)) +
                          ptx::exp2_approx(s1 - (row_max_ref - kMaxOffset));
    s0 = s0 == -ptx::infinity() ? 0.0f : copysignf(ptx::exp2_approx(a - (pv_max_ref - kMaxOffset)), v_scale[0]);
    s1 = s1 == -ptx::infinity() ? 0.0f : copysignf(ptx::exp2_approx(b - (pv_max_ref - kMaxOffset)), v_scale[1]);
    return ptx::exp2_approx(old_pv_max - pv_max_ref);
  }
};

}  // namespace attune::decode
