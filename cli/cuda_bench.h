// SPDX-License-Identifier: Apache-2.0
// Timing on a GPU: of attention over large data, and of anything that can be captured.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases/case.h"

namespace attune::cli {

struct CudaTiming {
  std::vector<double> seconds;  // of one run: device time of a captured graph over the runs that it holds, sorted
  double kv_bytes = 0;          // keys and values that a run must read, scales included
  double worst = 0;             // share of the error bound, of the checked rows
  std::string plan, failure;    // failure: a wrong result, which has no speed
  std::string not_covered;      // why no kernel takes the case
};

// Checks a sample of rows against the oracle first, unless check is false. A run is attune_run: schedule and attention.
CudaTiming time_on_cuda(const cases::Case& spec, int32_t device, bool check, double min_time);

// Seconds of one run, sorted: graphs of about 2 ms are captured from enqueue, called by the number of a run, and
// replayed for min_time of device time. estimate: seconds of a run, about. rounds_of: a graph holds a multiple of so
// many runs.
std::vector<double> time_graphs(int32_t device, const std::function<void(int run, void* stream)>& enqueue,
                                double estimate, int rounds_of, double min_time);

// GB/s of reading more than 8 GiB (or most of what is free) once, with 16-byte loads: the best of a few passes.
double measure_cuda_read(int32_t device);

}  // namespace attune::cli
