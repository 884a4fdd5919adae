// SPDX-License-Identifier: Apache-2.0
// The position in a pipeline: a ring of stages with mbarriers, whose phases alternate.
#pragma once

namespace attune::common {

// Stage, and parity of the mbarriers' phase.
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  template <int kCount>
  __device__ __forceinline__ void next() {
    if (++stage == kCount) stage = 0, phase ^= 1;
  }
};

}  // namespace attune::common
