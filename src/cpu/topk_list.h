// SPDX-License-Identifier: Apache-2.0
// The k best of a stream of scores, in memory for a little more than twice as many.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>

namespace attune::cpu {

// A score and its position as one number: larger is better. NaN comes first, then larger scores; of equal scores the
// lower position is better, so no two are equal. -0 counts as 0. Positions are below 2^31.
inline uint64_t candidate(float score, int64_t position) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  uint32_t rank = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  if ((bits & 0x7fffffffu) > 0x7f800000u) rank = 0xffffffffu;
  return static_cast<uint64_t>(rank) << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}
inline int64_t position_of(uint64_t candidate) { return 0xffffffffu - static_cast<uint32_t>(candidate); }

// Candidates stay in the order in which they came.
class TopkList {
 public:
  static constexpr int kMostAtOnce = 128;
  // Elements of `keys` and of `spare` if at most most_seen candidates come.
  static int64_t capacity(int64_t k, int64_t most_seen) {
    return std::min(2 * k, std::max(most_seen, k)) + kMostAtOnce;
  }

  // keys and spare: [capacity] each; spare may serve many lists, one at a time.
  TopkList() = default;
  TopkList(uint64_t* keys, uint64_t* spare, int64_t k, int64_t capacity)
      : keys_(keys), spare_(spare), k_(k), capacity_(capacity) {}

  // Scores of positions first, first + 1, .., n of them, at most kMostAtOnce. masked[i]: no candidate; may be null.
  void add(const float* scores, const bool* masked, int64_t first, int n) {
    make_room(n);
    // Without branches, as the machine cannot predict which scores stay.
    int64_t count = count_;
    for (int i = 0; i < n; ++i) {
      const uint64_t key = candidate(scores[i], first + i);
      keys_[count] = key;
      count += key > floor_ && (masked == nullptr || !masked[i]) ? 1 : 0;
    }
    count_ = count;
  }
  void add(const uint64_t* candidates, int64_t n) {
    for (int64_t first = 0; first < n; first += kMostAtOnce) {
      const int64_t m = std::min<int64_t>(kMostAtOnce, n - first);
      make_room(m);
      for (int64_t i = first; i < first + m; ++i) {
        keys_[count_] = candidates[i];
        count_ += candidates[i] > floor_ ? 1 : 0;
      }
    }
  }
  // Leaves the k best.
  void finish() {
    if (count_ <= k_) return;
    floor_ = kth_best();
    int64_t count = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const uint64_t key = keys_[i];
      keys_[count] = key;
      count += key >= floor_ ? 1 : 0;
    }
    count_ = count;
  }

  int64_t count() const { return count_; }
  const uint64_t* keys() const { return keys_; }

 private:
  void make_room(int64_t n) {
    if (count_ + n > capacity_) finish();
  }

  // A histogram of the leading bits leaves one bin to search: three times as fast as a selection.
  uint64_t kth_best() {
    constexpr int kBits = 12, kShift = 64 - kBits;
    int32_t in_bin[1 << kBits] = {};
    for (int64_t i = 0; i < count_; ++i) ++in_bin[keys_[i] >> kShift];
    int64_t wanted = k_;  // of the bin
    uint64_t bin = (uint64_t{1} << kBits) - 1;
    for (; in_bin[bin] < wanted; --bin) wanted -= in_bin[bin];
    int64_t found = 0;
    for (int64_t i = 0; i < count_; ++i) {
      spare_[found] = keys_[i];
      found += keys_[i] >> kShift == bin ? 1 : 0;
    }
    std::nth_element(spare_, spare_ + wanted - 1, spare_ + found, std::greater<>());
    return spare_[wanted - 1];
  }

  uint64_t* keys_ = nullptr;
  uint64_t* spare_ = nullptr;
  int64_t k_ = 0, capacity_ = 0, count_ = 0;
  uint64_t floor_ = 0;  // candidates up to this one are not among the k best; no candidate is 0
};

}  // namespace attune::cpu
