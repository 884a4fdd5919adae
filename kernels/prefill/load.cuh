// SPDX-License-Identifier: Apache-2.0
// The producer: one warp that takes tasks from the list and has the TMA copy q, then K and V tile by tile, from the last
// tile to the first. It runs ahead of the math warps as far as the rings allow, into the next tasks too.
//
// Where a tile reaches beyond the keys that the block may see, the rows of V there may be anything, NaN included, and
// would be multiplied by weights of 0. They become zero before the tile is handed over; rows of K need not, because
// their scores are replaced.
#pragma once

#include "prefill/config.cuh"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::prefill {

// [.., rows, heads, channels] each, as copies of boxes of 64 channels.
struct Maps {
  const ptx::TensorMap &q, &k, &v, &dense_k, &dense_v;
};

class Loader {
 public:
  __device__ __forceinline__ Loader(const PrefillParams& p, const Maps& maps, const Places& places)
      : p_(p), maps_(maps), places_(places), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    const int heads_at_a_time = p_.list->heads_at_a_time, num_tasks = p_.list->num_tasks;
    const int num_items = num_tasks * p_.num_head_tiles;  // the host refuses more than 2^31
    int item = static_cast<int>(blockIdx.x);
    Turn slot;
    unsigned q_parity = 1;
    while (item < num_items) {
      // All tasks for the first few head tiles, then for the next.
      const int section = item / (num_tasks * heads_at_a_time), first_head = section * heads_at_a_time;
      const int within = item - section * num_tasks * heads_at_a_time;
      const int heads = min(heads_at_a_time, p_.num_head_tiles - first_head);
      const int head_tile = first_head + within % heads;
      int next = 0;
      if (lane_ == 0) next = static_cast<int>(gridDim.x + ptx::count_arrival(&p_.list->next_item, num_items - 1));
      load(publish(p_.tasks + within / heads, head_tile, slot), head_tile, q_parity);
      item = __shfl_sync(0xffffffffu, next, 0);
    }
    publish(nullptr, 0, slot);
  }

 private:
  // Hands a task to the math warps; null: there are no more. It stays readable until the slot is needed again.
  __device__ __forceinline__ const Task& publish(const Task* from, int head_tile, Turn& slot) {
    constexpr int kVectors = sizeof(Task) / 16;
    Task& task = places_.task(slot.stage);
    uint4 part{};
    if (from != nullptr && lane_ < kVectors) part = reinterpret_cast<const uint4*>(from)[lane_];
    ptx::wait_phase(places_.task_empty(slot.stage), slot.parity ^ 1);
    if (lane_ < kVectors) reinterpret_cast<uint4*>(&task)[lane_] = part;
    __syncwarp();
    if (lane_ == 0) {
      if (from == nullptr) task.batch = -1;
      places_.head_tile(slot.stage) = head_tile;
      ptx::arrive(places_.task_full(slot.stage));
    }
    __syncwarp();
    slot.next<kernels::kTaskSlots>();
    return task;
  }

  __device__ __forceinline__ void load(const Task& task, int head_tile, unsigned& q_parity) {
    const int num_tiles = task.tile_end - task.tile_begin;
    if (num_tiles <= 0) return;
    const int kv_head = head_tile * p_.heads_of_tile / p_.group;
    const TileLine<Config::kKeys> line(task.num_cached, task.first_key, task.end_key);

    ptx::wait_phase(places_.q_empty(), q_parity);
    q_parity ^= 1;
    load_queries(task, head_tile);
    Tile last = tile_at(task, line, task.tile_end - 1);
    load_keys(task, kv_head, last);
    for (int i = task.tile_end - 2; i >= task.tile_begin; --i) {
      const Tile tile = tile_at(task, line, i);
      load_keys(task, kv_head, tile);
      load_values(task, kv_head, last);
      last = tile;
    }
    load_values(task, kv_head, last);
  }

  __device__ __forceinline__ void load_queries(const Task& task, int head_tile) {
    if (lane_ == 0) {
      ptx::arrive_expecting(places_.q_full(),
                            Config::kBlocksQk * 128 * p_.heads_of_tile * p_.tokens_of_tile);
      const int row = static_cast<int>(task.q_row) + task.token_begin, batch = p_.q_flat ? 0 : task.batch;
#pragma unroll
      for (int i = 0; i < Config::kBlocksQk; ++i) {
        ptx::copy_box(places_.q() + i * Config::kRows * 128, maps_.q, places_.q_full(), 64 * i,
                      head_tile * p_.heads_of_tile, row, batch);
      }
    }
    __syncwarp();
  }

  // Codes go to the converters, who hand them on as K and V.
  template <int kHeadDim, bool kValues>
  __device__ __forceinline__ void load_codes(const Task& task, int kv_head, const Tile& tile) {
    constexpr int kPitch = kernels::raw_pitch(kHeadDim);
    const Turn turn = raw_turn_;
    raw_turn_.next<Config::kRawStages>();
    const unsigned full = places_.raw_full(turn.stage);
    Boxes boxes(*this, task, tile, kValues);
    ptx::wait_phase(places_.raw_empty(turn.stage), turn.parity ^ 1);
    if constexpr (!kValues) note_hidden(places_.raw_hidden(turn.stage), boxes, tile);
    if (lane_ == 0)
      ptx::arrive_expecting(full, boxes.count * kernels::raw_blocks(kHeadDim) * boxes.keys * kPitch);
    __syncwarp();
    copy<kernels::raw_blocks(kHeadDim), kPitch, 128>(boxes, kValues ? maps_.v : maps_.k, places_.raw(turn.stage), full,
                                                     kv_head);
  }

  __device__ __forceinline__ void load_keys(const Task& task, int kv_head, const Tile& tile) {
    const Turn turn = k_turn_;
    k_turn_.next<Config::kStages>();
    if (Config::kConverts && tile.cached) return load_codes<Config::kHeadDimQk, false>(task, kv_head, tile);
    const unsigned full = places_.k_full(turn.stage);
    // Asks for page ids while the stage is still in use.
    Boxes boxes(*this, task, tile, false);
    ptx::wait_phase(places_.k_empty(turn.stage), turn.parity ^ 1);
    note_hidden(places_.hidden(turn.stage), boxes, tile);
    if (lane_ == 0) ptx::arrive_expecting(full, boxes.count * Config::kBlocksQk * boxes.keys * 128);
    __syncwarp();
    copy<Config::kBlocksQk, 128, 64>(boxes, tile.cached ? maps_.k : maps_.dense_k, places_.k(turn.stage), full, kv_head);
  }

  __device__ __forceinline__ void load_values(const Task& task, int kv_head, const Tile& tile) {
    const Turn turn = v_turn_;
    v_turn_.next<Config::kStages>();
    const unsigned full = places_.v_full(turn.stage), at = places_.v(turn.stage);
    if (Config::kConverts && tile.cached) return load_codes<Config::kHeadDimV, true>(task, kv_head, tile);
    Boxes boxes(*this, task, tile, true);
    const bool whole = tile.low == tile.start && tile.high == tile.start + Config::kKeys;
    const unsigned barrier = whole ? full : places_.edge();
    ptx::wait_phase(places_.v_empty(turn.stage), turn.parity ^ 1);
    if (lane_ == 0) ptx::arrive_expecting(barrier, boxes.count * Config::kBlocksV * boxes.keys * 128);
    __syncwarp();
    copy<Config::kBlocksV, 128, 64>(boxes, tile.cached ? maps_.v : maps_.dense_v, at, barrier, kv_head);
    if (whole) return;
    ptx::wait_phase(places_.edge(), edge_parity_);
    edge_parity_ ^= 1;
    clear_rows(at, 0, tile.low - tile.start);
    clear_rows(at, tile.high - tile.start, Config::kKeys);
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::arrive(full);
    __syncwarp();
  }

  // The copies that a tile needs: boxes first..first + count - 1 of `keys` keys each. This lane has page ids of boxes
  // first + lane_, first + lane_ + 32 ..; others are looked up when their turn comes.
  struct Boxes {
    int first, count, keys;
    int row, outer;  // of this lane's first box

    __device__ __forceinline__ Boxes(const Loader& loader, const Task& task, const Tile& tile,
                                     bool values) {
      const PrefillParams& p = loader.p_;
      keys = Config::kKeys, first = 0, count = 1;
      if (Config::kCached && tile.cached) {
        keys = p.box_keys;
        first = (tile.low - tile.start) / keys;
        count = (tile.high - tile.start + keys - 1) / keys - first;
      }
      task_ = &task, tile_ = &tile, values_ = values, loader_ = &loader;
      place(loader.lane_ % count, row, outer);
    }
    __device__ __forceinline__ void place(int i, int& its_row, int& its_outer) const {
      const Task& task = *task_;
      const Tile& tile = *tile_;
      const PrefillParams& p = loader_->p_;
      if (!(Config::kCached && tile.cached)) {
        its_row = static_cast<int>(task.kv_row) + tile.start - task.num_cached;
        its_outer = p.kv_flat ? 0 : task.batch;
        return;
      }
      const Slot s = slot_of(p, task.batch, tile.start + (first + i) * keys, values_);
      its_row = s.slot;
      // Beyond the pages there is nothing: the copy brings zeros.
      its_outer = s.page < 0 ? static_cast<int>(p.num_pages) : static_cast<int>(s.page);
    }

   private:
    const Task* task_;
    const Tile* tile_;
    bool values_;
    const Loader* loader_;
  };

  // kBlocks of kChannels, in rows of kPitch bytes.
  template <int kBlocks, int kPitch, int kChannels>
  __device__ __forceinline__ void copy(const Boxes& boxes, const ptx::TensorMap& map, unsigned at, unsigned barrier,
                                       int kv_head) {
    // Lane i has box i % count, and of it the blocks of channels i / count + k * (lanes / count).
    const int lanes = boxes.count <= 32 ? 32 / boxes.count : 1, mine = lane_ / boxes.count;
#pragma unroll 1
    for (int i = lane_ < boxes.count ? lane_ : lane_ % boxes.count; i < boxes.count; i += 32) {
      int row = boxes.row, outer = boxes.outer;
      if (i >= 32) boxes.place(i, row, outer);
      const unsigned to = at + (boxes.first + i) * boxes.keys * kPitch;
      if (mine < lanes) {
#pragma unroll 1
        for (int block = mine; block < kBlocks; block += lanes)
          ptx::copy_box(to + block * Config::kKeys * kPitch, map, barrier, kChannels * block, kv_head, row, outer);
      }
    }
    __syncwarp();
  }

  // Tells the math warps which keys lie on pages that are not there.
  __device__ __forceinline__ void note_hidden(unsigned at, const Boxes& boxes, const Tile& tile) {
    if constexpr (!Config::kCached) return;
    bool bad = false;
    if (tile.cached) {
#pragma unroll 1
      for (int i = lane_; i < boxes.count; i += 32) {
        int row = boxes.row, outer = boxes.outer;
        if (i >= 32) boxes.place(i, row, outer);
        bad |= outer >= p_.num_pages;
      }
    }
    const bool any = __any_sync(0xffffffffu, bad) != 0;
    if (lane_ == 0) ptx::store_shared_u32(at, any ? 1u : 0u);
    if (any) hide_boxes(at, boxes);
    __syncwarp();
  }
  __device__ __forceinline__ void hide_boxes(unsigned at, const Boxes& boxes) {
    // Word i / 32 of the tile's keys, one lane each: rare, so plain.
    if (lane_ < Config::kKeys / 32) {
      unsigned bits = 0;
#pragma unroll 1
      for (int key = 0; key < 32; ++key) {
        const int box = (32 * lane_ + key) / boxes.keys - boxes.first;
        if (box < 0 || box >= boxes.count) continue;
        int row, outer;
        boxes.place(box, row, outer);
        if (outer >= p_.num_pages) bits |= 1u << key;
      }
      ptx::store_shared_u32(at + 4 + 4 * lane_, bits);
    }
  }

  // Rows [begin, end) of V become zero; swizzling stays within a row.
  __device__ __forceinline__ void clear_rows(unsigned at, int begin, int end) {
#pragma unroll 1
    for (int i = lane_; i < (end - begin) * 8; i += 32) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksV; ++block)
        ptx::store_shared_zero(at + block * Config::kKeys * 128 + begin * 128 + i * 16);
    }
  }

  const PrefillParams& p_;
  const Maps& maps_;
  const Places& places_;
  const int lane_;
  Turn k_turn_, v_turn_, raw_turn_;
  unsigned edge_parity_ = 0;
};

}  // namespace attune::prefill
