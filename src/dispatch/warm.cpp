// SPDX-License-Identifier: Apache-2.0
#include "dispatch/warm.h"

#include "core/parallel.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/versioned.h"
#include "dispatch/device.h"
#include "dispatch/registry.h"

namespace attune {
namespace {

void plan_once(const attune_attention* a, attune_device device) {
  const Known<attune_attention> known("attention", a);
  const Problem p = make_problem(*known, Data::kOptional);
  find_kernel(p, traits_of(p, *known), device).make_plan(p, device.index);
}

}  // namespace

void warm_kernels(std::span<const attune_attention* const> attentions, attune_device device) {
  check_device(device);
  run_in_parallel(attentions.size(), [&](size_t i) {
    try {
      plan_once(attentions[i], device);
    } catch (const Failure& e) {
      fail(e.status(), "attentions[", i, "]: ", e.what());
    }
  });
}

}  // namespace attune
