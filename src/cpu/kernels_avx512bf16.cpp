// SPDX-License-Identifier: Apache-2.0
// GEMM, scores and value sums of bf16 tiles with AVX512-BF16, and the entries of the table that this instruction set replaces.
#include "cpu/kernels_avx512bf16.h"

#include "cpu/kernels_prefetch.h"
#include "cpu/kernels_targets.h"

#if !defined(__x86_64__)

bool attune::cpu::use_avx512bf16(KernelTable* /*table*/) { return false; }

#else

ATTUNE_BEGIN_AVX512BF16
namespace attune::cpu::avx512bf16 {
namespace {

// --- GEMM: as in kernels_gemm-inl.h, with pairs along k for elements ----------------------------------------------------------

template <int R, int V>
ATTUNE_TILE void gemm_tile(int pairs, const bf16_t* __restrict a, int64_t lda, const bf16_t* __restrict b, int64_t ldb,
                           float* __restrict c, int64_t ldc, bool accumulate) {
  __m512 acc[R][V];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
  }
  for (int kk = 0; kk < pairs; ++kk) {
    __m512i bv[V];
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) bv[v] = load(b + 2 * kk * ldb + v * 32);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i av = broadcast_pair(a + r * lda + 2 * kk);
      ATTUNE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], av, bv[v]);
    }
  }
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = c + r * ldc + v * 16;
      _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), acc[r][v]) : acc[r][v]);
    }
  }
}

constexpr int kGemmRows = 6;  // 24 accumulators, 4 vectors of b, one of a
constexpr int kGemmVecs = 4;

template <int V>
ATTUNE_INLINE void gemm_panel(int m, int pairs, const bf16_t* a, int64_t lda, const bf16_t* b, int64_t ldb, float* c, int64_t ldc,
                              bool accumulate) {
  int i = 0;
  for (; i + kGemmRows <= m; i += kGemmRows) {
    gemm_tile<kGemmRows, V>(pairs, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
  }
  a += i * lda;
  c += i * ldc;
  switch (m - i) {
    case 1: return gemm_tile<1, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 2: return gemm_tile<2, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 3: return gemm_tile<3, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 4: return gemm_tile<4, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 5: return gemm_tile<5, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    default: return;
  }
}

}  // namespace

void gemm_bf16(int m, int n, int k, const bf16_t* a, int lda, const bf16_t* b, int ldb, float* c, int ldc, bool accumulate) {
  const int pairs = (k + 1) / 2;
  const int columns = (n + 15) / 16 * 16;
  int j = 0;
  for (; j + 64 <= columns; j += 64) gemm_panel<kGemmVecs>(m, pairs, a, lda, b + j * 2, ldb, c + j, ldc, accumulate);
  if (j + 32 <= columns) {
    gemm_panel<2>(m, pairs, a, lda, b + j * 2, ldb, c + j, ldc, accumulate);
    j += 32;
  }
  if (j < columns) gemm_panel<1>(m, pairs, a, lda, b + j * 2, ldb, c + j, ldc, accumulate);
}

namespace {

// --- Scores from rows -----------------------------------------------------------------------------------------------------------

// The reduction adds pairs of vectors, halving the lanes each holds. A blend and a shuffle bring the addends together where two
// shuffles would: shuffles share a port with VDPBF16PS, blends run anywhere.

// {a0 + a2, a1 + a3, b0 + b2, b1 + b3} of each block of lanes.
ATTUNE_INLINE __m512 add_lane_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}

// Block by block, the sums of v0..v3.
ATTUNE_INLINE __m512 add_lanes(__m512 v0, __m512 v1, __m512 v2, __m512 v3) {
  const __m512 a = add_lane_pairs(v0, v2), b = add_lane_pairs(v1, v3);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, a, b), _mm512_permute_ps(_mm512_mask_blend_ps(0x5555, a, b), 0xb1));
}

// {a0 + a2, a1 + a3, b0 + b2, b1 + b3} of blocks.
ATTUNE_INLINE __m512 add_block_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}

