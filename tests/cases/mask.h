// SPDX-License-Identifier: Apache-2.0
// The masks of a case: their keys in JSON, how they are drawn, what they show, and their tensors. A new mask belongs
// here and in masks.json.
#pragma once

#include <cstdint>
#include <vector>

#include "attune/attune.h"

namespace attune::cases {

class Object;
class Random;
struct Case;

// Masks beside causality and windows.
struct MaskSpec {
  int mask_bits = 0;        // 0 none, 1 [total_q, bytes], 2 [total_q, num_heads_q, bytes]
  int64_t mask_start = -1;  // >= 0: mask_start present, that for sequence 0, one more for each further one
  int64_t mask_keys = 0;    // keys covered; 0: all
  std::vector<std::vector<int64_t>> ranges;  // bidirectional_ranges of every sequence
  bool operator==(const MaskSpec&) const = default;
};

void read_masks(Object& object, Case& c);
// Leaves the masks of these sequences.
void keep_masks(const std::vector<size_t>& kept, MaskSpec& mask);
// The masks of a random case, some of the time; not where indices replace them.
void draw_mask(Random& r, Case& c);

// Who may see what, by the rules of attune.h alone. P = keys - n_q + i.
bool is_inactive(const Case& c, int64_t b);  // finished or skipped
class Visibility {
 public:
  explicit Visibility(const Case& c, const attune_tensor& mask_bits) : case_(c), mask_bits_(mask_bits) {}
  // Query i (row `row` of q) of sequence b and head h sees key j.
  bool sees(int64_t b, int64_t i, int64_t row, int64_t h, int64_t j) const;
  // [b][j]: some query of sequence b sees key j. Sparse cases: all false.
  std::vector<std::vector<uint8_t>> seen_keys() const;

 private:
  const Case& case_;
  attune_tensor mask_bits_;
};

}  // namespace attune::cases
