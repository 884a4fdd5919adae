// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_schedule.h"

#include <algorithm>

namespace attune::cpu {
namespace {

constexpr int64_t kPiecesPerThread = 8;   // enough for balance, few enough that merging costs nothing
constexpr int64_t kMinPieceKeys = 512;

// Rows of an item of this sequence.
int64_t item_rows(const Problem& p, const Sequence& s) {
  if (p.sparse) return std::min<int64_t>(p.group, kDecodeRows);
  return is_prefill(p, s) ? prefill_rows(p.head_dim_qk, p.head_dim_v) : kDecodeRows;
}

// Time of an item in arbitrary units: reading a key costs about as much as 8 rows' arithmetic on it.
int64_t item_cost(int64_t keys, int64_t rows) { return keys * (rows + 8); }

// Calls emit(sequence, kv_head, row_begin, rows, kv_begin, kv_end) for every unsplit item.
template <class Emit>
void for_each_item(const Problem& p, const Sequence* sequences, Emit&& emit) {
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
        for (int64_t h = 0; h < p.heads_kv; ++h) emit(b, h, r, m, begin, end);
      }
    }
  }
}

}  // namespace

ScheduleLimits schedule_limits(const Problem& p, int threads) {
  ScheduleLimits l;
  l.threads = threads;
  // Every sequence may end with a partial block of rows; a block is never larger than the rows there are.
  const int64_t least_rows = std::min<int64_t>(p.sparse ? std::min<int64_t>(p.group, kDecodeRows) : prefill_rows(p.head_dim_qk, p.head_dim_v),
                                               kDecodeRows);
  const int64_t blocks = p.sparse ? p.total_q * ((p.group + least_rows - 1) / least_rows)
                                  : (p.total_q * p.group + least_rows - 1) / least_rows + std::min(p.batch, p.total_q);
  const int64_t base = blocks * p.heads_kv;
  const bool may_split = threads > 1 && !p.batch_invariant;
  l.max_partials = may_split ? 4 * kPiecesPerThread * threads : 0;
  l.max_merges = may_split ? 2 * kPiecesPerThread * threads : 0;
  l.max_items = base + l.max_partials;
  const int64_t rows = std::max<int64_t>(1, p.max_seqlen_q) * p.group;
  l.partial_rows = std::min<int64_t>(rows, std::max(prefill_rows(p.head_dim_qk, p.head_dim_v), kDecodeRows));
  return l;
}

void make_schedule(const Problem& p, const ScheduleLimits& limits, Schedule& out) {
  make_sequences(p, out.sequences);
  int64_t total = 0;
  for_each_item(p, out.sequences, [&](int64_t, int64_t, int64_t, int64_t m, int64_t begin, int64_t end) { total += item_cost(end - begin, m); });
  // Only items above the target are split, so there are at most 2 * pieces of them and 4 * pieces of their parts.
  const int64_t target = limits.max_partials > 0 ? total / (kPiecesPerThread * limits.threads) + 1 : INT64_MAX;
  int64_t items = 0, merges = 0;
  int32_t partials = 0;
  for_each_item(p, out.sequences, [&](int64_t b, int64_t h, int64_t r, int64_t m, int64_t begin, int64_t end) {
    const int64_t keys = end - begin, cost = item_cost(keys, m);
    int64_t pieces = 1;
    if (cost > target && m <= limits.partial_rows) {
      pieces = std::clamp<int64_t>(std::min((cost + target - 1) / target, keys / kMinPieceKeys), 1, 4 * kPiecesPerThread * limits.threads);
      if (merges >= limits.max_merges || partials + pieces > limits.max_partials) pieces = 1;
    }
    const int64_t tile = kMaxTileN;
    const int64_t step = pieces > 1 ? round_up((keys + pieces - 1) / pieces, tile) : keys;
    const int32_t first = partials;
    const int64_t aligned = begin / tile * tile;
    for (int64_t i = 0; i < pieces; ++i) {
      Item item{};
      item.sequence = static_cast<int32_t>(b);
      item.kv_head = static_cast<int32_t>(h);
      item.row_begin = r;
      item.num_rows = static_cast<int32_t>(m);
      item.kv_begin = pieces > 1 ? std::max(begin, aligned + i * step) : begin;
      item.kv_end = pieces > 1 && i + 1 < pieces ? std::min(end, aligned + (i + 1) * step) : end;
      if (item.kv_end <= item.kv_begin && i > 0) continue;
      item.cost = item_cost(item.kv_end - item.kv_begin, m);
      item.partial = pieces > 1 ? partials++ : -1;
      out.items[items++] = item;
    }
    if (pieces > 1) {
      out.merges[merges++] = {r, static_cast<int32_t>(b), static_cast<int32_t>(h), static_cast<int32_t>(m), first, partials - first};
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