// Block r is the sums of row r's four vectors, where the rows are those of the arguments in the order 0, 2, 1, 3.
ATTUNE_INLINE __m512 add_blocks(__m512 row0, __m512 row1, __m512 row2, __m512 row3) {
  const __m512 a = add_block_pairs(row0, row2), b = add_block_pairs(row1, row3);
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Scores of R query rows with four key rows; the first `count` of the four are stored.
template <int R>
ATTUNE_TILE void qk_tile(int d, const bf16_t* __restrict q, int64_t ldq, const bf16_t* const* __restrict rows,
                         float* __restrict s, int64_t lds, int count) {
  const bf16_t* __restrict row0 = rows[0];
  const bf16_t* __restrict row1 = rows[count > 1 ? 1 : 0];
  const bf16_t* __restrict row2 = rows[count > 2 ? 2 : 0];
  const bf16_t* __restrict row3 = rows[count > 3 ? 3 : 0];
  __m512 acc[4][4];
  ATTUNE_UNROLL
  for (int r = 0; r < 4; ++r) {
    ATTUNE_UNROLL
    for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_setzero_ps();
  }
  int c = 0;
  for (; c + 32 <= d; c += 32) {
    const __m512i k0 = load(row0 + c), k1 = load(row1 + c), k2 = load(row2 + c), k3 = load(row3 + c);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i qv = load(q + r * ldq + c);
      acc[r][0] = dot(acc[r][0], qv, k0);
      acc[r][1] = dot(acc[r][1], qv, k1);
      acc[r][2] = dot(acc[r][2], qv, k2);
      acc[r][3] = dot(acc[r][3], qv, k3);
    }
  }
  if (c < d) {
    const int rest = d - c;
    const __m512i k0 = load(row0 + c, rest), k1 = load(row1 + c, rest), k2 = load(row2 + c, rest), k3 = load(row3 + c, rest);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i qv = load(q + r * ldq + c, rest);
      acc[r][0] = dot(acc[r][0], qv, k0);
      acc[r][1] = dot(acc[r][1], qv, k1);
      acc[r][2] = dot(acc[r][2], qv, k2);
      acc[r][3] = dot(acc[r][3], qv, k3);
    }
  }
  // Rows R.. hold zeros: the compiler drops their merges, the others are the same whatever R is.
  __m512 sums[4];
  ATTUNE_UNROLL
  for (int r = 0; r < 4; ++r) sums[r] = merge_lanes(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  const __m512 all = merge_neighbours(merge_halves(sums[0], sums[1]), merge_halves(sums[2], sums[3]));
  const __mmask8 stored = static_cast<__mmask8>((1u << count) - 1u);
  _mm_mask_storeu_ps(s, stored, _mm512_castps512_ps128(all));
  if (R > 1) _mm_mask_storeu_ps(s + lds, stored, _mm512_extractf32x4_ps(all, 1));
  if (R > 2) _mm_mask_storeu_ps(s + 2 * lds, stored, _mm512_extractf32x4_ps(all, 2));
  if (R > 3) _mm_mask_storeu_ps(s + 3 * lds, stored, _mm512_extractf32x4_ps(all, 3));
}

}  // namespace

void qk_rows_bf16(int m, int n, int d, const bf16_t* q, int ldq, const bf16_t* const* rows, float* s, int lds) {
  // All query rows visit a block of key rows while it is in L1.
  for (int j0 = 0; j0 < n; j0 += kRowBlock) {
    const int block_end = j0 + kRowBlock < n ? j0 + kRowBlock : n;
    for (int i = 0; i < m; i += 4) {
      const bf16_t* qi = q + static_cast<int64_t>(i) * ldq;
      for (int j = j0; j < block_end; j += 4) {
        const int count = n - j < 4 ? n - j : 4;
        if (i == 0) {
          const int ahead = j + kRowsAhead;
          prefetch_rows(rows, ahead, ahead + 4 < n ? ahead + 4 : n, d);
        }
        float* si = s + static_cast<int64_t>(i) * lds + j;
        switch (m - i) {
          case 1: qk_tile<1>(d, qi, ldq, rows + j, si, lds, count); break;
          case 2: qk_tile<2>(d, qi, ldq, rows + j, si, lds, count); break;
          case 3: qk_tile<3>(d, qi, ldq, rows + j, si, lds, count); break;
          default: qk_tile<4>(d, qi, ldq, rows + j, si, lds, count); break;
        }
      }
    }
  }
}

namespace {

// --- Sums of value rows ---------------------------------------------------------------------------------------------------------

// The 16-bit interleave works within blocks of 128 bits, so accumulators `lo` and `hi` hold columns {0-3, 8-11, 16-19, 24-27} and
// {4-7, 12-15, 20-23, 28-31}; put back in order once at the end.
ATTUNE_INLINE void add_columns(float* o, __m512 lo, __m512 hi, int n) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = _mm512_permutex2var_ps(lo, first, hi), b = _mm512_permutex2var_ps(lo, second, hi);
  if (n >= 32) {
    _mm512_storeu_ps(o, _mm512_add_ps(_mm512_loadu_ps(o), a));
    _mm512_storeu_ps(o + 16, _mm512_add_ps(_mm512_loadu_ps(o + 16), b));
  } else {
    const __mmask16 mask_a = first16(n), mask_b = first16(n - 16);
    _mm512_mask_storeu_ps(o, mask_a, _mm512_add_ps(_mm512_maskz_loadu_ps(mask_a, o), a));
    if (n > 16) _mm512_mask_storeu_ps(o + 16, mask_b, _mm512_add_ps(_mm512_maskz_loadu_ps(mask_b, o + 16), b));
  }
}

