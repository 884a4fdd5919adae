// SPDX-License-Identifier: Apache-2.0
#include "page_allocator.h"

#include <numeric>

#include "cases/number.h"

namespace attune::cli {

PageAllocator::PageAllocator(int64_t num_pages, uint64_t seed)
    : num_pages_(num_pages), free_(static_cast<size_t>(num_pages)) {
  std::iota(free_.begin(), free_.end(), 0);
  cases::Random(seed).shuffle(free_);
}

bool PageAllocator::allocate(int64_t count, std::vector<int32_t>& pages) {
  if (count > num_free()) return false;
  for (; count > 0; --count) {
    pages.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

void PageAllocator::release(std::vector<int32_t>& pages) {
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  pages.clear();
}

}  // namespace attune::cli
