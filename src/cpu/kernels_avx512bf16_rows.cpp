// SPDX-License-Identifier: Apache-2.0
// Decode with AVX512-BF16: scores with key rows and sums of value rows, bf16 or 8-bit codes, straight from the cache's
// rows. Codes become bfloat16 in registers and give the same bits as rows converted before.
#include "cpu/kernels_avx512bf16_codes.h"
#include "cpu/kernels_prefetch.h"

#if defined(__x86_64__)

ATTUNE_BEGIN_AVX512BF16
namespace attune::cpu::avx512bf16 {
namespace {

// How the tiles read rows of bfloat16.
struct Bf16Source {
  using Element = bf16_t;
  static constexpr int kVectors = 1;    // of 32 values, from one load
  static constexpr bool kAsks = false;  // prefetches rows ahead

  ATTUNE_INLINE void read(const bf16_t* row, __m512i* out) const { out[0] = load(row); }
  ATTUNE_INLINE void read(const bf16_t* row, int n, __m512i* out) const { out[0] = load(row, n); }

  // Pairs (even row, odd row) of 16 * V columns; if kPartial, only the first n exist. odd may be null: a row of zeros.
  template <int V, bool kPartial>
  ATTUNE_INLINE void read_pairs(const bf16_t* even, const bf16_t* odd, int n, __m512i* out) const {
    ATTUNE_UNROLL
    for (int v = 0; v < V; v += 2) {
      const __m512i x = kPartial ? load(even + 16 * v, n - 16 * v) : load(even + 16 * v);
      __m512i y = _mm512_setzero_si512();
      if (odd != nullptr) y = kPartial ? load(odd + 16 * v, n - 16 * v) : load(odd + 16 * v);
      out[v] = _mm512_unpacklo_epi16(x, y);
      out[v + 1] = _mm512_unpackhi_epi16(x, y);
    }
  }

  // The interleave works within blocks of 128 bits: of 32 columns the first vector has 0-3, 8-11, 16-19, 24-27.
  template <int V>
  ATTUNE_INLINE static void in_order(__m512* sums) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    ATTUNE_UNROLL
    for (int v = 0; v < V; v += 2) {
      const __m512 lo = sums[v], hi = sums[v + 1];
      sums[v] = _mm512_permutex2var_ps(lo, first, hi);
      sums[v + 1] = _mm512_permutex2var_ps(lo, second, hi);
    }
  }
};

// How the tiles read rows of 8-bit codes.
template <bool kIsInt8>
struct CodeSource {
  using Element = uint8_t;
  static constexpr int kVectors = 2;
  static constexpr bool kAsks = true;
  Lookup<kIsInt8> lookup;

  ATTUNE_INLINE explicit CodeSource(const CodeTable& table) : lookup(table) {}

  ATTUNE_INLINE void read(const uint8_t* row, __m512i* out) const { lookup.decode(load(row), &out[0], &out[1]); }
  ATTUNE_INLINE void read(const uint8_t* row, int n, __m512i* out) const {
    lookup.decode(load(row, n), &out[0], &out[1]);
  }

  // The codes of both rows are interleaved before the look-up, and its bytes after it: a pair is then in one lane.
  template <int V, bool kPartial>
  ATTUNE_INLINE void read_pairs(const uint8_t* even, const uint8_t* odd, int n, __m512i* out) const {
    static_assert(V == 4, "64 codes a load");
    const __m512i x = kPartial ? load(even, n) : load(even);
    __m512i y = _mm512_setzero_si512();
    if (odd != nullptr) y = kPartial ? load(odd, n) : load(odd);
    __m512i lower, upper;
    lookup.find(_mm512_unpacklo_epi8(x, y), &lower, &upper);
    out[0] = _mm512_unpacklo_epi8(lower, upper);
    out[1] = _mm512_unpackhi_epi8(lower, upper);
    lookup.find(_mm512_unpackhi_epi8(x, y), &lower, &upper);
    out[2] = _mm512_unpacklo_epi8(lower, upper);
    out[3] = _mm512_unpackhi_epi8(lower, upper);
  }

