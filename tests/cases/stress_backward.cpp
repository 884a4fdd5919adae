// SPDX-License-Identifier: Apache-2.0
// The backward of attention looked at from all sides. Here, too, the library is called.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "backward_problem.h"
#include "beside.h"
#include "device_backward.h"
#include "outcome.h"
#include "reference/operation.h"
#include "stress_parts.h"

namespace attune::cases {
namespace {

class Runner : public PlannedRunner {
 public:
  explicit Runner(const BackwardProblem& problem) : PlannedRunner(problem.arena().memory()) {
    BackwardCall call = problem.device();
    attune_plan* made = nullptr;
    const attune_status status = attune_attention_backward_plan(call.linked(), memory().device(), &made);
    take(status, "attune_attention_backward_plan", made);
  }
  // in: another workspace than its own.
  void run(const BackwardProblem& problem, void* stream = nullptr, Workspace* in = nullptr) {
    BackwardCall call = problem.device();
    void* const at = in == nullptr ? workspace() : in->buffer.device();
    require(attune_attention_backward_run(plan(), call.linked(), at, bytes(), stream), "attune_attention_backward_run");
  }
  // Fills the workspace with numbers, not NaN: a row with a NaN may be recomputed, which would hide that it was read.
  void spoil_workspace() { memory().fill(workspace(), std::byte{0x45}, bytes()); }
};

// What a run must give: of every element where the device has the oracle's kernels, else of a sample. Made before the
// run.
class Expectation {
 public:
  explicit Expectation(const BackwardProblem& problem) : problem_(problem), memory_(problem.arena().memory()) {
    if (memory_.launches()) {
      oracle_ = std::make_unique<DeviceBackwardOracle>(problem, kOracleBlocks, kOracleThreads);
      memory_.launch(DeviceBackwardOracle::kSource, DeviceBackwardOracle::kEntry, oracle_->blocks(), kOracleThreads,
                     oracle_->params());
    }
    sample_ = evaluate_sample(problem, oracle_ ? kSampledRowsBesideAll : kSampledRows, !oracle_);
  }
  // "" where the gradients, and all other bytes, are as they must be.
  std::string check(const Runner& runner) const {
    if (std::string failure = check_all(); !failure.empty()) return failure;
    if (std::string failure = compare(problem_, sample_).failure; !failure.empty()) return failure;
    return runner.check_guards();
  }

 private:
  std::string check_all() const {
    if (!oracle_) return "";
    DeviceCompareGradients all(problem_, *oracle_, kCompareBlocks, kOracleThreads);
    memory_.launch(DeviceCompareGradients::kSource, DeviceCompareGradients::kEntry, kCompareBlocks, kOracleThreads,
                   all.params());
    if (std::string failure = all.failure(); !failure.empty()) return failure;
    return oracle_->check_guards();
  }

