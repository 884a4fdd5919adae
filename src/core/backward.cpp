// SPDX-License-Identifier: Apache-2.0
#include "core/backward.h"

#include "core/dtype.h"

namespace attune {
namespace {

// Refuses what has no backward on any device. What some kernel may take later is refused by coverage.
void check_forward(const attune_attention& a) {
  require(present(a.lse), "lse is absent; the backward reads the forward's lse");
  require(!present(a.q_rope), "q_rope is set; it has no backward: give whole rows of q");
  require(a.out.dtype != ATTUNE_FLOAT8_E4M3, "out is ", dtype_name(a.out.dtype),
          "; the backward reads out, which must not be of 8 bits");
}

// A gradient has the dtype of its input, or float32.
RowView read_gradient(const char* name, const attune_tensor& t, const char* of, const attune_tensor& input, Data data) {
  if (!present(t)) return {};
  require(present(input), name, " is set, but ", of, " is absent");
  check_tensor(name, t, {input.dtype, ATTUNE_FLOAT32}, {input.rank}, data);
  for (int i = 0; i < t.rank; ++i) check_extent(name, t, i, input.shape[i], Name("as ", of));
  check_no_overlap(name, t);
  return row_view(t);
}

TableView read_table(const char* name, const attune_tensor& t, const char* of, const attune_tensor& input, Data data) {
  TableView view;
  if (!present(t)) return view;
  require(present(input), name, " is set, but ", of, " is absent");
  check_tensor(name, t, {ATTUNE_FLOAT32}, {input.rank}, data);
  for (int i = 0; i < t.rank; ++i) check_extent(name, t, i, input.shape[i], Name("as ", of));
  check_no_overlap(name, t);
  view.given = true;
  view.data = static_cast<float*>(t.data);
  for (int i = 0; i < t.rank; ++i) {
    view.shape[3 - t.rank + i] = t.shape[i];
    view.stride[3 - t.rank + i] = t.shape[i] > 1 ? t.stride[i] : 0;
  }
  return view;
}

}  // namespace

BackwardDtypes dtypes_of(const BackwardProblem& p) {
  const auto of = [](const TableView& table) { return table ? ATTUNE_FLOAT32 : ATTUNE_DTYPE_NONE; };
  const Problem& f = p.forward;
  return {f.q.dtype,  f.k.dtype,  f.v.dtype,    f.out.dtype, p.dq.dtype,
          p.dk.dtype, p.dv.dtype, of(p.dsinks), of(p.dbias), of(p.dt5_bias)};
}

void check_dtypes(const BackwardDtypes& planned, const BackwardDtypes& run) {
  constexpr const char* kNames[] = {"q", "k", "v", "out", "dq", "dk", "dv", "dsinks", "dbias", "dt5_bias"};
  for (size_t i = 0; i < run.size(); ++i) {
    const auto text = [](int32_t dtype) { return dtype == ATTUNE_DTYPE_NONE ? "absent" : dtype_name(dtype); };
    require(run[i] == planned[i], kNames[i], " is ", text(run[i]), "; in the plan it is ", text(planned[i]));
  }
}

BackwardProblem make_backward(const attune_attention_backward& op, const attune_attention& a, Data data) {
  check_forward(a);
  BackwardProblem p;
  p.forward = make_problem(a, data);
  check_tensor("dout", op.dout, {a.out.dtype}, {a.out.rank}, data);
  for (int i = 0; i < op.dout.rank; ++i) check_extent("dout", op.dout, i, a.out.shape[i], "as out");
  p.dout = row_view(op.dout);
  if (present(op.dlse)) {
    check_tensor("dlse", op.dlse, {ATTUNE_FLOAT32}, {a.lse.rank}, data);
    for (int i = 0; i < op.dlse.rank; ++i) check_extent("dlse", op.dlse, i, a.lse.shape[i], "as lse");
    p.dlse = row_view(op.dlse, false);
  }
  p.dq = read_gradient("dq", op.dq, "q", a.q, data);
  p.dk = read_gradient("dk", op.dk, "k", a.k, data);
  p.dv = read_gradient("dv", op.dv, "v", a.v, data);
  p.dsinks = read_table("dsinks", op.dsinks, "sinks", a.sinks, data);
  p.dbias = read_table("dbias", op.dbias, "bias", a.bias, data);
  p.dt5_bias = read_table("dt5_bias", op.dt5_bias, "t5_bias", a.t5_bias, data);
  require(p.dq || p.dk || p.dv || p.dsinks || p.dbias || p.dt5_bias,
          "dq, dk, dv, dsinks, dbias and dt5_bias are all absent: there is no gradient to compute");
  return p;
}

Traits traits_of(const BackwardProblem& p, const attune_attention& a) {
  Traits t = traits_of(p.forward, a);
  uint32_t& output = t.axes[static_cast<int>(Axis::kOutput)];
  output = 0;
  for (const RowView* gradient : {&p.dq, &p.dk, &p.dv}) {
    if (gradient->dtype == ATTUNE_FLOAT32) output |= use::kOutF32;
    if (gradient->dtype == ATTUNE_FLOAT16) output |= use::kOutF16;
    if (gradient->dtype == ATTUNE_BFLOAT16) output |= use::kOutBf16;
  }
  return t;
}

void make_key_extents(const BackwardProblem& p, Sequence* out) {
  Problem whole = p.forward;
  whole.seqused = {};
  make_sequences(whole, out);
}

}  // namespace attune
