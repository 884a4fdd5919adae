// SPDX-License-Identifier: Apache-2.0
// Calls that hold prompts and sequences of a few queries: each sequence goes to the kernel that suits it, cuda_prefill
// or cuda_decode, by its length on the device.
#pragma once

#include <vector>

#include "core/kernel.h"
#include "cuda/decode/config.h"
#include "cuda/kernel.h"
#include "cuda/prefill/config.h"

namespace attune::cuda {

const Kernel& mixed_kernel();

namespace mixed {

// Sequences with at most so many queries go to decode.
int max_decode_queries(const Problem& p);

// Whether the problem may hold both prompts and short sequences, as far as the host knows.
bool may_be_mixed(const Problem& p);

// The configurations of prefill and decode. Decode's workspace follows that of prefill.
struct Configs {
  prefill::Config prompts;
  decode::Config steps;
};
Configs choose_configs(const Problem& p, const decode::DeviceShape& device);

// Throws INVALID_ARGUMENT where either kernel would refuse a run, so that its prologue appends nothing. attended: p
// after that prologue.
void check_run(const Problem& p, const Problem& attended, const Configs& c);

// The kernels of a plan.
std::vector<KernelSpec> kernels_of(const Problem& p, const decode::DeviceShape& device);

}  // namespace mixed

}  // namespace attune::cuda
