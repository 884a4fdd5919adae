// SPDX-License-Identifier: Apache-2.0
// Decode: scores of query rows with key rows, and sums of value rows, straight from the cache's rows. Every byte of the
// cache is touched once, so these are built to keep up with memory: query rows and partial sums stay in registers. The
// caller prefetches (kernels_prefetch.h): only it knows the next rows.

#if defined(ATTUNE_CPU_KERNELS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTUNE_CPU_KERNELS_ROWS_INL_H_
#undef ATTUNE_CPU_KERNELS_ROWS_INL_H_
#else
#define ATTUNE_CPU_KERNELS_ROWS_INL_H_
#endif

#include "cpu/kernels_convert-inl.h"
#include "cpu/kernels_prefetch.h"

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {

// Sums of the lanes of four vectors, to four[0..3]. Lanes are added in an order that only the width of a vector
// decides.
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void reduce_four(VF v0, VF v1, VF v2, VF v3, float* four) {
  four[0] = hn::GetLane(v0);
  four[1] = hn::GetLane(v1);
  four[2] = hn::GetLane(v2);
  four[3] = hn::GetLane(v3);
}
#else
using D4 = hn::FixedTag<float, 4>;

// Compares lanes, not tags: since Highway 1.1 the half of a wider tag is another type than D4.
template <class D>
HWY_INLINE hn::Vec<D4> add_blocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return add_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

HWY_INLINE void reduce_four(VF v0, VF v1, VF v2, VF v3, float* four) {
  const DF d;
  const VF even = hn::Add(hn::InterleaveLower(d, v0, v2), hn::InterleaveUpper(d, v0, v2));
  const VF odd = hn::Add(hn::InterleaveLower(d, v1, v3), hn::InterleaveUpper(d, v1, v3));
  const VF sums = hn::Add(hn::InterleaveLower(d, even, odd), hn::InterleaveUpper(d, even, odd));
  hn::StoreU(add_blocks(d, sums), D4(), four);
}
#endif

// Scores of R query rows with four key rows; the first `count` of the four are stored.
template <int R, class Q, class K>
HWY_NOINLINE void qk_tile(int d, const Q* HWY_RESTRICT q, int64_t ldq, const K* const* HWY_RESTRICT rows,
                          float* HWY_RESTRICT s, int64_t lds, int count) {
  VF acc[R][4];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int j = 0; j < 4; ++j) acc[r][j] = hn::Zero(DF());
  }
  const K* HWY_RESTRICT row0 = rows[0];
  const K* HWY_RESTRICT row1 = rows[1];
  const K* HWY_RESTRICT row2 = rows[2];
  const K* HWY_RESTRICT row3 = rows[3];
  int c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    const VF k0 = load(row0 + c), k1 = load(row1 + c), k2 = load(row2 + c), k3 = load(row3 + c);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const VF qv = load(q + r * ldq + c);
      acc[r][0] = hn::MulAdd(qv, k0, acc[r][0]);
      acc[r][1] = hn::MulAdd(qv, k1, acc[r][1]);
      acc[r][2] = hn::MulAdd(qv, k2, acc[r][2]);
      acc[r][3] = hn::MulAdd(qv, k3, acc[r][3]);
    }
  }
  if (c < d) {
    const int rest = d - c;
    const VF k0 = load(row0 + c, rest), k1 = load(row1 + c, rest), k2 = load(row2 + c, rest), k3 = load(row3 + c, rest);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const VF qv = load(q + r * ldq + c, rest);
      acc[r][0] = hn::MulAdd(qv, k0, acc[r][0]);
      acc[r][1] = hn::MulAdd(qv, k1, acc[r][1]);
      acc[r][2] = hn::MulAdd(qv, k2, acc[r][2]);
      acc[r][3] = hn::MulAdd(qv, k3, acc[r][3]);
    }
  }
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    if (count == 4) {
      reduce_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3], s + r * lds);
    } else {
      float four[4];
      reduce_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3], four);
      for (int j = 0; j < count; ++j) s[r * lds + j] = four[j];
    }
  }
}

constexpr int kKeyBlock = 16;  // key rows that stay in L1 while all query rows visit them
// A tile of four query rows and four key rows needs 16 accumulators and 5 operands.
constexpr int kQkRows = kManyRegisters ? 4 : 2;

