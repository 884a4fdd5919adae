// SPDX-License-Identifier: Apache-2.0
#include "mask.h"

#include <algorithm>
#include <utility>

#include "case.h"
#include "json_object.h"
#include "problem.h"

namespace attune::cases {

void read_masks(Object& object, Case& c) {
  object.get("causal", c.causal);
  object.get_pair("window", c.window_left, c.window_right);
  object.get("mask_bits", c.mask_bits);
  object.get("mask_start", c.mask_start);
  object.get("mask_keys", c.mask_keys);
  object.get("ranges", c.ranges);
  object.get("finished", c.finished);
  object.get("skip_decode", c.skip_decode);
  object.get("zero_finished", c.zero_finished);
}

void keep_masks(const std::vector<size_t>& kept, MaskSpec& mask) {
  if (mask.ranges.empty()) return;
  std::vector<std::vector<int64_t>> ranges;
  for (const size_t b : kept) ranges.push_back(mask.ranges[b]);
  mask.ranges = std::move(ranges);
}

void draw_mask(Random& r, Case& c) {
  if (c.kv == KvSource::kSlots) return;  // indices replace the masks
  c.causal = r.chance(0.7);
  if (r.chance(0.3)) c.window_left = r.pick<int64_t>({0, 1, 15, 16, 40, 127});
  // A ring serves no wider window than it has slots.
  if (c.cache.ring_capacity > 0) c.window_left = std::min(c.window_left, c.cache.ring_capacity);
  if (r.chance(0.15)) c.window_right = r.pick<int64_t>({0, 1, 17});
  if (r.chance(0.15)) {
    c.mask_bits = static_cast<int>(r.integer(1, 2));
    if (r.chance(0.5)) c.mask_start = r.integer(0, 20);
    if (r.chance(0.5)) c.mask_keys = r.integer(1, 50);
  }
  if (r.chance(0.1)) {
    for (int64_t b = 0; b < c.batch(); ++b) {
      const int64_t first = r.integer(0, 30);
      c.ranges.push_back({first, first + r.integer(0, 30)});
    }
  }
}

bool is_inactive(const Case& c, int64_t b) {
  const auto i = static_cast<size_t>(b);
  return (!c.finished.empty() && c.finished[i] != 0) || (c.skip_decode && c.seqlens_q[i] == 1);
}

bool Visibility::sees(int64_t b, int64_t i, int64_t row, int64_t h, int64_t j) const {
  const Case& c = case_;
  const int64_t keys = c.keys(b);
  const int64_t position = keys - c.seqlens_q[static_cast<size_t>(b)] + i;
  if (j < 0 || j >= keys) return false;
  // A ring has forgotten what lies further back than its capacity.
  if (c.cache.ring_capacity > 0 && j < c.stored(b) - c.cache.ring_capacity) return false;
  bool allowed = (!c.causal || j <= position) && (c.window_left < 0 || j >= position - c.window_left) &&
                 (c.window_right < 0 || j <= position + c.window_right);
  if (!c.ranges.empty()) {
    const std::vector<int64_t>& ranges = c.ranges[static_cast<size_t>(b)];
    for (size_t r = 0; r + 1 < ranges.size(); r += 2) {
      const int64_t first = ranges[r], last = ranges[r + 1];
      if (first < last && first <= j && j <= last && first <= position && position <= last) allowed = true;
    }
  }
  if (allowed && c.mask_bits > 0) {
    const int64_t bit = j - (c.mask_start < 0 ? 0 : c.mask_start + b);
    const int64_t bytes = mask_bits_.shape[mask_bits_.rank - 1];
    if (bit >= 0 && bit < bytes * 8) {
      const void* byte =
          c.mask_bits == 2 ? element_at(mask_bits_, {row, h, bit / 8}) : element_at(mask_bits_, {row, bit / 8});
      allowed = (*static_cast<const uint8_t*>(byte) >> (bit % 8)) & 1;
    }
  }
  return allowed;
}

std::vector<std::vector<uint8_t>> Visibility::seen_keys() const {
  const Case& c = case_;
  std::vector<std::vector<uint8_t>> seen(static_cast<size_t>(c.batch()));
  int64_t row = 0;
  for (int64_t b = 0; b < c.batch(); ++b) {
    auto& keys = seen[static_cast<size_t>(b)];
    const int64_t n_q = c.seqlens_q[static_cast<size_t>(b)];
    keys.assign(static_cast<size_t>(c.keys(b)), !c.poison && !is_inactive(c, b) ? 1 : 0);
    // Heads differ in what they see only with one mask for each head.
    const int64_t heads = c.mask_bits == 2 ? c.num_heads_q : 1;
    if (c.poison && !is_inactive(c, b) && c.sparse.topk == 0) {
      for (int64_t j = 0; j < c.keys(b); ++j) {
        for (int64_t i = 0; i < n_q && keys[static_cast<size_t>(j)] == 0; ++i) {
          for (int64_t h = 0; h < heads; ++h) keys[static_cast<size_t>(j)] |= sees(b, i, row + i, h, j);
        }
      }
    }
    row += n_q;
  }
  return seen;
}

void Problem::build_mask() {
  const Case& c = case_;
  host_.causal = c.causal;
  host_.window_left = c.window_left;
  host_.window_right = c.window_right;
  host_.skip_decode = c.skip_decode;
  host_.zero_finished = c.zero_finished;
  if (c.mask_bits > 0) {
    int64_t keys = c.mask_keys;
    for (int64_t b = 0; b < c.batch() && c.mask_keys == 0; ++b) keys = std::max(keys, c.keys(b));
    const int64_t bytes = std::max<int64_t>(1, (keys + 7) / 8);
    std::vector<int64_t> shape = {num_rows_, bytes};
    if (c.mask_bits == 2) shape.insert(shape.begin() + 1, c.num_heads_q);
    Layout layout;
    if (c.strides == StrideMode::kOdd) {
      layout.padding.assign(shape.size(), 0);
      layout.padding.back() = 3;
    }
    host_.mask_bits = arena_.add("mask_bits", ATTUNE_UINT8, shape, layout);
    for_each_element(host_.mask_bits, [&](const int64_t*, void* element) {
      *static_cast<uint8_t*>(element) = static_cast<uint8_t>(random_.next() | random_.next());
    });
    if (c.mask_start >= 0) {
      std::vector<int64_t> starts;
      for (int64_t b = 0; b < c.batch(); ++b) starts.push_back(c.mask_start + b);
      host_.mask_start = add_vector("mask_start", ATTUNE_INT32, starts);
    }
  }
  if (!c.ranges.empty()) {
    size_t most = 0;
    for (const auto& ranges : c.ranges) most = std::max(most, ranges.size() / 2);
    host_.bidirectional_ranges =
        arena_.add("bidirectional_ranges", ATTUNE_INT32, {c.batch(), static_cast<int64_t>(most), 2});
    for_each_element(host_.bidirectional_ranges, [&](const int64_t* index, void* element) {
      const auto& ranges = c.ranges.at(static_cast<size_t>(index[0]));
      const auto entry = static_cast<size_t>(index[1] * 2 + index[2]);
      // first == last is no range.
      encode(ATTUNE_INT32, entry < ranges.size() ? static_cast<double>(ranges[entry]) : 0, element);
    });
  }
  if (!c.finished.empty()) host_.finished = add_vector("finished", ATTUNE_UINT8, c.finished);
}

}  // namespace attune::cases
