// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prologue.h"

#include <algorithm>

#include "core/integers.h"
#include "cuda/attention/tensor_maps.h"

namespace attune::cuda::attention {
namespace {

constexpr size_t kRowsAlignment = 256;  // of q, k and v in the workspace

// A dense copy of the rows of `like` for the workspace, `at` bytes into memory (null while planning). Each row begins
// at a multiple of 16 bytes. Advances `at`.
RowView dense_rows(const RowView& like, Rows rows, int64_t heads, int64_t head_dim, void* memory, size_t& at) {
  RowView v = like;
  if (rows == Rows::kFp32) v.dtype = ATTUNE_FLOAT32, v.element_size = static_cast<int32_t>(sizeof(float));
  if (rows == Rows::kBf16) v.dtype = ATTUNE_BFLOAT16, v.element_size = 2;
  v.data = memory == nullptr ? nullptr : static_cast<std::byte*>(memory) + at;
  v.dim_stride = 1;
  const int64_t unit = std::max<int64_t>(1, kAlignment / v.element_size);
  v.head_stride = round_up(head_dim, unit);
  v.row_stride = heads * v.head_stride;
  v.batch_stride = v.rows_per_batch * v.row_stride;
  const size_t bytes = static_cast<size_t>(v.rows * v.row_stride * v.element_size);
  at += round_up(bytes, kRowsAlignment);
  return v;
}

struct PreparedRows {
  RowView q, k, v;
  size_t bytes = 0;
};
PreparedRows place_rows(const Problem& p, void* memory, Rows rows) {
  PreparedRows r;
  r.q = dense_rows(p.q, rows, p.heads_q, p.head_dim_qk, memory, r.bytes);
  if (p.k) r.k = dense_rows(p.k, rows, p.heads_kv, p.head_dim_qk, memory, r.bytes);
  if (p.v_aliases_k) {
    r.v = r.k;
  } else if (p.v) {
    r.v = dense_rows(p.v, rows, p.heads_kv, p.head_dim_v, memory, r.bytes);
  }
  return r;
}

// Whether the prologue depends on a query's position. kernels/rows/store.cu counts that from the first new token.
bool uses_position(const Prologue& p) { return (p.has_rope() && !p.has_positions) || p.logn; }

bool lies_aligned(const RowView& v) {
  return strides_fit(v) && reinterpret_cast<uintptr_t>(v.data) % static_cast<uintptr_t>(kAlignment) == 0;
}

}  // namespace

bool is_fp8_attention(const Problem& p) {
  const Prologue& g = p.prologue;
  const bool others = g.q_bias || g.k_bias || g.v_bias || g.ia3_k || g.ia3_v || g.has_rope() || g.logn || g.append;
  return p.dense_kv && !p.sparse && !others && p.q.dtype == ATTUNE_FLOAT8_E4M3 && p.k.dtype == ATTUNE_FLOAT8_E4M3 &&
         p.v.dtype == ATTUNE_FLOAT8_E4M3;
}

bool has_prologue(const Problem& p) { return (p.prologue.any && !is_fp8_attention(p)) || p.prologue.append; }

std::string prologue_refusal(const Problem& p) {
  if (!has_prologue(p)) return "";
  if (p.cache && !p.new_tokens && uses_position(p.prologue))
    return "a prologue of queries alone that asks where they stand";
  if (p.skip_decode) return "a prologue with skip_decode";
  if (p.dense_kv && (p.cu_kv.data != p.cu_q.data || p.fixed_kv != p.fixed_q || p.k.rows != p.q.rows))
    return "a prologue for dense keys that are not q's tokens";
  if (p.dense_kv && p.seqused && uses_position(p.prologue))
    return "a prologue that asks where tokens stand, with seqused_kv";
  return "";
}

bool copies_rows(const Problem& p) { return row_to_copy(p) != nullptr; }

const char* row_to_copy(const Problem& p) {
  if (has_prologue(p) || !(p.q.element_size == 2 || is_fp8_attention(p))) return nullptr;
  const bool rows = p.dense_kv || p.new_tokens;
  return !lies_aligned(p.q) ? "q" : rows && !lies_aligned(p.k) ? "k" : rows && !lies_aligned(p.v) ? "v" : nullptr;
}

bool prepares_rows(const Problem& p, Rows rows) { return has_prologue(p) || copies_rows(p) || rows != Rows::kOwnType; }

size_t prologue_bytes(const Problem& p, Rows rows) {
  return prepares_rows(p, rows) ? place_rows(p, nullptr, rows).bytes : 0;
}

namespace {

PrepareProblem start_prepare(const Problem& p, void* memory, Rows rows) {
  const PreparedRows prepared = place_rows(p, memory, rows);
  PrepareProblem op;
  op.heads_q = p.heads_q, op.heads_kv = p.heads_kv, op.head_dim_qk = p.head_dim_qk;
  op.q = p.q, op.k = p.k;
  op.q_out = prepared.q, op.k_out = prepared.k;
  if (!p.v_aliases_k) op.head_dim_v = p.head_dim_v, op.v = p.v, op.v_out = prepared.v;
  if (rows == Rows::kBf16) {
    op.prologue.any = op.prologue.scaled = p.prologue.scaled;
    op.prologue.qkv_scale = p.prologue.qkv_scale, op.prologue.qkv_scale_stride = p.prologue.qkv_scale_stride;
  }
  return op;
}

// Takes all rows as one sequence: copies do not depend on the sequence.
void take_all(PrepareProblem& op, const RowView& rows) {
  op.total = rows.rows;
  op.fixed = rows.rows_per_batch > 0 ? rows.rows_per_batch : rows.rows;
  op.batch = rows.rows / std::max<int64_t>(1, op.fixed);
}

// Rows of a multiple of 8 bytes are copied as bytes, in vectors of 8 from any such address.
constexpr int64_t kVector = 8;

bool lies_in_vectors(const RowView& v, int64_t head_dim) {
  if (!v) return true;
  const auto fits = [&](int64_t elements) { return elements * v.element_size % kVector == 0; };
  return v.dim_stride == 1 && fits(head_dim) && fits(v.batch_stride) && fits(v.row_stride) && fits(v.head_stride) &&
         reinterpret_cast<uintptr_t>(v.data) % static_cast<uintptr_t>(kVector) == 0;
}

void take_bytes(RowView& v) {
  v.batch_stride *= v.element_size, v.row_stride *= v.element_size, v.head_stride *= v.element_size;
  if (v) v.dtype = ATTUNE_INT8, v.element_size = 1;
}

void copy_in_vectors(PrepareProblem& op) {
  for (const RowView* v : {&op.q, &op.k, &op.q_out, &op.k_out})
    if (!lies_in_vectors(*v, op.head_dim_qk)) return;
  for (const RowView* v : {&op.v, &op.v_out})
    if (!lies_in_vectors(*v, op.head_dim_v)) return;
  op.copies = true;
  const int64_t size = (op.q ? op.q : op.k).element_size;
  op.head_dim_qk *= size, op.head_dim_v *= size;
  for (RowView* v : {&op.q, &op.k, &op.v, &op.q_out, &op.k_out, &op.v_out}) take_bytes(*v);
}

}  // namespace

PrepareProblem to_prepare(const Problem& p, void* memory, Rows rows) {
  PrepareProblem op = start_prepare(p, memory, rows);
  op.batch = p.batch, op.total = p.total_q, op.fixed = p.fixed_q;
  op.cu = p.cu_q;
  op.seqused = p.cache ? p.seqused : IntView{};
  op.finished = {p.finished, p.finished_stride};
  op.cache = p.cache;
  op.prologue = p.prologue;
  return op;
}

Launches launches_before(const Problem& p, void* memory, Rows rows) {
  Launches before;
  PrepareProblem& first = before.ops[before.count++];
  first = has_prologue(p) ? to_prepare(p, memory, rows) : start_prepare(p, memory, rows);
  if (has_prologue(p)) return before;
  take_all(first, p.q);
  if (p.k && (p.k.rows != p.q.rows || p.k.rows_per_batch != p.q.rows_per_batch)) {
    PrepareProblem& keys = before.ops[before.count++];
    keys = first;
    take_all(keys, p.k);
    keys.q = keys.q_out = {};
    first.k = first.k_out = first.v = first.v_out = {};
  }
  if (rows == Rows::kOwnType)
    for (int i = 0; i < before.count; ++i) copy_in_vectors(before.ops[i]);
  return before;
}

Problem after_prologue(const Problem& p, void* memory, Rows rows) {
  const PreparedRows prepared = place_rows(p, memory, rows);
  Problem after = p;
  if (has_prologue(p) || rows == Rows::kBf16) after.prologue = {};
  after.q = prepared.q, after.k = prepared.k, after.v = prepared.v;
  return after;
}

}  // namespace attune::cuda::attention
