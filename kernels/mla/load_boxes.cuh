// SPDX-License-Identifier: Apache-2.0
// A warp that takes tasks from the list and has the TMA copy tiles of keys, from the last to the first, and the queries.
// It runs ahead of the math groups as far as the two buffers allow, each part of which it fills as soon as it is empty.
//
// Rows of a tile beyond the keys that the block may see may be anything, NaN included, and as values would be multiplied by
// weights of 0: they become zero before the tile is handed over.
#pragma once

#include "mla/source.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::mla {

// Of a block's queries: one box a chunk. All lanes of a warp.
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Places& places, const ptx::TensorMap& map,
                                             const Task& task, int head_tile) {
  if (threadIdx.x % 32 == 0) {
    ptx::arrive_expecting(places.q_full(), Config::kChunks * 128 * p.heads_of_tile * p.tokens_of_tile);
    const int row = static_cast<int>(task.q_row) + task.token_begin, batch = p.q_flat ? 0 : task.batch;
#pragma unroll 1
    for (int i = 0; i < Config::kChunks; ++i) {
      ptx::copy_box(places.q() + i * Config::kChunkBytes, map, places.q_full(), 64 * i, head_tile * p.heads_of_tile, row,
                    batch);
    }
  }
  __syncwarp();
}

// What the math groups need where rows of the block see different keys of a tile. One thread.
__device__ __forceinline__ void note_edge(const PrefillParams& p, const Places& places, int stage, const Task& t,
                                          const Tile& tile) {
  const int position = t.num_keys - t.num_q + t.token_begin;
  const bool edge = tile.start < prefill::first_visible(p, position + t.num_tokens - 1) ||
                    tile.high > prefill::end_visible(p, t.num_keys, position);
  ptx::store_shared_u32(places.note(stage) + 16, static_cast<unsigned>(tile.start));
  ptx::store_shared_u32(places.note(stage) + 20, edge ? 1 : 0);
}

