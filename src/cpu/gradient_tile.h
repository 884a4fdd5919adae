// SPDX-License-Identifier: Apache-2.0
// Tiles of the backward on the CPU: P and the gradient of the scores, for queries of one head and a key tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backward.h"
#include "core/workspace.h"
#include "cpu/kernels.h"
#include "cpu/score.h"
#include "cpu/tile.h"

namespace attune::cpu {

inline constexpr int kTileRows = 64;    // queries a tile
inline constexpr int kTileKeys = 128;   // keys a key tile, as kMaxTileN
inline constexpr int kChunkRows = 512;  // queries that are staged at a time
static_assert(kTileKeys == kMaxTileN && kChunkRows % kTileRows == 0);

// Memory of one thread. T is the type of the operands of products: float or bf16.
template <class T>
struct GradientScratch {
  // keys: how many a work item may sum gradients of.
  GradientScratch(Workspace& c, int64_t head_dim_qk, int64_t head_dim_v, int64_t keys, int64_t num_buckets);

  int64_t ld_q, ld_v;  // of rows of q and k, of dout and v: multiples of 16
  // A chunk of queries of one head. pairs: two rows interleaved, as the products over queries take bf16.
  T *q, *dout;                  // [kChunkRows][ld_q or ld_v]
  T *q_pairs, *dout_pairs;      // bf16: the same, but rows that are not finite are 0. Else null
  float *lse2, *share, *delta;  // [kChunkRows], see GradientTile
  bool *bad_q, *bad_dout;       // [kChunkRows]: the row has a NaN or an infinity
  // A key tile.
  T *k_columns, *v_columns;  // packed K^T and V^T
  T* k_rows;                 // [kTileKeys][ld_q], or pairs; rows that are not finite are 0
  T* stage;                  // [kTileKeys][ld_q or ld_v]: rows that are not in place
  bool* bad_k;               // [kTileKeys]
  // A tile.
  float *s, *d, *capped;     // [kTileRows][kTileKeys]; P and the gradient of the scores in the end
  bool* seen;                // [kTileRows][kTileKeys], where something is not finite
  float* transposed;         // [kTileKeys][kTileRows]
  T *p_columns, *d_columns;  // P^T and the gradient's transpose. float: p_columns is transposed
  T* d_rows;                 // bf16: the gradient. Else null
  T* clean;                  // float: [kTileRows][ld_q or ld_v]: rows of q or dout without those that are not finite
  float *slope, *position;   // [kTileRows], for ALiBi
  float *row, *other_row;    // of any head dim
  const T** rows;            // [kChunkRows]
  // Sums.
  float* dq;        // [kChunkRows][ld_q]
  float *dk, *dv;   // [keys][ld_q or ld_v]
  double* buckets;  // [num_buckets]
};

// What all items of a run share.
struct GradientRun {
  const BackwardProblem& p;
  const Problem& single;  // the forward with a KV head for each query head, so that rows of a tile are queries
  const T5Buckets& t5;
  const KernelTable& kernels;
};

// One sequence: stages queries and keys and computes tiles. A tile's bits depend on the sequence and on the tile alone.
template <class T>
class GradientTiles {
 public:
  GradientTiles(const GradientRun& run, const Sequence& sequence, int64_t b, GradientScratch<T>& scratch)
      : run_(run), p_(run.p.forward), sequence_(sequence), b_(b), s_(scratch) {}

  // Queries [first, first + count) of a head; count is at most kChunkRows.
  void stage(int64_t head, int64_t first, int64_t count);
  // The key tile from first on.
  void load_keys(int64_t kv_head, int64_t first);

  // The rows and columns of a tile that may hold anything but 0.
  struct Tile {
    int row, m;  // of the chunk
    int n;
  };
  // Computes rows [row, row + m) of the chunk against the keys: P to scratch.s, the gradient of the scores to
  // scratch.d. That is of the scores before the softcap; for_bias: behind it, where biases are added. False if no row
  // sees a key.
  bool compute(int row, int m, bool for_bias, Tile& tile);

  int64_t first_query() const { return first_query_; }
  int64_t num_queries() const { return num_queries_; }
  int64_t first_key() const { return first_key_; }
  int num_keys() const { return num_keys_; }
  // Whether a staged row of q or dout, or a key, has a NaN or an infinity; then scratch.seen is set.
  bool any_bad() const { return any_bad_rows_ || any_bad_k_; }

 private:
  void stage_row(const RowView& from, int64_t row, int64_t head, int64_t n, T* to) const;
  void stage_constants(int64_t i, int64_t row, int64_t head);
  const T* place_key(const RowView& from, int64_t row, int64_t head, int64_t n, T* stage) const;
  bool any_nonfinite(const T* x, int64_t n) const;
  Tile trim(int row, int m) const;

  const GradientRun& run_;
  const Problem& p_;
  const Sequence& sequence_;
  const int64_t b_;
  GradientScratch<T>& s_;
  int64_t head_ = 0, first_query_ = 0, num_queries_ = 0, first_key_ = 0;
  int num_keys_ = 0;
  bool any_bad_rows_ = false, any_bad_k_ = false;
};

// c[m][n] (+)= a[m][k] * b[k][n], b as the type of its elements is packed.
inline void multiply(const KernelTable& kt, int m, int64_t n, int k, const float* a, int64_t lda, const float* b,
                     int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  kt.gemm_f32(m, static_cast<int>(n), k, a, static_cast<int>(lda), b, static_cast<int>(ldb), c, static_cast<int>(ldc),
              accumulate);
}
inline void multiply(const KernelTable& kt, int m, int64_t n, int k, const bf16_t* a, int64_t lda, const bf16_t* b,
                     int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  kt.gemm_bf16(m, static_cast<int>(n), k, a, static_cast<int>(lda), b, static_cast<int>(ldb), c, static_cast<int>(ldc),
               accumulate);
}

}  // namespace attune::cpu