template <class Q, class K>
HWY_INLINE void qk_rows(int m, int n, int d, const Q* q, int64_t ldq, const K* const* rows, float* s, int64_t lds) {
  // All query rows visit a block of key rows while it is in L1.
  for (int j0 = 0; j0 < n; j0 += kKeyBlock) {
    const int block_end = HWY_MIN(j0 + kKeyBlock, n);
    for (int i = 0; i < m; i += kQkRows) {
      for (int j = j0; j < block_end; j += 4) {
        const int count = HWY_MIN(4, n - j);
        // Missing rows repeat the last one: the same arithmetic, and the results are dropped.
        const K* four[4];
        ATTUNE_UNROLL
        for (int t = 0; t < 4; ++t) four[t] = rows[j + HWY_MIN(t, count - 1)];
        const Q* qi = q + i * ldq;
        float* si = s + i * lds + j;
        switch (HWY_MIN(kQkRows, m - i)) {
          case 1:
            qk_tile<1>(d, qi, ldq, four, si, lds, count);
            break;
          case 2:
            qk_tile<2>(d, qi, ldq, four, si, lds, count);
            break;
          case 3:
            qk_tile<3>(d, qi, ldq, four, si, lds, count);
            break;
          default:
            qk_tile<4>(d, qi, ldq, four, si, lds, count);
            break;
        }
      }
    }
  }
}

void qk_rows_f32(int m, int n, int d, const float* q, int ldq, const float* const* rows, float* s, int lds) {
  qk_rows(m, n, d, q, ldq, rows, s, lds);
}
void qk_rows_mixed(int m, int n, int d, const float* q, int ldq, const bf16_t* const* rows, float* s, int lds) {
  qk_rows(m, n, d, q, ldq, rows, s, lds);
}
void qk_rows_f16(int m, int n, int d, const float* q, int ldq, const f16_t* const* rows, float* s, int lds) {
  qk_rows(m, n, d, q, ldq, rows, s, lds);
}
void qk_rows_bf16(int m, int n, int d, const bf16_t* q, int ldq, const bf16_t* const* rows, float* s, int lds) {
  qk_rows(m, n, d, q, ldq, rows, s, lds);
}

HWY_INLINE VF broadcast(float x) { return hn::Set(DF(), x); }
HWY_INLINE VF broadcast(bf16_t bits) { return hn::BitCast(DF(), hn::Set(DU(), static_cast<uint32_t>(bits) << 16)); }

// R output rows, V vectors of columns. If rest > 0 the last vector has `rest` lanes.
template <int R, int V, bool kPartial, class P, class W>
HWY_NOINLINE void pv_tile(int n, const P* HWY_RESTRICT p, int64_t ldp, const W* const* HWY_RESTRICT rows,
                          int64_t column, float* HWY_RESTRICT o, int64_t ldo, int rest) {
  static_assert(!kPartial || V == 1, "a partial tile is one vector wide");
  const DF d;
  VF acc[R][V];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = hn::Zero(d);
  }
  for (int j = 0; j < n; ++j) {
    const W* row = rows[j] + column;
    VF w[V];
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) w[v] = kPartial ? load(row, rest) : load(row + v * kLanes);
    ATTUNE_UNROLL
    for (int r = 0; r < R; ++r) {
      const VF weight = broadcast(p[r * ldp + j]);
      ATTUNE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(weight, w[v], acc[r][v]);
    }
  }
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = o + r * ldo + v * kLanes;
      if (kPartial) {
        store_first(hn::Add(load(to, rest), acc[r][v]), d, to, rest);
      } else {
        hn::StoreU(hn::Add(load(to), acc[r][v]), d, to);
      }
    }
  }
}

constexpr int kValueBlock = 64;  // value rows of one sum in registers
constexpr int kPvRows = 4;
constexpr int kPvVecs = kManyRegisters ? 4 : 2;

