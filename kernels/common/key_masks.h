// SPDX-License-Identifier: Apache-2.0
// Masks that are looked up key by key. The host checks and fills them (src/core/problem.cpp); kernels take them as they
// are (common/masks.cuh). Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "common/kinds.h"
#include "common/prologue_params.h"

namespace attune {

struct KeyMasks {
  // Bit i % 8 of byte i / 8 of a query's row (and head) lets key start + i through.
  const unsigned char* bits = nullptr;
  long long row_stride = 0, head_stride = 0, byte_stride = 0;
  int columns = 0;
  int has_bits = 0;              // plans have no data
  kernels::IntTable start = {};  // by sequence; not given: 0

  // Of use::kKeyMasks.
  ATTUNE_SHARED_FUNCTION unsigned kinds() const { return has_bits != 0 ? use::kBits : use::Masks{}; }
  ATTUNE_SHARED_FUNCTION int start_of(long long sequence) const {
    return start.data != nullptr ? start.data[sequence * start.column_stride] : 0;
  }
};

}  // namespace attune
