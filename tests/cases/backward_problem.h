// SPDX-License-Identifier: Apache-2.0
// A case of the backward made real: the attention case of the same row with its poison, out and lse as the oracle's
// forward gives them, and beside them what only the backward has.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "compare.h"
#include "problem.h"
#include "reference/backward.h"

namespace attune::cases {

// Both descriptors of a call.
struct BackwardCall {
  attune_attention attention;
  attune_attention_backward op;
  const attune_attention_backward* linked() {
    op.attention = &attention;
    return &op;
  }
};
// Those of the backward, then those of attention.
std::vector<NamedTensor> tensors_of(BackwardCall& call);

// What out and lse come from: the oracle, or the library's forward where it takes the case, which is quicker.
enum class Forward { kOracle, kLibrary };

class BackwardProblem {
 public:
  explicit BackwardProblem(const Case& spec, Memory& memory = host_memory(), Forward forward = Forward::kOracle);

  // Changes seqused_kv in place, with all that follows from it: fewer(b, keys) of the keys of sequence b stay in use.
  // False where the case does not allow it.
  bool use_fewer_keys(const std::function<int64_t(int64_t b, int64_t keys)>& fewer);

  const Case& spec() const { return problem_.spec(); }
  const Problem& forward() const { return problem_; }
  Arena& arena() { return problem_.arena(); }
  const Arena& arena() const { return problem_.arena(); }
  // With the host's bytes, as before the run, and with the device's.
  BackwardCall& host() { return host_; }
  const BackwardCall& host() const { return host_; }
  BackwardCall device() const { return problem_.arena().on_device(host_); }

 private:
  attune_tensor add_like(const char* name, attune_dtype dtype, const attune_tensor& shape);
  void* row_element(const attune_tensor& t, int64_t row, int64_t head, int64_t dim) const;
  void add_inputs();
  void make_inputs();
  void fill_forward();
  bool run_forward();
  void fill_inputs();
  void plant();
  void add_outputs();

  Problem problem_;
  Forward forward_;
  BackwardCall host_{};
  std::vector<std::byte> q_;                // q's buffer before rows were spoiled
  std::vector<reference::RowResult> rows_;  // of the library's forward: written and lse
};

// Why no kernel of the device takes such a case, whatever its lengths; "" where one does. Takes no time: it asks for
// two tokens a sequence.
std::string why_not_covered(Case spec, attune_device device);

// Plans and runs it in a guarded workspace. "" or what failed.
std::string run(BackwardCall device, Memory& memory, attune_status* status = nullptr);

// What the oracle says. Made before the run.
struct ExpectedGradients {
  std::optional<reference::BackwardSample> sample;  // absent: every element is known
  reference::Backward exact;
};
ExpectedGradients evaluate(const BackwardProblem& problem);
// All of a small problem; else so many rows of dq, as many of dk and dv together, dsinks and, if asked for, the other
// tables, for which every pair is visited.
ExpectedGradients evaluate_sample(const BackwardProblem& problem, int64_t rows, bool tables = true);
// Every element of every gradient against the oracle and its bound, or whether it was written; every other byte against
// what it was.
Report compare(const BackwardProblem& problem, const ExpectedGradients& expected);
// As on a device of that type.
Report compare(const BackwardProblem& problem, const ExpectedGradients& expected, int32_t device_type);

// The gradients of a problem by name, and what their bounds have in common.
struct NamedGradient {
  const char* name;
  attune_tensor host;
  const reference::Gradient reference::Backward::*exact;
  oracle::GradientTerms terms;
};
std::vector<NamedGradient> gradients_of(const BackwardProblem& problem, int32_t device_type);
inline std::vector<NamedGradient> gradients_of(const BackwardProblem& problem) {
  return gradients_of(problem, problem.arena().memory().device().type);
}

using BackwardRunner = std::function<std::string(const BackwardCall& device)>;

// evaluate, run, compare.
Report run_and_check(BackwardProblem& problem);
Report run_and_check(BackwardProblem& problem, const BackwardRunner& runner);  // instead of run
Report run_backward_case(const Case& spec, Memory& memory = host_memory());

}  // namespace attune::cases
