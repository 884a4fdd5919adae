// SPDX-License-Identifier: Apache-2.0
#include "cpu/qkv_prepare.h"

#include "core/problem.h"
#include "cpu/append.h"
#include "cpu/prologue.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

// A token of a sequence.
struct Token {
  int64_t b, row, position;
  bool appended;
};

void prepare_queries(const PrepareProblem& op, const Token& t) {
  alignas(64) float x[kMaxHeadDim];
  for (int64_t h = 0; h < op.heads_q; ++h) {
    prepare_q_row(op.prologue, op.q, op.head_dim_qk, t.row, h, t.b, t.position, x);
    write_row(op.q_out, t.row, h, op.head_dim_qk, x);
  }
}

// Reads each row whole before it writes any of its outputs, which may be the input itself.
void prepare_keys(const PrepareProblem& op, const Token& t) {
  alignas(64) float k[kMaxHeadDim];
  alignas(64) float v[kMaxHeadDim];
  for (int64_t h = 0; h < op.heads_kv; ++h) {
    if (op.k) prepare_k_row(op.prologue, op.k, op.head_dim_qk, t.row, h, t.b, t.position, k);
    if (op.v) prepare_v_row(op.prologue, op.v, op.head_dim_v, t.row, h, t.b, v);
    if (op.k_out) write_row(op.k_out, t.row, h, op.head_dim_qk, k);
    if (op.v_out) write_row(op.v_out, t.row, h, op.head_dim_v, v);
    if (t.appended) append_row(op.cache, t.b, t.position, h, k, op.v ? v : nullptr, op.prologue.power_of_two_scales);
  }
}

}  // namespace

void run_qkv_prepare(const PrepareProblem& op) {
  if (op.total == 0) return;  // spares the loop over the sequences
  RowSplitter split(op.cu, op.fixed, op.total);
  const int64_t ring = op.cache ? op.cache.ring_capacity : 0;
  // Tokens that later ones of the same call overwrite in a ring are not written: threads would race for the slot.
  auto range = [&](int64_t b) {
    const RowRange r = split(b);
    return op.finished(b) ? RowRange{r.first, 0} : r;
  };
  for_each_sequence_row(op.batch, range, [&](int64_t b, int64_t i, int64_t row, int64_t count) {
    const bool retained = ring == 0 || i >= count - ring;
    const Token t{b, row, op.first_position(b) + i, op.prologue.append && retained};
    if (op.q_out) prepare_queries(op, t);
    if (op.k_out || op.v_out || t.appended) prepare_keys(op, t);
  });
}

}  // namespace attune::cpu
