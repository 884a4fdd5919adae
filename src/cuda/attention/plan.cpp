// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/plan.h"

#include <cstddef>

#include "cuda/attention/params.h"
#include "cuda/launch.h"
#include "cuda/ops/ops.h"

namespace attune::cuda::attention {

void WorkTilePlan::find_kernels(const Problem& p, std::vector<KernelSpec> specs, size_t bytes) {
  const size_t own = specs.size();
  if (prepares_)
    for (const PrepareProblem& op : launches_before(p, nullptr, rows_)) specs.push_back(kernel_of(op));
  warm(specs, device_);
  for (size_t i = 0; i < own; ++i) kernels_.push_back(&get_kernel(specs[i], device_));
  rows_begin_ = bytes;
  rows_bytes_ = prologue_bytes(p, rows_);
}

void WorkTilePlan::schedule(const Problem& p, void* workspace, void* stream) const {
  if (is_empty(p) || kernels_.size() == 1) return;
  launch_kernel(kernel(1), programmatic(1, 1024, stream), to_params(p, workspace));
}

void WorkTilePlan::run(const Problem& p, void* workspace, void* stream) const {
  if (is_empty(p)) return;
  if (!prepares_) {
    check_run(p);
    return attend(p, workspace, stream);
  }
  // The plan could not check this: the addresses of tables say whether k and v belong to q's tokens, and a plan has no
  // addresses.
  require_still_taken(name_, prologue_refusal(p));
  std::byte* const rows = static_cast<std::byte*>(workspace) + rows_begin_;
  const Problem after = after_prologue(p, rows, rows_);
  check_run(after);  // before anything is appended
  for (const PrepareProblem& op : launches_before(p, rows, rows_)) run_qkv_prepare(op, device_, stream);
  attend(after, workspace, stream);
}

}  // namespace attune::cuda::attention