  // Block b of vector v has columns 16 b + 4 v and three more: a transposition of blocks.
  template <int V>
  ATTUNE_INLINE static void in_order(__m512* sums) {
    const __m512 a = _mm512_shuffle_f32x4(sums[0], sums[1], 0x44), b = _mm512_shuffle_f32x4(sums[2], sums[3], 0x44);
    const __m512 e = _mm512_shuffle_f32x4(sums[0], sums[1], 0xee), f = _mm512_shuffle_f32x4(sums[2], sums[3], 0xee);
    sums[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    sums[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    sums[2] = _mm512_shuffle_f32x4(e, f, 0x88);
    sums[3] = _mm512_shuffle_f32x4(e, f, 0xdd);
  }
};

// At most n rows of `ahead`, from begin on.
ATTUNE_INLINE RowsAhead rows_from(const RowsAhead& ahead, int begin, int n) {
  if (ahead.n <= begin) return {};
  return {ahead.rows + begin, ahead.n - begin < n ? ahead.n - begin : n, ahead.bytes, ahead.behind};
}

// --- Scores

// The reduction adds pairs of vectors, halving the lanes each holds. A blend and a shuffle bring the addends together
// where two shuffles would: shuffles share a port with VDPBF16PS, blends run anywhere.

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

// Block r holds the sums of rowr's blocks.
ATTUNE_INLINE __m512 add_blocks(__m512 row0, __m512 row1, __m512 row2, __m512 row3) {
  const __m512 a = add_block_pairs(row0, row1), b = add_block_pairs(row2, row3);
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// acc[r][j] += q[r] . k[j] for one vector.
template <int R>
ATTUNE_INLINE void multiply(__m512 (&acc)[R][4], const bf16_t* q, int64_t ldq, int n, __m512i k0, __m512i k1,
                            __m512i k2, __m512i k3) {
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    const __m512i qv = n >= 32 ? load(q + r * ldq) : load(q + r * ldq, n);
    acc[r][0] = dot(acc[r][0], qv, k0);
    acc[r][1] = dot(acc[r][1], qv, k1);
    acc[r][2] = dot(acc[r][2], qv, k2);
    acc[r][3] = dot(acc[r][3], qv, k3);
  }
}

// Scores of R query rows with four key rows; the first `count` of the four exist.
template <int R, class Source>
ATTUNE_INLINE void qk_tile(const Source& source, int d, const bf16_t* q, int64_t ldq,
                           const typename Source::Element* const* rows, float* s, int64_t lds, int count) {
  constexpr int kVectors = Source::kVectors;
  constexpr int kWidth = 32 * kVectors;
  // Missing rows repeat the first: the same arithmetic, and the results are dropped.
  const typename Source::Element* row0 = rows[0];
  const typename Source::Element* row1 = rows[count > 1 ? 1 : 0];
  const typename Source::Element* row2 = rows[count > 2 ? 2 : 0];
  const typename Source::Element* row3 = rows[count > 3 ? 3 : 0];
  __m512 acc[R][4];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = _mm512_setzero_ps();
  __m512i k0[kVectors], k1[kVectors], k2[kVectors], k3[kVectors];
  int c = 0;
  for (; c + kWidth <= d; c += kWidth) {
    source.read(row0 + c, k0);
    source.read(row1 + c, k1);
    source.read(row2 + c, k2);
    source.read(row3 + c, k3);
    ATTUNE_UNROLL
    for (int v = 0; v < kVectors; ++v) multiply<R>(acc, q + c + 32 * v, ldq, 32, k0[v], k1[v], k2[v], k3[v]);
  }
  if (c < d) {
    const int rest = d - c;
    source.read(row0 + c, rest, k0);
    source.read(row1 + c, rest, k1);
    source.read(row2 + c, rest, k2);
    source.read(row3 + c, rest, k3);
    ATTUNE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (rest > 32 * v) multiply<R>(acc, q + c + 32 * v, ldq, rest - 32 * v, k0[v], k1[v], k2[v], k3[v]);
    }
  }
  // Rows that do not exist are zeros: their sums are dropped, the others are added up in the same way whatever R is.
  __m512 sums[4];
  ATTUNE_UNROLL
  for (int r = 0; r < 4; ++r) {
    sums[r] = r < R ? add_lanes(acc[r % R][0], acc[r % R][1], acc[r % R][2], acc[r % R][3]) : _mm512_setzero_ps();
  }
  const __m512 all = add_blocks(sums[0], sums[1], sums[2], sums[3]);
  // Masked stores are slow on Zen 4: only the last rows get one.
  const __m128 row_sums[4] = {_mm512_castps512_ps128(all), _mm512_extractf32x4_ps(all, 1),
                              _mm512_extractf32x4_ps(all, 2), _mm512_extractf32x4_ps(all, 3)};
  if (count == 4) {
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) _mm_storeu_ps(s + r * lds, row_sums[r]);
  } else {
    const __mmask8 exist = static_cast<__mmask8>((1u << count) - 1u);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) _mm_mask_storeu_ps(s + r * lds, exist, row_sums[r]);
  }
}