class BoxLoader {
 public:
  __device__ __forceinline__ BoxLoader(const PrefillParams& p, const ptx::TensorMap& q, const ptx::TensorMap& k,
                                       const ptx::TensorMap& dense_k, const Places& places)
      : p_(p), q_(q), k_(k), dense_k_(dense_k), places_(places), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    prefill::TaskFeed feed(p_, places_);
    unsigned q_parity = 1;
    for (int slot = feed.next(); slot >= 0; slot = feed.next()) {
      const Task& task = places_.task(slot);
      const int head_tile = places_.head_tile(slot), kv_head = head_tile * p_.heads_of_tile / p_.group;
      const Line line(task.num_cached, task.first_key, task.end_key);
      Pages pages = ask(task, tile_at(task, line, task.tile_end - 1));
      for (int i = task.tile_end - 1; i >= task.tile_begin; --i) {
        Pages next{};
        if (i > task.tile_begin) next = ask(task, tile_at(task, line, i - 1));
        load(task, tile_at(task, line, i), kv_head, pages);
        pages = next;
        if (i == task.tile_end - 1) {
          ptx::wait_phase(places_.q_empty(), q_parity);
          q_parity ^= 1;
          load_queries(p_, places_, q_, task, head_tile);
        }
      }
    }
  }

 private:
  // Of the keys lane and lane + 32 of a tile.
  struct Pages {
    int of[2];
  };
  __device__ __forceinline__ Pages ask(const Task& task, const Tile& tile) const {
    Pages pages{};
    if (!tile.cached) return pages;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = tile.start + lane_ + 32 * i;
      pages.of[i] = key >= tile.low && key < tile.high ? prefill::find_slot(p_, task.batch, key, false).page : -1;
    }
    return pages;
  }

  __device__ __forceinline__ void load(const Task& task, const Tile& tile, int kv_head, const Pages& pages) {
    const Turn turn = turn_;
    turn_.next<Config::kStages>();
    const bool whole = tile.low == tile.start && tile.high == tile.start + Config::kKeys;
    // Boxes that hold a key which some row may see.
    const int shift = tile.cached ? p_.box_shift : 6, keys = 1 << shift;
    const int first = (tile.low - tile.start) >> shift,
              count = tile.low < tile.high ? ((tile.high - tile.start + keys - 1) >> shift) - first : 0;
    ptx::wait_phase(places_.k_empty(turn.stage, kKeysOnly), turn.parity ^ 1);
    note_hidden(turn.stage, task, tile, pages);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (part == 1 || part == 3) ptx::wait_phase(places_.k_empty(turn.stage, half_of(part)), turn.parity ^ 1);
      const Part channels = part_at(part);
      if (channels.count == 0) continue;
      const unsigned barrier = whole ? places_.k_full(turn.stage, part) : places_.edge();
      if (lane_ == 0) ptx::arrive_expecting(barrier, channels.count * count * keys * 128);
      __syncwarp();
      const int copies = channels.count * count;
#pragma unroll 1
      for (int i = 0; i < (copies + 31) / 32; ++i) {
        const int copy = 32 * i + lane_, chunk = channels.chunk + copy % channels.count,
                  box = first + copy / channels.count, page = page_of(pages, min(box * keys, Config::kKeys - 1), tile);
        if (copy >= copies) continue;
        const unsigned to = places_.k(turn.stage) + chunk * Config::kChunkBytes + box * keys * 128;
        if (tile.cached) {
          // Beyond the pages there is nothing: the copy brings zeros.
          const int outer = prefill::is_there(p_, page) ? page : static_cast<int>(p_.num_pages);
          ptx::copy_box(to, k_, barrier, 64 * chunk, kv_head, prefill::slot_in_page(p_, tile.start + box * keys), outer);
        } else {
          const int row = static_cast<int>(task.kv_row) + tile.start - task.num_cached;
          ptx::copy_box(to, dense_k_, barrier, 64 * chunk, kv_head, row, p_.kv_flat ? 0 : task.batch);
        }
      }
      __syncwarp();
      if (!whole) {
        ptx::wait_phase(places_.edge(), edge_parity_);
        edge_parity_ ^= 1;
        for (int i = 0; i < channels.count; ++i) {
          const unsigned at = places_.k(turn.stage) + (channels.chunk + i) * Config::kChunkBytes;
          clear_rows(at, 0, tile.low - tile.start);
          clear_rows(at, tile.high - tile.start, Config::kKeys);
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane_ == 0) ptx::arrive(places_.k_full(turn.stage, part));
        __syncwarp();
      }
    }
  }

  // The page of key x of the tile, some lane's.
  __device__ __forceinline__ static int page_of(const Pages& pages, int x, const Tile& tile) {
    // A box may begin before the first key that is visible, and its page has been asked for that.
    x = max(x, tile.low - tile.start);
    const int low = __shfl_sync(0xffffffffu, pages.of[0], x % 32), high = __shfl_sync(0xffffffffu, pages.of[1], x % 32);
    return x < 32 ? low : high;
  }

  // Tells the math groups which keys nobody sees, or lie on pages that are not there.
  __device__ __forceinline__ void note_hidden(int stage, const Task& task, const Tile& tile, const Pages& pages) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = tile.start + lane_ + 32 * i;
      const bool seen =
          key >= tile.low && key < tile.high && (!tile.cached || prefill::is_there(p_, pages.of[i]));
      const unsigned bits = __ballot_sync(0xffffffffu, !seen);
      if (lane_ < 8) ptx::store_shared_u8(places_.note(stage) + 8 * i + lane_, bits >> (4 * lane_) & 15);
    }
    if (lane_ == 0) note_edge(p_, places_, stage, task, tile);
    __syncwarp();
  }

  // Swizzling stays within a row.
  __device__ __forceinline__ void clear_rows(unsigned at, int begin, int end) const {
#pragma unroll 1
    for (int i = 8 * begin + lane_; i < 8 * end; i += 32) ptx::store_shared_zero(at + 16 * i);
  }

  const PrefillParams& p_;
  const ptx::TensorMap &q_, &k_, &dense_k_;
  const Places& places_;
  const int lane_;
  Turn turn_;
  unsigned edge_parity_ = 0;
};

}  // namespace attune::mla
