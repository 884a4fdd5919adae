// SPDX-License-Identifier: Apache-2.0
// The operations beside attention on CUDA: qkv_prepare, cache operations, merge (kernels/rows/). Each is one launch on
// the caller's stream; the first of its kind in a process looks the kernel up, or compiles it.
#pragma once

#include <cstdint>

#include "core/ops.h"
#include "cuda/kernel.h"

namespace attune::cuda {

// device: an ordinal; stream: a CUstream of its primary context, null for the default one. Throw INVALID_ARGUMENT for
// data that the device cannot reach, and as get_kernel and launch do.
void run_qkv_prepare(const PrepareProblem& op, int32_t device, void* stream);
void run_cache_op(const CacheProblem& op, int32_t device, void* stream);
void run_merge(const MergeProblem& op, int32_t device, void* stream);

// The kernel that the run would take, for warming and tests.
KernelSpec kernel_of(const PrepareProblem& op);
KernelSpec kernel_of(const CacheProblem& op);
KernelSpec kernel_of(const MergeProblem& op);

}  // namespace attune::cuda
