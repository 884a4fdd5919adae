// SPDX-License-Identifier: Apache-2.0
// Masks that are looked up key by key, for the CPU and the kernels alike. The host checks and fills them
// (src/core/problem.cpp). Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "common/kinds.h"
#include "common/prologue_params.h"

namespace attune {

struct KeyMasks {
  // Bit i % 8 of byte i / 8 in the row of a query (and head) says whether key start + i is visible.
  const unsigned char* bits = nullptr;
  long long row_stride = 0, head_stride = 0, byte_stride = 0;
  int columns = 0;
  int has_bits = 0;              // plans have no data
  kernels::IntTable start = {};  // by sequence; 0 if it is not given

  // The kinds that are in use, of use::kKeyMasks.
  ATTUNE_SHARED_FUNCTION unsigned kinds() const { return has_bits != 0 ? use::kBits : use::Masks{}; }

  // Where the rows of one sequence begin.
  struct Rows {
    long long first_row;  // the row of query 0 in the bits
    int first_key;        // the first key that the bits cover
  };
  ATTUNE_SHARED_FUNCTION Rows rows(long long sequence, long long first_row) const {
    return {first_row, start.data != nullptr ? start.data[sequence * start.column_stride] : 0};
  }

  ATTUNE_SHARED_FUNCTION bool sees(const Rows& rows, int query, int head, int key) const {
    const long long column = static_cast<long long>(key) - rows.first_key;
    if (column < 0 || column >= columns) return true;
    const unsigned char byte =
        bits[(rows.first_row + query) * row_stride + head * head_stride + (column >> 3) * byte_stride];
    return (byte >> (column & 7) & 1) != 0;
  }
  // Bit i is set if key + i is visible, for eight keys. The CPU takes masks eight keys at a time.
  ATTUNE_SHARED_FUNCTION unsigned sees_eight(const Rows& rows, long long query, long long head, long long key) const {
    const long long column = key - rows.first_key, i = column >> 3;
    const unsigned char* row = bits + (rows.first_row + query) * row_stride + head * head_stride;
    const unsigned low = i >= 0 && i < columns / 8 ? row[i * byte_stride] : 0xff;
    if ((column & 7) == 0) return low;
    const unsigned high = i + 1 >= 0 && i + 1 < columns / 8 ? row[(i + 1) * byte_stride] : 0xff;
    return ((low | high << 8) >> (column & 7)) & 0xff;
  }
};
static_assert(use::kKeyMasks == use::kBits, "kinds(), sees() and sees_eight() have all of them");

}  // namespace attune
