// SPDX-License-Identifier: Apache-2.0
// The kernels of prefill on the CPU (tests/emulator), launched as their plan launches them.
#pragma once

#include "cuda/prefill/config.h"
#include "emulated.h"

namespace attune::cuda {

// Of prefill's or MLA's configuration.
template <class Config>
void emulate_schedule(const Config& c, const kernels::WorkTileParams& params) {
  const auto schedule = reinterpret_cast<void (*)(kernels::WorkTileParams)>(emulator::find_kernel(c.schedule_kernel()));
  emulator::run(1, 1024, [&] { schedule(params); });
}

// p: what the parameters are of.
inline void emulate_attention(const Problem& p, const prefill::Config& c, const kernels::WorkTileParams& params) {
  using ptx::TensorMap;
  using MainKernel = void (*)(kernels::WorkTileParams, TensorMap, TensorMap, TensorMap, TensorMap, TensorMap);
  using Fp32Kernel = void (*)(kernels::WorkTileParams, kernels::Fp32Rows);
  void* const kernel = emulator::find_kernel(c.main_kernel());
  const kernels::Fp32Rows vec4 = prefill::fp32_rows(p);
  const prefill::Maps m = prefill::describe_maps(p, c);
  emulator::run(
      static_cast<unsigned>(c.blocks), static_cast<unsigned>(c.threads()),
      [&] {
        if (c.fp32()) return reinterpret_cast<Fp32Kernel>(kernel)(params, vec4);
        reinterpret_cast<MainKernel>(kernel)(params, emulator::tensor_map(m.q), emulator::tensor_map(m.k),
                                             emulator::tensor_map(m.v), emulator::tensor_map(m.dense_k),
                                             emulator::tensor_map(m.dense_v));
      },
      static_cast<unsigned>(c.cluster));
}

}  // namespace attune::cuda
