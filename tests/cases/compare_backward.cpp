// SPDX-License-Identifier: Apache-2.0
// Gradients against the oracle's, as docs/semantics.md bounds them.
#include <algorithm>
#include <cmath>

#include "backward_problem.h"

namespace attune::cases {
namespace {

constexpr double kWorkOfRow = 4e5;  // channels of pairs for each row of a sample: fewer in all are computed whole

double sum_error(int64_t n) { return (16 + 2 * std::sqrt(static_cast<double>(n))) * 0x1p-24; }

int64_t rows_of(const attune_tensor& t) { return t.rank == 4 ? t.shape[0] * t.shape[1] : t.shape[0]; }

// count of them, the first and the last among them.
std::vector<bool> draw_rows(Random& random, int64_t all, int64_t count) {
  std::vector<bool> rows(static_cast<size_t>(all), count >= all);
  if (all == 0 || count >= all) return rows;
  rows.front() = rows.back() = true;
  for (int64_t n = 2; n < count; ++n) rows[static_cast<size_t>(random.integer(0, all - 1))] = true;
  return rows;
}

// One gradient, element by element.
class GradientChecker {
 public:
  GradientChecker(const BackwardProblem& problem, Snapshot& snapshot, Checker& checker)
      : may_be_nan_(!problem.spec().plant.empty() || !problem.spec().backward.plant.empty()),
        snapshot_(snapshot),
        checker_(checker) {}

  // owned: rows that a sequence owns; null: all. known: which rows and heads are compared.
  void check(const NamedGradient& g, const reference::Gradient& exact, const std::vector<bool>* owned,
             const std::function<bool(size_t row, size_t head)>& known) {
    if (g.host.dtype == ATTUNE_DTYPE_NONE) return;
    const attune_tensor t = snapshot_.after(g.host);
    const auto dtype = static_cast<attune_dtype>(t.dtype);
    const int64_t dims = t.shape[t.rank - 1], size = element_size(dtype);
    const bool adjacent = t.stride[t.rank - 1] == 1;  // so that one call serves a row
    size_t i = 0;
    bool is_owned = false, is_known = false;  // of the row
    for_each_element(t, [&](const int64_t* index, void* element) {
      const size_t at = i++;
      const int64_t row = t.rank == 4 ? index[0] * t.shape[1] + index[1] : index[0];
      const int64_t head = t.rank > 1 ? index[t.rank - 2] : 0, dim = index[t.rank - 1];
      if (dim == 0) {
        is_owned = owned == nullptr || (*owned)[static_cast<size_t>(row)];
        is_known = is_owned && known(static_cast<size_t>(row), static_cast<size_t>(head));
        if (is_owned && adjacent) snapshot_.allow(element, dims * size);
      }
      if (!is_owned) return;
      if (!adjacent) snapshot_.allow(element, size);
      if (is_known) {
        const double bound =
            oracle::bound_of_gradient(g.terms, exact.terms[at], exact.parts[at], exact.scores[at], exact.factors[at]);
        checker_.element(g.name, row, head, dim, dtype, exact.value[at], bound, decode(dtype, element));
      } else if (!may_be_nan_ && std::isnan(decode(dtype, element))) {
        checker_.fail(std::string(g.name) + "[row " + std::to_string(row) + ", head " + std::to_string(head) +
                      ", dim " + std::to_string(dim) + "] was not written, or is NaN");
      }
    });
  }

