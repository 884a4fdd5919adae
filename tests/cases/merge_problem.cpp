// SPDX-License-Identifier: Apache-2.0
// attune_merge of a case.
#include <cmath>
#include <limits>

#include "op_problem.h"

namespace attune::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kOutScale = 3.5;

}  // namespace

MergeProblem::MergeProblem(const Case& spec, Memory& memory)
    : arena_(memory), random_(spec.name, static_cast<uint64_t>(spec.op.parts * 1000 + spec.head_dim_v)) {
  op_.struct_size = sizeof(op_);
  const int64_t parts = spec.op.parts, rows = spec.total_q(), heads = spec.num_heads_q, dim = spec.head_dim_v;
  const auto pad = [&](size_t rank) {
    Layout layout;
    if (spec.strides == StrideMode::kOdd) layout.padding.assign(rank, 3);
    return layout;
  };
  const attune_dtype out = spec.resolved_out_dtype();
  op_.partial_out = arena_.add("partial_out", spec.dtype, {parts, rows, heads, dim}, pad(4));
  op_.partial_lse = arena_.add("partial_lse", ATTUNE_FLOAT32, {parts, rows, heads}, pad(3));
  op_.out = arena_.add("out", out, {rows, heads, dim}, pad(3));
  if (spec.lse) op_.lse = arena_.add("lse", ATTUNE_FLOAT32, {rows, heads}, pad(2));
  if (!spec.sinks.empty()) {
    op_.sinks = arena_.add("sinks", ATTUNE_FLOAT32, {heads});
    for_each_element(op_.sinks, [&](const int64_t* index, void* element) {
      encode(ATTUNE_FLOAT32, index[0] % 3 == 2 ? -kInfinity : 2 * random_.normal(), element);
    });
  }
  if (out == ATTUNE_FLOAT8_E4M3) {
    op_.out_scale = arena_.add("out_scale", ATTUNE_FLOAT32, {1});
    encode(ATTUNE_FLOAT32, kOutScale, op_.out_scale.data);
  }
  fill_parts();
  arena_.upload();
}

// Some partial outputs are empty, some rows wholly, some have far apart lse; those that are empty stay NaN.
void MergeProblem::fill_parts() {
  const auto dtype = static_cast<attune_dtype>(op_.partial_out.dtype);
  for_each_element(op_.partial_lse, [&](const int64_t* index, void* element) {
    const bool empty = random_.chance(0.2) || index[1] == 1;
    const double lse =
        empty ? -kInfinity : 3 * random_.normal() + (index[1] == 2 ? 400.0 * static_cast<double>(index[0]) : 0.0);
    encode(ATTUNE_FLOAT32, lse, element);
    if (empty) return;
    for (int64_t d = 0; d < op_.partial_out.shape[3]; ++d)
      encode(dtype, random_.normal(), element_at(op_.partial_out, {index[0], index[1], index[2], d}));
  });
}

std::string MergeProblem::run(void* stream) const {
  const attune_merge op = device();
  const attune_status status = attune_merge_run(&op, arena_.memory().device(), stream);
  return status == ATTUNE_OK ? "" : std::string("attune_merge_run: ") + attune_last_error();
}

Report MergeProblem::check() {
  if (!exact_) exact_ = reference::merge(op_);
  Checker checker;
  Snapshot snapshot(arena_);
  const attune_tensor out = snapshot.after(op_.out), lse = snapshot.after(op_.lse);
  const auto dtype = static_cast<attune_dtype>(out.dtype);
  const double scale = dtype == ATTUNE_FLOAT8_E4M3 ? kOutScale : 1.0;
  size_t i = 0;
  for_each_element(out, [&](const int64_t* index, void* element) {
    snapshot.allow(element, element_size(dtype));
    checker.element("out", index[0], index[1], index[2], dtype, exact_->out[i] * scale,
                    (exact_->abs[i] * 0x1p-19 + 1e-36) * scale, decode(dtype, element), dtype == ATTUNE_FLOAT8_E4M3);
    ++i;
  });
  i = 0;
  for_each_element(lse, [&](const int64_t* index, void* element) {
    snapshot.allow(element, 4);
    const double bound = 0x1p-20 * (1 + (std::isfinite(exact_->lse[i]) ? std::fabs(exact_->lse[i]) : 0.0));
    checker.element("lse", index[0], index[1], -1, ATTUNE_FLOAT32, exact_->lse[i], bound,
                    decode(ATTUNE_FLOAT32, element));
    ++i;
  });
  snapshot.check(checker);
  return checker.report();
}

}  // namespace attune::cases
