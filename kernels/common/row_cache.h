// SPDX-License-Identifier: Apache-2.0
// Rows and caches, for the kernels beside attention. Strides of rows are in bytes. Compiled by NVRTC and by the host's
// compiler; no standard headers.
#pragma once

#include "common/kv_plane.h"
#include "common/kv_scale.h"
#include "common/prologue_params.h"

namespace attune::kernels {

// Rows of q, k or v: [outer, rows_per_outer, heads, channels]. Without an outer axis, outer is 0 for all rows.
struct RowTensor {
  char* data;  // null: not given
  long long outer_stride, row_stride, head_stride, channel_stride;
  int dtype;
};

struct RowCache {
  KvPlane k, v;
  KvScale k_scale, v_scale;
  IntTable page_table, v_page_table, batch_index;
  long long num_pages, page_size, capacity;  // capacity: the most tokens of a sequence
  long long ring_capacity;
  int paged;
  int power_of_two_scales;
};

}  // namespace attune::kernels
