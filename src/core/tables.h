// SPDX-License-Identifier: Apache-2.0
// Tables that models need, computed in double: RoPE frequencies and cosines, log-n factors, ALiBi slopes, T5 buckets.
#pragma once

#include <cstdint>

#include "attune/attune.h"

namespace attune {

// Throws INVALID_ARGUMENT unless the fields that the style reads make sense.
void check_rope(const attune_rope& rope);
// frequencies: dim / 2 radians a position. rope has passed check_rope.
void rope_frequencies(const attune_rope& rope, double* frequencies);
// fp32 cos_sin [num_positions, dim] of the positions first_position..
void rope_rows(const attune_rope& rope, const double* frequencies, int64_t first_position, int64_t num_positions,
               float* cos_sin);

void logn_table(int64_t max_position, int64_t num_positions, float* logn);
void alibi_slopes(int64_t num_heads, float* slopes);

// Throws INVALID_ARGUMENT unless there are enough buckets and max_distance lies beyond the exact ones.
void check_t5(int64_t num_buckets, int64_t max_distance, bool bidirectional);
// Bucket of the relative position key - query. Exact: logarithms do not decide at the boundaries.
int64_t t5_bucket(int64_t relative_position, int64_t num_buckets, int64_t max_distance, bool bidirectional);

}  // namespace attune
