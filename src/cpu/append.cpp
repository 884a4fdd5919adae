// SPDX-License-Identifier: Apache-2.0
#include "cpu/append.h"

#include "cpu/kv_rows.h"

namespace attune::cpu {

void append_row(const KvCache& cache, int64_t table_row, int64_t position, int64_t head, const float* k_row,
                const float* v_row, bool power_of_two_scales) {
  if (position < 0 || (cache.ring_capacity == 0 && position >= cache.capacity())) return;
  const KvSlot k_slot = cache.find(table_row, position, false);
  const KvSlot v_slot = v_row != nullptr ? cache.find(table_row, position, true) : k_slot;
  if (k_slot.page < 0 || v_slot.page < 0) return;
  write_k_row(cache, k_slot, head, k_row, power_of_two_scales);
  if (v_row != nullptr) write_v_row(cache, v_slot, head, v_row, power_of_two_scales);
}

}  // namespace attune::cpu
