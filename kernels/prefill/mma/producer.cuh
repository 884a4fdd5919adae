// SPDX-License-Identifier: Apache-2.0
// The producer of prefill_mma.cu: all threads of the block copy rows of Q, and tiles of K and V, to shared memory by
// cp.async. Cached rows: cached_rows.cuh.
#pragma once

#include "common/finish.cuh"
#include "prefill/mma/cached_rows.cuh"
#include "prefill/mma/xpacked.cuh"

namespace attune::prefill_mma {

// Copies chunk `chunk` of a row. Chunks after its channels, and all chunks of an invalid row, become zeros.
template <int kHeadDim, class Layout>
__device__ __forceinline__ void copy_chunk(unsigned tile, int row, int chunk, const char* from, bool there) {
  const bool reads = there && chunk < kHeadDim / 8;
  ptx::copy_async<16>(tile + Layout::offset(row, chunk), reads ? from + chunk * 16 : from, reads ? 16 : 0);
}

// Copies kRows rows a fixed stride apart. kAll: all of them, and all their chunks; else only rows from first_row on,
// `count` of them, and the others become zeros.
template <int kHeadDim, int kRows, bool kAll = false>
__device__ __forceinline__ void copy_rows(const char* first, long long stride, unsigned first_row, unsigned count,
                                          unsigned to) {
  constexpr int kChunks = kernels::mma_chunks(kHeadDim), kStep = Config::kThreads / kChunks;  // rows at a time
  using Layout = common::RowLayout<kChunks>;
  // signed numbers would take more registers
  const unsigned row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  if (chunk >= kHeadDim / 8) count = 0;
  const char* from = first + row * stride + chunk * 16;
  const unsigned at = to + Layout::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < kRows; i += kStep, from += kStep * stride)
    ptx::copy_async<16>(Layout::rows_down(at, i), from, kAll || row + i - first_row < count ? 16 : 0);
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

// Copies rows of tile i of K, or of V, without conversion.
template <bool kValues, class FindTile>
__device__ __forceinline__ void copy_tile(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                          const FindTile& tile_at, int kv_head, const SharedStorage& shared,
                                          unsigned to) {
  constexpr int kHeadDim = kValues ? Config::kHeadDimV : Config::kHeadDimQk, kChunks = kernels::mma_chunks(kHeadDim);
  using Layout = common::RowLayout<kChunks>;
  if (Config::kCached && (!Config::kDense || shared.tiles.is_cached(i))) {
    if constexpr (Config::kXpacked && !Config::kQuantized) {
      copy_xpacked_tile<kValues>(p, t, i, steady, tile_at, kv_head, shared, to);
    } else if constexpr (!Config::kQuantized) {
      copy_cached_tile<kValues, kHeadDim, Layout>(p, t, i, steady, tile_at, kv_head, shared, to);
    }
    return;
  }
  const kernels::NewRows& plane = kValues ? p.new_v : p.new_k;
  if constexpr (!Config::kCached && Layout::kSwizzled && kHeadDim % 16 == 0) {
    if (steady) {
      const long long stride = plane.row_stride * 2;
      const char* const first = (kValues ? shared.steady.v : shared.steady.k) + i * Config::kKeys * stride;
      copy_rows<kHeadDim, Config::kKeys, true>(first, stride, 0, 0, to);
      return;
    }
  }
  const Tile tile = tile_at(i);
  const long long row = t.batch * plane.batch_stride + (t.kv_row + tile.start - t.num_cached) * plane.row_stride;
  const char* const first = plane.data + (row + kv_head * plane.head_stride) * 2;
  if constexpr (Layout::kSwizzled) {
    copy_rows<kHeadDim, Config::kKeys>(first, plane.row_stride * 2, tile.low - tile.start, tile.high - tile.low, to);
  } else {
#pragma unroll 2
    for (int i = threadIdx.x; i < Config::kKeys * kChunks; i += Config::kThreads) {
      const int key = tile.start + i / kChunks;
      const bool there = key >= tile.low && key < tile.high;
      const char* const from = there ? first + i / kChunks * plane.row_stride * 2 : plane.data;
      copy_chunk<kHeadDim, Layout>(to, i / kChunks, i % kChunks, from, there);
    }
  }
}

}  // namespace attune::prefill_mma
