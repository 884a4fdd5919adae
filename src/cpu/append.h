// SPDX-License-Identifier: Apache-2.0
// Writing a new token to a cache by sequence and position.
#pragma once

#include <cstdint>

#include "core/kv_cache.h"

namespace attune::cpu {

// Writes the row of one KV head of the token at `position` of row `table_row` of the tables: rounded, or quantised,
// once. v_row is null where V aliases K. Nothing is written for a position that the cache does not hold, or where a
// page id of K or V is out of range.
void append_row(const KvCache& cache, int64_t table_row, int64_t position, int64_t head, const float* k_row,
                const float* v_row, bool power_of_two_scales);

}  // namespace attune::cpu
