// SPDX-License-Identifier: Apache-2.0
// c[m][n] (+)= a[m][k] * b[k][n] on tiles that live in L1 and L2: a register tile of kRows x kVecs accumulators, a
// broadcast, b vectors. A row's elements see the same additions in the same order in every register tile.

#if defined(ATTUNE_CPU_KERNELS_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTUNE_CPU_KERNELS_GEMM_INL_H_
#undef ATTUNE_CPU_KERNELS_GEMM_INL_H_
#else
#define ATTUNE_CPU_KERNELS_GEMM_INL_H_
#endif

#include "cpu/kernels_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {

// fp32 operands: one step of k a vector of b.
struct GemmF32 {
  using A = float;
  using B = float;
  // Of 32 registers 24 are accumulators, 4 hold b and one a; of 16: 12, 2 and one. Six rows hide the latency of FMA.
  static constexpr int kRows = 6;
  static constexpr int kVecs = kManyRegisters ? 4 : 2;

  template <int R, int V>
  static HWY_INLINE void accumulate(int k, const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b,
                                    int64_t ldb, VF (&acc)[R][V]) {
    const DF d;
    for (int kk = 0; kk < k; ++kk) {
      VF bv[V];
      ATTUNE_UNROLL
      for (int v = 0; v < V; ++v) bv[v] = hn::LoadU(d, b + kk * ldb + v * kLanes);
      ATTUNE_UNROLL
      for (int r = 0; r < R; ++r) {
        const VF av = hn::Set(d, a[r * lda + kk]);
        ATTUNE_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
      }
    }
  }
};

// bf16 operands without bf16 instructions: b holds pairs along k, widened as they are used.
struct GemmBF16 {
  using A = bf16_t;
  using B = bf16_t;
  static constexpr int kRows = 4;
  static constexpr int kVecs = kManyRegisters ? 4 : 2;

  static HWY_INLINE VF set(bf16_t bits) { return hn::BitCast(DF(), hn::Set(DU(), static_cast<uint32_t>(bits) << 16)); }

  template <int R, int V>
  static HWY_INLINE void accumulate(int k, const bf16_t* HWY_RESTRICT a, int64_t lda, const bf16_t* HWY_RESTRICT b,
                                    int64_t ldb, VF (&acc)[R][V]) {
    const DU du;
    for (int kk = 0; kk < k; kk += 2) {
      const uint32_t* pairs = reinterpret_cast<const uint32_t*>(b) + kk / 2 * ldb;
      ATTUNE_UNROLL
      for (int v = 0; v < V; ++v) {
        const VU pair = hn::LoadU(du, pairs + v * kLanes);
        const VF even = hn::BitCast(DF(), hn::ShiftLeft<16>(pair));
        const VF odd = hn::BitCast(DF(), hn::And(pair, hn::Set(du, 0xffff0000u)));
        ATTUNE_UNROLL
        for (int r = 0; r < R; ++r) acc[r][v] = hn::MulAdd(set(a[r * lda + kk]), even, acc[r][v]);
        ATTUNE_UNROLL
        for (int r = 0; r < R; ++r) acc[r][v] = hn::MulAdd(set(a[r * lda + kk + 1]), odd, acc[r][v]);
      }
    }
  }
};

template <class Gemm, int R, int V>
HWY_NOINLINE void gemm_tile(int k, const typename Gemm::A* HWY_RESTRICT a, int64_t lda,
                            const typename Gemm::B* HWY_RESTRICT b, int64_t ldb, float* HWY_RESTRICT c, int64_t ldc,
                            bool accumulate) {
  const DF d;
  VF acc[R][V];
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = hn::Zero(d);
  }
  Gemm::template accumulate<R, V>(k, a, lda, b, ldb, acc);
  ATTUNE_UNROLL
  for (int r = 0; r < R; ++r) {
    ATTUNE_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = c + r * ldc + v * kLanes;
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), acc[r][v]) : acc[r][v], d, to);
    }
  }
}

// All rows of a panel of V vectors of columns. Rows that are left over go to smaller tiles: the last seven or eight to
// two, as a tile of one or two rows has too few sums under way.
template <class Gemm, int V>
HWY_INLINE void gemm_panel(int m, int k, const typename Gemm::A* a, int64_t lda, const typename Gemm::B* b, int64_t ldb,
                           float* c, int64_t ldc, bool accumulate) {
  int i = 0;
  for (; i + Gemm::kRows <= m && (Gemm::kRows != 6 || m - i < 7 || m - i > 8); i += Gemm::kRows) {
    gemm_tile<Gemm, Gemm::kRows, V>(k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
  }
  if (m - i > 6) {
    gemm_tile<Gemm, 4, V>(k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
    i += 4;
  }
  a += i * lda;
  c += i * ldc;
  switch (m - i) {
    case 1:
      return gemm_tile<Gemm, 1, V>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 2:
      return gemm_tile<Gemm, 2, V>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 3:
      return gemm_tile<Gemm, 3, V>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 4:
      return gemm_tile<Gemm, 4, V>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 5:
      return gemm_tile<Gemm, 5, V>(k, a, lda, b, ldb, c, ldc, accumulate);
    default:
      return;
  }
}

// kPair: elements of b that one column takes in a row of b.
template <class Gemm, int kPair>
HWY_INLINE void gemm(int m, int n, int k, const typename Gemm::A* a, int64_t lda, const typename Gemm::B* b,
                     int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  const int columns = (n + 15) / 16 * 16;  // a multiple of kLanes
  int j = 0;
  for (; j + Gemm::kVecs * kLanes <= columns; j += Gemm::kVecs * kLanes) {
    gemm_panel<Gemm, Gemm::kVecs>(m, k, a, lda, b + j * kPair, ldb, c + j, ldc, accumulate);
  }
  if constexpr (Gemm::kVecs > 2) {
    if (j + 2 * kLanes <= columns) {
      gemm_panel<Gemm, 2>(m, k, a, lda, b + j * kPair, ldb, c + j, ldc, accumulate);
      j += 2 * kLanes;
    }
  }
  if (j < columns) gemm_panel<Gemm, 1>(m, k, a, lda, b + j * kPair, ldb, c + j, ldc, accumulate);
}

void gemm_f32(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
              bool accumulate) {
  gemm<GemmF32, 1>(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

void gemm_bf16(int m, int n, int k, const bf16_t* a, int lda, const bf16_t* b, int ldb, float* c, int ldc,
               bool accumulate) {
  gemm<GemmBF16, 2>(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
