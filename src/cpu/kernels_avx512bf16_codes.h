// SPDX-License-Identifier: Apache-2.0
// Private to kernels_avx512bf16*.cpp: 8-bit codes to bfloat16 by table look-up, which is exact for every code.
#pragma once

#include "cpu/kernels_avx512bf16.h"

#if defined(__x86_64__)

namespace attune::cpu::avx512bf16 {

// bfloat16 bits of the 128 codes of an 8-bit type without their sign, lower and upper bytes apart: two look-ups by
// VPERMI2B make a value.
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
  table.set(0, bf16_bits(128, 0));  // entry 0 is that of -128, whose lower seven bits are 0; Lookup turns code 0 into 0
  return table;
}

inline constexpr CodeTable kE4M3 = e4m3_table();
inline constexpr CodeTable kE5M2 = e5m2_table();
inline constexpr CodeTable kInt8 = int8_table();

ATTUNE_BEGIN_AVX512BF16

// The tables of one dtype in registers.
template <bool kIsInt8>
struct Lookup {
  __m512i lower0, lower1, upper0, upper1;

  ATTUNE_INLINE explicit Lookup(const CodeTable& t)
      : lower0(load(t.lower)), lower1(load(t.lower + 64)), upper0(load(t.upper)), upper1(load(t.upper + 64)) {}

  // Lower and upper bytes of 64 values.
  ATTUNE_INLINE void find(__m512i codes, __m512i* lower, __m512i* upper) const {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    // Look-ups read the lower seven bits of an index, so -128 and 0 both find entry 0, whose lower byte is 0. The
    // absolute value is a minimum, which any port computes; VPABSB would compete with VDPBF16PS for its ports.
    const __m512i index = kIsInt8 ? _mm512_min_epu8(codes, _mm512_sub_epi8(_mm512_setzero_si512(), codes)) : codes;
    *lower = _mm512_permutex2var_epi8(lower0, index, lower1);
    const __m512i bytes =
        kIsInt8 ? _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(codes, codes), upper0, index, upper1)
                : _mm512_permutex2var_epi8(upper0, index, upper1);
    *upper = _mm512_ternarylogic_epi64(bytes, codes, sign, 0xf8);  // bytes | (codes & sign)
  }

  // 64 codes to two vectors of bfloat16 in order. The interleave of bytes works within blocks of 128 bits, so the
  // quarters of the codes are put in place first.
  ATTUNE_INLINE void decode(__m512i codes, __m512i* first, __m512i* second) const {
    __m512i lower, upper;
    find(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes), &lower, &upper);
    *first = _mm512_unpacklo_epi8(lower, upper);
    *second = _mm512_unpackhi_epi8(lower, upper);
  }
};

ATTUNE_INLINE __mmask64 first64(int n) { return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << (n > 0 ? n : 0)) - 1; }
ATTUNE_INLINE __m512i load(const uint8_t* p, int n) { return _mm512_maskz_loadu_epi8(first64(n), p); }

ATTUNE_END_AVX512BF16

}  // namespace attune::cpu::avx512bf16

#endif  // __x86_64__