template <int R, class Source>
ATTUNE_TILE void qk_block(const Source& source_in, int n, int d, const bf16_t* __restrict q, int64_t ldq,
                          const typename Source::Element* const* __restrict rows, float* __restrict s, int64_t lds,
                          const RowsAhead& ahead_in) {
  const Source source = source_in;
  const RowsAhead ahead = ahead_in;
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    if constexpr (Source::kAsks) prefetch_rows(ahead, j, 4);
    qk_tile<R>(source, d, q, ldq, rows + j, s + j, lds, 4);
  }
  if constexpr (Source::kAsks) prefetch_rows(ahead, j, ahead.n);
  if (j < n) qk_tile<R>(source, d, q, ldq, rows + j, s + j, lds, n - j);
}

constexpr int kKeyBlock = 16;  // key rows that stay in L1 while all query rows visit them

template <class Source>
ATTUNE_INLINE void qk_rows(const Source& source, int m, int n, int d, const bf16_t* q, int64_t ldq,
                           const typename Source::Element* const* rows, float* s, int64_t lds, const RowsAhead& ahead) {
  const int block = m <= 4 ? n : kKeyBlock;
  for (int j = 0; j < n; j += block) {
    const int count = n - j < block ? n - j : block;
    for (int i = 0; i < m; i += 4) {
      const bf16_t* qi = q + i * ldq;
      float* si = s + i * lds + j;
      const RowsAhead share = i == 0 ? rows_from(ahead, j, j + count == n ? ahead.n : count) : RowsAhead();
      switch (m - i) {
        case 1:
          qk_block<1>(source, count, d, qi, ldq, rows + j, si, lds, share);
          break;
        case 2:
          qk_block<2>(source, count, d, qi, ldq, rows + j, si, lds, share);
          break;
        case 3:
          qk_block<3>(source, count, d, qi, ldq, rows + j, si, lds, share);
          break;
        default:
          qk_block<4>(source, count, d, qi, ldq, rows + j, si, lds, share);
          break;
      }
    }
  }
}

// --- Sums of value rows

// R output rows and 16 * V columns; if kPartial, only the first `columns` exist. n may be odd.
template <int R, int V, bool kPartial, class Source>
ATTUNE_TILE void pv_tile(const Source& source_in, int n, const bf16_t* __restrict p, int64_t ldp,
                         const typename Source::Element* const* __restrict rows, int64_t column, float* __restrict o,
                         int64_t ldo, int columns, const RowsAhead& ahead_in) {
  const Source source = source_in;
  const RowsAhead ahead = ahead_in;
  __m512 acc[R][V];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
  }
  __m512i w[V];
  int j = 0;
  for (; j + 2 <= n; j += 2) {
    if constexpr (Source::kAsks) prefetch_rows(ahead, j, 2);
    source.template read_pairs<V, kPartial>(rows[j] + column, rows[j + 1] + column, columns, w);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i weight = broadcast_pair(p + r * ldp + j);
      ATTUNE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], weight, w[v]);
    }
  }
  if constexpr (Source::kAsks) prefetch_rows(ahead, j, ahead.n);
  if (j < n) {
    source.template read_pairs<V, kPartial>(rows[j] + column, nullptr, columns, w);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i weight = _mm512_set1_epi32(p[r * ldp + j]);
      ATTUNE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = dot(acc[r][v], weight, w[v]);
    }
  }
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    Source::template in_order<V>(acc[r]);
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = o + r * ldo + 16 * v;
      if (kPartial) {
        const __mmask16 mask = first16(columns - 16 * v);
        _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), acc[r][v]));
      } else {
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), acc[r][v]));
      }
    }
  }
}

