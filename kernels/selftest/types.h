// SPDX-License-Identifier: Apache-2.0
// Integers of the runtime's own test kernels.
#pragma once

using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
