// SPDX-License-Identifier: Apache-2.0
#include "cpu/score.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "core/tables.h"

namespace attune::cpu {

constexpr uint32_t kScoreMasks = use::kCausal | use::kWindow | use::kKeyMasks | use::kRanges;
constexpr uint32_t kScoreTerms =
    use::kPlain | use::kSoftcap | use::kAlibi | use::kAlibiSqrt | use::kBias | use::kNewTokenBias | use::kT5;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLog2e = std::numbers::log2e_v<float>;

struct Range {
  int64_t first, last;
};

Range range_at(const Problem& p, int64_t b, int64_t i) {
  const int32_t* r = p.ranges + b * p.range_batch_stride + i * p.range_stride;
  return {r[0], r[p.range_end_stride]};
}

// Marks [from, to] of the columns [first, first + n) as visible.
void mark(bool* visible, int64_t first, int n, int64_t from, int64_t to) {
  const int64_t begin = std::max<int64_t>(from - first, 0);
  const int64_t end = std::min<int64_t>(to - first + 1, n);
  for (int64_t j = begin; j < end; ++j) visible[j] = true;
}

// Byte i is 1 where bit i is set, else 0.
uint64_t spread(uint8_t bits) {
  const uint64_t ones = (bits * uint64_t{0x0101010101010101}) & uint64_t{0x8040201008040201};
  return ((ones + 0x7f7f7f7f7f7f7f7f) >> 7) & 0x0101010101010101;
}

// Hides what the masks of keys [first, first + n) hide of a row; visible has kMaxTileN.
void hide_by_key(const KeyMasks& masks, const KeyMasks::Rows& rows, int64_t query, int64_t head, int64_t first, int n,
                 bool* visible) {
  static_assert(sizeof(bool) == 1 && kMaxTileN % 8 == 0);
  for (int j = 0; j < n; j += 8) {
    uint64_t eight;
    std::memcpy(&eight, visible + j, sizeof eight);
    eight &= spread(static_cast<uint8_t>(masks.sees_eight(rows, query, head, first + j)));
    std::memcpy(visible + j, &eight, sizeof eight);
  }
}

// Additive terms that are looked up key by key.
void add_tables(const ScoreRows& rows, int row, int m, int64_t first, int n, float* s) {
  const Problem& p = rows.p;
  const int64_t new_begin = rows.sequence.seqlen_kv() - rows.sequence.num_q;
  for (int r = 0; r < m; ++r) {
    float* out = s + static_cast<int64_t>(r) * kMaxTileN;
    const int64_t query = rows.query(row + r), head = rows.head(row + r), position = rows.position(row + r);
    if (p.alibi && p.alibi_sqrt) {
      const float slope = p.alibi(p.alibi_per_batch ? rows.item.sequence : 0, head);
      for (int j = 0; j < n; ++j) {
        const int64_t back = position - (first + j);
        if (back > 0) out[j] -= slope * std::sqrt(static_cast<float>(back));
      }
    }
    if (p.bias && position >= 0 && position < p.bias.shape[1]) {
      const int64_t bias_head = p.bias.shape[0] == 1 ? 0 : head;
      const int64_t end = std::min<int64_t>(n, p.bias.shape[2] - first);
      for (int64_t j = 0; j < end; ++j) out[j] += p.bias(bias_head, position, first + j);
    }
    if (p.new_token_bias && query < p.new_token_bias.shape[1]) {
      const int64_t begin = std::max<int64_t>(0, new_begin - first);
      const int64_t end = std::min<int64_t>(n, new_begin + p.new_token_bias.shape[2] - first);
      for (int64_t j = begin; j < end; ++j) out[j] += p.new_token_bias(query, first + j - new_begin);
    }
    if (p.t5_bias) {
      for (int j = 0; j < n; ++j) out[j] += p.t5_bias(head, rows.t5(first + j - position));
    }
  }
}

}  // namespace

int32_t T5Buckets::operator()(int64_t distance) const {
  return bucket[static_cast<size_t>(std::clamp(distance, -max_distance, max_distance) + max_distance)];
}

T5Buckets make_t5_buckets(const Problem& p) {
  T5Buckets t;
  if (!p.t5_bias) return t;
  t.max_distance = p.t5_max_distance;
  t.bucket.resize(static_cast<size_t>(2 * p.t5_max_distance + 1));
  for (int64_t d = -t.max_distance; d <= t.max_distance; ++d) {
    t.bucket[static_cast<size_t>(d + t.max_distance)] =
        static_cast<int32_t>(t5_bucket(d, p.t5_num_buckets, p.t5_max_distance, p.t5_bidirectional));
  }
  return t;
}

