// SPDX-License-Identifier: Apache-2.0
// What surrounds the bf16 products with AVX512-BF16 and VBMI: conversion of cache rows, packing, the softmax that writes bf16.
#include "cpu/kernels_avx512bf16.h"

#if defined(__x86_64__)

namespace attune::cpu::avx512bf16 {
namespace {

// bfloat16 bits of the 128 codes without sign of an 8-bit float, as separate bytes: two lookups of VPERMI2B make a value.
struct CodeTable {
  alignas(64) uint8_t lower[128] = {};
  alignas(64) uint8_t upper[128] = {};

  constexpr void set(int code, int bits) {
    lower[code] = static_cast<uint8_t>(bits & 0xff);
    upper[code] = static_cast<uint8_t>(bits >> 8);
  }
};

// bfloat16 bits of mantissa * 2^exponent, mantissa in 1..255: always exact.
constexpr int bf16_bits(int mantissa, int exponent) {
  int top = 0;
  while ((mantissa >> (top + 1)) != 0) ++top;
  return ((exponent + top + 127) << 7) | ((mantissa << (7 - top)) & 0x7f);
}

constexpr CodeTable float_table(int mantissa_bits, int bias) {
  CodeTable table;
  for (int code = 1; code < 128; ++code) {
    const int exponent = code >> mantissa_bits;
    const int fraction = code & ((1 << mantissa_bits) - 1);
    const int implied = exponent > 0 ? 1 << mantissa_bits : 0;
    table.set(code, bf16_bits(fraction + implied, (exponent > 0 ? exponent : 1) - bias - mantissa_bits));
  }
  return table;
}

constexpr CodeTable e4m3_table() {
  CodeTable table = float_table(3, 7);
  table.set(0x7f, 0x7fc0);
  return table;
}

constexpr CodeTable e5m2_table() {
  CodeTable table = float_table(2, 15);
  table.set(0x7c, 0x7f80);
  for (int code = 0x7d; code < 0x80; ++code) table.set(code, 0x7fc0);
  return table;
}

constexpr CodeTable int8_table() {
  CodeTable table;
  for (int code = 1; code < 128; ++code) table.set(code, bf16_bits(code, 0));
  return table;
}

constexpr CodeTable kE4M3 = e4m3_table();
constexpr CodeTable kE5M2 = e5m2_table();
constexpr CodeTable kInt8 = int8_table();

}  // namespace

ATTUNE_BEGIN_AVX512BF16
namespace {

struct Lookup {
  __m512i lower0, lower1, upper0, upper1;

  ATTUNE_INLINE explicit Lookup(const CodeTable& t)
      : lower0(load(t.lower)), lower1(load(t.lower + 64)), upper0(load(t.upper)), upper1(load(t.upper + 64)) {}
};

// 64 codes to bfloat16. The interleave of bytes works within blocks of 128 bits, so the quarters are put in place first.
template <bool kIsInt8>
ATTUNE_INLINE void decode(const Lookup& lookup, __m512i codes, __m512i* first, __m512i* second) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
  // Lookups read the lower seven bits of an index, so that -128 finds entry 0: right but for the upper byte.
  const __m512i index = kIsInt8 ? _mm512_abs_epi8(codes) : codes;
  const __m512i lower = _mm512_permutex2var_epi8(lookup.lower0, index, lookup.lower1);
  __m512i upper = _mm512_permutex2var_epi8(lookup.upper0, index, lookup.upper1);
  upper = _mm512_ternarylogic_epi64(upper, codes, sign, 0xf8);  // upper | (codes & sign)
  if (kIsInt8) upper = _mm512_mask_mov_epi8(upper, _mm512_cmpeq_epi8_mask(codes, sign), _mm512_set1_epi8(static_cast<char>(0xc3)));
  *first = _mm512_unpacklo_epi8(lower, upper);
  *second = _mm512_unpackhi_epi8(lower, upper);
}

template <bool kIsInt8>
ATTUNE_INLINE void decode_row(const CodeTable& table, const void* src, int64_t n, bf16_t* dst) {
  const auto* codes = static_cast<const uint8_t*>(src);
  const Lookup lookup(table);
  __m512i first, second;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    decode<kIsInt8>(lookup, load(codes + i), &first, &second);
    _mm512_storeu_si512(dst + i, first);
    _mm512_storeu_si512(dst + i + 32, second);
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    decode<kIsInt8>(lookup, _mm512_maskz_loadu_epi8((__mmask64{1} << rest) - 1, codes + i), &first, &second);
    _mm512_mask_storeu_epi16(dst + i, first32(rest), first);
    if (rest > 32) _mm512_mask_storeu_epi16(dst + i + 32, first32(rest - 32), second);
  }
}

// Halves are normal as bfloat16's wider exponent sees them, so that the flush of denormals does not matter.
ATTUNE_INLINE void half_row(const void* src, int64_t n, bf16_t* dst) {
  const auto* halves = static_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first16(n - i < 16 ? static_cast<int>(n - i) : 16);
    const __m512 v = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves + i));
    _mm256_mask_storeu_epi16(dst + i, mask, (__m256i)_mm512_cvtneps_pbh(v));
  }
}

}  // namespace

bool to_bf16(attune_dtype dtype, const void* src, int64_t n, bf16_t* dst) {
  switch (dtype) {
    case ATTUNE_FLOAT16: half_row(src, n, dst); return true;
    case ATTUNE_FLOAT8_E4M3: decode_row<false>(kE4M3, src, n, dst); return true;
    case ATTUNE_FLOAT8_E5M2: decode_row<false>(kE5M2, src, n, dst); return true;
    case ATTUNE_INT8: decode_row<true>(kInt8, src, n, dst); return true;
    default: return false;
  }
}

