// SPDX-License-Identifier: Apache-2.0
// What the emulated TMA knows of an array: the description itself, of four axes.
#pragma once

#include <cstdint>

namespace attune::ptx {

struct TensorMap {
  const unsigned char* data;
  int64_t shape[4], stride_bytes[4];
  int box[4];
  int element_size;
  bool swizzled;  // by 128 bytes, or not at all
};

}  // namespace attune::ptx
