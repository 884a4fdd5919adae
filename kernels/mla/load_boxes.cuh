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

// Whether rows of the block see different keys of a tile.
__device__ __forceinline__ bool is_edge(const PrefillParams& p, const Task& t, const Tile& tile) {
  const int position = t.num_keys - t.num_q + t.token_begin;
  return tile.start < prefill::first_visible(p, position + t.num_tokens - 1) ||
         tile.high > prefill::end_visible(p, t.num_keys, position);
}

// hidden: a bit for each key of the tile that nobody sees; start: its first key; edge: rows of the block see different keys.
__device__ __forceinline__ void store_note(const Places& places, int stage, unsigned long long hidden, int start,
                                           bool edge) {
  const unsigned words[4] = {static_cast<unsigned>(hidden), static_cast<unsigned>(hidden >> 32),
                             static_cast<unsigned>(start), edge ? 1u : 0u};
  ptx::store_shared_four(places.note(stage), words);
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
      const Plain plain = plain_tiles(task, line);
      const int begin = task.tile_begin, end = task.tile_end, batch = task.batch;
      for (int i = end - 1; i >= begin; --i) {
        if (plain.begin <= i && i < plain.end) {
          const int first = max(begin, plain.begin);
          for (; i >= first; --i) {
            const bool leads = i == end - 1;
            load_plain(batch, (line.cached_begin + i) * Config::kKeys, kv_head, leads || i == plain.end - 1, i > first);
            if (leads) queries(task, head_tile, q_parity);
          }
          ++i;
        } else {
          const Tile tile = tile_at(task, line, i);
          load(task, tile, kv_head, ask(task, tile));
          if (i == end - 1) queries(task, head_tile, q_parity);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void queries(const Task& task, int head_tile, unsigned& q_parity) const {
    ptx::wait_phase(places_.q_empty(), q_parity);
    q_parity ^= 1;
    load_queries(p_, places_, q_, task, head_tile);
  }

  // ---- tiles whose keys are all in the cache, and seen by all rows of the block

  struct Plain {
    int begin, end;
  };
  __device__ __forceinline__ Plain plain_tiles(const Task& t, const Line& line) const {
    const int position = t.num_keys - t.num_q + t.token_begin;
    const int low = max(t.first_key, prefill::first_visible(p_, position + t.num_tokens - 1));
    const int high = min(min(t.end_key, t.num_cached), prefill::end_visible(p_, t.num_keys, position));
    return {(low + Config::kKeys - 1) / Config::kKeys - line.cached_begin, high / Config::kKeys - line.cached_begin};
  }

  // start: the first key. fresh: it is the first of a run; more: the tile before it is to be loaded next.
  __device__ __forceinline__ void load_plain(int batch, int start, int kv_head, bool fresh, bool more) {
    const int shift = p_.box_shift, boxes = Config::kKeys >> shift;
    if (fresh) next_page_ = page_of_box(batch, start);
    const int page = next_page_;
    if (more) next_page_ = page_of_box(batch, start - Config::kKeys);
    const Turn turn = turn_;
    turn_.next<Config::kStages>();
    const bool absent = lane_ < boxes && !prefill::is_there(p_, page);
    // Beyond the pages there is nothing: a copy brings zeros.
    const int outer = absent ? static_cast<int>(p_.num_pages) : page,
              row = prefill::slot_in_page(p_, start + (lane_ % boxes << shift));
    ptx::wait_phase(places_.k_empty(turn.stage, kKeysOnly), turn.parity ^ 1);
    if (__any_sync(0xffffffffu, absent) || (noted_ >> turn.stage & 1) != 0) note_plain(turn.stage, absent);
    const unsigned to = places_.k(turn.stage);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Part channels = part_at(part);
      if (part == 1 || part == 3) ptx::wait_phase(places_.k_empty(turn.stage, half_of(part)), turn.parity ^ 1);
      if (channels.count == 0) continue;
      const unsigned barrier = places_.k_full(turn.stage, part);
      if (lane_ == 0) ptx::arrive_expecting(barrier, channels.count * Config::kChunkBytes);
      __syncwarp();
#pragma unroll 1
      for (int b = 0; b < boxes; ++b) {
        const int row_of_box = __shfl_sync(0xffffffffu, row, b), outer_of_box = __shfl_sync(0xffffffffu, outer, b);
        if (lane_ == 0) {
#pragma unroll
          for (int j = 0; j < channels.count; ++j) {
            ptx::copy_box(to + (channels.chunk + j) * Config::kChunkBytes + (b << shift) * 128, k_, barrier,
                          64 * (channels.chunk + j), kv_head, row_of_box, outer_of_box);
          }
        }
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ int page_of_box(int batch, int start) const {
    return prefill::find_slot(p_, batch, start + (lane_ % (Config::kKeys >> p_.box_shift) << p_.box_shift), false).page;
  }
  __device__ __forceinline__ void note_plain(int stage, bool absent) {
    const unsigned boxes = __ballot_sync(0xffffffffu, absent);
    if (lane_ == 0) {
      unsigned long long hidden = 0;
      for (int b = 0; b < kMostBoxes; ++b)
        if ((boxes >> b & 1) != 0) hidden |= keys_between(b << p_.box_shift, (b + 1) << p_.box_shift);
      store_note(places_, stage, hidden, 0, false);
    }
    noted_ = boxes != 0 ? noted_ | 1u << stage : noted_ & ~(1u << stage);
    __syncwarp();
  }
  // ---- all others

  // Lanes 2 b and 2 b + 1 copy box b of a tile. Its page, or -1 where no key of it is to be read.
  static constexpr int kMostBoxes = 8;
  __device__ __forceinline__ int box() const { return lane_ / 2; }
  __device__ __forceinline__ int shift_of(const Tile& tile) const { return tile.cached ? p_.box_shift : 6; }
  __device__ __forceinline__ bool has_box(const Tile& tile) const {
    const int begin = tile.start + (box() << shift_of(tile));
    return box() < Config::kKeys >> shift_of(tile) && begin < tile.high && begin + (1 << shift_of(tile)) > tile.low;
  }
  __device__ __forceinline__ int ask(const Task& task, const Tile& tile) const {
    if (!tile.cached || !has_box(tile)) return -1;
    return prefill::find_slot(p_, task.batch, max(tile.start + (box() << p_.box_shift), tile.low), false).page;
  }

  __device__ __forceinline__ void load(const Task& task, const Tile& tile, int kv_head, int page) {
    const Turn turn = turn_;
    turn_.next<Config::kStages>();
    const bool whole = tile.low == tile.start && tile.high == tile.start + Config::kKeys, mine = has_box(tile);
    const int keys = 1 << shift_of(tile);
    const unsigned bytes = __popc(__ballot_sync(0xffffffffu, mine)) / 2 * keys * 128;
    const ptx::TensorMap& map = tile.cached ? k_ : dense_k_;
    const Origin from = origin_of(task, tile, page);
    const unsigned to = places_.k(turn.stage) + lane_ % 2 * Config::kChunkBytes + box() * keys * 128;
    ptx::wait_phase(places_.k_empty(turn.stage, kKeysOnly), turn.parity ^ 1);
    note(turn.stage, task, tile, page);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const Part channels = part_at(part);
      if (part == 1 || part == 3) ptx::wait_phase(places_.k_empty(turn.stage, half_of(part)), turn.parity ^ 1);
      if (channels.count == 0) continue;
      const unsigned barrier = whole ? places_.k_full(turn.stage, part) : places_.edge();
      if (lane_ == 0) ptx::arrive_expecting(barrier, channels.count * bytes);
      __syncwarp();
      if (mine && lane_ % 2 < channels.count) {
        ptx::copy_box(to + channels.chunk * Config::kChunkBytes, map, barrier, 64 * (channels.chunk + lane_ % 2), kv_head,
                      from.row, from.outer);
      }
      __syncwarp();
      if (!whole) clear_edge(turn.stage, part, tile);
    }
  }

  __device__ __forceinline__ void clear_edge(int stage, int part, const Tile& tile) {
    ptx::wait_phase(places_.edge(), edge_parity_);
    edge_parity_ ^= 1;
#pragma unroll 1
    for (int i = 0; i < part_at(part).count; ++i) {
      const unsigned at = places_.k(stage) + (part_at(part).chunk + i) * Config::kChunkBytes;
      clear_rows(at, 0, tile.low - tile.start);
      clear_rows(at, tile.high - tile.start, Config::kKeys);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.k_full(stage, part));
    __syncwarp();
  }

  // The two outer coordinates of the lane's box.
  struct Origin {
    int row, outer;
  };
  __device__ __forceinline__ Origin origin_of(const Task& task, const Tile& tile, int page) const {
    if (!tile.cached)
      return {static_cast<int>(task.kv_row) + tile.start - task.num_cached, p_.kv_flat ? 0 : task.batch};
    // Beyond the pages there is nothing: a copy brings zeros.
    return {prefill::slot_in_page(p_, tile.start + (box() << p_.box_shift)),
            prefill::is_there(p_, page) ? page : static_cast<int>(p_.num_pages)};
  }

  // Tells the math groups which keys nobody sees, or lie on pages that are not there.
  __device__ __forceinline__ void note(int stage, const Task& task, const Tile& tile, int page) {
    const bool absent = tile.cached && has_box(tile) && !prefill::is_there(p_, page);
    unsigned long long hidden = ~keys_between(tile.low - tile.start, tile.high - tile.start);
    if (__any_sync(0xffffffffu, absent)) {
#pragma unroll 1
      for (int b = 0; b < kMostBoxes; ++b) {
        if (__shfl_sync(0xffffffffu, absent ? 1 : 0, 2 * b) != 0)
          hidden |= keys_between(b << p_.box_shift, (b + 1) << p_.box_shift);
      }
    }
    if (lane_ == 0) store_note(places_, stage, hidden, tile.start, is_edge(p_, task, tile));
    noted_ |= 1u << stage;
    __syncwarp();
  }
  // Bits of the keys [begin, end) of a tile.
  __device__ __forceinline__ static unsigned long long keys_between(int begin, int end) {
    const auto before = [](int x) { return x >= Config::kKeys ? ~0ull : (1ull << x) - 1; };
    return before(end) & ~before(begin);
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
  unsigned noted_ = (1 << Config::kStages) - 1;  // stages whose note says something, a bit each
  int next_page_ = -1;                           // of the lane's box of the next plain tile
};

}  // namespace attune::mla
