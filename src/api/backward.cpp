// SPDX-License-Identifier: Apache-2.0
// The C ABI of the backward of attention: checks, translates, catches. Nothing else.
#include "core/backward.h"
#include "api/plan.h"
#include "attune/attune.h"
#include "core/aliasing.h"
#include "core/status.h"
#include "core/versioned.h"
#include "dispatch/device.h"
#include "dispatch/registry.h"

using attune::BackwardProblem;
using attune::Data;
using attune::guarded;
using attune::Known;
using attune::require;

namespace {

// Both descriptors of a call.
struct Descriptors {
  explicit Descriptors(const attune_attention_backward* given)
      : op("attention_backward", given), attention("attention", op->attention) {}
  const Known<attune_attention_backward> op;
  const Known<attune_attention> attention;
};

const attune::Kernel& choose(const BackwardProblem& p, const attune::Traits& traits, attune_device device) {
  return attune::find_kernel(p.forward, traits, device, attune::kAttentionBackward, &p);
}

}  // namespace

extern "C" {

attune_status attune_attention_backward_init(attune_attention_backward* op, uint64_t struct_size) {
  return guarded(
      [&] { attune::write_struct("attention_backward", op, struct_size, [](attune_attention_backward&) {}); });
}

attune_status attune_attention_backward_supported(const attune_attention_backward* op, attune_device device) {
  return guarded([&] {
    const Descriptors known(op);
    attune::check_device_argument(device);
    const BackwardProblem p = attune::make_backward(*known.op, *known.attention, Data::kOptional);
    choose(p, attune::traits_of(p, *known.attention), device);
  });
}

attune_status attune_attention_backward_plan(const attune_attention_backward* op, attune_device device,
                                             attune_plan** plan) {
  return guarded([&] {
    require(plan != nullptr, "plan is null");
    *plan = nullptr;
    const Descriptors known(op);
    attune::check_device_argument(device);
    const BackwardProblem p = attune::make_backward(*known.op, *known.attention, Data::kOptional);
    auto out = std::make_unique<attune_plan>();
    out->traits = attune::traits_of(p, *known.attention);
    out->kernel = &choose(p, out->traits, device);
    out->device = device;
    out->limits = attune::plan_limits(p.forward);
    out->dtypes = attune::dtypes_of(p);
    out->backward = out->kernel->make_backward_plan(p, device.index);
    *plan = out.release();
  });
}

attune_status attune_attention_backward_run(const attune_plan* plan, const attune_attention_backward* op,
                                            void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&] {
    require(plan != nullptr, "plan is null");
    require(plan->backward != nullptr, "plan is of attention; attune_run runs it");
    attune::check_stream(plan->device, stream);
    const Descriptors known(op);
    const BackwardProblem p = attune::make_backward(*known.op, *known.attention, Data::kRequired);
    attune::check_fits(*plan, p.forward, attune::traits_of(p, *known.attention));
    attune::check_dtypes(plan->dtypes, attune::dtypes_of(p));
    const size_t need = plan->backward->workspace_size();
    attune::check_workspace("the plan", need, workspace, workspace_bytes);
    attune::check_apart(*known.op, *known.attention, workspace, need);
    plan->backward->run(p, workspace, stream);
  });
}

}  // extern "C"
