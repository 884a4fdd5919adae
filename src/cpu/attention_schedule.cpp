// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_schedule.h"

#include <algorithm>

#include "core/integers.h"
#include "core/schedule_stamp.h"

namespace attune::cpu {
namespace {

constexpr int64_t kSplitsPerThread = 8;  // enough for balance, few enough that merging costs nothing
constexpr int64_t kMinSplitKeys = 512;
constexpr int64_t kLeastItemsPerThread = 4;

// Rows of an item of this sequence.
int64_t item_rows(const Problem& p, const Sequence& s) {
  if (p.sparse) return std::min<int64_t>(p.group, kDecodeRows);
  return is_prefill(p, s) ? prefill_rows(p.head_dim_qk, p.head_dim_v) : kDecodeRows;
}

// Time of an item in arbitrary units: reading a key costs about as much as the arithmetic of 8 rows on it.
int64_t item_cost(int64_t keys, int64_t rows, int64_t heads) { return keys * (rows + 8) * heads; }

// True if the KV heads of a token follow each other in the cache (NHD), so that an item gains by walking them together:
// it reads memory in order and looks up each page once.
bool heads_are_adjacent(const Problem& p) {
  const KvCache& c = p.cache;
  return c && c.one_factor && c.k.contiguous && c.v.contiguous && c.k.head_stride == p.head_dim_qk &&
         (c.v_aliases_k || c.v.head_stride == p.head_dim_v) && c.k.slot_stride >= p.heads_kv * p.head_dim_qk;
}

// The most KV heads that an item may have if every thread is to get several items.
int64_t most_heads(const Problem& p, const Sequence* sequences, int threads, bool may_split) {
  if (p.sparse || p.heads_kv == 1 || !heads_are_adjacent(p)) return 1;
  int64_t splits = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = sequences[b];
    if (s.num_q == 0 || is_skipped(p, s, b)) continue;
    splits += may_split ? std::max<int64_t>(1, s.seqlen_kv() / kMinSplitKeys) : 1;
  }
  int64_t heads = p.heads_kv;
  while (heads > 1 && splits * ceil_div(p.heads_kv, heads) < kLeastItemsPerThread * threads) heads = ceil_div(heads, 2);
  return heads;
}

// The number of KV heads of an item of this sequence; each head has `rows` rows.
int64_t item_heads(const Problem& p, const Sequence& s, int64_t rows, int64_t most) {
  if (is_prefill(p, s)) return 1;
  const int64_t items = ceil_div(p.heads_kv, std::clamp<int64_t>(kDecodeRows / rows, 1, most));
  return ceil_div(p.heads_kv, items);
}

// Calls emit(item) for every unsplit item, without its cost.
template <class Emit>
void for_each_item(const Problem& p, const Sequence* sequences, int64_t most_heads, Emit&& emit) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = sequences[b];
    if (s.num_q == 0 || is_skipped(p, s, b)) continue;
    const int64_t rows = s.num_q * p.group, most = item_rows(p, s);
    // A sparse row has its own keys, so an item must not cross queries.
    const int64_t period = p.sparse ? p.group : rows;
    for (int64_t base = 0; base < rows; base += period) {
      for (int64_t r = base; r < base + period; r += most) {
        const int64_t m = std::min(most, base + period - r);
        KeyRange keys;
        if (p.sparse) {
          const int64_t q_row = s.q_begin + r / p.group;
          keys = {0, p.list.used(q_row, b) + (p.extra_list.indices != nullptr ? p.extra_list.used(q_row, b) : 0) - 1};
        } else {
          keys = visible_keys(p, s, b, r / p.group, (r + m - 1) / p.group + 1);
        }
        const int64_t begin = std::max<int64_t>(keys.first, 0), end = std::max(begin, keys.last + 1);
        const int64_t heads = item_heads(p, s, m, most_heads);
        for (int64_t h = 0; h < p.heads_kv; h += heads) {
          Item item{};
          item.sequence = static_cast<int32_t>(b);
          item.kv_head = static_cast<int32_t>(h);
          item.num_heads = static_cast<int32_t>(std::min(heads, p.heads_kv - h));
          item.row_begin = r;
          item.num_rows = static_cast<int32_t>(m);
          item.kv_begin = begin;
          item.kv_end = end;
          emit(item);
        }
      }
    }
  }
}

}  // namespace

