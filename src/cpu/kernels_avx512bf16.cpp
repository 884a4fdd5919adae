// SPDX-License-Identifier: Apache-2.0
// GEMM of bf16 tiles with AVX512-BF16, and the entries of the table that this instruction set replaces.
#include "cpu/kernels_avx512bf16.h"

#include "cpu/kernels_targets.h"

#if !defined(__x86_64__)

bool attune::cpu::use_avx512bf16(KernelTable* /*table*/) { return false; }
bool attune::cpu::has_fast_bf16() { return false; }

#else

#include <cpuid.h>

ATTUNE_BEGIN_AVX512BF16
namespace attune::cpu::avx512bf16 {
namespace {

// --- GEMM: as in kernels_gemm-inl.h, but an element is a pair along k

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
ATTUNE_INLINE void gemm_panel(int m, int pairs, const bf16_t* a, int64_t lda, const bf16_t* b, int64_t ldb, float* c,
                              int64_t ldc, bool accumulate) {
  int i = 0;
  for (; i + kGemmRows <= m; i += kGemmRows) {
    gemm_tile<kGemmRows, V>(pairs, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
  }
  a += i * lda;
  c += i * ldc;
  switch (m - i) {
    case 1:
      return gemm_tile<1, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 2:
      return gemm_tile<2, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 3:
      return gemm_tile<3, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 4:
      return gemm_tile<4, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    case 5:
      return gemm_tile<5, V>(pairs, a, lda, b, ldb, c, ldc, accumulate);
    default:
      return;
  }
}

}  // namespace

void gemm_bf16(int m, int n, int k, const bf16_t* a, int lda, const bf16_t* b, int ldb, float* c, int ldc,
               bool accumulate) {
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

}  // namespace attune::cpu::avx512bf16
ATTUNE_END_AVX512BF16

namespace attune::cpu {
namespace {

// Entries of the base table, for cases that the functions here do not take.
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

// By CPUID: __builtin_cpu_supports needs the compiler's runtime, and that of zig, which builds the wheels, lacks these
// bits. AVX3 implies that the system saves the registers.
bool has_avx512bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kVbmi = 1u << 1, kBf16 = 1u << 5;  // leaf 7: ECX, then EAX of its second part
  const bool has_second_part = eax >= 1, has_vbmi = (ecx & kVbmi) != 0;
  if (!has_second_part || !has_vbmi) return false;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kBf16) != 0;
}

}  // namespace

// Not on Intel's cores: on Emerald Rapids prompts of bf16 took 1.65 times as long as those of fp32.
bool has_fast_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return !(ebx == signature_INTEL_ebx && ecx == signature_INTEL_ecx && edx == signature_INTEL_edx);
}

bool use_avx512bf16(KernelTable* table) {
  if (!has_avx512bf16()) return false;
  base_to_bf16 = table->to_bf16;
  base_softmax = table->softmax;
  table->native_bf16 = table->fast_bf16 = true;
  table->to_bf16 = to_bf16;
  table->pack_v_bf16 = avx512bf16::pack_v_bf16;
  table->gemm_bf16 = avx512bf16::gemm_bf16;
  table->qk_rows_bf16 = avx512bf16::qk_rows_bf16;
  table->pv_rows_bf16 = avx512bf16::pv_rows_bf16;
  table->qk_rows_8bit = avx512bf16::qk_rows_8bit;
  table->pv_rows_8bit = avx512bf16::pv_rows_8bit;
  table->softmax = softmax;
  return true;
}

}  // namespace attune::cpu

#endif  // __x86_64__
