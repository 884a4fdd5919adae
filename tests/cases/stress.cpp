// SPDX-License-Identifier: Apache-2.0
// Here, too, the library is called.
#include "stress.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "beside.h"
#include "compare.h"
#include "device_compare.h"
#include "device_oracle.h"
#include "indexer_problem.h"
#include "op_problem.h"
#include "outcome.h"
#include "stress_parts.h"

namespace attune::cases {
namespace {

class Runner : public PlannedRunner {
 public:
  explicit Runner(Problem& problem) : PlannedRunner(problem.arena().memory()), problem_(problem) {
    const attune_attention a = problem.device();
    attune_plan* made = nullptr;
    const attune_status status = attune_plan_create(&a, memory().device(), &made);
    take(status, "attune_plan_create", made);
  }
  // in: another workspace than its own.
  void run(void* stream = nullptr, Workspace* in = nullptr) {
    const attune_attention a = problem_.device();
    require(attune_run(plan(), &a, in == nullptr ? workspace() : in->buffer.device(), bytes(), stream), "attune_run");
  }
  void schedule() {
    const attune_attention a = problem_.device();
    require(attune_schedule(plan(), &a, workspace(), bytes(), nullptr), "attune_schedule");
  }
  void run_scheduled() {
    const attune_attention a = problem_.device();
    require(attune_run_scheduled(plan(), &a, workspace(), bytes(), nullptr), "attune_run_scheduled");
  }

 private:
  Problem& problem_;
};

bool is_poison(const std::byte* at, int64_t bytes) {
  return std::all_of(at, at + bytes, [](std::byte b) { return b == kPoison; });
}

// Whether each element of the rows that sequences own was written, and no other was. Where the compared rows are a
// sample, this is what is known of the others.
std::string check_written(const Problem& problem) {
  const Case& c = problem.spec();
  if (!c.plant.empty()) return "";  // NaN may be an answer
  const Snapshot snapshot(problem.arena());
  for (const auto& [name, host] : {std::pair{"out", problem.host().out}, {"lse", problem.host().lse}}) {
    if (host.data == nullptr) continue;
    const attune_tensor t = snapshot.after(host);
    const int64_t size = element_size(static_cast<attune_dtype>(t.dtype));
    for (int64_t b = 0; b < c.batch(); ++b) {
      const bool written = !is_inactive(c, b) || c.zero_finished;
      for (int64_t i = 0; i < c.seqlens_q[static_cast<size_t>(b)]; ++i) {
        const int64_t row = problem.first_row(b) + i;
        for (int64_t h = 0; h < c.num_heads_q; ++h) {
          const bool rank4 = problem.host().q.rank == 4, has_dim = std::string_view(name) == "out";
          const auto* at =
              static_cast<const std::byte*>(rank4     ? has_dim ? element_at(t, {b, i, h, 0}) : element_at(t, {b, i, h})
                                                : has_dim ? element_at(t, {row, h, 0})
                                                      : element_at(t, {row, h}));
          const int64_t step = has_dim ? t.stride[t.rank - 1] * size : size;
          for (int64_t d = 0; d < (has_dim ? c.head_dim_v : 1); ++d) {
            if (is_poison(at + d * step, size) == written)
              return std::string(name) + "[row " + std::to_string(row) + ", head " + std::to_string(h) + ", dim " +
                     std::to_string(d) + "] was " + (written ? "not written" : "written, and is nobody's");
          }
        }
      }
    }
  }
  return "";
}

// What a run must give: of every row where the device has the oracle's kernels, else of a sample. Made before the run.
class Expectation {
 public:
  explicit Expectation(Problem& problem) : problem_(problem), memory_(problem.arena().memory()) {
    if (memory_.launches()) {
      oracle_ = std::make_unique<DeviceOracle>(problem, kOracleBlocks, kOracleThreads);
      memory_.launch(DeviceOracle::kSource, DeviceOracle::kEntry, oracle_->blocks(), kOracleThreads, oracle_->params());
    }
    sample_ = evaluate_sample(problem, oracle_ ? kSampledRowsBesideAll : kSampledRows);
  }
  // "" where the outputs, the appended slots and all other bytes are as they must be.
  std::string check(const Runner& runner) const {
    if (std::string failure = check_all_rows(); !failure.empty()) return failure;
    if (std::string failure = compare(problem_, sample_).failure; !failure.empty()) return failure;
    if (std::string failure = check_written(problem_); !failure.empty()) return failure;
    return runner.check_guards();
  }

