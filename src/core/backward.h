// SPDX-License-Identifier: Apache-2.0
// attune_attention_backward, checked and normalised.
#pragma once

#include <array>
#include <cstdint>

#include "attune/attune.h"
#include "core/kernel.h"
#include "core/problem.h"

namespace attune {

// A gradient of a table: fp32 with free strides, in elements.
struct TableView {
  float* data = nullptr;
  int64_t shape[3] = {1, 1, 1}, stride[3] = {0, 0, 0};  // outermost first, right aligned to rank 3
  bool given = false;

  explicit operator bool() const { return given; }
  float& operator()(int64_t i, int64_t j, int64_t k) const {
    return data[i * stride[0] + j * stride[1] + k * stride[2]];
  }
};

struct BackwardProblem {
  Problem forward;     // whose out and lse are read
  RowView dout, dlse;  // dlse not given: 0
  RowView dq, dk, dv;  // each is optional; so are the tables
  TableView dsinks, dbias, dt5_bias;
};

// A run must have the dtypes of its plan: of q, k, v, out, dq, dk, dv, dsinks, dbias and dt5_bias; NONE: not given.
using BackwardDtypes = std::array<int32_t, 10>;
BackwardDtypes dtypes_of(const BackwardProblem& p);
// Throws INVALID_ARGUMENT naming the first that differs.
void check_dtypes(const BackwardDtypes& planned, const BackwardDtypes& run);

// Throws INVALID_ARGUMENT for anything wrong. a: that of op.attention.
BackwardProblem make_backward(const attune_attention_backward& op, const attune_attention& a, Data data);
// What the forward uses, with the dtypes of the gradients for its outputs.
Traits traits_of(const BackwardProblem& p, const attune_attention& a);
// The rows of each sequence in k, in use or not: sets num_dense and kv_begin. out has p.forward.batch entries.
void make_key_extents(const BackwardProblem& p, Sequence* out);

// A plan of one kernel for one descriptor, as KernelPlan.
class BackwardPlan {
 public:
  virtual ~BackwardPlan() = default;
  virtual size_t workspace_size() const = 0;
  virtual std::string describe() const = 0;
  virtual void run(const BackwardProblem& p, void* workspace, void* stream) const = 0;
};

}  // namespace attune
