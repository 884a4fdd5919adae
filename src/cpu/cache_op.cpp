// SPDX-License-Identifier: Apache-2.0
#include "cpu/cache_op.h"

#include <algorithm>

#include "core/problem.h"
#include "cpu/append.h"
#include "cpu/kv_rows.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

constexpr KvSlot kNowhere{-1, 0};

// Slot number `slot` of the pool; kNowhere where it is out of range.
KvSlot pool_slot(const KvCache& cache, int64_t slot) {
  if (slot < 0 || slot >= cache.num_slots()) return kNowhere;
  return {slot / cache.page_size, slot % cache.page_size};
}

KvSlot slot_of_token(const CacheProblem& op, int64_t i) {
  return pool_slot(op.cache, op.slots != nullptr ? op.slots[i * op.slot_stride] : i);
}

// Slot of position t of sequence b; a ring keeps only the last of `used` tokens.
KvSlot sequence_slot(const KvCache& cache, int64_t b, int64_t t, int64_t used, bool of_v) {
  const bool held = cache.ring_capacity > 0 ? t >= used - cache.ring_capacity : t < cache.capacity();
  return held ? cache.find(b, t, of_v) : kNowhere;
}

// Writes dense token i to a slot.
void store_token(const CacheProblem& op, int64_t i, KvSlot slot) {
  if (slot.page < 0) return;
  alignas(64) float x[kMaxHeadDim];
  for (int64_t h = 0; h < op.cache.num_heads; ++h) {
    read_row(op.k, i, h, op.cache.head_dim_qk, x);
    write_k_row(op.cache, slot, h, x, op.power_of_two_scales);
    if (!op.v) continue;
    read_row(op.v, i, h, op.cache.head_dim_v, x);
    write_v_row(op.cache, slot, h, x, op.power_of_two_scales);
  }
}

// Reads a slot to dense token i; kNowhere gives zeros.
void fetch_token(const CacheProblem& op, int64_t i, KvSlot k_slot, KvSlot v_slot) {
  alignas(64) float x[kMaxHeadDim];
  const bool somewhere = k_slot.page >= 0 && v_slot.page >= 0;
  if (!somewhere) std::fill(x, x + kMaxHeadDim, 0.0f);
  for (int64_t h = 0; h < op.cache.num_heads; ++h) {
    if (somewhere) read_k_row(op.cache, k_slot, h, x);
    write_row(op.k, i, h, op.cache.head_dim_qk, x);
    if (!op.v) continue;
    if (somewhere) read_v_row(op.cache, v_slot, h, x);
    write_row(op.v, i, h, op.cache.head_dim_v, x);
  }
}

void append_sequences(const CacheProblem& op) {
  RowSplitter split(op.cu, op.fixed, op.tokens);
  const int64_t ring = op.cache.ring_capacity;
  const auto range = [&](int64_t b) {
    const RowRange r = split(b);
    return op.finished(b) ? RowRange{r.first, 0} : r;
  };
  for_each_sequence_row(op.batch, range, [&](int64_t b, int64_t i, int64_t row, int64_t count) {
    if (ring > 0 && i < count - ring) return;  // a later token of this call takes its slot
    alignas(64) float k[kMaxHeadDim];
    alignas(64) float v[kMaxHeadDim];
    const int64_t position = std::max<int64_t>(op.seqused(b), 0) + i;
    for (int64_t h = 0; h < op.cache.num_heads; ++h) {
      read_row(op.k, row, h, op.cache.head_dim_qk, k);
      if (op.v) read_row(op.v, row, h, op.cache.head_dim_v, v);
      append_row(op.cache, b, position, h, k, op.v ? v : nullptr, op.power_of_two_scales);
    }
  });
}

void gather_sequences(const CacheProblem& op) {
  RowSplitter split(op.cu, op.fixed, op.tokens);
  const auto range = [&](int64_t b) {
    RowRange r = split(b);
    r.count = std::clamp<int64_t>(op.seqused(b), 0, r.count);
    if (op.cache.ring_capacity == 0) r.count = std::min(r.count, op.cache.capacity());
    return r;
  };
  for_each_sequence_row(op.batch, range, [&](int64_t b, int64_t t, int64_t row, int64_t) {
    const int64_t used = op.seqused(b);
    const KvSlot k_slot = sequence_slot(op.cache, b, t, used, false);
    const KvSlot v_slot = op.v ? sequence_slot(op.cache, b, t, used, true) : k_slot;
    fetch_token(op, row, k_slot, v_slot);
  });
}

}  // namespace

void run_cache_op(const CacheProblem& op) {
  if (op.tokens == 0) return;  // spares the loop over the sequences
  const bool writes = op.kind == ATTUNE_CACHE_APPEND || op.kind == ATTUNE_CACHE_QUANTIZE;
  if (!op.by_slots) {
    if (writes) {
      append_sequences(op);
    } else {
      gather_sequences(op);
    }
    return;
  }
  parallel_for(op.tokens, [&](int64_t i) {
    const KvSlot slot = slot_of_token(op, i);
    if (writes) {
      store_token(op, i, slot);
    } else {
      fetch_token(op, i, slot, slot);
    }
  });
}

}  // namespace attune::cpu