float apply_score_terms(const ScoreRows& rows, int row, int m, int64_t first, const KvTile& tile, float* s,
                        Scratch& scratch, const KernelTable& kernels) {
  const Problem& p = rows.p;
  const int n = tile.n;
  const float* factor = tile.scaled ? tile.k_factor : nullptr;
  if (!p.has_score_terms()) {
    // The softmax scales, unless keys have scales or the scale is not positive: the max would become a min.
    if (factor == nullptr && p.scale > 0) return p.scale * kLog2e;
    kernels.scale_columns(m, n, s, kMaxTileN, p.scale, factor);
    return kLog2e;
  }
  if (p.softcap > 0) {
    if (factor != nullptr) kernels.scale_columns(m, n, s, kMaxTileN, 1.0f, factor);
    kernels.softcap(m, n, s, kMaxTileN, p.scale, p.softcap);
  } else {
    kernels.scale_columns(m, n, s, kMaxTileN, p.scale, factor);
  }
  if (p.alibi && !p.alibi_sqrt) {
    // Distances, not positions, so that they stay exact in fp32 for any context.
    for (int r = 0; r < m; ++r) {
      scratch.slope[r] = p.alibi(p.alibi_per_batch ? rows.item.sequence : 0, rows.head(row + r));
      scratch.position[r] = static_cast<float>(rows.position(row + r) - first);
    }
    kernels.add_alibi(m, n, s, kMaxTileN, scratch.slope, scratch.position, 0.0f);
  }
  if (p.alibi_sqrt || p.bias || p.new_token_bias || p.t5_bias) add_tables(rows, row, m, first, n, s);
  return kLog2e;
}

bool fully_visible(const ScoreRows& rows, int row, int m, int64_t first, const KvTile& tile) {
  const Problem& p = rows.p;
  if (tile.any_hidden || p.key_masks.kinds() != 0) return false;
  if (p.sparse) return true;
  if (p.num_ranges > 0) return false;
  // Positions grow with the row: the last row sees the fewest keys on the left, the first the fewest on the right.
  return p.first_visible(rows.position(row + m - 1)) <= first &&
         p.last_visible(rows.position(row)) >= first + tile.n - 1;
}

int apply_mask(const ScoreRows& rows, int row, int m, int64_t first, const KvTile& tile, float* s) {
  const Problem& p = rows.p;
  const int n = tile.n;
  const int64_t b = rows.item.sequence;
  const KeyMasks::Rows mask_rows = p.key_masks.rows(b, rows.sequence.q_begin);
  int end = 0;
  for (int r = 0; r < m; ++r) {
    float* out = s + static_cast<int64_t>(r) * kMaxTileN;
    bool visible[kMaxTileN] = {};
    if (p.sparse) {
      for (int j = 0; j < n; ++j) visible[j] = !tile.masked[j];
    } else {
      const int64_t position = rows.position(row + r);
      mark(visible, first, n, p.first_visible(position), p.last_visible(position));
      for (int64_t i = 0; i < p.num_ranges; ++i) {
        const Range range = range_at(p, b, i);
        if (range.first < range.last && position >= range.first && position <= range.last)
          mark(visible, first, n, range.first, range.last);
      }
      if (tile.any_hidden) {
        for (int j = 0; j < n; ++j) visible[j] = visible[j] && !tile.masked[j];
      }
    }
    if (p.key_masks.kinds() != 0)
      hide_by_key(p.key_masks, mask_rows, rows.query(row + r), rows.head(row + r), first, n, visible);
    for (int j = 0; j < n; ++j) {  // without a branch, which a random mask would make unpredictable
      const uint32_t keep = 0u - static_cast<uint32_t>(visible[j]);
      out[j] =
          std::bit_cast<float>((std::bit_cast<uint32_t>(out[j]) & keep) | (std::bit_cast<uint32_t>(-kInf) & ~keep));
    }
    for (int j = n; j > end; --j) {
      if (visible[j - 1]) end = j;
    }
  }
  return end;
}

KeyRange visible_keys(const Problem& p, const Sequence& s, int64_t b, int64_t query_begin, int64_t query_end) {
  const int64_t low = s.position(query_begin), high = s.position(query_end - 1);
  KeyRange keys{p.first_visible(low), std::min(p.last_visible(high), s.seqlen_kv() - 1)};
  if (p.window_left >= 0) keys.first = std::max<int64_t>(0, low - p.window_left);
  for (int64_t i = 0; i < p.num_ranges; ++i) {
    const Range range = range_at(p, b, i);
    if (range.first >= range.last || range.last < low || range.first > high) continue;
    keys.first = std::min(keys.first, std::max<int64_t>(range.first, 0));
    keys.last = std::max(keys.last, std::min(range.last, s.seqlen_kv() - 1));
  }
  // The ring has overwritten older keys.
  if (p.cache.ring_capacity > 0) keys.first = std::max(keys.first, s.num_cached - p.cache.ring_capacity);
  return keys;
}

}  // namespace attune::cpu
