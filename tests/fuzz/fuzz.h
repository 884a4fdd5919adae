// SPDX-License-Identifier: Apache-2.0
// What a fuzz target offers, and how it reads its input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Runs one input. Aborts when the library misbehaves; libFuzzer or the standalone main reports the input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Inputs that the standalone main tries when it is not told how many: some seconds of work.
int64_t fuzz_default_iterations();

namespace attune::fuzz {

// Turns bytes into choices. Past the end everything is 0.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ >= size_; }
  uint8_t byte() { return empty() ? 0 : data_[at_++]; }
  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }
  // 0..n-1.
  size_t choose(size_t n) { return n == 0 ? 0 : (n <= 256 ? byte() : word()) % n; }
  // A number as likely to be right as to be absurd.
  int64_t number() {
    static constexpr int64_t kOdd[] = {0,
                                       1,
                                       2,
                                       3,
                                       4,
                                       7,
                                       8,
                                       15,
                                       16,
                                       17,
                                       64,
                                       65,
                                       127,
                                       128,
                                       255,
                                       -1,
                                       -2,
                                       576,
                                       577,
                                       1024,
                                       4096,
                                       65536,
                                       1 << 24,
                                       1 << 30,
                                       INT32_MAX,
                                       INT32_MIN,
                                       INT64_MAX,
                                       INT64_MIN,
                                       INT64_MAX / 2,
                                       int64_t{1} << 40};
    const uint8_t kind = byte();
    if (kind < 200) return kOdd[kind % (sizeof(kOdd) / sizeof(kOdd[0]))];
    if (kind < 230) return byte();
    return static_cast<int64_t>(word());
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

}  // namespace attune::fuzz