  const BackwardProblem& problem_;
  Memory& memory_;
  std::unique_ptr<DeviceBackwardOracle> oracle_;
  ExpectedGradients sample_;
};

// "" where the sequences that stay have the bits that they had.
std::string others_show(const BackwardProblem& problem, const Snapshot& before) {
  const Snapshot after(problem.arena());
  attune_attention whole = problem.host().attention;
  whole.seqused_kv = {};  // keys that are not in use have gradients, too
  const reference::Operation op(whole);
  const attune_attention_backward& gradients = problem.host().op;
  const bool fixed = whole.q.rank == 4;
  for (size_t i = 0; i < op.sequences.size(); ++i) {
    const auto b = static_cast<int64_t>(i);
    if (!stays(b)) continue;
    const reference::Sequence& s = op.sequences[i];
    for (const auto& [name, host, first, count] : {std::tuple{"dq", gradients.dq, s.first_query, s.num_queries},
                                                   {"dk", gradients.dk, s.first_dense, s.num_dense},
                                                   {"dv", gradients.dv, s.first_dense, s.num_dense}}) {
      if (host.data == nullptr) continue;
      const std::string failure =
          bits_of_rows_differ(name, b, host, fixed ? b : first, fixed ? 1 : count, before, after);
      if (!failure.empty()) return failure;
    }
  }
  return "";
}

// A batch that a plan for the other takes: of the same kind, each sequence no longer, some left out.
Case smaller_of(const Case& spec) {
  Case c = spec;
  c.name += " smaller";
  Random r(c.name, 0);
  c.seqlens_q.clear(), c.seqlens_kv.clear(), c.ranges.clear();
  const bool fixed = spec.queries == QueryShape::kFixed;
  const auto shorter = [&](int64_t n) { return r.integer(std::min<int64_t>(n, 1), n); };
  const int64_t fixed_q = shorter(spec.max_seqlen_q());
  for (size_t b = 0; b < spec.seqlens_q.size(); ++b) {
    if (r.chance(0.2)) continue;
    const bool same = spec.seqlens_q[b] == spec.seqlens_kv[b];
    const int64_t n_q = fixed ? fixed_q : shorter(spec.seqlens_q[b]), n_kv = shorter(spec.seqlens_kv[b]);
    c.seqlens_q.push_back(n_q);
    c.seqlens_kv.push_back(same && !fixed ? n_q : n_kv);
    if (!spec.ranges.empty()) c.ranges.push_back(spec.ranges[b]);
  }
  return c;
}

std::string run_smaller(const BackwardProblem& problem, Runner& runner, int64_t& runs) {
  const Case spec = smaller_of(problem.spec());
  const std::vector<int64_t>& keys = spec.seqlens_kv;
  // A maximum of 0 is none.
  if (spec.max_seqlen_q() == 0 || *std::max_element(keys.begin(), keys.end()) == 0) return "";
  BackwardProblem smaller(spec, problem.arena().memory(), Forward::kLibrary);
  const Expectation expected(smaller);
  runner.run(smaller);
  ++runs;
  const std::string failure = expected.check(runner);
  return failure.empty() ? "" : "the plan again, of a smaller batch: " + failure;
}

// A run alone has given first.
std::string run_beside_another(BackwardProblem& problem, Runner& runner, const Outcome& first, int64_t& runs) {
  BackwardProblem other(other_of(problem.spec()), problem.arena().memory(), Forward::kLibrary);
  Runner of_other(other);
  if (!of_other.covered()) return "";
  const Expectation expected(other);
  return run_two_plans(
      {problem.arena(), runner, [&](void* stream, Workspace* in) { runner.run(problem, stream, in); }}, first,
      {other.arena(), of_other, [&](void* stream, Workspace* in) { of_other.run(other, stream, in); }},
      [&] { return expected.check(of_other); }, runs);
}

// first: what a run has given, which is there still.
std::string run_fewer_keys(BackwardProblem& problem, Runner& runner, const Outcome& first,
                           const std::function<void()>& again, int64_t& runs) {
  std::optional<Snapshot> before;
  if (problem.spec().batch_invariant) before.emplace(problem.arena());
  first.restore();
  Random r(problem.spec().name + " fewer", 0);
  if (!problem.use_fewer_keys([&](int64_t b, int64_t keys) { return stays(b) ? keys : r.integer(0, keys); })) return "";
  const Expectation fewer(problem);
  again();
  ++runs;
  std::string failure = fewer.check(runner);
  if (failure.empty() && before) failure = others_show(problem, *before);
  return failure.empty() ? "" : "the plan again, over fewer keys: " + failure;
}

std::string run_all(BackwardProblem& problem, Runner& runner, int repeats, int64_t& runs) {
  const Expectation expected(problem);
  runner.run(problem);
  ++runs;
  if (std::string failure = expected.check(runner); !failure.empty()) return failure;
  const Outcome first(problem.arena());
  const auto repeat = [&](const std::string& what, const std::function<void()>& run) {
    first.restore();
    run();
    ++runs;
    const std::string failure = first.differs();
    return failure.empty() ? "" : what + ": " + failure;
  };
  const auto run = [&] { runner.run(problem); };
  runner.spoil_workspace();
  for (int i = 0; i < repeats; ++i) {
    if (std::string failure = repeat("run " + std::to_string(i + 2), run); !failure.empty()) return failure;
  }
  const std::function<void()> replay =
      problem.arena().memory().captured([&](void* stream) { runner.run(problem, stream); });
  for (int i = 0; replay && i < 2; ++i) {
    if (std::string failure = repeat("a replayed graph", replay); !failure.empty()) return failure;
  }
  const Side side{problem.arena(), [&](void* stream) { runner.run(problem, stream); }};
  if (std::string failure = run_in_a_row({{side, first}}, runs); !failure.empty()) return failure;
  if (std::string failure = runner.check_guards(); !failure.empty()) return failure;
  if (runs_beside(problem.spec())) {
    if (std::string failure = run_beside_another(problem, runner, first, runs); !failure.empty()) return failure;
  }
  if (std::string failure = run_smaller(problem, runner, runs); !failure.empty()) return failure;
  return run_fewer_keys(problem, runner, first, replay ? replay : run, runs);
}

}  // namespace

StressReport stress_backward(const Case& spec, Memory& memory, int repeats, const Wanted& wanted) {
  StressReport report;
  if (!why_not_covered(spec, memory.device()).empty()) return report;
  BackwardProblem problem(spec, memory, Forward::kLibrary);
  Runner runner(problem);
  if (!runner.covered()) return report;
  report.kernel = runner.kernel();
  if (!wanted(report.kernel)) return report;
  try {
    report.failure = run_all(problem, runner, repeats, report.runs);
  } catch (const Refused& e) {
    report.failure = e.what();  // the kernel's, whose name is known
  }
  return report;
}

}  // namespace attune::cases
