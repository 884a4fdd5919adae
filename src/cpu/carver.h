// SPDX-License-Identifier: Apache-2.0
// Cuts a workspace into aligned pieces.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integers.h"

namespace attune::cpu {

// Hands out 64-byte aligned pieces; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    std::byte* p = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(p);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace attune::cpu
