// SPDX-License-Identifier: Apache-2.0
// Counts the heap allocations of this thread. In builds that count, every run of the library on the CPU that succeeds
// is watched, whatever test makes it: see allocations.cpp.
#pragma once

#include <cstdint>

namespace attune::tests {

bool counts_allocations();   // false under sanitizers, which have a malloc of their own, and where there is no glibc
int64_t num_allocations();   // of this thread so far
int64_t num_watched_runs();  // of this process so far

}  // namespace attune::tests
