// SPDX-License-Identifier: Apache-2.0
// The MLA kernels on the CPU (tests/emulator), launched as their plan launches them; the schedule is that of prefill.
#pragma once

#include "cuda/mla/config.h"
#include "emulated_prefill_launch.h"

namespace attune::cuda {

// p: the problem that params are of.
inline void emulate_mla(const Problem& p, const mla::Config& c, const kernels::WorkTileParams& params) {
  using ptx::TensorMap;
  using Attend = void (*)(kernels::WorkTileParams, TensorMap, TensorMap, TensorMap, TensorMap);
  using AttendWithoutMaps = void (*)(kernels::WorkTileParams);
  const mla::Maps m = mla::describe_maps(p, c);
  void* const kernel = emulator::find_kernel(c.main_kernel());
  emulator::run(
      static_cast<unsigned>(c.blocks), c.threads(),
      [&] {
        if (!c.has_maps()) return reinterpret_cast<AttendWithoutMaps>(kernel)(params);
        reinterpret_cast<Attend>(kernel)(params, emulator::tensor_map(m.q), emulator::tensor_map(m.q_rope),
                                         emulator::tensor_map(m.k), emulator::tensor_map(m.dense_k));
      },
      static_cast<unsigned>(c.cluster));
  if (!c.splits) return;
  const auto combine = reinterpret_cast<void (*)(kernels::WorkTileParams)>(emulator::find_kernel(c.combine_kernel()));
  // How many warpgroups share rows depends on the blocks: one, two or four, each in some of the cases.
  const unsigned blocks[] = {2, 24, 130};
  emulator::run(blocks[(p.total_q + p.heads_q) % 3], kernels::kMlaCombineThreads, [&] { combine(params); });
}

}  // namespace attune::cuda
