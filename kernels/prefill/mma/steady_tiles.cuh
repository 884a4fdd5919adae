// SPDX-License-Identifier: Apache-2.0
// Steady tiles. All keys of a steady tile are read; they are cached (in a kernel without a cache: dense), and the rows
// that a warp copies lie in one page. Most tiles of long prompts are steady. What is the same for all of them is found
// once a row block, so that a copy is a page id, two products and its cp.async. Other tiles take the general functions
// of producer.cuh and cached_rows.cuh, which look up all that a cache may have.
#pragma once

#include "common/cached_slot.cuh"
#include "prefill/mma/mask.cuh"
#include "prefill/mma/shared_storage.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill_mma {

using scheduler::Tile;

constexpr int kWarpRows = Config::kKeys / Config::kWarps;  // rows of a tile that a warp copies; they are adjacent

// Whether the rows that a warp copies lie in one page, at a slot that a mask finds, and its id in one table or nowhere.
__device__ __forceinline__ bool has_steady_rows(const WorkTileParams& p, int batch) {
  if (p.v_page_table.data != nullptr) return false;
  if (p.paged != 0) return p.page_shift >= 0 && p.page_size % kWarpRows == 0;
  return p.batch_index.data == nullptr && common::page_exists(p, batch);
}

// The tiles [begin, end).
__device__ __forceinline__ TileRun run_of(int begin, int end) {
  return {begin, static_cast<unsigned>(max(end - begin, 0))};
}

// Finds the steady tiles of a row block. Called by one thread.
__device__ __forceinline__ void find_steady_tiles(const WorkTileParams& p, const WorkTile& t, SharedStorage& shared) {
  const Tiles tiles(t.num_cached, t.first_key, t.end_key);
  shared.tiles = tiles;
  SteadyTiles s{};
  const int end = Config::kCached ? min(t.end_key, t.num_cached) : t.end_key, start = tiles.start(0);
  const bool any = Config::kCached ? tiles.num_cached_tiles > 0 && has_steady_rows(p, t.batch) : tiles.num_tiles > 0;
  if (any) {
    const int begin = start < t.first_key ? 1 : 0, end_steady = (end - start) / Config::kKeys;
    s.all = run_of(begin, end_steady);
    if constexpr (!Rows::KeyMask::kAny) {
      // The last row sees the fewest keys at the start of a window, the first row the fewest at its end.
      const int position = t.num_keys - t.num_q + t.token_begin;
      const int first_seen = scheduler::first_visible(p, position + t.num_tokens - 1) - start,
                end_seen = scheduler::end_visible(p, t.num_keys, position) - start;
      s.seen = run_of(max(begin, first_seen <= 0 ? 0 : (first_seen - 1) / Config::kKeys + 1),
                      min(end_steady, end_seen <= 0 ? 0 : end_seen / Config::kKeys));
    }
    if constexpr (Config::kCached) {
      s.k = p.k.data + shared.kv_head * p.k.head_stride;
      s.v = p.v.data + shared.kv_head * p.v.head_stride;
      s.slot_mask = p.paged != 0 ? p.page_size - 1 : 0x7fffffff;
      if (p.paged != 0) s.page_ids = p.page_table.data + t.batch * p.page_table.row_stride;
      for (int row = 0; row < Config::kKeys; row += kWarpRows) shared.pages[row / Config::kRowsOfId] = t.batch;
    } else {
      const auto rows_of = [&](const kernels::NewRows& plane) {
        const long long row = t.batch * plane.batch_stride + (t.kv_row + start - t.num_cached) * plane.row_stride;
        return plane.data + (row + shared.kv_head * plane.head_stride) * 2;
      };
      s.k = rows_of(p.new_k), s.v = rows_of(p.new_v);
    }
  }
  shared.steady = s;
}

// The page of a warp's rows of a steady tile; the position of the first of them.
__device__ __forceinline__ int steady_page(const SharedStorage& shared, int first_row) {
  return static_cast<int>(ptx::load_shared_u32(ptx::shared_address(shared.pages + first_row / Config::kRowsOfId)));
}
__device__ __forceinline__ int steady_key(const SharedStorage& shared, int i, int first_row) {
  return (shared.tiles.cached_begin + i) * Config::kKeys + first_row;
}

}  // namespace attune::prefill_mma
