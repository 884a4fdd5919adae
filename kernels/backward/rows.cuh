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

// Blocks of a series, which are adjacent blocks of a sequence. They read the same streamed rows, and add to the same
// sums of dq while these are in L2.
constexpr int kSeries = 4, kSeriesInTurn = 16;

// Whether blocks of keys take turns, which decides their list, their tickets and how they walk. If later keys are first
// seen by later queries, all blocks of a series walk up, each from the first tile of queries that sees it, and the last
// keys add to dq first: they reach a tile one after the other and seldom wait. A second series of a head would wait for
// the first, so this takes eight KV heads: a series of each is 128 blocks, about as many as a GPU has multiprocessors.
// With several query heads of a KV head the tiles between the first and the last block of a series do not fit L2.
// Otherwise blocks walk down from their last tiles, and add in the order of the keys. Lengths and batches have no part
// in this: the bits of a sequence do not depend on its neighbours.
__device__ __forceinline__ bool takes_turns(const BackwardParams& p) {
  return (p.causal || (p.window_left >= 0 && p.window_right >= 0)) && p.num_heads_kv >= 8 && p.group == 1;
}

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

// Whether eight channels of a gradient can be stored with stores of 16 bytes.
template <int kChannels>
__device__ __forceinline__ bool takes_eights(const GradientRows& to) {
  return kChannels % 8 == 0 && to.dim_stride == 1 && (to.row_stride | to.head_stride | to.batch_stride) % 8 == 0 &&
         reinterpret_cast<unsigned long long>(to.data) % 16 == 0;
}
// Stores channels channel .. channel + 7 of the row that begins at `first`, or as many as exist.
template <int kChannels>
__device__ __forceinline__ void store_eight(const GradientRows& to, bool eights, long long first, int channel,
                                            const float (&x)[8]) {
  if (eights && to.dtype == common::kFloat32) {
    float4* const at = reinterpret_cast<float4*>(to.data + 4 * (first + channel));
    at[0] = make_float4(x[0], x[1], x[2], x[3]);
    at[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else if (eights) {
    unsigned r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = to.dtype == common::kBFloat16 ? ptx::pack_bf16(x[2 * i], x[2 * i + 1])
                                           : ptx::pack_f16(x[2 * i], x[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(to.data + 2 * (first + channel)) = make_uint4(r[0], r[1], r[2], r[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (channel + i < kChannels)
        common::store_element(to.dtype, to.data, first + (channel + i) * to.dim_stride, x[i]);
    }
  }
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
