// SPDX-License-Identifier: Apache-2.0
// Cuts a workspace into parts that begin at multiples of 256 bytes; with a null base it only counts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integers.h"

namespace attune::cuda {

class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    std::byte* const part = base_ == nullptr ? nullptr : base_ + size_;
    size_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 256));
    return reinterpret_cast<T*>(part);
  }
  size_t size() const { return size_; }

 private:
  std::byte* base_;
  size_t size_ = 0;
};

}  // namespace attune::cuda