// R output rows, V vectors of 32 columns; of the last vector only `rest` columns where kPartial. n may be odd.
template <int R, int V, bool kPartial>
ATTUNE_TILE void pv_tile(int n, const bf16_t* __restrict p, int64_t ldp, const bf16_t* const* __restrict rows, int64_t column,
                         float* __restrict o, int64_t ldo, int rest) {
  __m512 acc[R][2 * V];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < 2 * V; ++v) acc[r][v] = _mm512_setzero_ps();
  }
  int j = 0;
  for (; j + 2 <= n; j += 2) {
    const bf16_t* even = rows[j] + column;
    const bf16_t* odd = rows[j + 1] + column;
    __m512i w[2 * V];
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) {
      const __m512i x = kPartial ? load(even + 32 * v, rest) : load(even + 32 * v);
      const __m512i y = kPartial ? load(odd + 32 * v, rest) : load(odd + 32 * v);
      w[2 * v] = _mm512_unpacklo_epi16(x, y);
      w[2 * v + 1] = _mm512_unpackhi_epi16(x, y);
    }
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i weight = broadcast_pair(p + r * ldp + j);
      ATTUNE_UNROLL
      for (int v = 0; v < 2 * V; ++v) acc[r][v] = dot(acc[r][v], weight, w[v]);
    }
  }
  if (j < n) {  // the odd row, paired with zeros
    const bf16_t* even = rows[j] + column;
    const __m512i zero = _mm512_setzero_si512();
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) {
      const __m512i x = kPartial ? load(even + 32 * v, rest) : load(even + 32 * v);
      const __m512i lo = _mm512_unpacklo_epi16(x, zero), hi = _mm512_unpackhi_epi16(x, zero);
      ATTUNE_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512i weight = _mm512_set1_epi32(p[r * ldp + j]);
        acc[r][2 * v] = dot(acc[r][2 * v], weight, lo);
        acc[r][2 * v + 1] = dot(acc[r][2 * v + 1], weight, hi);
      }
    }
  }
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) add_columns(o + r * ldo + 32 * v, acc[r][2 * v], acc[r][2 * v + 1], kPartial ? rest : 32);
  }
}

template <int V, bool kPartial>
ATTUNE_INLINE void pv_panel(int m, int n, const bf16_t* p, int64_t ldp, const bf16_t* const* rows, int64_t column, float* o,
                            int64_t ldo, int rest) {
  for (int i = 0; i < m; i += 4) {
    const bf16_t* pi = p + i * ldp;
    float* oi = o + i * ldo + column;
    switch (m - i) {
      case 1: pv_tile<1, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest); break;
      case 2: pv_tile<2, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest); break;
      case 3: pv_tile<3, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest); break;
      default: pv_tile<4, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest); break;
    }
  }
}

}  // namespace

void pv_rows_bf16(int m, int n, int dv, const bf16_t* p, int ldp, const bf16_t* const* rows, float* o, int ldo) {
  for (int j = 0; j < n; j += kPvBlock) {
    const int count = n - j < kPvBlock ? n - j : kPvBlock;
    prefetch_rows(rows + j, 0, count, dv);
    int c = 0;
    for (; c + 64 <= dv; c += 64) pv_panel<2, false>(m, count, p + j, ldp, rows + j, c, o, ldo, 0);
    for (; c + 32 <= dv; c += 32) pv_panel<1, false>(m, count, p + j, ldp, rows + j, c, o, ldo, 0);
    if (c < dv) pv_panel<1, true>(m, count, p + j, ldp, rows + j, c, o, ldo, dv - c);
  }
}

}  // namespace attune::cpu::avx512bf16
ATTUNE_END_AVX512BF16

namespace attune::cpu {
namespace {

// Copies of the base table's entries, for what the functions here leave to it.
void (*base_to_bf16)(attune_dtype dtype, const void* src, int64_t n, bf16_t* dst);
void (*base_softmax)(const SoftmaxTile& t);

void to_bf16(attune_dtype dtype, const void* src, int64_t n, bf16_t* dst) {
  if (!avx512bf16::to_bf16(dtype, src, n, dst)) base_to_bf16(dtype, src, n, dst);
}

void softmax(const SoftmaxTile& t) {
  if (t.p_type == TileType::kBF16 && t.scale2 > 0.0f) {
    avx512bf16::softmax_bf16(t);
  } else {
    base_softmax(t);
  }
}

}  // namespace

bool use_avx512bf16(KernelTable* table) {
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return false;
  base_to_bf16 = table->to_bf16;
  base_softmax = table->softmax;
  table->native_bf16 = true;
  table->to_bf16 = to_bf16;
  table->pack_v_bf16 = avx512bf16::pack_v_bf16;
  table->gemm_bf16 = avx512bf16::gemm_bf16;
  table->qk_rows_bf16 = avx512bf16::qk_rows_bf16;
  table->pv_rows_bf16 = avx512bf16::pv_rows_bf16;
  table->softmax = softmax;
  return true;
}

}  // namespace attune::cpu

#endif  // __x86_64__