uint64_t schedule_stamp(const Problem& p) {
  Stamp stamp = stamp_of_shapes(p);
  for (const IntView* t : {&p.cu_q, &p.cu_kv, &p.list.length, &p.extra_list.length}) stamp.add(*t);
  // Clamped as a run clamps them, so that layers whose tables have other widths agree.
  const int64_t most = p.cache && p.cache.ring_capacity == 0 ? p.cache.capacity() : INT64_MAX;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.seqused) stamp.add(std::min<int64_t>(p.seqused(b), most));
    if (p.finished != nullptr) stamp.add(p.is_finished(b));
    for (int64_t i = 0; i < p.num_ranges; ++i) {
      const int32_t* const range = p.ranges + b * p.range_batch_stride + i * p.range_stride;
      stamp.add(range[0]), stamp.add(range[p.range_end_stride]);
    }
  }
  return stamp.value();
}

ScheduleLimits schedule_limits(const Problem& p, int threads) {
  ScheduleLimits l;
  l.threads = threads;
  // An upper bound: every sequence may end with a block that is not full.
  const int64_t least_rows = std::min<int64_t>(
      p.sparse ? std::min<int64_t>(p.group, kDecodeRows) : prefill_rows(p.head_dim_qk, p.head_dim_v), kDecodeRows);
  const int64_t blocks = p.sparse ? p.total_q * ceil_div(p.group, least_rows)
                                  : ceil_div(p.total_q * p.group, least_rows) + std::min(p.batch, p.total_q);
  const int64_t base = blocks * p.heads_kv;
  const bool may_split = threads > 1 && !p.batch_invariant;
  l.max_partials = may_split ? 4 * kSplitsPerThread * threads : 0;
  l.max_merges = may_split ? 2 * kSplitsPerThread * threads : 0;
  l.max_items = base + l.max_partials;
  const int64_t rows = std::max<int64_t>(1, p.max_seqlen_q) * p.group * p.heads_kv;
  l.partial_rows = std::min<int64_t>(rows, std::max(prefill_rows(p.head_dim_qk, p.head_dim_v), kDecodeRows));
  return l;
}

void make_schedule(const Problem& p, const ScheduleLimits& limits, Schedule& out) {
  make_sequences(p, out.sequences);
  const bool may_split = limits.max_partials > 0;
  const int64_t heads = most_heads(p, out.sequences, limits.threads, may_split);
  auto cost_of = [](const Item& i) { return item_cost(i.kv_end - i.kv_begin, i.num_rows, i.num_heads); };
  int64_t total = 0;
  for_each_item(p, out.sequences, heads, [&](const Item& item) { total += cost_of(item); });
  // Only items above the target are split: at most max_merges of them, into at most max_partials splits.
  const int64_t target = may_split ? total / (kSplitsPerThread * limits.threads) + 1 : INT64_MAX;
  int64_t items = 0, merges = 0;
  int32_t partials = 0;
  for_each_item(p, out.sequences, heads, [&](const Item& whole) {
    const int64_t begin = whole.kv_begin, end = whole.kv_end, keys = end - begin, cost = cost_of(whole);
    int64_t splits = 1;
    if (cost > target && whole.num_rows * whole.num_heads <= limits.partial_rows) {
      splits = std::clamp<int64_t>(std::min(ceil_div(cost, target), keys / kMinSplitKeys), 1,
                                   4 * kSplitsPerThread * limits.threads);
      if (merges >= limits.max_merges || partials + splits > limits.max_partials) splits = 1;
    }
    const int64_t tile = kMaxTileN;
    const int64_t step = splits > 1 ? round_up(ceil_div(keys, splits), tile) : keys;
    const int32_t first = partials;
    const int64_t aligned = begin / tile * tile;
    for (int64_t i = 0; i < splits; ++i) {
      Item item = whole;
      item.kv_begin = splits > 1 ? std::max(begin, aligned + i * step) : begin;
      item.kv_end = splits > 1 && i + 1 < splits ? std::min(end, aligned + (i + 1) * step) : end;
      if (item.kv_end <= item.kv_begin && i > 0) continue;
      item.cost = cost_of(item);
      item.partial = splits > 1 ? partials++ : -1;
      out.items[items++] = item;
    }
    if (splits > 1) {
      out.merges[merges++] = {whole.row_begin, whole.sequence, whole.kv_head,   whole.num_rows,
                              whole.num_heads, first,          partials - first};
    }
  });
  // Longest first; ties keep the order of the batch, so the list is the same every time.
  std::sort(out.items, out.items + items, [](const Item& x, const Item& y) {
    if (x.cost != y.cost) return x.cost > y.cost;
    if (x.sequence != y.sequence) return x.sequence < y.sequence;
    if (x.kv_head != y.kv_head) return x.kv_head < y.kv_head;
    if (x.row_begin != y.row_begin) return x.row_begin < y.row_begin;
    return x.kv_begin < y.kv_begin;
  });
  out.num_items = items;
  out.num_merges = merges;
}

}  // namespace attune::cpu
