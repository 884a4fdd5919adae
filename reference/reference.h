// SPDX-License-Identifier: Apache-2.0
// The oracle: every operation in float64 with plain loops, straight from the semantics. Shares no code with src/ or
// kernels/. It reads the same descriptors as the C ABI (host memory) and the same stored bytes, dequantised exactly.
// Descriptors must be well formed (shapes, dtypes, ranks); contents (lengths, page ids, indices, beams) may be
// anything, and are masked as attune.h says.
#pragma once

#include <cstdint>
#include <vector>

#include "attune/attune.h"

namespace attune::reference {

// One query row and head of the output. row counts the rows of q in memory order (rank 4: batch * seqlen_q + i).
struct RowHead {
  int64_t row = 0;
  int64_t head = 0;
};

// What the operation gives for one RowHead, and what bounds its error.
struct RowResult {
  bool written =
      false;  // false: the operation must leave the row untouched (finished, skipped, no sequence owns the row)
  std::vector<double> out;      // [head_dim_v], before rounding or output scaling
  std::vector<double> pv_abs;   // [head_dim_v]: sum over visible keys of p * |v|
  std::vector<double> v_abs;    // [head_dim_v]: of |v|
  std::vector<double> pv_lost;  // [head_dim_v]: of p times what the prologue's sums cancel of v (Operation::value_lost)
  double largest_p = 0;         // of the visible keys
  double lse = 0;               // natural log, without sinks; -inf when nothing is visible
  double max_logit = 0;         // -inf when nothing is visible
  double z_abs = 0;             // max over visible keys of |scale| * sum_d |q_d k_d|: what rounding of q and k can move
  double z_lost = 0;            // the same of |q| and what cancels of k, and the other way round
  int64_t num_visible = 0;
};

// Rows of q: total_q, or batch * seqlen_q.
int64_t num_rows(const attune_attention& a);

// Evaluates the given rows. Must be called before the run: it reads the cache as it stands, without the new tokens.
// A visible key whose score is -inf (a bias of -inf) weighs nothing, whatever its value holds.
std::vector<RowResult> attention(const attune_attention& a, const std::vector<RowHead>& rows);
// All rows, row-major [num_rows][num_heads_q].
std::vector<RowResult> attention(const attune_attention& a);

// What prologue.append writes for one token and KV head, exact (before rounding or quantisation). Tokens that are not
// stored (finished or skipped sequences, no room, a bad page id, overwritten by a later token of the same ring) have no
// entry.
struct CacheWrite {
  int64_t slot = 0;  // page * page_size + offset (in the K table; v_slot in the V table)
  int64_t v_slot = 0;
  int64_t head = 0;
  std::vector<double> k, v;  // [head_dim_qk], [head_dim_v]; v empty where V aliases K
};
std::vector<CacheWrite> appended(const attune_attention& a);
// The prologue alone. Results in double, row-major [rows][heads][head_dim]; empty where the input is absent.
struct Prepared {
  std::vector<double> q, k, v;
  std::vector<bool>
      written;  // [rows]: false: the outputs of the row stay untouched (finished, or no sequence owns it); 0 in q, k, v
};
Prepared qkv_prepare(const attune_qkv_prepare& op);
std::vector<CacheWrite> appended(const attune_qkv_prepare& op);

// What attune_cache_op_run moves: append and quantize to the cache, dequantize and gather to dense rows.
struct CacheMoves {
  std::vector<CacheWrite> writes;
  std::vector<bool> written;  // [tokens]: dense rows that are written
  std::vector<double> k, v;   // [tokens][heads][head_dim]; 0 where nothing is written; empty where absent
};
CacheMoves cache_op(const attune_cache_op& op);

// Merge by lse: out [rows][heads][head_dim_v], lse [rows][heads], abs as sum of weights * |partial_out|.
struct Merged {
  std::vector<double> out, lse, abs;
};
Merged merge(const attune_merge& op);

// What the indexer says of one row. Hidden are the tokens in the row's range whose pages are bad.
struct IndexRow {
  bool written = false;            // false: no sequence owns the row
  std::vector<int64_t> positions;  // of the keys that the row sees, ascending
  std::vector<int64_t> entries;    // what indices holds for each of them
  std::vector<double> scores;      // of each; for SELECT as given
  std::vector<double> scores_abs;  // of each: the sum of the magnitudes of its products; what bounds its error
  std::vector<int64_t> hidden;
};
// Rows in memory order (batch axis: batch * seqlen_q + i). For SCORES scores are not read.
std::vector<IndexRow> index_rows(const attune_indexer& op);
// The entries of the topk best by row.scores, in the order of positions.
std::vector<int64_t> index_select(const IndexRow& row, int64_t topk);

// One stored row of a cache, dequantised. Never touches a byte outside the slot. is_v false: K [head_dim_qk].
std::vector<double> cache_row(const attune_kv_cache& cache, int64_t head_dim_v, int64_t slot, int64_t head, bool is_v);
// Slot of position t (in a ring: any t that it retains) of sequence b in the K table, or in the V table; -1 where there
// is none.
int64_t cache_slot(const attune_kv_cache& cache, int64_t b, int64_t t, bool is_v);
// Decoders of single elements, bit by bit.
double decode_element(attune_dtype dtype, const void* element);

// Rope frequency map F(f_j) of pair j for the styles, in double. Style NONE does not rotate: all 0.
std::vector<double> rope_frequencies(const attune_rope& rope);

}  // namespace attune::reference
