// SPDX-License-Identifier: Apache-2.0
// Launching a kernel: grid, cluster, dynamic shared memory, programmatic dependent launch.
#pragma once

#include <cstdint>

#include "cuda/kernel.h"

namespace attune::cuda {

struct LaunchConfig {
  uint32_t grid[3] = {1, 1, 1};     // blocks; a multiple of cluster on each axis
  uint32_t block[3] = {1, 1, 1};    // threads
  uint32_t cluster[3] = {1, 1, 1};  // blocks; all 1: no cluster attribute (a __cluster_dims__ of the kernel holds)
  uint32_t shared_bytes = 0;        // dynamic
  // May start while the kernel before it on the stream still runs: it must execute griddepcontrol.wait before it reads
  // what that kernel wrote, or writes what that kernel reads. Nothing on architectures without such launches.
  bool programmatic = false;
  void* stream = nullptr;  // CUstream of the kernel's device
};

// A programmatic launch of a grid with one axis.
inline LaunchConfig programmatic(int64_t blocks, int64_t threads, void* stream, int64_t shared_bytes = 0) {
  return {.grid = {static_cast<uint32_t>(blocks), 1, 1},
          .block = {static_cast<uint32_t>(threads), 1, 1},
          .shared_bytes = static_cast<uint32_t>(shared_bytes),
          .programmatic = true,
          .stream = stream};
}

// Enqueues one launch. args[i] points at the i-th kernel parameter, which is copied. Allocates nothing.
void launch(const CompiledKernel& kernel, const LaunchConfig& config, void** args);

// The same with the parameters themselves: launch_kernel(k, config, params, map). Their types must be the kernel's own.
template <class... Args>
void launch_kernel(const CompiledKernel& kernel, const LaunchConfig& config, const Args&... args) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))..., nullptr};
  launch(kernel, config, pointers);
}

}  // namespace attune::cuda