template <int V, bool kPartial, class Source>
ATTUNE_INLINE void pv_panel(const Source& source, int m, int n, const bf16_t* p, int64_t ldp,
                            const typename Source::Element* const* rows, int64_t column, float* o, int64_t ldo,
                            int columns, const RowsAhead& ahead) {
  for (int i = 0; i < m; i += 4) {
    const bf16_t* pi = p + i * ldp;
    float* oi = o + i * ldo + column;
    const RowsAhead share = i == 0 && column == 0 ? ahead : RowsAhead();
    switch (m - i) {
      case 1:
        pv_tile<1, V, kPartial>(source, n, pi, ldp, rows, column, oi, ldo, columns, share);
        break;
      case 2:
        pv_tile<2, V, kPartial>(source, n, pi, ldp, rows, column, oi, ldo, columns, share);
        break;
      case 3:
        pv_tile<3, V, kPartial>(source, n, pi, ldp, rows, column, oi, ldo, columns, share);
        break;
      default:
        pv_tile<4, V, kPartial>(source, n, pi, ldp, rows, column, oi, ldo, columns, share);
        break;
    }
  }
}

constexpr int kValueBlock =
    64;  // value rows of one sum in registers; 64 columns of them stay in L1 for all output rows

template <class Source>
ATTUNE_INLINE void pv_rows(const Source& source, int m, int n, int dv, const bf16_t* p, int64_t ldp,
                           const typename Source::Element* const* rows, float* o, int64_t ldo, const RowsAhead& ahead) {
  for (int j = 0; j < n; j += kValueBlock) {
    const int count = n - j < kValueBlock ? n - j : kValueBlock;
    const RowsAhead share = rows_from(ahead, j, j + count == n ? ahead.n : count);
    int c = 0;
    for (; c + 64 <= dv; c += 64) pv_panel<4, false>(source, m, count, p + j, ldp, rows + j, c, o, ldo, 64, share);
    if constexpr (Source::kVectors == 1) {
      for (; c + 32 <= dv; c += 32) pv_panel<2, false>(source, m, count, p + j, ldp, rows + j, c, o, ldo, 32, share);
      if (c < dv) pv_panel<2, true>(source, m, count, p + j, ldp, rows + j, c, o, ldo, dv - c, share);
    } else {
      if (c < dv) pv_panel<4, true>(source, m, count, p + j, ldp, rows + j, c, o, ldo, dv - c, share);
    }
  }
}

}  // namespace

void qk_rows_bf16(int m, int n, int d, const bf16_t* q, int ldq, const bf16_t* const* rows, float* s, int lds) {
  qk_rows(Bf16Source(), m, n, d, q, ldq, rows, s, lds, RowsAhead());
}

void qk_rows_8bit(attune_dtype dtype, int m, int n, int d, const bf16_t* q, int ldq, const uint8_t* const* rows,
                  float* s, int lds, const RowsAhead& ahead) {
  if (dtype == ATTUNE_INT8) {
    qk_rows(CodeSource<true>(kInt8), m, n, d, q, ldq, rows, s, lds, ahead);
  } else {
    qk_rows(CodeSource<false>(dtype == ATTUNE_FLOAT8_E4M3 ? kE4M3 : kE5M2), m, n, d, q, ldq, rows, s, lds, ahead);
  }
}

void pv_rows_bf16(int m, int n, int dv, const bf16_t* p, int ldp, const bf16_t* const* rows, float* o, int ldo) {
  pv_rows(Bf16Source(), m, n, dv, p, ldp, rows, o, ldo, RowsAhead());
}

void pv_rows_8bit(attune_dtype dtype, int m, int n, int dv, const bf16_t* p, int ldp, const uint8_t* const* rows,
                  float* o, int ldo, const RowsAhead& ahead) {
  if (dtype == ATTUNE_INT8) {
    pv_rows(CodeSource<true>(kInt8), m, n, dv, p, ldp, rows, o, ldo, ahead);
  } else {
    pv_rows(CodeSource<false>(dtype == ATTUNE_FLOAT8_E4M3 ? kE4M3 : kE5M2), m, n, dv, p, ldp, rows, o, ldo, ahead);
  }
}

}  // namespace attune::cpu::avx512bf16
ATTUNE_END_AVX512BF16

#endif  // __x86_64__
