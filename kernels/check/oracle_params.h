// SPDX-License-Identifier: Apache-2.0
// What host and device share of the oracle on the GPU: the descriptor's tensors unchanged, and results in float64.
// Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/attention_fields.h"

namespace attune::oracle {

constexpr int kMaxRank = 6;
// As attune_dtype, plus float64 for tensors that the host has prepared.
enum Dtype { kNone, kFloat32, kFloat16, kBfloat16, kE4m3, kE5m2, kInt8, kUint8, kInt32, kInt64, kFloat64 };
enum Layout { kNhd, kHnd, kXpacked, kBytes };  // as attune_kv_layout
enum Format { kPlain, kMla656, kMla584 };      // as attune_kv_format

// As attune_tensor: strides are in elements, dtype 0 means absent.
struct Tensor {
  const char* data;
  int dtype, rank;
  long long shape[kMaxRank], stride[kMaxRank];
};

struct Row;  // check/rows.h

struct Cache {
  Tensor k, v, k_scale, v_scale, page_table, v_page_table, batch_index;
  int format, layout;
  long long num_pages, page_size, ring_capacity;  // page_size is never 0
};

namespace kinds {  // field kinds of the descriptor (common/attention_fields.h)
using Input = Tensor;
using Bits = Tensor;
using Cache = oracle::Cache;
using ReadCache = oracle::Cache;
using Bool = int;
using Int32 = int;
using Int64 = long long;
using Float = double;
}  // namespace kinds

struct OracleParams {
  // As in the descriptor, with two changes: q, k and v are float64 if a prologue has changed them, and the host
  // resolves cu_seqlens_kv, which may be those of the queries, and softmax_scale.
#define ATTUNE_FIELD(name, kind) kinds::kind name;
  ATTUNE_ATTENTION_INPUTS(ATTUNE_FIELD)
  ATTUNE_ATTENTION_LATER_INPUTS(ATTUNE_FIELD)
#undef ATTUNE_FIELD
  long long rows, batch;
  int heads_q, heads_kv, head_dim_qk, head_dim_v;

  // What cancels in the prologue's sums of q, k and v, in the shape of these; absent if nothing can cancel.
  Tensor q_lost, k_lost, v_lost;

  // Results, as in reference/reference.h: [rows, heads_q, head_dim_v] and [rows, heads_q].
  double *out, *pv_abs, *pv_lost, *v_abs;
  double *lse, *max_logit, *z_abs, *z_lost, *largest_p;
  long long* num_visible;
  unsigned char* written;
  // For each block: max_keys doubles, kNumSums for each thread, and the Row of each key's value.
  double* scratch;
  Row* values;
  long long max_keys;
};
constexpr int kNumSums = 5;

}  // namespace attune::oracle
