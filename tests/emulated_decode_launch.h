// SPDX-License-Identifier: Apache-2.0
// The decode kernels on the CPU (tests/emulator), launched as their plan launches them.
#pragma once

#include "cuda/decode/config.h"
#include "emulated.h"

namespace attune::cuda {

using DecodeKernel = void (*)(kernels::AttentionParams);

inline void emulate_decode_schedule(const decode::Config& c, const kernels::AttentionParams& params) {
  const auto schedule = reinterpret_cast<DecodeKernel>(emulator::find_kernel(c.schedule_kernel()));
  emulator::run(1, static_cast<unsigned>(c.schedule_threads), [&] { schedule(params); });
}

inline void emulate_decode(const decode::Config& c, const kernels::AttentionParams& params) {
  const auto attend = reinterpret_cast<DecodeKernel>(emulator::find_kernel(c.main_kernel()));
  const auto threads = static_cast<unsigned>(32 * c.warps);
  if (c.cluster == 0) return emulator::run(static_cast<unsigned>(c.blocks), threads, [&] { attend(params); });
  const decode::Grid grid = c.grid(params);
  emulator::run(
      emulator::Index{grid[0], grid[1], grid[2]}, threads, [&] { attend(params); }, static_cast<unsigned>(c.cluster));
}

}  // namespace attune::cuda
