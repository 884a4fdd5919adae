// SPDX-License-Identifier: Apache-2.0
// The parameters of the prologue (docs/semantics.md), and small tables. The host fills them with src/cuda/ops/params.h.
// Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

namespace attune::kernels {

// An int32 table [rows, columns], or a vector along the columns. data null: not given.
struct IntTable {
  const int* data;
  long long row_stride, column_stride;  // in elements
};

// Weights [outer, heads, channels] of a float dtype. data null: not given.
struct FloatTable {
  const char* data;
  long long outer_stride, head_stride, channel_stride;  // in bytes
  int dtype;
  int vector;  // runs of 8 channels from a multiple of 8 on are contiguous and aligned to 16 bytes
};

struct PrologueParams {
  const float* qkv_scale;      // [3]: for 8-bit q, k, v; null: none
  long long qkv_scale_stride;  // strides are in elements unless they say otherwise
  FloatTable q_bias, k_bias, v_bias;
  FloatTable ia3_k, ia3_v;
  IntTable ia3_task;  // [batch]; if it is not given, task 0
  long long num_tasks;

  const float* cos_sin;  // [num_tables, num_positions, rotary_dim]; null: no RoPE
  long long table_stride, position_stride, channel_stride;
  long long num_tables, num_positions;
  int rotary_dim, rope_offset, interleaved;
  int cos_sin_vector;        // rows of the table are contiguous and aligned to 16 bytes
  IntTable rope_table_index;  // [batch]
  IntTable positions;         // [total_q, components]
  int components;            // numbers of a position: 1, or 3 for mRoPE
  int mrope_interleaved;
  int mrope_section[3];

  const float* logn;  // [logn_length]; null: none
  long long logn_stride, logn_length;
};

}  // namespace attune::kernels
