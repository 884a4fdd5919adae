// SPDX-License-Identifier: Apache-2.0
// Random cache operations on two devices, compared byte by byte.
#pragma once

#include <algorithm>

#include "cases/op_problem.h"
#include "support.h"

namespace attune::tests {

using cases::Formats;

// On rows and tables that may say anything, the same on every memory for the same seed.
class RandomCacheOp : public cases::CacheOpProblem {
 public:
  RandomCacheOp(cases::Memory& memory, uint64_t seed, Formats formats = Formats::kAll)
      : CacheOpProblem(cases::random_cache_op_case(seed, formats), memory) {}
};

// All that one operation left is what the other did.
inline void expect_same_bytes(cases::CacheOpProblem& want, cases::CacheOpProblem& have, uint64_t seed) {
  for (size_t i = 0; i < want.arena().buffers().size(); ++i) {
    const auto expected = want.arena().buffers()[i]->download(), got = have.arena().buffers()[i]->download();
    const auto at = std::mismatch(expected.begin(), expected.end(), got.begin());
    EXPECT_TRUE(at.first == expected.end())
        << "seed " << seed << ", " << have.describe() << ": byte " << at.first - expected.begin() << " of "
        << want.arena().buffers()[i]->name();
  }
  EXPECT_EQ(have.arena().check_guards(), "") << seed;
}

}  // namespace attune::tests
