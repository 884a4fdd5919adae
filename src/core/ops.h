// SPDX-License-Identifier: Apache-2.0
// The operations beside attention, checked and normalised: qkv_prepare, merge, cache operations.
#pragma once

#include <cstdint>

#include "attune/attune.h"
#include "core/kv_cache.h"
#include "core/prologue.h"
#include "core/tensor.h"

namespace attune {

// uint8 flags [batch]; not given: none is set.
struct FlagView {
  const uint8_t* data = nullptr;
  int64_t stride = 0;
  bool operator()(int64_t b) const { return data != nullptr && data[b * stride] != 0; }
};

struct PrepareProblem {
  int64_t batch = 0, total = 0;  // sequences, tokens
  int64_t fixed = 0;             // tokens of each sequence where there is no cu
  int64_t heads_q = 0, heads_kv = 0, head_dim_qk = 0, head_dim_v = 0;
  RowView q, k, v, q_out, k_out, v_out;
  IntView cu, seqused;
  FlagView finished;
  KvCache cache;
  Prologue prologue;
  bool copies = false;  // there is no prologue and no append: outputs are the inputs, bit by bit

  // Absolute position of the first new token.
  int64_t first_position(int64_t b) const;
};
PrepareProblem make_qkv_prepare(const attune_qkv_prepare& op);

struct MergeProblem {
  int64_t parts = 0, rows = 0, heads = 0, head_dim_v = 0;
  RowView partial_out, partial_lse;                // of part 0
  int64_t out_part_bytes = 0, lse_part_bytes = 0;  // from one part to the next
  ParamView sinks;
  RowView out, lse;
  const float* out_scale = nullptr;
};
MergeProblem make_merge(const attune_merge& op);

struct CacheProblem {
  int32_t kind = ATTUNE_CACHE_APPEND;
  bool power_of_two_scales = false;
  KvCache cache;
  RowView k, v;  // no v where V aliases K
  int64_t tokens = 0;
  const int64_t* slots = nullptr;  // null: tokens are addressed by sequence and position
  int64_t slot_stride = 0;
  bool by_slots = false;
  int64_t batch = 0, fixed = 0;
  IntView cu, seqused;
  FlagView finished;
};
CacheProblem make_cache_op(const attune_cache_op& op);

}  // namespace attune
