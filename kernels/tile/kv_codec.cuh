// SPDX-License-Identifier: Apache-2.0
// How numbers become codes of a quantised cache, with the same bits as the CPU backend (docs/semantics.md, "Caches").
// By element, so that any kernel can use them with its own layout of rows over threads:
//
//   float scale = token_scale(dtype, amax);              // per token and head; amax: largest magnitude of the row
//   const Divider over(scale);                           // fixed scales are used the same way
//   codes = encode_pair(dtype, over(x0), over(x1));      // tile/run.cuh; or encode_run
//
// MLA rows: the first kNope channels are e4m3 with one scale for kGroup of them, the rest are bf16. MlaRow<656> and
// MlaRow<584> say where things lie; scale = mla_scale<kFormat>(amax of the group, power_of_two).
#pragma once

#include "ptx/math.cuh"
#include "tile/run.cuh"

namespace attune::tile {

// The larger magnitude; NaN is passed over.
__device__ __forceinline__ float larger_magnitude(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// An infinity counts as the largest float.
__device__ __forceinline__ float finite_amax(float amax) { return fminf(amax, __uint_as_float(0x7f7fffffu)); }

__device__ __forceinline__ float largest_code(int dtype) {
  return dtype == kInt8 ? 127.0f : dtype == kE4m3 ? 448.0f : 57344.0f;
}

// The scale of a row whose largest magnitude is amax (from larger_magnitude); of a row of zeros it is 1.
__device__ __forceinline__ float token_scale(int dtype, float amax) {
  const float scale = __fdiv_rn(finite_amax(amax), largest_code(dtype));
  return scale == 0.0f ? 1.0f : scale;
}

// x / scale to nearest even, as the CPU divides: one multiplication and one step of Newton's method with an exact
// remainder. A scale far from 1 is moved, and x with it, by a power of two, so that no remainder that matters to 8 bits
// is rounded; quotients so large or small that x leaves fp32's range saturate, or are 0, in any case.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(float scale) {
    const float magnitude = fabsf(scale);
    move_ = magnitude < 0x1p-60f ? 0x1p80f : magnitude > 0x1p60f ? 0x1p-80f : 1.0f;
    scale_ = scale * move_;
    reciprocal_ = __frcp_rn(scale_);
  }
  __device__ __forceinline__ float operator()(float x) const { return quotient(x * move_); }
  // Several at a time ask once whether to move.
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount]) const {
    if (move_ != 1.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= move_;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = quotient(x[i]);
  }

 private:
  __device__ __forceinline__ float quotient(float x) const {
    const float q = x * reciprocal_;
    const float exact = fmaf(fmaf(-q, scale_, x), reciprocal_, q);
    return exact == exact ? exact : q;  // infinities have no remainder
  }
  float scale_, reciprocal_, move_;
};

// 2^ceil(log2(max(amax / 448, 1e-4))), and its exponent byte.
__device__ __forceinline__ unsigned power_of_two_exponent(float amax) {
  const unsigned bits = __float_as_uint(fmaxf(__fdiv_rn(amax, 448.0f), 1e-4f));
  return (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
}
// 2^(e - 127); 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(unsigned e) {
  return __uint_as_float(e == 255 ? 0x7fffffffu : e == 0 ? 0x00400000u : e << 23);
}

// The packed formats, by their bytes a token.
template <int kFormat>
struct MlaRow {
  static_assert(kFormat == 656 || kFormat == 584, "the formats of kv_format.h");
  static constexpr int kHeadDim = kFormat == 656 ? 576 : 512;
  static constexpr int kNope = kFormat == 656 ? 512 : 448, kGroup = kFormat == 656 ? 128 : 64;
  static constexpr int kGroups = kNope / kGroup;
  static constexpr int kRope = kFormat == 656 ? 528 : 448;      // first byte of the bf16 part
  static constexpr int kRowBytes = kFormat == 656 ? 656 : 576;  // 584: scales lie after all rows of the page
  static constexpr int kScaleStep = kFormat == 656 ? 4 : 1;     // bytes of one scale
  // Scales of the row at `row`, token `offset` of a page that begins at `page` and holds page_size.
  __device__ static char* scales(char* row, char* page, long long page_size, long long offset) {
    return kFormat == 656 ? row + 512 : page + page_size * 576 + offset * 8;
  }
  __device__ static const char* scales(const char* row, const char* page, long long page_size, long long offset) {
    return scales(const_cast<char*>(row), const_cast<char*>(page), page_size, offset);
  }
  __device__ __forceinline__ static float load_scale(const char* scales, int group) {
    if constexpr (kFormat == 656) {
      unsigned bits;  // any alignment
      const char* at = scales + 4 * group;
      if ((reinterpret_cast<unsigned long long>(at) & 3) == 0) {
        bits = *reinterpret_cast<const unsigned*>(at);
      } else {
        bits = load_bits(1, at) | load_bits(1, at + 1) << 8 | load_bits(1, at + 2) << 16 | load_bits(1, at + 3) << 24;
      }
      return __uint_as_float(bits);
    }
    return e8m0_to_float(static_cast<unsigned char>(scales[group]));
  }
  __device__ __forceinline__ static void store_scale(char* scales, int group, float scale) {
    if constexpr (kFormat == 656) {
      const unsigned bits = __float_as_uint(scale);
      char* at = scales + 4 * group;
      if ((reinterpret_cast<unsigned long long>(at) & 3) == 0) {
        *reinterpret_cast<unsigned*>(at) = bits;
      } else {
        for (int i = 0; i < 4; ++i) at[i] = static_cast<char>(bits >> (8 * i));
      }
    } else {
      scales[group] = static_cast<char>(__float_as_uint(scale) >> 23);
    }
  }
};

// The scale of a group with this largest magnitude; of a group of zeros it is the smallest power of two.
template <int kFormat>
__device__ __forceinline__ float mla_scale(float amax, bool power_of_two) {
  amax = finite_amax(amax);
  if (kFormat == 656 && !power_of_two) {
    const float scale = __fdiv_rn(amax, 448.0f);
    if (scale != 0.0f) return scale;
  }
  return e8m0_to_float(power_of_two_exponent(amax));
}

}  // namespace attune::tile
