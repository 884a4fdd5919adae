// SPDX-License-Identifier: Apache-2.0
// Launches the kernels that move rows (kernels/rows/) in the emulator, as src/cuda/ops/ops.cpp does on a device.
#pragma once

#include "cuda/ops/config.h"
#include "cuda/ops/params.h"
#include "emulator/emulator.h"
#include "emulator/module.h"

namespace attune::cuda {

// num_sms: multiprocessors of the device.
template <class Params>
void launch_rows(const ops::Config& c, Params params, int num_sms) {
  params.tokens.tile = c.tile_tokens(params.tokens.total, num_sms);
  params.tokens.groups_shift = c.groups_shift(params.tokens.tile);
  const auto blocks = static_cast<unsigned>((params.tokens.total + params.tokens.tile - 1) / params.tokens.tile);
  const auto kernel = reinterpret_cast<void (*)(Params)>(emulator::find_kernel(c.spec()));
  emulator::run(blocks, kernels::kRowsThreads, [&] { kernel(params); });
}

inline void launch_prepare(const PrepareProblem& op, int num_sms) {
  if (op.total > 0) launch_rows(ops::choose_store(op), ops::store_params(op), num_sms);
}

}  // namespace attune::cuda
