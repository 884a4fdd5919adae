// SPDX-License-Identifier: Apache-2.0
// Lengths and page tables of the sequences of a step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attune/attune.hpp"

namespace attune::cli {

class BatchTables {
 public:
  BatchTables(int64_t max_batch, int64_t max_pages)
      : max_pages_(max_pages),
        cu_seqlens_(static_cast<size_t>(max_batch + 1)),
        seqused_(static_cast<size_t>(max_batch)),
        page_table_(static_cast<size_t>(max_batch * max_pages)) {}

  void clear() { batch_ = 0; }
  void add(int64_t queries, int64_t cached, const std::vector<int32_t>& pages) {
    const auto b = static_cast<size_t>(batch_++);
    cu_seqlens_[b + 1] = cu_seqlens_[b] + static_cast<int32_t>(queries);
    seqused_[b] = static_cast<int32_t>(cached);
    const auto row = page_table_.begin() + static_cast<std::ptrdiff_t>(b) * max_pages_;
    // What lies past a sequence's pages must never be read: no page has this number.
    std::fill(std::copy(pages.begin(), pages.end(), row), row + max_pages_, 0x7fffff00);
  }

  int64_t batch() const { return batch_; }
  int64_t rows() const { return cu_seqlens_[static_cast<size_t>(batch_)]; }
  attune_tensor cu_seqlens() const { return dense(cu_seqlens_.data(), {batch_ + 1}); }
  attune_tensor seqused() const { return dense(seqused_.data(), {batch_}); }
  attune_tensor page_table() const { return dense(page_table_.data(), {batch_, max_pages_}); }

 private:
  int64_t max_pages_, batch_ = 0;
  std::vector<int32_t> cu_seqlens_, seqused_, page_table_;
};

}  // namespace attune::cli
