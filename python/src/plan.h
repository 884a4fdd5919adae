// SPDX-License-Identifier: Apache-2.0
// attune_plan with the arguments it was made for and its workspace, so that a call only names what changed.
#pragma once

#include <memory>

#include "fields.h"

namespace attune::python {

// Bytes on a device, aligned to 256: of the C++ heap, the caller's, or of the framework of the arrays.
class Workspace {
 public:
  Workspace() = default;
  // given: the caller's array, or None. stream: what the caller said of where it is used, or None.
  Workspace(size_t bytes, const Arrays& arrays, nb::handle given, nb::handle stream);
  void* data() const { return data_; }
  size_t size() const { return size_; }
  bool is_given() const { return given_; }

 private:
  struct Free {
    void operator()(void* p) const noexcept;
    void operator()(dlpack::ManagedTensorVersioned* p) const noexcept { p->deleter(p); }
  };
  std::unique_ptr<void, Free> heap_;
  std::unique_ptr<dlpack::ManagedTensorVersioned, Free> direct_;
  nb::object array_;
  void* data_ = nullptr;
  size_t size_ = 0;
  bool given_ = false;
};

struct PlanDeleter {
  void operator()(attune_plan* plan) const noexcept { attune_plan_destroy(plan); }
};
using PlanHandle = std::unique_ptr<attune_plan, PlanDeleter>;

using RunFunction = attune_status (*)(const attune_plan*, const attune_attention*, void*, size_t, void*);

class Plan {
 public:
  Plan(nb::dict arguments, nb::object workspace);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  // Runs with the plan's arguments and these changes; gives the outputs: out, or (out, lse, max_logits) as far as
  // wanted.
  nb::object call(RunFunction run, nb::kwargs changes);
  // The second half of run, of which the first must have been the last to write to the workspace.
  nb::object run_scheduled(nb::kwargs changes);
  std::string describe() const;
  size_t workspace_size() const { return workspace_.size(); }
  nb::tuple device() const { return nb::make_tuple(device_.type, device_.index); }

 private:
  nb::dict arguments_;  // owns what values_ borrows
  Values values_;
  attune_device device_{};
  attune_tensor q_, q_rope_, out_;  // as planned
  PlanHandle plan_;
  Workspace workspace_;
  bool running_ = false;
  bool scheduled_ = false;
};

// One call without a plan to keep: plans, runs, forgets, and gives the outputs as Plan::call does.
nb::object run_attention(nb::dict arguments, nb::object workspace, nb::object stream);

attune_attention read_attention(const Values& values, Arrays* arrays);

}  // namespace attune::python
