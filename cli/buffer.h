// SPDX-License-Identifier: Apache-2.0
// Owned host memory, aligned to 256 bytes, not initialised.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace attune::cli {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes)
      : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment}))), size_(bytes) {}
  void* data() const { return data_.get(); }
  size_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr size_t kAlignment = 256;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

}  // namespace attune::cli
