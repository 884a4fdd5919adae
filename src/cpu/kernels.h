// SPDX-License-Identifier: Apache-2.0
// The SIMD building blocks of the CPU backend: one table of functions per instruction set, chosen at run time.
// They know tiles, not tensors: rows are pointers, so any layout can be fed. Nothing here allocates or synchronises.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attune/attune.h"

namespace attune::cpu {

using bf16_t = uint16_t;  // bits of a bfloat16
struct f16_t {
  uint16_t bits;
};

// Element type of tiles in scratch memory, and of the rows that decode reads, which alone may be kF16. bf16 tiles are
// only used where KernelTable::native_bf16 is true.
enum class TileType : uint8_t { kF32, kBF16, kF16 };

// From this maximum on, product and difference of a row are rounded apart: fused, the product of the largest score is
// not the rounded one that is the maximum, and 2^ of what lies between them may be infinite, or 0 in a whole row.
constexpr float kMostFused = 0x1p24f;
// A score times its scale. In base 2 the lowest scores, such as those of a mask of the lowest number, would become -inf,
// which is "not seen": they are the lowest number again.
inline float scaled_score(float s, float scale) {
  constexpr float kMost = __FLT_MAX__, kInf = __builtin_huge_valf();
  const float z = s * scale;
  if (s == -kInf) return s;
  if (s == kInf || (z <= kMost && z >= -kMost)) return z;
  return z > kMost ? kMost : z < -kMost ? -kMost : z;
}

// One pass of the online softmax over a tile of scores, in base 2: p = exp2(s * scale2 - m).
struct SoftmaxTile {
  int m;     // rows
  int n;     // columns; entries that a row may not see hold -inf
  float* s;  // [m][lds] scores; may be overwritten
  int lds;
  float scale2;          // score scale times log2(e)
  const float* v_scale;  // [n] or null: p is multiplied by it after it has entered the row sum
  float* row_max;        // [m] in units of s * scale2, -inf before the first tile; updated
  float* row_sum;        // [m] sum of p (as rounded to p_type, before v_scale); rescaled and updated
  float* o;              // [m][ldo] running output; rows are rescaled by exp2(old max - new max)
  int ldo;
  int dv;   // columns of o
  void* p;  // [m][ldp] of p_type: the result. For kF32 may be s itself with ldp == lds
  int ldp;
  TileType p_type;  // kBF16: p rounded to nearest even
};
// A row whose max stays -inf gets p = 0; its sum and o stay. A NaN score makes p, sum and o NaN. Columns n.. up to the
// next multiple of 2 of a bf16 p are written as 0 (ldp allows it).

// The backward's softmax: turns a tile of scores into P, and one of dout V^T into the gradient of the scores.
struct GradientTile {
  int m;     // rows
  int n;     // columns; scores that a row may not see are -inf
  float* s;  // [m][ld] scores; becomes P = a * share, a = exp2(s * scale2 - lse2)
  float* d;  // [m][ld] dout V^T; becomes a * (share * d - delta), times 1 - (capped / cap)^2 if capped
  int ld;    // of capped, too; rows have room for columns up to the next multiple of 16, which become 0
  float scale2;
  const float* lse2;    // [m]; -inf: the row sees nothing
  const float* share;   // [m]
  const float* delta;   // [m]
  const float* capped;  // [m][ld] or null: scores behind the softcap, before what was added to them
  float cap;
};
// Where a score or its row's lse2 is -inf, both results are 0, whatever the other numbers are. Elsewhere NaN spreads.

// Rows that a later call will read. A function that takes this prefetches `bytes` bytes of rows[j], from `behind` bytes
// after its address on, when it comes to its own row j: a steady stream of requests queues better than a burst.
struct RowsAhead {
  const void* const* rows = nullptr;
  int n = 0;
  int64_t bytes = 0, behind = 0;
};

struct KernelTable {
  const char* isa;   // e.g. "AVX3+AVX512BF16"
  bool native_bf16;  // there are bf16 tiles, which 8-bit codes become at once
  bool fast_bf16;    // and their products take less time than those of fp32 tiles

  // --- Rows of a source to rows of a tile. n contiguous elements at src to dst; src dtype float32, float16, bfloat16,
  // e4m3, e5m2 or int8 (codes, no scale). NaN codes give NaN. to_bf16 rounds to nearest even (NaN stays NaN).
  void (*to_f32)(attune_dtype dtype, const void* src, int64_t n, float* dst);
  void (*to_bf16)(attune_dtype dtype, const void* src, int64_t n, bf16_t* dst);

  // --- Packing for the GEMMs. rows[i] is row i (d contiguous elements of the tile type) or null for a row of zeros.
  // Columns from n up to the next multiple of 16 are written as zeros; ld is a multiple of 16, out is 64-byte aligned.
  void (*pack_k_f32)(const float* const* rows, int n, int d, float* out, int ld);  // out[dd][i] = rows[i][dd]
  void (*pack_k_bf16)(const bf16_t* const* rows, int n, int d, bf16_t* out,
                      int ld);  // out[dd / 2][i][dd % 2]; odd d: zero pad
  void (*pack_v_bf16)(const bf16_t* const* rows, int n, int dv, bf16_t* out,
                      int ld);  // out[i / 2][c][i % 2]; odd n: zero pad

