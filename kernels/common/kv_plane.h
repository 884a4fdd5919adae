// SPDX-License-Identifier: Apache-2.0
// Where the rows of a cache lie. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"

namespace attune::kernels {

// Rows of K, or of V. A row begins at page * page_stride + slot * slot_stride + head * head_stride.
struct KvPlane {
  char* data;
  long long page_stride, slot_stride, head_stride;  // in bytes
  long long outer_stride, inner_stride;             // in elements
  int pack;                                         // a contiguous row is one pack: the largest int
  int contiguous;                                   // the elements of a row follow each other
  int table_is_own;                                 // V: page ids are in v_page_table
  int dtype;                                        // of packed formats: ATTUNE_UINT8

  // Element d of a row, in elements.
  ATTUNE_SHARED_FUNCTION long long element(int d) const { return d / pack * outer_stride + d % pack * inner_stride; }
};

}  // namespace attune::kernels
