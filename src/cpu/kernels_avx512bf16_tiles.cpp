// SPDX-License-Identifier: Apache-2.0
// Around the bf16 products with AVX512-BF16 and VBMI: conversion of cache rows, packing, the softmax to bf16.
#include "cpu/kernels_avx512bf16_codes.h"

#if defined(__x86_64__)

ATTUNE_BEGIN_AVX512BF16
namespace attune::cpu::avx512bf16 {
namespace {

template <bool kIsInt8>
ATTUNE_INLINE void decode_row(const CodeTable& table, const void* src, int64_t n, bf16_t* dst) {
  const auto* codes = static_cast<const uint8_t*>(src);
  const Lookup<kIsInt8> lookup(table);
  __m512i first, second;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    lookup.decode(load(codes + i), &first, &second);
    _mm512_storeu_si512(dst + i, first);
    _mm512_storeu_si512(dst + i + 32, second);
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    lookup.decode(load(codes + i, rest), &first, &second);
    _mm512_mask_storeu_epi16(dst + i, first32(rest), first);
    if (rest > 32) _mm512_mask_storeu_epi16(dst + i + 32, first32(rest - 32), second);
  }
}

// Denormal fp16 numbers are normal in the wider exponent of bfloat16, so flushing denormals changes nothing.
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
    case ATTUNE_FLOAT16:
      half_row(src, n, dst);
      return true;
    case ATTUNE_FLOAT8_E4M3:
      decode_row<false>(kE4M3, src, n, dst);
      return true;
    case ATTUNE_FLOAT8_E5M2:
      decode_row<false>(kE5M2, src, n, dst);
      return true;
    case ATTUNE_INT8:
      decode_row<true>(kInt8, src, n, dst);
      return true;
    default:
      return false;
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

// --- Softmax, as in kernels_softmax-inl.h

namespace {

// 2^x for x < 128; -inf gives 0, NaN stays NaN, 2^0 is exactly 1. REDUCE leaves x - floor(x) and SCALEF multiplies by
// 2^floor(x). Four terms on [0, 1) (minimax with constant term 1) reach 2^-18, far below the rounding to bf16 that
// follows.
ATTUNE_INLINE __m512 exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x01);
  __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.013426683843135834f), _mm512_set1_ps(0.052242476493120193f));
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

// 32 entries of a row of p, of which the first n exist.
template <bool kPartial>
ATTUNE_INLINE __m512 exp2_entries(const float* s, int n, __m512 factor, __m512 offset, const float* v_scale, bf16_t* p,
                                  __m512 sum) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  const __mmask16 mask0 = first16(n), mask1 = first16(n - 16);
  __m512 e0, e1;
  if (kPartial) {
    e0 = _mm512_maskz_mov_ps(mask0, exp2(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(mask0, s), factor, offset)));
    e1 = _mm512_maskz_mov_ps(mask1, exp2(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(mask1, s + 16), factor, offset)));
  } else {
    e0 = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s), factor, offset));
    e1 = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + 16), factor, offset));
  }
  __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(e1, e0);
  sum = dot(sum, rounded, ones);
  if (v_scale != nullptr) {
    e0 = _mm512_mul_ps(e0, kPartial ? _mm512_maskz_loadu_ps(mask0, v_scale) : _mm512_loadu_ps(v_scale));
    e1 = _mm512_mul_ps(e1, kPartial ? _mm512_maskz_loadu_ps(mask1, v_scale + 16) : _mm512_loadu_ps(v_scale + 16));
    rounded = (__m512i)_mm512_cvtne2ps_pbh(e1, e0);
  }
  if (kPartial) {
    _mm512_mask_storeu_epi16(p, first32((n + 1) / 2 * 2), rounded);  // an odd n is padded with one zero
  } else {
    _mm512_storeu_si512(p, rounded);
  }
  return sum;
}

// p = exp2(s * scale - max), times v_scale where there is one. Returns the sum of the rounded p before v_scale.
ATTUNE_INLINE float exp2_row(const float* s, int n, float scale, float max, const float* v_scale, bf16_t* p) {
  const __m512 factor = _mm512_set1_ps(scale), offset = _mm512_set1_ps(max);
  __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
  int j = 0;
  for (; j + 64 <= n; j += 64) {
    sum0 = exp2_entries<false>(s + j, 32, factor, offset, v_scale != nullptr ? v_scale + j : nullptr, p + j, sum0);
    sum1 = exp2_entries<false>(s + j + 32, 32, factor, offset, v_scale != nullptr ? v_scale + j + 32 : nullptr,
                               p + j + 32, sum1);
  }
  for (; j + 32 <= n; j += 32)
    sum0 = exp2_entries<false>(s + j, 32, factor, offset, v_scale != nullptr ? v_scale + j : nullptr, p + j, sum0);
  if (j < n)
    sum1 = exp2_entries<true>(s + j, n - j, factor, offset, v_scale != nullptr ? v_scale + j : nullptr, p + j, sum1);
  return _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
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
  for (int begin = 0; begin < t.m; begin += kSoftmaxRows) {
    const int end = begin + kSoftmaxRows < t.m ? begin + kSoftmaxRows : t.m;
    float tile_max[kSoftmaxRows];
    for (int i = begin; i < end; ++i)
      tile_max[i - begin] = scaled_score(row_max(t.s + static_cast<int64_t>(i) * t.lds, t.n), t.scale2);
    for (int i = begin; i < end; ++i) {
      const float old_max = t.row_max[i];
      const float max = tile_max[i - begin] > old_max ? tile_max[i - begin] : old_max;
      if (max > old_max) {
        const float rescale = _mm512_cvtss_f32(exp2(_mm512_set1_ps(old_max - max)));
        t.row_max[i] = max;
        t.row_sum[i] *= rescale;
        scale_row(t.o + static_cast<int64_t>(i) * t.ldo, t.dv, rescale);
      }
      // A row that has seen no key has only -inf (or NaN) scores. With 0 in place of the max they give 0 (or NaN).
      const float offset = max == -__builtin_huge_valf() ? 0.0f : max;
      bf16_t* p = static_cast<bf16_t*>(t.p) + static_cast<int64_t>(i) * t.ldp;
      float* const row = t.s + static_cast<int64_t>(i) * t.lds;
      const bool fused = __builtin_fabsf(offset) < kMostFused;
      for (int j = 0; !fused && j < t.n; ++j) row[j] = scaled_score(row[j], t.scale2);
      t.row_sum[i] += exp2_row(row, t.n, fused ? t.scale2 : 1.0f, offset, t.v_scale, p);
    }
  }
}

}  // namespace attune::cpu::avx512bf16
ATTUNE_END_AVX512BF16

#endif  // __x86_64__
