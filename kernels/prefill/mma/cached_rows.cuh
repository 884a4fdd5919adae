// SPDX-License-Identifier: Apache-2.0
// Copies rows of a cache to shared memory by cp.async. A warp copies the same kWarpRows rows of each tile.
//
// The page ids of these rows were copied to shared memory one tile before (fetch_pages). If they were loaded from
// global memory here, the warp would wait for them before it goes on to its GEMMs.
#pragma once

#include "prefill/mma/steady_tiles.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill_mma {

struct WarpRows {
  int first_row, lane;  // the first of the warp's rows; the lane
};
__device__ __forceinline__ WarpRows warp_rows_of(unsigned thread) {
  return {static_cast<int>(thread / 32 * kWarpRows), static_cast<int>(thread % 32)};
}
// Recomputed at each use, because copies are addressed only twice a tile: otherwise all addresses would stay in
// registers.
__device__ __forceinline__ WarpRows warp_rows() { return warp_rows_of(ptx::opaque(threadIdx.x)); }

// Whether a warp's rows lie in one page.
__device__ __forceinline__ bool one_page_a_warp(const WorkTileParams& p) {
  return p.paged == 0 || p.page_size % kWarpRows == 0;
}
// Whether page ids are in memory. If not, each sequence is one page.
__device__ __forceinline__ bool has_page_ids(const WorkTileParams& p) {
  return p.paged != 0 || p.batch_index.data != nullptr;
}
// Whether fetch_pages() copies the ids for K, or for V.
__device__ __forceinline__ bool fetches_pages(const WorkTileParams& p, bool values) {
  if (values && p.v_page_table.data != nullptr) return false;
  return Config::kRowsOfId == 1 || p.paged == 0 || p.page_size % Config::kRowsOfId == 0;
}
__device__ __forceinline__ const int* page_id_at(const WorkTileParams& p, int batch, int key, bool values) {
  if (p.paged == 0) return p.batch_index.data + batch * p.batch_index.column_stride;
  const kernels::IntTable& table = values && p.v_page_table.data != nullptr ? p.v_page_table : p.page_table;
  return table.data + (batch * table.row_stride + common::page_index(p, key) * table.column_stride);
}

// Issues the copies of the page ids of a warp's rows of tile i. They overwrite those of the tile before. The rows of a
// steady tile have one id.
template <class FindTile>
__device__ __forceinline__ void fetch_pages(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                            const FindTile& tile_at, SharedStorage& shared) {
  __syncwarp();  // all lanes have read the previous ids
  const WarpRows here = warp_rows();
  if (steady) {
    if (here.lane != 0 || shared.steady.page_ids == nullptr) return;
    const int page = steady_key(shared, i, here.first_row) >> p.page_shift;
    ptx::copy_async<4>(ptx::shared_address(shared.pages + here.first_row / Config::kRowsOfId),
                       shared.steady.page_ids + page * p.page_table.column_stride, 4);
    return;
  }
  const Tile tile = tile_at(i);
  if (!tile.cached || !has_page_ids(p) || !fetches_pages(p, false)) return;
  if (here.lane >= kWarpRows / Config::kRowsOfId) return;
  const int row = here.first_row + here.lane * Config::kRowsOfId, key = tile.start + row;
  // Keys before `low` may be on the same page and so have the same id.
  const int low = tile.low & -(one_page_a_warp(p) ? kWarpRows : Config::kRowsOfId);
  const bool there = key >= low && key < tile.high;
  ptx::copy_async<4>(ptx::shared_address(shared.pages + row / Config::kRowsOfId),
                     page_id_at(p, t.batch, there ? key : tile.low, false), there ? 4 : 0);
}

// The page of a row of this warp. Some keys on the row's page are in [low, high).
__device__ __forceinline__ int page_of_row(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                           const SharedStorage& shared, int row, bool values) {
  if (!has_page_ids(p)) return t.batch;
  if (!fetches_pages(p, values)) return *page_id_at(p, t.batch, tile.start + row, values);
  return static_cast<int>(ptx::load_shared_u32(ptx::shared_address(shared.pages + row / Config::kRowsOfId)));
}
// The page and slot of a row of this warp. page -1: the row is not read.
__device__ __forceinline__ common::Slot find_row(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                                 const SharedStorage& shared, int row, bool values) {
  const int key = tile.start + row;
  if (key < tile.low || key >= tile.high) return {-1, 0};
  const int page = page_of_row(p, t, tile, shared, row, values);
  return {common::page_exists(p, page) ? page : -1, common::slot_in_page(p, key)};
}

