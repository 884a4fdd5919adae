// SPDX-License-Identifier: Apache-2.0
// Work on several threads: the compiler of the kernels takes about a second for each.
#pragma once

#include <cstddef>
#include <functional>

namespace attune::bundle {

// Calls one(i) for each i below count, by as many threads as the machine runs at once. All are called; then the first
// exception is thrown again.
void for_each_parallel(size_t count, const std::function<void(size_t)>& one);

}  // namespace attune::bundle
