// SPDX-License-Identifier: Apache-2.0
// How the rows of a cache are laid out. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"

namespace attune::kernels {

// The rows of K, or of V. A row begins at page * page_stride + slot * slot_stride + head * head_stride.
struct KvPlane {
  char* data;
  long long page_stride, slot_stride, head_stride;  // in bytes
  long long outer_stride, inner_stride;             // in elements
  int pack;  // elements of a pack are inner_stride apart; the largest int for a contiguous row
  int contiguous;                                   // neighbouring channels are adjacent in memory
  int has_v_page_table;                                 // V: its page ids are in v_page_table
  int dtype;                                        // packed formats: ATTUNE_UINT8

  // The offset of channel d in its row, in elements.
  ATTUNE_SHARED_FUNCTION long long element(int d) const { return d / pack * outer_stride + d % pack * inner_stride; }
};

}  // namespace attune::kernels
