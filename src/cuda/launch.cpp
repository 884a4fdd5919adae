// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"

#include "core/status.h"
#include "cuda/device.h"

namespace attune::cuda {
namespace {

[[noreturn]] void launch_failed(Result result, const CompiledKernel& kernel, const LaunchConfig& c) {
  check(result,
        cat("launching ", kernel.name, " on CUDA device ", kernel.device, ", grid ", c.grid[0], "x", c.grid[1], "x",
            c.grid[2], ", block ", c.block[0], "x", c.block[1], "x", c.block[2], ", cluster ", c.cluster[0], "x",
            c.cluster[1], "x", c.cluster[2], ", ", c.shared_bytes, " bytes of dynamic shared memory"));
  fail(ATTUNE_INTERNAL, "unreachable");
}

}  // namespace

void launch(const CompiledKernel& kernel, const LaunchConfig& c, void** args) {
  const Driver& d = require_driver();
  LaunchAttribute attributes[2];
  uint32_t num_attributes = 0;
  if (c.cluster[0] * c.cluster[1] * c.cluster[2] > 1) {
    LaunchAttribute& a = attributes[num_attributes++];
    a.id = LaunchAttributeId::kClusterDimension;
    a.padding = 0;
    for (int i = 0; i < 3; ++i) a.value.cluster[i] = c.cluster[i];
  }
  if (c.programmatic && kernel.dependent_launch) {
    LaunchAttribute& a = attributes[num_attributes++];
    a.id = LaunchAttributeId::kProgrammaticStreamSerialization;
    a.padding = 0;
    a.value.programmatic = 1;
  }
  const DriverLaunchConfig config = {{c.grid[0], c.grid[1], c.grid[2]},
                                     {c.block[0], c.block[1], c.block[2]},
                                     c.shared_bytes,
                                     static_cast<StreamHandle>(c.stream),
                                     attributes,
                                     num_attributes};
  // The NULL stream belongs to the current context, so that one must be the kernel's.
  const ScopedContext context(kernel.device);
  const Result result = d.cuLaunchKernelEx(&config, kernel.function, args, nullptr);
  if (result != kSuccess) [[unlikely]]
    launch_failed(result, kernel, c);
}

}  // namespace attune::cuda
