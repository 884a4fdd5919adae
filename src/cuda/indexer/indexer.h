// SPDX-License-Identifier: Apache-2.0
// attune_indexer on CUDA (kernels/indexer/): launches on the caller's stream. The first of its kind in a process looks
// its kernels up, or compiles them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/indexer.h"
#include "cuda/architecture.h"
#include "cuda/kernel.h"

namespace attune::cuda {

// Bytes that a run of these shapes needs, whatever the alignment of its tensors. device: an ordinal.
size_t indexer_workspace_size(const IndexerProblem& op, int32_t device);
// stream: a CUstream of the device's primary context, null for the default one. Throws as check_workspace, get_kernel
// and launch do, and INVALID_ARGUMENT for data that the device cannot reach.
void run_indexer(const IndexerProblem& op, int32_t device, void* workspace, size_t bytes, void* stream);

// The kernels that the run would take on a device of so many multiprocessors, for warming and tests.
std::vector<KernelSpec> kernels_of(const IndexerProblem& op, int num_sms, const Target& target = {});

}  // namespace attune::cuda
