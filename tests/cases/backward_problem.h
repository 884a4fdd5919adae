// SPDX-License-Identifier: Apache-2.0
// A case of the backward made real: the attention case of the same row with its poison, out and lse as the oracle's
// forward gives them, and beside them what only the backward has.
#pragma once

#include <functional>
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

class BackwardProblem {
 public:
  explicit BackwardProblem(const Case& spec, Memory& memory = host_memory());

  const Case& spec() const { return problem_.spec(); }
  const Problem& forward() const { return problem_; }
  Arena& arena() { return problem_.arena(); }
  // With the host's bytes, as before the run, and with the device's.
  BackwardCall& host() { return host_; }
  BackwardCall device() const { return problem_.arena().on_device(host_); }

 private:
  attune_tensor add_like(const char* name, attune_dtype dtype, const attune_tensor& shape);
  void* row_element(const attune_tensor& t, int64_t row, int64_t head, int64_t dim) const;
  void fill_forward();
  void add_inputs();
  void plant();
  void add_outputs();

  Problem problem_;
  Random random_;
  BackwardCall host_{};
  std::vector<reference::RowResult> rows_;
};

// Plans and runs it in a guarded workspace. "" or what failed.
std::string run(BackwardCall device, Memory& memory, attune_status* status = nullptr);

using BackwardRunner = std::function<std::string(const BackwardCall& device)>;

// Every element of every gradient against the oracle and its bound, every other byte against what it was.
Report run_and_check(BackwardProblem& problem);
Report run_and_check(BackwardProblem& problem, const BackwardRunner& runner);  // instead of run
Report run_backward_case(const Case& spec, Memory& memory = host_memory());

}  // namespace attune::cases