 private:
  bool may_be_nan_;
  Snapshot& snapshot_;
  Checker& checker_;
};

}  // namespace

std::vector<NamedGradient> gradients_of(const BackwardProblem& problem, int32_t device_type) {
  const Case& c = problem.spec();
  const attune_attention_backward& op = problem.host().op;
  const int64_t queries = c.max_seqlen_q(), group = c.num_heads_q / c.num_heads_kv;
  int64_t keys = 0;
  for (int64_t b = 0; b < c.batch(); ++b) keys = std::max(keys, c.keys(b));
  const oracle::BoundTerms forward = bound_terms(problem.forward());
  const double scale =
      c.softmax_scale != 0 ? std::fabs(c.softmax_scale) : 1 / std::sqrt(static_cast<double>(c.head_dim_qk));
  // What a p below 2^-126, which may be 0, makes of a dP of 64. A GPU multiplies fp16's p and dx as such: half a step
  // of its subnormal numbers.
  const double least = device_type == ATTUNE_DEVICE_CUDA && c.dtype == ATTUNE_FLOAT16 ? 0x1p-25 : 0x1p-120;
  // n: the most that an element sums.
  const auto terms = [&](int64_t n, double rounding, double smallest) {
    return oracle::GradientTerms{sum_error(std::max(c.head_dim_qk, c.head_dim_v)), sum_error(n) + rounding,
                                 forward.additive, smallest};
  };
  return {{"dq", op.dq, &reference::Backward::dq, terms(keys, forward.of_p, least * scale)},
          {"dk", op.dk, &reference::Backward::dk, terms(queries * group, forward.of_p, least * scale)},
          {"dv", op.dv, &reference::Backward::dv, terms(queries * group, forward.of_p, least)},
          {"dsinks", op.dsinks, &reference::Backward::dsinks, terms(c.total_q(), 0, 0)},
          {"dbias", op.dbias, &reference::Backward::dbias, terms(c.batch() * c.num_heads_q, 0, 0)},
          {"dt5_bias", op.dt5_bias, &reference::Backward::dt5_bias, terms(c.total_q() * keys, 0, 0)}};
}

ExpectedGradients evaluate(const BackwardProblem& problem) {
  const BackwardCall& host = problem.host();
  return {{}, reference::attention_backward(host.attention, host.op.dout, host.op.dlse)};
}

ExpectedGradients evaluate_sample(const BackwardProblem& problem, int64_t rows, bool tables) {
  const Case& c = problem.spec();
  double pairs = 0;
  for (int64_t b = 0; b < c.batch(); ++b)
    pairs += static_cast<double>(c.seqlens_q[static_cast<size_t>(b)]) * static_cast<double>(c.keys(b));
  if (pairs * static_cast<double>(c.num_heads_q * (c.head_dim_qk + c.head_dim_v)) <=
      kWorkOfRow * static_cast<double>(rows))
    return evaluate(problem);
  const BackwardCall& host = problem.host();
  Random random(c.name, 2);
  reference::BackwardSample sample;
  sample.q = draw_rows(random, rows_of(host.attention.q) * c.num_heads_q, rows);
  sample.kv = draw_rows(random, rows_of(host.attention.k) * c.num_heads_kv, rows);
  sample.tables = tables && (host.op.dbias.data != nullptr || host.op.dt5_bias.data != nullptr);
  reference::Backward exact = reference::attention_backward(host.attention, host.op.dout, host.op.dlse, &sample);
  return {std::move(sample), std::move(exact)};
}

Report compare(const BackwardProblem& problem, const ExpectedGradients& expected) {
  return compare(problem, expected, problem.arena().memory().device().type);
}

Report compare(const BackwardProblem& problem, const ExpectedGradients& expected, int32_t device_type) {
  const Case& c = problem.spec();
  Checker checker;
  Snapshot snapshot(problem.arena());
  GradientChecker check(problem, snapshot, checker);
  for (const NamedGradient& g : gradients_of(problem, device_type)) {
    const std::string_view name = g.name;
    const bool of_q = name == "dq", of_kv = name == "dk" || name == "dv";
    const reference::Backward& exact = expected.exact;
    const auto known = [&, heads = static_cast<size_t>(of_q ? c.num_heads_q : c.num_heads_kv)](size_t row,
                                                                                               size_t head) {
      if (!expected.sample || name == "dsinks") return true;
      const reference::BackwardSample& sample = *expected.sample;
      return of_q ? sample.q[row * heads + head] : of_kv ? sample.kv[row * heads + head] : sample.tables;
    };
    check.check(g, exact.*g.exact, of_q ? &exact.q_written : of_kv ? &exact.kv_written : nullptr, known);
  }
  snapshot.check(checker);
  return checker.report();
}

Report run_and_check(BackwardProblem& problem, const BackwardRunner& runner) {
  const ExpectedGradients expected = evaluate(problem);
  if (std::string failure = runner(problem.device()); !failure.empty()) {
    Report report;
    report.failure = std::move(failure);
    return report;
  }
  return compare(problem, expected);
}

Report run_and_check(BackwardProblem& problem) {
  return run_and_check(problem, [&](const BackwardCall& device) { return run(device, problem.arena().memory()); });
}

Report run_backward_case(const Case& spec, Memory& memory) {
  BackwardProblem problem(spec, memory);
  return run_and_check(problem);
}

}  // namespace attune::cases
