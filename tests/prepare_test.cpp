// SPDX-License-Identifier: Apache-2.0
// qkv_prepare on the CPU over the case table.
#include "prepare_fixture.h"

namespace attune::tests {
namespace {

TEST(QkvPrepare, MatchesTheOracle) { EXPECT_GT(check_prepare(cases::host_memory()), 60); }

}  // namespace
}  // namespace attune::tests
