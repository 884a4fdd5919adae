// SPDX-License-Identifier: Apache-2.0
// Integer types of the runtime's test kernels.
#pragma once

using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
