// SPDX-License-Identifier: Apache-2.0
// Cuts a workspace into aligned parts; with a null base it only counts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integers.h"

namespace attune {

inline constexpr int64_t kCacheLine = 64;

class Workspace {
 public:
  explicit Workspace(void* base, int64_t alignment = 256)
      : base_(static_cast<std::byte*>(base)), alignment_(alignment) {}
  template <class T>
  T* take(int64_t count) {
    std::byte* const part = base_ == nullptr ? nullptr : base_ + size_;
    size_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), alignment_));
    return reinterpret_cast<T*>(part);
  }
  size_t size() const { return size_; }

 private:
  std::byte* base_;
  int64_t alignment_;
  size_t size_ = 0;
};

}  // namespace attune
