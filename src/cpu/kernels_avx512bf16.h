// SPDX-License-Identifier: Apache-2.0
// Private to kernels_avx512bf16*.cpp: the kernels for CPUs with AVX512-BF16 and VBMI (Zen 4, Sapphire Rapids), and the
// helpers that they share. Only code between ATTUNE_BEGIN_AVX512BF16 and ATTUNE_END_AVX512BF16 is compiled for these
// instructions, and it uses no std template: the linker could keep that copy of it and run it elsewhere.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

#define ATTUNE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ATTUNE_UNROLL ATTUNE_PRAGMA(clang loop unroll(full))
#define ATTUNE_BEGIN_AVX512BF16                                                                                   \
  ATTUNE_PRAGMA(clang attribute push(                                                                             \
      __attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512dq,avx512cd,avx512vbmi,avx512bf16"))), \
      apply_to = function))
#define ATTUNE_END_AVX512BF16 ATTUNE_PRAGMA(clang attribute pop)
#else
#define ATTUNE_UNROLL ATTUNE_PRAGMA(GCC unroll 16)
// The compiler's own header passes undefined registers on purpose, and GCC warns about them (GCC bug 105593).
#define ATTUNE_BEGIN_AVX512BF16                                 \
  ATTUNE_PRAGMA(GCC diagnostic ignored "-Wuninitialized")       \
  ATTUNE_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
  ATTUNE_PRAGMA(GCC push_options)                               \
  ATTUNE_PRAGMA(GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512dq,avx512cd,avx512vbmi,avx512bf16"))
#define ATTUNE_END_AVX512BF16 ATTUNE_PRAGMA(GCC pop_options)
#endif

#define ATTUNE_INLINE [[gnu::always_inline]] inline
// A register tile is a function of its own, so that it has all registers.
#define ATTUNE_TILE [[gnu::noinline]]

namespace attune::cpu::avx512bf16 {

void gemm_bf16(int m, int n, int k, const bf16_t* a, int lda, const bf16_t* b, int ldb, float* c, int ldc,
               bool accumulate);
void qk_rows_bf16(int m, int n, int d, const bf16_t* q, int ldq, const bf16_t* const* rows, float* s, int lds);
void pv_rows_bf16(int m, int n, int dv, const bf16_t* p, int ldp, const bf16_t* const* rows, float* o, int ldo);
void qk_rows_8bit(attune_dtype dtype, int m, int n, int d, const bf16_t* q, int ldq, const uint8_t* const* rows,
                  float* s, int lds, const RowsAhead& ahead);
void pv_rows_8bit(attune_dtype dtype, int m, int n, int dv, const bf16_t* p, int ldp, const uint8_t* const* rows,
                  float* o, int ldo, const RowsAhead& ahead);

// Returns false where the base table is as fast for the dtype; then nothing is done.
bool to_bf16(attune_dtype dtype, const void* src, int64_t n, bf16_t* dst);
void pack_v_bf16(const bf16_t* const* rows, int n, int dv, bf16_t* out, int ld);
// Only for a bf16 p and a positive scale.
void softmax_bf16(const SoftmaxTile& t);

// Rows whose maxima are found before their exponentials: one row's chain of operations is long, eight rows overlap.
inline constexpr int kSoftmaxRows = 8;

ATTUNE_BEGIN_AVX512BF16

// VDPBF16PS: a pair of products for each fp32 lane, twice the work of an FMA. Denormals are read and written as zero.
ATTUNE_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

ATTUNE_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }

// Masks of the first n lanes; n may be anything.
ATTUNE_INLINE __mmask16 first16(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << (n > 0 ? n : 0)) - 1u);
}
ATTUNE_INLINE __mmask32 first32(int n) { return n >= 32 ? 0xffffffffu : (1u << (n > 0 ? n : 0)) - 1u; }

// The first n elements, the rest zero; nothing behind them is touched.
ATTUNE_INLINE __m512i load(const bf16_t* p, int n) { return _mm512_maskz_loadu_epi16(first32(n), p); }

ATTUNE_INLINE __m512i broadcast_pair(const bf16_t* p) {
  int pair;
  memcpy(&pair, p, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

ATTUNE_END_AVX512BF16

}  // namespace attune::cpu::avx512bf16

#endif  // __x86_64__
