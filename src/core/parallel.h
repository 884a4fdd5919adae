// SPDX-License-Identifier: Apache-2.0
// Runs long jobs, compiling and planning, on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace attune {

// Calls job(i) for i in 0..n-1, several at a time. Tries all, then throws the failure of the least i.
void run_in_parallel(size_t n, const std::function<void(size_t)>& job);

}  // namespace attune
