// SPDX-License-Identifier: Apache-2.0
// attune_prologue, checked and normalised: what happens to q, k and v of the new tokens before attention.
#pragma once

#include <cstdint>

#include "attune/attune.h"
#include "core/kv_cache.h"
#include "core/tensor.h"

namespace attune {

struct Prologue {
  bool any = false;  // something other than append is asked for
  bool append = false;
  bool scaled = false;               // qkv_scale is given; its data, and those of cos_sin, may be null while planning
  bool power_of_two_scales = false;  // of what is appended
  const float* qkv_scale = nullptr;  // [3] with qkv_scale_stride
  int64_t qkv_scale_stride = 0;
  ParamView q_bias, k_bias, v_bias;  // [heads, dim]
  ParamView ia3_k, ia3_v;            // [tasks, heads, dim]
  IntView ia3_task;
  const float* cos_sin = nullptr;  // [num_tables, num_positions, rotary_dim]
  int64_t num_tables = 0, num_positions = 0, rotary_dim = 0;
  int64_t table_stride = 0, position_stride = 0, channel_stride = 0;
  IntView rope_table_index;
  bool has_positions = false;
  IntView positions;  // rows: tokens; cols: 1 or 3
  int64_t rope_offset = 0;
  bool interleaved = false;
  bool mrope = false, mrope_interleaved = false;
  int32_t mrope_section[3] = {0, 0, 0};
  ParamView logn;
  int64_t logn_length = 0;

  bool has_rope() const { return rotary_dim > 0; }
};

// What the checks need to know of the operation. Fields of tensors that are not given are not read.
struct PrologueShapes {
  int64_t batch, total_q, heads_q, heads_kv, head_dim_qk, head_dim_v;
  bool has_q, has_k, has_v;
  int32_t q_dtype, k_dtype, v_dtype;
  bool same_tokens;  // queries and keys are the same tokens, so per-token positions serve both
};

// Throws INVALID_ARGUMENT for anything wrong; messages name the field ("prologue.q_bias").
Prologue make_prologue(const attune_prologue& p, const PrologueShapes& s, Data data);
// Throws if power-of-two scales are asked for, but the cache that is appended to has no scales, or scales that are only
// read.
void check_scales(const Prologue& p, const KvCache& cache);

}  // namespace attune