  // --- GEMM of the prefill tiles: c[m][n] (+)= sum_k a[m][k] * b[k][n]. The order of the sum over k is the same for
  // every row, whatever m is. n need not be a multiple of 16, but b and c rows are padded to one and may be computed
  // there.
  void (*gemm_f32)(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                   bool accumulate);
  // a bf16 [m][lda], b as packed pairs [ceil(k / 2)][ldb][2]; a is zero padded to even k.
  void (*gemm_bf16)(int m, int n, int k, const bf16_t* a, int lda, const bf16_t* b, int ldb, float* c, int ldc,
                    bool accumulate);

  // --- Decode tiles, straight from rows: s[i][j] = sum_d q[i][d] * rows[j][d]. No null rows. d any number >= 1; q and
  // the rows need not be aligned. The result of (i, j) does not depend on m, n or the other rows.
  void (*qk_rows_f32)(int m, int n, int d, const float* q, int ldq, const float* const* rows, float* s, int lds);
  void (*qk_rows_mixed)(int m, int n, int d, const float* q, int ldq, const bf16_t* const* rows, float* s,
                        int lds);  // fp32 q, bf16 rows
  void (*qk_rows_f16)(int m, int n, int d, const float* q, int ldq, const f16_t* const* rows, float* s, int lds);
  void (*qk_rows_bf16)(int m, int n, int d, const bf16_t* q, int ldq, const bf16_t* const* rows, float* s, int lds);
  // o[i][c] += sum_j p[i][j] * rows[j][c]. The order of the sum over j is fixed and does not depend on m.
  void (*pv_rows_f32)(int m, int n, int dv, const float* p, int ldp, const float* const* rows, float* o, int ldo);
  void (*pv_rows_mixed)(int m, int n, int dv, const float* p, int ldp, const bf16_t* const* rows, float* o, int ldo);
  void (*pv_rows_f16)(int m, int n, int dv, const float* p, int ldp, const f16_t* const* rows, float* o, int ldo);
  void (*pv_rows_bf16)(int m, int n, int dv, const bf16_t* p, int ldp, const bf16_t* const* rows, float* o, int ldo);
  // The same on rows of codes (e4m3, e5m2, int8), with the bits that to_bf16 and the bf16 functions give. d and dv at
  // most 1024.
  void (*qk_rows_8bit)(attune_dtype dtype, int m, int n, int d, const bf16_t* q, int ldq, const uint8_t* const* rows,
                       float* s, int lds, const RowsAhead& ahead);
  void (*pv_rows_8bit)(attune_dtype dtype, int m, int n, int dv, const bf16_t* p, int ldp, const uint8_t* const* rows,
                       float* o, int ldo, const RowsAhead& ahead);

  void (*softmax)(const SoftmaxTile& t);
  void (*softmax_gradient)(const GradientTile& t);
  // s[i][j] = cap * tanh(s[i][j] * scale / cap), for any finite s; NaN stays NaN, -inf gives -cap.
  void (*softcap)(int m, int n, float* s, int lds, float scale, float cap);
  // s[i][j] = s[i][j] * scalar * factor[j]; factor null: by scalar only.
  void (*scale_columns)(int m, int n, float* s, int lds, float scalar, const float* factor);
  // out[j] = sum over i of w[i] * max(s[i][j], 0), in the order of i, beginning with out[j] if accumulate. A NaN stays.
  // Columns up to the next multiple of 16 may be computed: s and out have them.
  void (*relu_sum)(int m, int n, const float* s, int lds, const float* w, float* out, bool accumulate);
  // s[i][j] += slope[i] * (first + j - position[i])
  void (*add_alibi)(int m, int n, float* s, int lds, const float* slope, const float* position, float first);
  // True if any of n fp32 / bf16 elements is NaN or infinite.
  bool (*any_nonfinite_f32)(const float* x, int64_t n);
  bool (*any_nonfinite_bf16)(const bf16_t* x, int64_t n);
};

// The best table for this machine; ATTUNE_CPU_ISA=<name> (a name from isa_names()) forces another. Never fails: an
// unknown name is ignored and logged.
const KernelTable& kernels();
// Names of the sets that this machine can run, best first, and the table of a name (null if unknown). For tests.
const char* const* isa_names(int* count);
const KernelTable* kernels_for(const char* isa);
// All instruction sets of this binary, best first, and whether this machine runs them. For tests.
struct BuiltIsa {
  const char* name;
  bool runs_here;
};
const BuiltIsa* built_isas(int* count);
// Chooses the table that kernels() returns; null restores the default. For tests.
bool force_isa(const char* isa);

}  // namespace attune::cpu
