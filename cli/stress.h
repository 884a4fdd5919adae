// SPDX-License-Identifier: Apache-2.0
// attune check --stress: random batches as servers have them, for so many seconds.
#pragma once

#include <cstdint>
#include <string>

#include "attune/attune.h"

namespace attune::cli {

struct StressOptions {
  double seconds = 0;  // 0: none
  uint64_t seed = 1;
  std::string only;         // kernels, a regular expression
  std::string one;          // "SEED:INDEX": that case alone
  int configurations = 64;  // that kernels are compiled for
  int repeats = 0;          // of each batch; 0: few of most, many of some
  int64_t budget = 0;       // keys and rows of the largest batches; 0: what suits the device
};

// Prints what was run, and each failure with the call that repeats it. Throws CLI::RuntimeError if one failed, or if
// nothing was run.
void run_stress(const StressOptions& options, attune_device device);

}  // namespace attune::cli