void pack_v_bf16(const bf16_t* const* rows, int n, int dv, bf16_t* out, int ld) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = load(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int i = 0; i < n; i += 2) {
    const bf16_t* even = rows[i];
    const bf16_t* odd = i + 1 < n ? rows[i + 1] : nullptr;
    bf16_t* to = out + static_cast<int64_t>(i) * ld;
    for (int c = 0; c < dv; c += 32) {
      const int rest = dv - c;
      const __m512i zero = _mm512_setzero_si512();
      const __m512i x = even == nullptr ? zero : rest >= 32 ? load(even + c) : load(even + c, rest);
      const __m512i y = odd == nullptr ? zero : rest >= 32 ? load(odd + c) : load(odd + c, rest);
      _mm512_storeu_si512(to + 2 * c, _mm512_permutex2var_epi16(x, low, y));
      if (rest > 16) _mm512_storeu_si512(to + 2 * c + 32, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

// --- Softmax, as in kernels_softmax-inl.h -------------------------------------------------------------------------------------

namespace {

// 2^x for x < 128. REDUCE leaves x - floor(x) and SCALEF multiplies by 2^floor(x); both know -inf and NaN. Four terms reach 2^-18,
// far below the rounding to bf16 that follows.
ATTUNE_INLINE __m512 exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x01);
  __m512 y = _mm512_set1_ps(0.013426683843135834f);
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.052242476493120193f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.241280198097229f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.6930448412895203f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, x);
}

ATTUNE_INLINE float row_max(const float* s, int n) {
  __m512 max0 = _mm512_set1_ps(-__builtin_huge_valf()), max1 = max0;
  int j = 0;
  for (; j + 32 <= n; j += 32) {  // MAXPS returns its second operand when one is NaN
    max0 = _mm512_max_ps(_mm512_loadu_ps(s + j), max0);
    max1 = _mm512_max_ps(_mm512_loadu_ps(s + j + 16), max1);
  }
  for (; j < n; j += 16) {
    const __mmask16 mask = first16(n - j);
    max0 = _mm512_mask_max_ps(max0, mask, _mm512_maskz_loadu_ps(mask, s + j), max0);
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(max0, max1));
}

// p = exp2(s * scale - max), times v_scale where there is one. Returns the sum of the rounded p before v_scale.
ATTUNE_INLINE float exp2_row(const float* s, int n, float scale, float max, const float* v_scale, bf16_t* p) {
  const __m512 factor = _mm512_set1_ps(scale), offset = _mm512_set1_ps(max);
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  for (int j = 0; j < n; j += 32) {
    const int rest = n - j;
    const __mmask16 mask0 = first16(rest), mask1 = first16(rest - 16);
    __m512 e0 = exp2(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(mask0, s + j), factor, offset));
    __m512 e1 = exp2(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(mask1, s + j + 16), factor, offset));
    if (rest < 32) {
      e0 = _mm512_maskz_mov_ps(mask0, e0);
      e1 = _mm512_maskz_mov_ps(mask1, e1);
    }
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(e1, e0);
    sum = dot(sum, rounded, ones);
    if (v_scale != nullptr) {
      e0 = _mm512_mul_ps(e0, _mm512_maskz_loadu_ps(mask0, v_scale + j));
      e1 = _mm512_mul_ps(e1, _mm512_maskz_loadu_ps(mask1, v_scale + j + 16));
      rounded = (__m512i)_mm512_cvtne2ps_pbh(e1, e0);
    }
    // An odd n is padded with one zero.
    _mm512_mask_storeu_epi16(p + j, first32((rest + 1) / 2 * 2), rounded);
  }
  return _mm512_reduce_add_ps(sum);
}

ATTUNE_INLINE void scale_row(float* x, int n, float factor) {
  const __m512 f = _mm512_set1_ps(factor);
  for (int j = 0; j < n; j += 16) {
    const __mmask16 mask = first16(n - j);
    _mm512_mask_storeu_ps(x + j, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + j), f));
  }
}

}  // namespace

void softmax_bf16(const SoftmaxTile& t) {
  for (int i = 0; i < t.m; ++i) {
    const float* s = t.s + static_cast<int64_t>(i) * t.lds;
    const float old_max = t.row_max[i];
    const float tile_max = row_max(s, t.n) * t.scale2;
    const float max = tile_max > old_max ? tile_max : old_max;
    if (max > old_max) {
      const float rescale = _mm512_cvtss_f32(exp2(_mm512_set1_ps(old_max - max)));
      t.row_max[i] = max;
      t.row_sum[i] *= rescale;
      scale_row(t.o + static_cast<int64_t>(i) * t.ldo, t.dv, rescale);
    }
    // A row that has seen nothing has only -inf (or NaN): with 0 in place of the max these give 0 (or NaN).
    const float offset = max == -__builtin_huge_valf() ? 0.0f : max;
    bf16_t* p = static_cast<bf16_t*>(t.p) + static_cast<int64_t>(i) * t.ldp;
    t.row_sum[i] += exp2_row(s, t.n, t.scale2, offset, t.v_scale, p);
  }
}

}  // namespace attune::cpu::avx512bf16
ATTUNE_END_AVX512BF16

#endif  // __x86_64__
