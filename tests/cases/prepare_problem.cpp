// SPDX-License-Identifier: Apache-2.0
// attune_qkv_prepare of a case, and the operations beside attention by their names.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "op_problem.h"

namespace attune::cases {
namespace {

void check_rows(const char* what, const attune_tensor& host, const std::vector<double>& exact,
                const std::vector<bool>& written, Snapshot& snapshot, Checker& checker) {
  if (host.dtype == ATTUNE_DTYPE_NONE) return;
  const attune_tensor out = snapshot.after(host);
  const auto dtype = static_cast<attune_dtype>(out.dtype);
  const int64_t dim = out.shape[out.rank - 1];
  size_t i = 0;
  double largest = 0;
  for_each_element(out, [&](const int64_t* index, void* element) {
    const auto d = static_cast<size_t>(index[out.rank - 1]);
    const int64_t row = out.rank == 4 ? index[0] * out.shape[1] + index[1] : index[0];
    if (d == 0) {
      largest = 0;
      for (int64_t c = 0; c < dim; ++c) largest = std::max(largest, std::fabs(exact[i + static_cast<size_t>(c)]));
    }
    if (written[static_cast<size_t>(row)]) {
      snapshot.allow(element, element_size(dtype));
      // A few roundings of fp32, relative to the row: RoPE mixes pairs, a bias may cancel.
      checker.element(what, row, index[out.rank - 2], index[out.rank - 1], dtype, exact[i], largest * 0x1p-20,
                      decode(dtype, element));
    }
    ++i;
  });
}

}  // namespace

const char* operation_name(const Case& c) {
  if (c.indexer.topk > 0) return "indexer";
  if (c.backward.on) return "attention_backward";
  switch (c.op.operation) {
    case Operation::kPrepare:
      return "qkv_prepare";
    case Operation::kCacheOp:
      return "cache_op";
    case Operation::kMerge:
      return "merge";
    default:
      return "attention";
  }
}

bool is_planned(const Case& c) { return c.indexer.topk == 0 && c.op.operation == Operation::kAttention; }

std::unique_ptr<OpProblem> make_op_problem(const Case& spec, Memory& memory) {
  switch (spec.op.operation) {
    case Operation::kPrepare:
      return std::make_unique<PrepareProblem>(spec, memory);
    case Operation::kCacheOp:
      return std::make_unique<CacheOpProblem>(spec, memory);
    case Operation::kMerge:
      return std::make_unique<MergeProblem>(spec, memory);
    default:
      throw std::logic_error(spec.name + " is a case of attention");
  }
}

std::string OpProblem::run_and_check(const std::function<std::string()>& run) {
  arena().upload();
  if (std::string failure = run(); !failure.empty()) return failure;
  return check().failure;
}

PrepareProblem::PrepareProblem(const Case& spec, Memory& memory) : problem_(spec, memory) {
  const attune_attention& a = problem_.host();
  op_.struct_size = sizeof(op_);
  op_.q = a.q, op_.k = a.k, op_.v = a.v;
  op_.cu_seqlens_q = a.cu_seqlens_q;
  op_.seqused_kv = a.seqused_kv;
  op_.finished = a.finished;
  op_.cache = a.cache;
  op_.prologue = a.prologue;
  if (a.cache.k.dtype == ATTUNE_DTYPE_NONE) op_.prologue.append = op_.prologue.power_of_two_scales = 0;
  const struct {
    const char* name;
    attune_tensor in, *out;
  } outputs[] = {{"q_out", op_.q, &op_.q_out}, {"k_out", op_.k, &op_.k_out}, {"v_out", op_.v, &op_.v_out}};
  const Outputs where = spec.op.outputs;
  for (const auto& o : outputs) {
    if (o.in.dtype == ATTUNE_DTYPE_NONE || (where == Outputs::kOnlyQInPlace && o.out != &op_.q_out)) continue;
    if (where != Outputs::kElsewhere) {
      *o.out = o.in;
    } else {
      *o.out = arena().add(o.name, spec.resolved_out_dtype(), {o.in.shape, o.in.shape + o.in.rank});
    }
  }
}

std::string PrepareProblem::run(void* stream) const {
  const attune_qkv_prepare op = device();
  const attune_status status = attune_qkv_prepare_run(&op, problem_.arena().memory().device(), stream);
  return status == ATTUNE_OK ? "" : std::string("attune_qkv_prepare_run: ") + attune_last_error();
}

Report PrepareProblem::check() {
  if (!exact_) {
    exact_ = reference::qkv_prepare(op_);
    writes_ = reference::appended(op_);
  }
  Checker checker;
  Snapshot snapshot(arena());
  check_rows("q_out", op_.q_out, exact_->q, exact_->written, snapshot, checker);
  check_rows("k_out", op_.k_out, exact_->k, exact_->written, snapshot, checker);
  check_rows("v_out", op_.v_out, exact_->v, exact_->written, snapshot, checker);
  check_writes(op_.cache, writes_, op_.prologue.power_of_two_scales != 0, snapshot, checker);
  snapshot.check(checker);
  return checker.report();
}

}  // namespace attune::cases
