// SPDX-License-Identifier: Apache-2.0
// A plan of prefill or MLA. It launches the schedule, then a prologue or copies of q, k and v to the workspace where
// these are needed, then attention.
#pragma once

#include <vector>

#include "common/work_tile_params.h"
#include "core/kernel.h"
#include "cuda/attention/prologue.h"
#include "cuda/kernel.h"

namespace attune::cuda::attention {

// Whether a call has nothing to do.
inline bool is_empty(const Problem& p) { return p.batch == 0 || p.total_q == 0 || p.heads_q == 0; }

class WorkTilePlan : public KernelPlan {
 public:
  size_t workspace_size() const final { return rows_begin_ + rows_bytes_; }
  void schedule(const Problem& p, void* workspace, void* stream) const final;
  void run(const Problem& p, void* workspace, void* stream) const final;

 protected:
  // prepares: q, k and v are copied to the workspace.
  WorkTilePlan(const char* name, int32_t device, bool prepares, Rows rows = Rows::kOwnType)
      : name_(name), device_(device), prepares_(prepares), rows_(rows) {}

  // Finds the kernels: attention first, then its schedule if it has one, then others. bytes: of the workspace, without
  // copies of rows.
  void find_kernels(const Problem& p, std::vector<KernelSpec> specs, size_t bytes);

  const CompiledKernel& kernel(int i) const { return *kernels_[static_cast<size_t>(i)]; }
  const char* name() const { return name_; }
  int32_t device() const { return device_; }
  bool prepares() const { return prepares_; }

  virtual kernels::WorkTileParams to_params(const Problem& p, void* workspace) const = 0;
  // p: after the prologue or copies.
  virtual void check_run(const Problem& p) const = 0;
  virtual void attend(const Problem& p, void* workspace, void* stream) const = 0;

 private:
  const char* name_;
  int32_t device_;
  bool prepares_;
  Rows rows_;
  size_t rows_begin_ = 0, rows_bytes_ = 0;
  std::vector<const CompiledKernel*> kernels_;
};

}  // namespace attune::cuda::attention