// A chunk of 16 bytes that a lane copies.
struct Chunk {
  int row, number;  // the row within the warp's rows; the chunk within the row
};
// chunk_of(lane, step) is the chunk that a lane copies in a step, by copy(here, step, from, there). kRowsOn: from step
// to step a lane goes down by this many rows; 0: its chunks have no such pattern.
template <bool kValues, int kSteps, int kRowsOn, class ChunkOf, class Copy>
__device__ __forceinline__ void copy_chunks(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                            const SharedStorage& shared, const ChunkOf& chunk_of, const Copy& copy) {
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const char* const head = plane.data + kv_head * plane.head_stride;
  const WarpRows here = warp_rows();
  const int first = here.first_row;
  if (one_page_a_warp(p)) {
    const int low = tile.low - tile.start - first, high = tile.high - tile.start - first;  // rows that are read
    int page = -1;
    if (low < kWarpRows && high > 0) page = page_of_row(p, t, tile, shared, first, kValues);
    const bool exists = common::page_exists(p, page);
    const unsigned count = exists ? high - low : 0;
    const char* const rows = head + (exists ? page : 0) * plane.page_stride +
                             common::slot_in_page(p, tile.start + first) * plane.slot_stride;
    if constexpr (kRowsOn > 0) {
      const Chunk mine = chunk_of(here.lane, 0);
      const char* from = rows + mine.row * plane.slot_stride + mine.number * 16;
      const unsigned row = mine.row - low;
#pragma unroll
      for (int step = 0; step < kSteps; ++step, from += kRowsOn * plane.slot_stride)
        copy(here, step, from, row + step * kRowsOn < count);
    } else {
#pragma unroll 2
      for (int step = 0; step < kSteps; ++step) {
        const Chunk mine = chunk_of(here.lane, step);
        copy(here, step, rows + mine.row * plane.slot_stride + mine.number * 16,
             static_cast<unsigned>(mine.row - low) < count);
      }
    }
    return;
  }
  // Each lane finds one row and shares it by shuffles.
  const common::Slot slot = find_row(p, t, tile, shared, first + here.lane % kWarpRows, kValues);
  const bool exists = slot.page >= 0;
  const unsigned valid_keys = __ballot_sync(0xffffffffu, exists);
  const long long at = (exists ? slot.page : 0) * plane.page_stride + slot.slot * plane.slot_stride;
#pragma unroll kRowsOn > 0 ? kSteps : 2
  for (int step = 0; step < kSteps; ++step) {
    const Chunk mine = chunk_of(here.lane, step);
    const char* const row = head + __shfl_sync(0xffffffffu, at, mine.row);
    copy(here, step, row + mine.number * 16, (valid_keys >> mine.row & 1) != 0);
  }
}

// The same for a steady tile. kRowsOn is not 0.
template <bool kValues, int kSteps, int kRowsOn, class ChunkOf, class Copy>
__device__ __forceinline__ void copy_steady_chunks(const WorkTileParams& p, const SharedStorage& shared, int i,
                                                   const ChunkOf& chunk_of, const Copy& copy) {
  const kernels::KvPlane& plane = kValues ? p.v : p.k;
  const WarpRows here = warp_rows();
  const Chunk mine = chunk_of(here.lane, 0);
  const int page = steady_page(shared, here.first_row),
            slot = steady_key(shared, i, here.first_row) & shared.steady.slot_mask;
  const bool exists = common::page_exists(p, page);
  const char* from = (kValues ? shared.steady.v : shared.steady.k) + (exists ? page : 0) * plane.page_stride +
                     (slot + mine.row) * plane.slot_stride + mine.number * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step, from += kRowsOn * plane.slot_stride) copy(here, step, from, exists);
}

// Rows of 16-bit channels. Chunks after a row's channels, and all chunks of an invalid row, become zeros.
template <bool kValues, int kHeadDim, class Layout, class FindTile>
__device__ __forceinline__ void copy_cached_tile(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                                 const FindTile& tile_at, int kv_head, const SharedStorage& shared,
                                                 unsigned to) {
  constexpr int kChunks = kernels::mma_chunks(kHeadDim), kSteps = kWarpRows * kChunks / 32,
                kRowsOn = Layout::kSwizzled ? 32 / kChunks : 0;
  static_assert(kWarpRows * kChunks % 32 == 0, "all lanes copy the same number of chunks");
  const auto chunk_of = [](int lane, int step) {
    const int i = lane + step * 32;
    return Chunk{i / kChunks, i % kChunks};
  };
  const auto copy = [&](const WarpRows& here, int step, const char* from, bool there) {
    const Chunk mine = chunk_of(here.lane, kRowsOn > 0 ? 0 : step);
    unsigned at = to + Layout::offset(here.first_row + mine.row, mine.number);
    if constexpr (kRowsOn > 0) at = Layout::rows_down(at, step * kRowsOn);
    ptx::copy_async<16>(at, from, there && mine.number < kHeadDim / 8 ? 16 : 0);
  };
  if (kRowsOn > 0 && steady) {
    copy_steady_chunks<kValues, kSteps, kRowsOn>(p, shared, i, chunk_of, copy);
  } else {
    copy_chunks<kValues, kSteps, kRowsOn>(p, t, tile_at(i), kv_head, shared, chunk_of, copy);
  }
}

__device__ __forceinline__ void store_valid_keys(SharedStorage& shared, const WarpRows& here, unsigned bits) {
  const unsigned to = ptx::shared_address(shared.valid_keys) + here.first_row / 8;
  if (here.lane != 0) return;
  if constexpr (kWarpRows == 16) {
    ptx::store_shared_u16(to, static_cast<unsigned short>(bits));
  } else {
    ptx::store_shared_u8(to, bits);
  }
}
// Sets a bit for each key of a tile: whether it is valid and has pages for K and V.
template <class FindTile>
__device__ __forceinline__ void find_valid_keys(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                                const FindTile& tile_at, SharedStorage& shared) {
  const WarpRows here = warp_rows();
  if (steady) {
    const bool exists = common::page_exists(p, steady_page(shared, here.first_row));
    return store_valid_keys(shared, here, exists ? (1u << kWarpRows) - 1 : 0u);
  }
  const Tile tile = tile_at(i);
  const int row = here.first_row + here.lane, key = tile.start + row;
  bool there = false;
  if (here.lane < kWarpRows) {
    there = key >= tile.low && key < tile.high;
    if (tile.cached)
      there = there && find_row(p, t, tile, shared, row, false).page >= 0 && common::has_value(p, t.batch, key);
  }
  store_valid_keys(shared, here, __ballot_sync(0xffffffffu, there));
}

}  // namespace attune::prefill_mma
