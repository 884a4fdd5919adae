// SPDX-License-Identifier: Apache-2.0
// Rows of a cache to fp32 and back: the codec of every KV format on the CPU.
#pragma once

#include "core/kv_cache.h"

namespace attune::cpu {

// One row, dequantised. out: head_dim_qk (K) or head_dim_v (V) floats.
void read_k_row(const KvCache& cache, KvSlot slot, int64_t head, float* out);
void read_v_row(const KvCache& cache, KvSlot slot, int64_t head, float* out);

// One row, rounded or quantised once. Scales per token and head are computed and stored. Where V aliases K, only
// write_k_row is used.
void write_k_row(const KvCache& cache, KvSlot slot, int64_t head, const float* row, bool power_of_two_scales);
void write_v_row(const KvCache& cache, KvSlot slot, int64_t head, const float* row, bool power_of_two_scales);

}  // namespace attune::cpu
