// SPDX-License-Identifier: Apache-2.0
// The layout and quantisation of the packed MLA formats (docs/semantics.md, "Caches"), with the same bits as on the CPU
// backend. The first kNope channels are e4m3 with one scale for each kGroup of them; the rest are bf16.
//
//   const char* scales = MlaRow<584>::scales(row, page, page_size, offset);          // of the token at `row`
//   x = code of channel d * MlaRow<584>::load_scale(scales, d / MlaRow<584>::kGroup);  // d < kNope
//   x = bf16 at row + kRope + 2 * (d - kNope);                                       // else
//   scale = mla_scale<584>(amax of the group, power_of_two);                         // quantise
//   divide_by_scale<584>(x, amax, scale, power_of_two);                              // then encode_run(kE4m3, x)
#pragma once

#include "common/kv_codec.cuh"

namespace attune::common {

// 2^(e - 127); 255 is NaN.
__device__ __forceinline__ float e8m0_to_float(unsigned e) {
  return __uint_as_float(e == 255 ? 0x7fffffffu : e == 0 ? 0x00400000u : e << 23);
}

// The packed formats, named by their bytes for each token.
template <int kFormat>
struct MlaRow {
  static_assert(kFormat == 656 || kFormat == 584, "the formats of kv_format.h");
  static constexpr int kHeadDim = kFormat == 656 ? 576 : 512;
  static constexpr int kNope = kFormat == 656 ? 512 : 448, kGroup = kFormat == 656 ? 128 : 64;
  static constexpr int kGroups = kNope / kGroup;
  static constexpr int kRope = kFormat == 656 ? 528 : 448;      // the first byte of the bf16 channels
  static constexpr int kRowBytes = kFormat == 656 ? 656 : 576;  // 584: the scales come after all rows of the page
  // The scales of token `offset`, whose row is at `row`, in a page that begins at `page` and holds page_size tokens.
  __device__ static char* scales(char* row, char* page, long long page_size, long long offset) {
    return kFormat == 656 ? row + 512 : page + page_size * 576 + offset * 8;
  }
  __device__ static const char* scales(const char* row, const char* page, long long page_size, long long offset) {
    return scales(const_cast<char*>(row), const_cast<char*>(page), page_size, offset);
  }
  // aligned: the caller knows that rows begin at multiples of 4 bytes.
  __device__ __forceinline__ static float load_scale(const char* scales, int group, bool aligned = false) {
    if constexpr (kFormat == 656) {
      unsigned bits;
      const char* at = scales + 4 * group;
      if (aligned || (reinterpret_cast<unsigned long long>(at) & 3) == 0) {
        bits = *reinterpret_cast<const unsigned*>(at);
      } else {
        bits = load_bits(1, at) | load_bits(1, at + 1) << 8 | load_bits(1, at + 2) << 16 | load_bits(1, at + 3) << 24;
      }
      return __uint_as_float(bits);
    }
    return e8m0_to_float(static_cast<unsigned char>(scales[group]));
  }
  __device__ __forceinline__ static void store_scale(char* scales, int group, float scale, bool aligned = false) {
    if constexpr (kFormat == 656) {
      const unsigned bits = __float_as_uint(scale);
      char* at = scales + 4 * group;
      if (aligned || (reinterpret_cast<unsigned long long>(at) & 3) == 0) {
        *reinterpret_cast<unsigned*>(at) = bits;
      } else {
        for (int i = 0; i < 4; ++i) at[i] = static_cast<char>(bits >> (8 * i));
      }
    } else {
      scales[group] = static_cast<char>(__float_as_uint(scale) >> 23);
    }
  }
};

// The scale of a group with this largest magnitude. A group of zeros has the smallest power of two.
template <int kFormat>
__device__ __forceinline__ float mla_scale(float amax, bool power_of_two) {
  amax = finite_amax(amax);
  if (kFormat == 656 && !power_of_two) {
    const float scale = __fdiv_rn(amax, 448.0f);
    if (scale != 0.0f) return scale;
  }
  return power_of_two_at_least(fmaxf(__fdiv_rn(amax, 448.0f), 1e-4f));
}

// x / scale for a group with this largest magnitude and its mla_scale(). Each number is rounded once.
template <int kFormat, int kCount>
__device__ __forceinline__ void divide_by_scale(float (&x)[kCount], float amax, float scale, bool power_of_two) {
  if (kFormat == 584 || power_of_two) {
    const float reciprocal = __uint_as_float((254u << 23) - __float_as_uint(scale));  // 2^-e, so nothing is rounded
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= reciprocal;
  } else {
    Divider(scale).divide(x, amax);
  }
}

}  // namespace attune::common
