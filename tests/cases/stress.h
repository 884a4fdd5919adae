// SPDX-License-Identifier: Apache-2.0
// One case, looked at from all sides: against the oracle, every byte that it may and may not write, the same bits
// however often and in whatever way it runs.
#pragma once

#include <functional>
#include <string>

#include "case.h"
#include "memory.h"

namespace attune::cases {

struct StressReport {
  std::string failure;  // "" when all is well
  std::string kernel;   // of the registry, or "indexer"; "" where none takes the case
  int64_t runs = 0;
  bool passed() const { return failure.empty(); }
};

// Every element is compared with the oracle where the memory launches the oracle's kernels, else those of 48 rows; of
// all rows whether they were written. repeats: further runs over outputs that are poison again, which must give the
// same bits; as must schedule with run_scheduled, and a replayed graph where the device has those. Where lengths lie in
// arrays, the plan or graph runs again over fewer keys of two sequences of three; with batch_invariant the third keeps
// its bits.
//
// A case whose kernel is not wanted is planned, which names the kernel, and not run; but for the forward that a
// backward needs.
using Wanted = std::function<bool(const std::string& kernel)>;
inline bool any_kernel(const std::string&) { return true; }
StressReport stress(const Case& spec, Memory& memory, int repeats, const Wanted& wanted = any_kernel);

}  // namespace attune::cases
