// SPDX-License-Identifier: Apache-2.0
// Rows of the backward: which keys a query sees, which queries see a key, and where their elements are.
#pragma once

#include "backward/backward_params.h"
#include "common/element.cuh"
#include "common/lanes.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::backward {

using common::int_at, common::clamp_int, common::sum_of_lanes;
using kernels::BackwardList, kernels::BackwardParams, kernels::BackwardTile, kernels::GradientRows;
using kernels::kBackwardRows, kernels::NewRows;
using scheduler::read_sequence, scheduler::SequenceInfo;

#if defined(ATTUNE_SINK_SHARES) && ATTUNE_SINK_SHARES
constexpr bool kSinkShares = true;
using RowStats = kernels::SinkRowStats;
#else
constexpr bool kSinkShares = false;
using RowStats = kernels::RowStats;
#endif

// [begin, end); empty if end <= begin.
struct Span {
  int begin, end;
};

// The keys that a query sees.
__device__ __forceinline__ Span keys_of_query(const BackwardParams& p, const SequenceInfo& s, int query) {
  const int position = s.num_keys - s.num_q + query;
  return {scheduler::first_visible(p, position), scheduler::end_visible(p, s.num_keys, position)};
}

// The queries that see a key: the inverse of keys_of_query().
__device__ __forceinline__ Span queries_of_key(const BackwardParams& p, const SequenceInfo& s, int key) {
  if (key >= s.num_keys) return {0, 0};
  const long long query = key - (s.num_keys - s.num_q);  // the query at the key's position
  const long long right = p.causal ? 0 : p.window_right;
  return {right < 0 ? 0 : clamp_int(query - right, 0, s.num_q),
          p.window_left < 0 ? s.num_q : clamp_int(query + p.window_left + 1, 0, s.num_q)};
}

// The number of rows of k that a sequence has, in use or not.
__device__ __forceinline__ int key_extent(const BackwardParams& p, int b) {
  if (p.cu_seqlens_kv.data == nullptr) return p.fixed_kv;
  const int begin = clamp_int(int_at(p.cu_seqlens_kv, b), 0, p.total_kv);
  return clamp_int(static_cast<long long>(int_at(p.cu_seqlens_kv, b + 1)) - begin, 0, p.total_kv - begin);
}

// The index at which the stats of a sequence begin. It is even, because bulk copies begin at multiples of 16 bytes and
// stats may have 8 bytes. The stats of sequences do not overlap.
__device__ __forceinline__ long long stats_begin(const BackwardParams& p, const SequenceInfo& s, int b) {
  const long long row = p.cu_seqlens_q.data != nullptr ? s.q_begin : static_cast<long long>(b) * p.fixed_q;
  return (row + b) / 2 * 2;
}
__device__ __forceinline__ RowStats* stats_of(const BackwardParams& p, const SequenceInfo& s, int b, int head) {
  return reinterpret_cast<RowStats*>(p.stats) + head * p.stats_stride + stats_begin(p, s, b);
}

// The share that a sink leaves to the keys (SinkRowStats); 1 if the stats have none.
__device__ __forceinline__ float share_of(const kernels::RowStats&) { return 1.0f; }
__device__ __forceinline__ float share_of(const kernels::SinkRowStats& stats) { return stats.share; }

// The offset of a sequence's first row in a tensor with q's layout.
__device__ __forceinline__ long long q_offset(const BackwardParams& p, const SequenceInfo& s, int b,
                                              long long batch_stride, long long row_stride) {
  return p.cu_seqlens_q.data != nullptr ? s.q_begin * row_stride : b * batch_stride;
}
// The same in k's layout: batch_stride is 0 if rows have one numbering over the batch.
__device__ __forceinline__ long long kv_offset(const SequenceInfo& s, int b, long long batch_stride,
                                               long long row_stride) {
  return b * batch_stride + s.kv_row * row_stride;
}
// The offset of a row and head.
__device__ __forceinline__ long long query_offset(const BackwardParams& p, const SequenceInfo& s, int b,
                                                  const GradientRows& of, int row, int head) {
  return q_offset(p, s, b, of.batch_stride, of.row_stride) + row * of.row_stride + head * of.head_stride;
}
template <class Rows>
__device__ __forceinline__ long long key_offset(const SequenceInfo& s, int b, const Rows& of, int key, int head) {
  return kv_offset(s, b, of.batch_stride, of.row_stride) + key * of.row_stride + head * of.head_stride;
}

// Whether two channels of a gradient can be stored together.
template <int kChannels>
__device__ __forceinline__ bool takes_pairs(const GradientRows& to) {
  return to.dtype != common::kFloat32 && to.dim_stride == 1 && kChannels % 2 == 0 &&
         (to.row_stride | to.head_stride | to.batch_stride) % 2 == 0 &&
         reinterpret_cast<unsigned long long>(to.data) % 4 == 0;
}
// Stores `channel` and the next one, if it exists, of the row that begins at `first`.
template <int kChannels>
__device__ __forceinline__ void store_pair(const GradientRows& to, bool pairs, long long first, int channel, float x,
                                           float y) {
  if (pairs) {
    *reinterpret_cast<unsigned*>(to.data + 2 * (first + channel)) =
        to.dtype == common::kBFloat16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
    return;
  }
  common::store_element(to.dtype, to.data, first + channel * to.dim_stride, x);
  if (channel + 1 < kChannels) common::store_element(to.dtype, to.data, first + (channel + 1) * to.dim_stride, y);
}

__device__ __forceinline__ BackwardTile* tiles_of(BackwardList* list) {
  return reinterpret_cast<BackwardTile*>(list + 1);
}
// The block of rows and the head of this thread block, in a grid of blocks of rows times heads.
struct GridBlock {
  int index, head;
  __device__ __forceinline__ explicit GridBlock(int heads)
      : index(static_cast<int>(blockIdx.x) / heads), head(static_cast<int>(blockIdx.x) % heads) {}
};

}  // namespace attune::backward
