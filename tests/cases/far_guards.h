// SPDX-License-Identifier: Apache-2.0
// Memory whose blocks lie between gigabytes that nobody may touch: an index that has lost its upper half writes there.
#pragma once

#include <string>

#include "memory.h"

namespace attune::cases {

class FarGuards final : public MemoryOver {
 public:
  static constexpr const char* kSource = "check/guard.cu";
  static constexpr const char* kEntry = "attune_guard";

  // One allocation of all three, multiples of 256: bytes before the blocks, for blocks, and behind them. below launches
  // kernels. Blocks that do not fit come from below as they are.
  FarGuards(Memory& below, size_t before, size_t near, size_t behind);
  ~FarGuards() override;
  void* allocate(size_t bytes) override;
  void release(void* data) noexcept override;
  // By a kernel; what was wrong is mended.
  std::string check_far() override;

 private:
  bool is_near(const void* data) const { return data >= near_ && data < near_ + near_bytes_; }
  std::string check_stretch(std::byte* begin, size_t bytes);

  size_t before_bytes_, near_bytes_, behind_bytes_;
  std::byte *all_, *near_;
  size_t used_ = 0;   // of the bytes for blocks; they are free again when the last block goes
  int64_t live_ = 0;  // blocks there
};

}  // namespace attune::cases
