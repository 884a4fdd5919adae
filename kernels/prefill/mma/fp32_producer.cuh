// SPDX-License-Identifier: Apache-2.0
// The producer of prefill_fp32_mma.cu: all threads of the block load rows of Q, and tiles of K and V, to shared memory.
// Numbers are split into three bf16 numbers on the way, once for all warps.
//
// Threads load the rows, so any strides, layout and element type of a cache will do. Keys that the block may not see,
// keys on pages that do not exist, and channels beyond the head dim are not read; they become zeros.
#pragma once

#include "common/cached_slot.cuh"
#include "common/finish.cuh"
#include "prefill/mma/fp32_storage.cuh"
#include "prefill/mma/mask.cuh"
#include "prefill/row_vec4.cuh"
#include "ptx/shared.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill_mma {

using kernels::Fp32Rows;
using prefill::Vec4, prefill::RowSource, prefill::Strided;

// Stores kRows rows of kHeadDim channels as three tiles from `to` on. find: from a row's number to its RowSource.
// rows_contiguous: neighbouring rows are contiguous in memory and neighbouring channels are not, so neighbouring
// threads have rows.
template <int kType, int kHeadDim, int kRows, bool kVec4, class Find>
__device__ __forceinline__ void store_parts(const Find& find, const Strided& strides, unsigned to,
                                            bool rows_contiguous = false) {
  using Layout = common::RowLayout<kernels::mma_chunks(kHeadDim)>;
  // units of four channels in a row; in all
  constexpr int kVec4s = 2 * kernels::mma_chunks(kHeadDim), kTotal = kRows * kVec4s;
  constexpr int kSteps = (kTotal + Config::kThreads - 1) / Config::kThreads,
                kMost = kVec4 && Config::kQPartsInRegisters ? 8 : 4,
                kAtATime = kSteps < kMost ? kSteps : kMost;  // that a thread loads ahead
  constexpr int kPart = kRows * Layout::kPitch;
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < kTotal; begin += kAtATime * Config::kThreads) {
    Vec4 vec4s[kAtATime];
    const auto row_of = [&](int i) { return rows_contiguous ? i % kRows : i / kVec4s; };
    const auto vec4_of = [&](int i) { return rows_contiguous ? i / kRows : i % kVec4s; };
    const auto has = [&](int i) { return kTotal % (kAtATime * Config::kThreads) == 0 || i < kTotal; };
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      const int i = begin + j * Config::kThreads;
      if (has(i)) vec4s[j] = prefill::load_vec4<kType, kHeadDim, kVec4>(find(row_of(i)), strides, 4 * vec4_of(i));
    }
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      const int i = begin + j * Config::kThreads;
      if (!has(i)) break;
      float x[4];
      prefill::to_floats<kType>(vec4s[j], x);
      unsigned low[kParts], high[kParts];
      common::split_pair(x[0], x[1], low);
      common::split_pair(x[2], x[3], high);
      const unsigned at = to + Layout::offset(row_of(i), vec4_of(i) / 2) + vec4_of(i) % 2 * 8;
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::store_shared_two(at + part * kPart, low[part], high[part]);
    }
  }
}
template <int kType, int kHeadDim, int kRows, class Find>
__device__ __forceinline__ void store_parts(const Find& find, const Strided& strides, int vec4, unsigned to,
                                            bool rows_contiguous = false) {
  if (vec4 != 0) {
    store_parts<kType, kHeadDim, kRows, true>(find, strides, to);
  } else {
    store_parts<kType, kHeadDim, kRows, false>(find, strides, to, rows_contiguous);
  }
}

__device__ __forceinline__ void load_queries(const WorkTileParams& p, const WorkTile& t, int head, const Fp32Rows& vec4,
                                             unsigned to) {
  const auto find = [&](int row) -> RowSource {
    if (row >= t.num_tokens) return {nullptr, {1.0f}};
    return {p.q + 4 * common::row_offset(p, t.batch, t.q_begin, t.token_begin + row, head, p.q_batch_stride,
                                         p.q_row_stride, p.q_head_stride),
            {1.0f}};
  };
  store_parts<common::kFloat32, Config::kHeadDimQk, Config::kRows>(find, {0, 0, p.q_dim_stride}, vec4.q, to);
}

// A cached row of K or V; data null: its page does not exist.
template <bool kValues>
__device__ __forceinline__ RowSource cached_row(const WorkTileParams& p, const WorkTile& t, int kv_head, int key) {
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const common::Slot s = common::find_slot(p, t.batch, key, kValues);
  if (!common::page_exists(p, s.page)) return {nullptr, {1.0f}};
  return {plane.data + s.page * plane.page_stride + s.slot * plane.slot_stride + kv_head * plane.head_stride,
          Config::kCacheType == common::kFloat32 ? common::RowScale{1.0f}
                                                 : common::scale_of(p, t, kv_head, key, kValues)};
}
template <bool kValues>
__device__ __forceinline__ RowSource dense_row(const WorkTileParams& p, const WorkTile& t, int kv_head, int key) {
  const kernels::NewRows& rows = kValues ? p.new_v : p.new_k;
  return {rows.data + 4 * (t.batch * rows.batch_stride + (t.kv_row + key - t.num_cached) * rows.row_stride +
                           kv_head * rows.head_stride),
          {1.0f}};
}

template <bool kValues>
__device__ __forceinline__ void load_tile(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                          const Fp32Rows& vec4, unsigned to) {
  constexpr int kHeadDim = kValues ? Config::kHeadDimV : Config::kHeadDimQk;
  const auto rows = [&](const auto& row_of) {
    return [&](int row) -> RowSource {
      const int key = tile.start + row;
      if (key < tile.low || key >= tile.high) return {nullptr, {1.0f}};
      return row_of(p, t, kv_head, key);
    };
  };
  if (Config::kCached && (tile.cached || !Config::kDense)) {
    const kernels::KvPlane& plane = kValues ? p.v : p.k;
    store_parts<Config::kCacheType, kHeadDim, Config::kKeys>(
        rows(cached_row<kValues>), Strided::of(plane), kValues ? vec4.cached_v : vec4.cached_k, to,
        plane.slot_stride == common::element_size(Config::kCacheType));
  } else if constexpr (Config::kDense) {
    store_parts<common::kFloat32, kHeadDim, Config::kKeys>(rows(dense_row<kValues>),
                                                           Strided::of(kValues ? p.new_v : p.new_k),
                                                           kValues ? vec4.dense_v : vec4.dense_k, to);
  }
}

// Sets a bit for each key of a tile: whether it is valid and has pages for K and V. Called by one warp.
__device__ __forceinline__ void find_valid_keys(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                                Fp32Storage& shared) {
  const int lane = static_cast<int>(threadIdx.x), key = tile.start + lane;
  bool there = key >= tile.low && key < tile.high;
  if (Config::kCached && tile.cached && there) {
    there = common::page_exists(p, common::find_slot(p, t.batch, key, false).page) &&
            common::has_value(p, t.batch, key);
  }
  const unsigned bits = __ballot_sync(0xffffffffu, there || lane >= Config::kKeys);
  if (lane == 0) shared.valid_keys = bits;
}

}  // namespace attune::prefill_mma
