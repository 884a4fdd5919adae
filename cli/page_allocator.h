// SPDX-License-Identifier: Apache-2.0
// Hands out the pages of a KV pool.
#pragma once

#include <cstdint>
#include <vector>

namespace attune::cli {

// Pages that so many tokens fill.
inline int64_t pages_for(int64_t tokens, int64_t page_size) { return (tokens + page_size - 1) / page_size; }

class PageAllocator {
 public:
  // The pages 0..num_pages-1 are handed out in an order shuffled by the seed, as in a server that has run for a while.
  PageAllocator(int64_t num_pages, uint64_t seed);

  int64_t num_pages() const { return num_pages_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_used() const { return num_pages_ - num_free(); }
  // Appends count pages to `pages`, or changes nothing and returns false when there are not enough.
  bool allocate(int64_t count, std::vector<int32_t>& pages);
  // Takes all of them back and empties `pages`.
  void release(std::vector<int32_t>& pages);

 private:
  int64_t num_pages_;
  std::vector<int32_t> free_;  // the last is handed out next
};

}  // namespace attune::cli