template <int V, bool kPartial, class P, class W>
HWY_INLINE void pv_panel(int m, int n, const P* p, int64_t ldp, const W* const* rows, int64_t column, float* o,
                         int64_t ldo, int rest) {
  for (int i = 0; i < m; i += kPvRows) {
    const P* pi = p + i * ldp;
    float* oi = o + i * ldo + column;
    switch (HWY_MIN(kPvRows, m - i)) {
      case 1:
        pv_tile<1, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest);
        break;
      case 2:
        pv_tile<2, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest);
        break;
      case 3:
        pv_tile<3, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest);
        break;
      default:
        pv_tile<4, V, kPartial>(n, pi, ldp, rows, column, oi, ldo, rest);
        break;
    }
  }
}

template <class P, class W>
HWY_INLINE void pv_rows(int m, int n, int dv, const P* p, int64_t ldp, const W* const* rows, float* o, int64_t ldo) {
  for (int j0 = 0; j0 < n; j0 += kValueBlock) {
    const int count = HWY_MIN(kValueBlock, n - j0);
    const W* const* block = rows + j0;
    int c = 0;
    for (; c + kPvVecs * kLanes <= dv; c += kPvVecs * kLanes)
      pv_panel<kPvVecs, false>(m, count, p + j0, ldp, block, c, o, ldo, 0);
    for (; c + kLanes <= dv; c += kLanes) pv_panel<1, false>(m, count, p + j0, ldp, block, c, o, ldo, 0);
    if (c < dv) pv_panel<1, true>(m, count, p + j0, ldp, block, c, o, ldo, dv - c);
  }
}

void pv_rows_f32(int m, int n, int dv, const float* p, int ldp, const float* const* rows, float* o, int ldo) {
  pv_rows(m, n, dv, p, ldp, rows, o, ldo);
}
void pv_rows_mixed(int m, int n, int dv, const float* p, int ldp, const bf16_t* const* rows, float* o, int ldo) {
  pv_rows(m, n, dv, p, ldp, rows, o, ldo);
}
void pv_rows_f16(int m, int n, int dv, const float* p, int ldp, const f16_t* const* rows, float* o, int ldo) {
  pv_rows(m, n, dv, p, ldp, rows, o, ldo);
}
void pv_rows_bf16(int m, int n, int dv, const bf16_t* p, int ldp, const bf16_t* const* rows, float* o, int ldo) {
  pv_rows(m, n, dv, p, ldp, rows, o, ldo);
}

// Codes: a few rows at a time are converted to bf16 on the stack. Blocks are those of the bf16 functions, for the same
// bits.
constexpr int kMaxCodes = 1024;

void qk_rows_8bit(attune_dtype dtype, int m, int n, int d, const bf16_t* q, int ldq, const uint8_t* const* rows,
                  float* s, int lds, const RowsAhead& ahead) {
  prefetch_rows(ahead, 0, ahead.n);
  HWY_ALIGN bf16_t converted[4 * kMaxCodes];
  for (int j = 0; j < n; j += 4) {
    const int count = HWY_MIN(4, n - j);
    const bf16_t* pointers[4];
    for (int t = 0; t < count; ++t) {
      to_bf16(dtype, rows[j + t], d, converted + t * kMaxCodes);
      pointers[t] = converted + t * kMaxCodes;
    }
    qk_rows_bf16(m, count, d, q, ldq, pointers, s + j, lds);
  }
}

void pv_rows_8bit(attune_dtype dtype, int m, int n, int dv, const bf16_t* p, int ldp, const uint8_t* const* rows,
                  float* o, int ldo, const RowsAhead& ahead) {
  prefetch_rows(ahead, 0, ahead.n);
  constexpr int kColumns = 64;
  HWY_ALIGN bf16_t converted[kValueBlock * kColumns];
  for (int j = 0; j < n; j += kValueBlock) {
    const int count = HWY_MIN(kValueBlock, n - j);
    const bf16_t* pointers[kValueBlock];
    for (int c = 0; c < dv; c += kColumns) {
      const int columns = HWY_MIN(kColumns, dv - c);
      for (int t = 0; t < count; ++t) {
        to_bf16(dtype, rows[j + t] + c, columns, converted + t * kColumns);
        pointers[t] = converted + t * kColumns;
      }
      pv_rows_bf16(m, count, columns, p + j, ldp, pointers, o + c, ldo);
    }
  }
}

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
