// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel a call would get, without a device.
#pragma once

#include "core/registry.h"

namespace attune::cuda {

// As find_kernel() does, which asks for a device; null where it would refuse.
inline const Kernel* choose_kernel(const Problem& p, const attune_attention& a) {
  const Traits traits = traits_of(p, a);
  for (int i = 0; i < kernel_count(); ++i) {
    const Kernel& k = kernel_at(i);
    if (k.device_type == ATTUNE_DEVICE_CUDA && k.coverage.difference(traits).empty() &&
        (k.refusal == nullptr || k.refusal(p).empty()) && (k.leaves == nullptr || !k.leaves(p)))
      return &k;
  }
  return nullptr;
}

}  // namespace attune::cuda
