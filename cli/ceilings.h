// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured: the numbers that reports give a kernel's speed as a share of.
#pragma once

namespace attune::cli {

struct Ceilings {
  double fma_gflops_1;    // fp32 FMA from registers, one thread, 2 operations an FMA
  double fma_gflops_all;  // the same on all threads at once, in total
  double read_gbps_all;   // reading a buffer much larger than the caches, all threads, in total
  int threads;
};

// Takes well under two seconds. threads: at least 1.
Ceilings measure_ceilings(int threads);

}  // namespace attune::cli
