// SPDX-License-Identifier: Apache-2.0
// What the emulated TMA knows of an array: the description itself, of five axes.
#pragma once

#include <stdint.h>

namespace attune::ptx {

struct TensorMap {
  const unsigned char* data;
  int64_t shape[5], stride_bytes[5];
  int box[5];
  int element_size;
  unsigned swizzle;  // bits of an address that the three above are added to: 0x70, 0x10 or none
};

}  // namespace attune::ptx
