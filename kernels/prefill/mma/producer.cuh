// SPDX-License-Identifier: Apache-2.0
// Copies rows of Q, and tiles of K and V, to shared memory by cp.async; all threads of the block.
#pragma once

#include "common/cached_slot.cuh"
#include "common/finish.cuh"
#include "prefill/mma/config.cuh"
#include "ptx/async_copy.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill_mma {

using scheduler::Tile;

// Chunk `chunk` of a row; the chunks behind its channels, and all of a row that is not there, become zeros.
template <int kHeadDim, class Layout>
__device__ __forceinline__ void copy_chunk(unsigned tile, int row, int chunk, const char* from, bool there) {
  const bool reads = there && chunk < kHeadDim / 8;
  ptx::copy_async<16>(tile + Layout::offset(row, chunk), reads ? from + chunk * 16 : from, reads ? 16 : 0);
}

// kRows rows a fixed stride apart; those but first_row to first_row + count - 1 are not read, and become zeros.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void copy_rows(const char* first, long long stride, unsigned first_row, unsigned count,
                                          unsigned to) {
  constexpr int kChunks = kernels::mma_chunks(kHeadDim), kStep = Config::kThreads / kChunks;  // rows at a time
  using Layout = common::RowLayout<kChunks>;
  const unsigned row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;  // signs would take registers
  if (chunk >= kHeadDim / 8) count = 0;
  const char* from = first + row * stride + chunk * 16;
  const unsigned at = to + Layout::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < kRows; i += kStep, from += kStep * stride)
    ptx::copy_async<16>(Layout::rows_down(at, i), from, row + i - first_row < count ? 16 : 0);
}

__device__ __forceinline__ void copy_queries(const WorkTileParams& p, const WorkTile& t, int head, unsigned to) {
  constexpr int kChunks = kernels::mma_chunks(Config::kHeadDimQk);
  if constexpr (Config::LayoutK::kSwizzled) {
    const long long first = common::row_offset(p, t.batch, t.q_begin, t.token_begin, head, p.q_batch_stride,
                                               p.q_row_stride, p.q_head_stride);
    copy_rows<Config::kHeadDimQk, Config::kRows>(p.q + first * 2, p.q_row_stride * 2, 0, t.num_tokens, to);
  } else {
#pragma unroll 2
    for (int i = threadIdx.x; i < Config::kRows * kChunks; i += Config::kThreads) {
      const int row = i / kChunks;
      const bool there = row < t.num_tokens;
      const long long at = common::row_offset(p, t.batch, t.q_begin, t.token_begin + (there ? row : 0), head,
                                              p.q_batch_stride, p.q_row_stride, p.q_head_stride);
      copy_chunk<Config::kHeadDimQk, Config::LayoutK>(to, row, i % kChunks, p.q + at * 2, there);
    }
  }
}

// The row of a key, or of its value; false where it is not to be read: out of the tile's keys, or on no page.
template <bool kValues>
__device__ __forceinline__ bool find_row(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                         int key, const char*& row) {
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const kernels::NewRows& rows = kValues ? p.new_v : p.new_k;
  row = Config::kCached && tile.cached ? plane.data : rows.data;
  if (key < tile.low || key >= tile.high) return false;
  if (Config::kCached && tile.cached) {
    const common::Slot s = common::find_slot(p, t.batch, key, kValues);
    if (!common::is_there(p, s.page)) return false;
    row += s.page * plane.page_stride + s.slot * plane.slot_stride + kv_head * plane.head_stride;
  } else {
    row +=
        (t.batch * rows.batch_stride + (t.kv_row + key - t.num_cached) * rows.row_stride + kv_head * rows.head_stride) *
        2;
  }
  return true;
}

// The first row of a cached tile whose keys lie in one page, and how many rows from tile.low on are to be read.
struct PageRows {
  const char* first;
  unsigned count;
};
template <bool kValues>
__device__ __forceinline__ PageRows find_page(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                              int kv_head) {
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const common::Slot s = common::find_slot(p, t.batch, tile.start, kValues);
  const bool exists = common::is_there(p, s.page);
  const char* const page = plane.data + (exists ? s.page : 0) * plane.page_stride;
  return {page + s.slot * plane.slot_stride + kv_head * plane.head_stride,
          exists ? static_cast<unsigned>(tile.high - tile.low) : 0};
}

template <bool kValues>
__device__ __forceinline__ void copy_tile(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                          unsigned to) {
  constexpr int kHeadDim = kValues ? Config::kHeadDimV : Config::kHeadDimQk, kChunks = kernels::mma_chunks(kHeadDim);
  using Layout = common::RowLayout<kChunks>;
  if constexpr (Layout::kSwizzled) {
    const kernels::KvPlane& plane = kValues ? p.v : p.k;
    const kernels::NewRows& dense = kValues ? p.new_v : p.new_k;
    if (!Config::kCached || !tile.cached) {
      const long long row = t.batch * dense.batch_stride + (t.kv_row + tile.start - t.num_cached) * dense.row_stride,
                      first = row + kv_head * dense.head_stride;
      return copy_rows<kHeadDim, Config::kKeys>(dense.data + first * 2, dense.row_stride * 2, tile.low - tile.start,
                                                tile.high - tile.low, to);
    }
    // Cached tiles begin at multiples of their keys. (ptxas spills where this condition is a function.)
    if (p.paged == 0 || (p.page_shift >= 0 && 1 << p.page_shift >= Config::kKeys)) {
      const PageRows rows = find_page<kValues>(p, t, tile, kv_head);
      return copy_rows<kHeadDim, Config::kKeys>(rows.first, plane.slot_stride, tile.low - tile.start, rows.count, to);
    }
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < Config::kKeys * kChunks; i += Config::kThreads) {
    const char* from;
    const bool there = find_row<kValues>(p, t, tile, kv_head, tile.start + i / kChunks, from);
    copy_chunk<kHeadDim, Layout>(to, i / kChunks, i % kChunks, from, there);
  }
}

// Says which keys of a tile have pages, for K and V. The first two warps.
__device__ __forceinline__ void find_keys(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                          SharedStorage& shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= Config::kKeys) return;
  const char* row;
  const bool there = find_row<false>(p, t, tile, kv_head, tile.start + i, row) &&
                     (!Config::kCached || !tile.cached || common::has_value(p, t.batch, tile.start + i));
  const unsigned word = __ballot_sync(0xffffffffu, there);
  if (i % 32 == 0) shared.found[i / 32] = word;
}

}  // namespace attune::prefill_mma
