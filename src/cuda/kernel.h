// SPDX-License-Identifier: Apache-2.0
// Kernels: named by source, entry and defines; found in memory, in the bundle, in the disk cache, or compiled.
// A plan looks its kernels up once and keeps the references: runs never come here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/driver_types.h"
#include "cuda/jit/module.h"

namespace attune::cuda {

struct KernelSpec {
  std::string source;       // path inside kernels/, e.g. "decode/decode.cu"
  std::string entry;        // an extern "C" __global__ function of it
  Defines defines;          // macros of the specialisation; their order does not matter
  size_t shared_bytes = 0;  // most dynamic shared memory that launches will ask for
};
// "decode/decode.cu decode_main HEAD_DIM=128 GROUP=8".
std::string spec_name(const KernelSpec& spec);

// One kernel on one device, loaded and ready to launch. Lives as long as the process.
struct CompiledKernel {
  std::string name;  // spec_name
  int32_t device = 0;
  Function function = nullptr;  // in the device's primary context
  LibraryKernel kernel = nullptr;
  KernelOrigin origin = KernelOrigin::kCompiled;
  int32_t num_regs = 0;             // a thread
  int32_t static_shared_bytes = 0;  // a block
  int32_t local_bytes = 0;          // a thread: spills and indexed arrays
  int32_t max_threads = 0;          // a block
  int32_t max_dynamic_shared_bytes = 0;
  bool dependent_launch = true;  // it has griddepcontrol

  // Blocks of this size that one multiprocessor holds at a time.
  int32_t blocks_per_sm(int32_t threads, size_t dynamic_shared_bytes) const;
  // Clusters of this shape that the device holds at a time; 0 where it cannot launch one.
  int32_t max_active_clusters(uint32_t cluster_x, int32_t threads, size_t dynamic_shared_bytes) const;
};

// The kernel, ready to launch. Thread-safe; the first call for a spec takes milliseconds (bundle, disk cache) or
// seconds (compiler). Failure: ATTUNE_DEVICE_ERROR where the device or compiler is missing or ATTUNE_JIT=off forbids
// compiling, ATTUNE_INTERNAL where the source does not compile.
const CompiledKernel& get_kernel(const KernelSpec& spec, int32_t device);

// get_kernel for each spec, compiling side by side; microseconds where all are known. The first failure is thrown after
// all have finished.
void warm(const std::vector<KernelSpec>& all, int32_t device);

}  // namespace attune::cuda