 private:
  std::string check_all_rows() const {
    if (!oracle_) return "";
    DeviceCompare all(problem_, *oracle_, kCompareBlocks, kOracleThreads, memory_.device().type);
    memory_.launch(DeviceCompare::kSource, DeviceCompare::kEntry, kCompareBlocks, kOracleThreads, all.params());
    if (std::string failure = all.report().failure; !failure.empty()) return failure;
    return oracle_->check_guards();
  }

  const Problem& problem_;
  Memory& memory_;
  std::unique_ptr<DeviceOracle> oracle_;
  Expected sample_;
};

// Fewer keys in the arrays of the same plan, as a server's later steps have. False where the case does not allow it.
bool shorten(Problem& problem) {
  const Case& c = problem.spec();
  const attune_tensor used = problem.host().seqused_kv;
  if (used.data == nullptr || c.new_tokens || c.sparse.topk > 0 || c.window_left >= 0 || c.window_right >= 0 ||
      c.cache.ring_capacity > 0 || c.beam_width > 0 || !c.ranges.empty())
    return false;
  Random r(c.name + " shortened", 0);
  for (int64_t b = 0; b < c.batch(); ++b) {
    if (stays(b)) continue;
    auto* n = static_cast<int32_t*>(element_at(used, {b}));
    *n = static_cast<int32_t>(r.integer(std::min<int64_t>(*n, c.seqlens_q[static_cast<size_t>(b)]), *n));
  }
  problem.arena().owner(used.data)->upload();
  return true;
}

// "" where the sequences that stay have the bits that they had.
std::string others_show(const Problem& problem, const Snapshot& before) {
  const Case& c = problem.spec();
  const Snapshot after(problem.arena());
  for (const auto& [name, host] :
       {std::pair{"out", problem.host().out}, {"lse", problem.host().lse}, {"max_logits", problem.host().max_logits}}) {
    if (host.data == nullptr) continue;
    for (int64_t b = 0; b < c.batch(); ++b) {
      if (!stays(b)) continue;
      const bool fixed = problem.host().q.rank == 4;
      const int64_t rows = c.seqlens_q[static_cast<size_t>(b)];
      if (const std::string failure =
              bits_of_rows_differ(name, b, host, fixed ? b : problem.first_row(b), fixed ? 1 : rows, before, after);
          !failure.empty())
        return failure;
    }
  }
  return "";
}

// A run alone has given first.
std::string run_beside_another(Problem& problem, Runner& runner, const Outcome& first, int64_t& runs) {
  Problem other(other_of(problem.spec()), problem.arena().memory());
  Runner of_other(other);
  if (!of_other.covered()) return "";
  const Expectation expected(other);
  return run_two_plans(
      {problem.arena(), runner, [&](void* stream, Workspace* in) { runner.run(stream, in); }}, first,
      {other.arena(), of_other, [&](void* stream, Workspace* in) { of_other.run(stream, in); }},
      [&] { return expected.check(of_other); }, runs);
}

std::string run_all(Problem& problem, Runner& runner, int repeats, int64_t& runs) {
  const Expectation expected(problem);
  runner.run();
  ++runs;
  if (std::string failure = expected.check(runner); !failure.empty()) return failure;
  const Outcome first(problem.arena());
  for (int i = 0; i < repeats; ++i) {
    first.restore();
    runner.run();
    ++runs;
    if (std::string failure = first.differs(); !failure.empty()) return "run " + std::to_string(i + 2) + ": " + failure;
  }
  first.restore();
  runner.schedule();
  for (int i = 0; i < 2; ++i) {
    if (i > 0) first.restore();
    runner.run_scheduled();
    ++runs;
    if (std::string failure = first.differs(); !failure.empty()) return "run_scheduled: " + failure;
  }
  const std::function<void()> replay = problem.arena().memory().captured([&](void* stream) { runner.run(stream); });
  for (int i = 0; replay && i < 2; ++i) {
    first.restore();
    replay();
    ++runs;
    if (std::string failure = first.differs(); !failure.empty()) return "a replayed graph: " + failure;
  }
  const Side side{problem.arena(), [&](void* stream) { runner.run(stream); }};
  if (std::string failure = run_in_a_row({{side, first}}, runs); !failure.empty()) return failure;
  if (std::string failure = runner.check_guards(); !failure.empty()) return failure;
  if (runs_beside(problem.spec())) {
    if (std::string failure = run_beside_another(problem, runner, first, runs); !failure.empty()) return failure;
  }
  std::optional<Snapshot> before;
  if (problem.spec().batch_invariant) before.emplace(problem.arena());
  first.restore();
  if (!shorten(problem)) return "";
  const Expectation shorter(problem);
  if (replay) {
    replay();
  } else {
    runner.run();
  }
  ++runs;
  std::string failure = shorter.check(runner);
  if (failure.empty() && before) failure = others_show(problem, *before);
  return failure.empty() ? "" : "the plan again, over fewer keys: " + failure;
}

// Every kind against the oracle, and then again over its own results.
StressReport stress_indexer(const Case& spec, Memory& memory, int repeats) {
  StressReport report;
  IndexerProblem problem(spec, memory);
  const attune_indexer op = problem.device(ATTUNE_INDEXER_TOPK);
  size_t bytes = 0;
  if (attune_indexer_workspace_size(&op, memory.device(), &bytes) == ATTUNE_UNSUPPORTED) return report;
  report.kernel = "indexer";
  const auto run_again = [&](const attune_indexer& device) {
    std::string failure = run(device, memory);
    ++report.runs;
    if (!failure.empty()) return failure;
    const Outcome first(problem.arena());
    for (int i = 0; i < repeats && failure.empty(); ++i) {
      failure = run(device, memory);
      ++report.runs;
      if (failure.empty()) failure = first.differs();
      if (!failure.empty()) failure = "run " + std::to_string(i + 2) + ": " + failure;
    }
    return failure;
  };
  report.failure = run_and_check(problem, run_again).failure;
  return report;
}

// Against the oracle, and then again over its own results; from a graph, too, where the device has those.
StressReport stress_op(const Case& spec, Memory& memory, int repeats) {
  StressReport report;
  report.kernel = operation_name(spec);
  const std::unique_ptr<OpProblem> problem = make_op_problem(spec, memory);
  const auto run_one = [](const OpProblem& op, void* stream) {
    if (const std::string failure = op.run(stream); !failure.empty()) throw Refused(failure);
  };
  const auto run = [&](void* stream) { run_one(*problem, stream); };
  run(nullptr);
  ++report.runs;
  report.failure = problem->check().failure;
  const Outcome first(problem->arena());
  const auto again = [&](const std::string& what, const std::function<void()>& run_it) {
    if (!report.failure.empty()) return;
    first.restore();
    run_it();
    ++report.runs;
    if (const std::string failure = first.differs(); !failure.empty()) report.failure = what + ": " + failure;
  };
  for (int i = 0; i < repeats; ++i) again("run " + std::to_string(i + 2), [&] { run(nullptr); });
  const std::function<void()> replay = memory.captured(run);
  for (int i = 0; replay && i < 2; ++i) again("a replayed graph", replay);
  if (report.failure.empty()) report.failure = problem->arena().check_guards();
  if (!report.failure.empty() || !runs_beside(spec)) return report;
  const std::unique_ptr<OpProblem> other = make_op_problem(other_of(spec), memory);
  report.failure = run_beside(
      {problem->arena(), run}, first, {other->arena(), [&](void* stream) { run_one(*other, stream); }},
      [&] { return other->check().failure; }, report.runs);
  return report;
}

}  // namespace

StressReport stress(const Case& spec, Memory& memory, int repeats, const Wanted& wanted) {
  StressReport report;
  try {
    if (spec.indexer.topk > 0) {
      report = stress_indexer(spec, memory, repeats);
    } else if (spec.op.operation != Operation::kAttention) {
      report = stress_op(spec, memory, repeats);
    } else if (spec.backward.on) {
      report = stress_backward(spec, memory, repeats, wanted);
    } else {
      Problem problem(spec, memory);
      Runner runner(problem);
      if (!runner.covered()) return report;
      report.kernel = runner.kernel();
      if (!wanted(report.kernel)) return report;
      report.failure = run_all(problem, runner, repeats, report.runs);
    }
    // Also where something is wrong already: it must not be there for the next case.
    const std::string far = memory.check_far();
    if (report.failure.empty()) report.failure = far;
  } catch (const std::exception& e) {
    report.failure = e.what();
    if (report.kernel.empty() && !is_planned(spec)) report.kernel = operation_name(spec);
  }
  return report;
}

}  // namespace attune::cases
