// SPDX-License-Identifier: Apache-2.0
#include "gpus.h"

#include "cuda/device.h"

namespace attune::cli {

std::string wrong_architecture() { return cuda::wrong_architecture(); }

std::string why_gpus_are_not_used() {
  return cuda::driver_fails() || !cuda::devices().empty() ? cuda::why_no_device() : "";
}

}  // namespace attune::cli
