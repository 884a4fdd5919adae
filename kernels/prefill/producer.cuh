// SPDX-License-Identifier: Apache-2.0
// The TMA producer. One warp takes work tiles from the list and copies q and K, tile by tile, from the last to the
// first; it copies V too, unless a second warp does. Producers run ahead of the consumer warps as far as the stages
// allow, also into the next work tiles.
//
// In a tile at an edge, rows of V that the block may not see can hold anything. P is 0 there, but 0 * NaN is NaN, so
// the producer zeroes these rows before it commits the tile. Rows of K need no zeros, because their scores are masked.
#pragma once

#include "prefill/shared_storage.cuh"
#include "prefill/xpacked.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill {

// Tensor maps [.., rows, heads, channels]. A box has one line of channels.
struct Maps {
  const ptx::TensorMap &q, &k, &v, &dense_k, &dense_v;
};

class Producer {
 public:
  __device__ __forceinline__ Producer(const WorkTileParams& p, const Maps& maps, const Smem& smem)
      : p_(p), maps_(maps), smem_(smem), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    TileScheduler<Smem, Config::kCluster, Config::kCached && Config::kCluster == 1, false, Config::kRowPairs> scheduler(
        p_, smem_);
    for (int slot = scheduler.next(); slot >= 0; slot = scheduler.next()) load(slot);
  }

  // The second producer warp, for V.
  __device__ __forceinline__ void run_v() {
    for (PipelineState slot;; slot.next<kernels::kWorkSlots>()) {
      ptx::wait_phase(smem_.work_full(slot.stage), slot.phase);
      const int head_tile = smem_.head_tile(slot.stage);
      if (head_tile == kNoMoreWork) return;
      const WorkTile& work = smem_.work(slot.stage);
      const Tiles tiles(work.num_cached, work.first_key, work.end_key);
      int page = prefetch_page(work, tile_at(work, tiles, work.tile_end - 1), true);
      for (int i = work.tile_end - 1; i >= work.tile_begin; --i) {
        int next = 0;
        if (i > work.tile_begin) next = prefetch_page(work, tile_at(work, tiles, i - 1), true);
        load_v(work, kv_head_of(head_tile), tile_at(work, tiles, i), page);
        page = next;
      }
      __syncwarp();
      if (lane_ == 0) ptx::arrive(smem_.work_empty(slot.stage));
    }
  }

 protected:
  __device__ __forceinline__ void load(int slot) {
    const WorkTile& work = smem_.work(slot);
    const int head_tile = smem_.head_tile(slot);
    if (Config::kOverlapNextQK && lane_ == 0)
      smem_.out_base(slot) =
          common::row_offset(p_, work.batch, work.q_begin, work.token_begin, head_tile * p_.heads_of_tile,
                             p_.out_batch_stride, p_.out_row_stride, p_.out_head_stride);
    const int kv_head = kv_head_of(head_tile), last = work.tile_end - 1;
    const Tiles tiles(work.num_cached, work.first_key, work.end_key);
    int page = prefetch_page(work, tile_at(work, tiles, last), false), page_before = page;
    for (int i = last; i >= work.tile_begin; --i) {
      int next = 0;
      if (i > work.tile_begin) next = prefetch_page(work, tile_at(work, tiles, i - 1), false);
      const Tile tile = tile_at(work, tiles, i);
      const bool both = kLoadsKvTogether && tile.cached;
      // With two stages of q, the full barrier of the first K counts the bytes of q, so that the consumer warps wait
      // once.
      const bool with_q = Config::kOverlapNextQK && i == last;
      const unsigned q_full = Config::kOverlapNextQK ? smem_.k_full(k_pipe_.stage) : smem_.q_full();
      if (with_q) acquire_q();
      if (both) {
        load_k_and_v(work, kv_head, tile, page);
      } else {
        load_k(work, kv_head, tile, page, with_q ? q_bytes() : 0);
      }
      if (i == last) {
        if (!Config::kOverlapNextQK) {
          acquire_q();
          expect_q_bytes(q_full);
        }
        load_q(work, head_tile, q_full);
        q_pipe_.next<Config::kQueryStages>();
      } else if (!Config::kTwoProducerWarps && !Config::kQuantized) {
        load_v_of(work, kv_head, tile_at(work, tiles, i + 1), page_before);
      }
      if (Config::kQuantized && !both) load_v_of(work, kv_head, tile, page);
      page_before = page, page = next;
    }
    if (!Config::kTwoProducerWarps && !Config::kQuantized)
      load_v_of(work, kv_head, tile_at(work, tiles, work.tile_begin), page_before);
  }
  __device__ __forceinline__ void load_q_alone(const WorkTile& work, int head_tile) {
    acquire_q();
    expect_q_bytes(smem_.q_full());
    load_q(work, head_tile, smem_.q_full());
    q_pipe_.next<Config::kQueryStages>();
  }
  // page: prefetched for K.
  __device__ __forceinline__ void load_v_of(const WorkTile& work, int kv_head, const Tile& tile, int page) {
    load_v(work, kv_head, tile, p_.v_page_table.data != nullptr ? prefetch_page(work, tile, true) : page);
  }

  __device__ __forceinline__ int kv_head_of(int head_tile) const { return head_tile * p_.heads_of_tile / p_.group; }

  __device__ __forceinline__ int q_bytes() const {
    return Config::kBlocksQk * 128 * p_.heads_of_tile * p_.tokens_of_tile / (Config::kRowPairs ? 2 : 1);
  }
  __device__ __forceinline__ void acquire_q() const {
    ptx::wait_phase(smem_.q_empty(q_pipe_.stage), q_pipe_.phase ^ 1);
    if (Config::kStoreOutThroughQ) ptx::fence_async_proxy();  // consumer warps have written to that stage
  }
  __device__ __forceinline__ void expect_q_bytes(unsigned full) const {
    if (ptx::elect()) ptx::arrive_expecting(full, q_bytes());
    __syncwarp();
  }
  __device__ __forceinline__ void load_q(const WorkTile& work, int head_tile, unsigned full) {
    const int row = static_cast<int>(work.q_row) + work.token_begin, batch = p_.q_flat ? 0 : work.batch;
    const int head = head_tile * p_.heads_of_tile;
    const unsigned to = smem_.q(q_pipe_.stage);
    if (ptx::elect()) {
#pragma unroll
      for (int i = 0; i < Config::kBlocksQk; ++i) {
        ptx::tma_load(to + i * Config::kRows * 128, maps_.q, full, Config::kChannelsPerLine * i, head, row, batch);
      }
    }
    __syncwarp();
  }

  // The TMA boxes of a cached tile: first..first + count - 1, with `keys` keys each. Lanes box, box + kBoxLanes, ..
  // share a box, one lane for each block of channels.
  struct Boxes {
    int first, count, keys;
  };
  static constexpr int kMostBlocks = Config::kXpacked                       ? 1
                                     : Config::kBlocksQk > Config::kBlocksV ? Config::kBlocksQk
                                                                            : Config::kBlocksV;
  // 8-bit K and V are copied together, by half of the lanes each: the lanes' copies are issued one after the other, and
  // all other work is the same for both.
  static constexpr bool kLoadsKvTogether =
      Config::kQuantized && (Config::kXpacked || (Config::kHeadDimQk <= 128 && Config::kHeadDimV <= 128));
  static constexpr int kBoxLanes = kLoadsKvTogether ? 16 : kMostBlocks == 1 ? 32 : kMostBlocks == 2 ? 16 : 8;

  __device__ __forceinline__ Boxes boxes_of(const Tile& tile) const {
    const int first = (tile.low - tile.start) >> p_.box_shift, keys = 1 << p_.box_shift;
    return {first, ((tile.high - tile.start + keys - 1) >> p_.box_shift) - first, keys};
  }
  __device__ __forceinline__ Slot find_box(const WorkTile& work, const Tile& tile, int box, bool values) const {
    return find_slot(p_, work.batch, tile.start + (box << p_.box_shift), values);
  }
  // The page of this lane's first box. It is requested one tile ahead, to hide the latency of the load.
  __device__ __forceinline__ int prefetch_page(const WorkTile& work, const Tile& tile, bool values) const {
    if (!(Config::kCached && tile.cached)) return 0;
    const Boxes b = boxes_of(tile);
    if (kLoadsKvTogether && loads_v()) values = true;
    return find_box(work, tile, b.first + min(lane_ % kBoxLanes, b.count - 1), values).page;
  }

  // Whether this block copies a line of channels. In a cluster the other block copies every second line; if the number
  // of lines is odd, the blocks alternate in copying more.
  __device__ __forceinline__ static bool copies(const Tile& tile, int line) {
    return Config::kCluster == 1 || (line + tile.start / Config::kKeys) % 2 == ptx::cluster_rank();
  }
  // One box, to this block, or to both blocks of a cluster.
  __device__ __forceinline__ static void copy_box(unsigned to, const ptx::TensorMap& map, unsigned barrier, int c0,
                                                  int c1, int c2, int c3) {
    if constexpr (Config::kCluster == 1) {
      ptx::tma_load(to, map, barrier, c0, c1, c2, c3);
    } else {
      ptx::tma_load_multicast((1u << Config::kCluster) - 1, to, map, barrier, c0, c1, c2, c3);
    }
  }

  // Copies a tile of dense keys, which is one box. more: further bytes that the barrier expects.
  template <int kBlocks>
  __device__ __forceinline__ void copy_dense(const WorkTile& work, const Tile& tile, const ptx::TensorMap& map,
                                             unsigned to, unsigned barrier, int kv_head, int more) const {
    const int outer = p_.kv_flat ? 0 : work.batch, row = static_cast<int>(work.kv_row) + tile.start - work.num_cached;
    const bool any = tile.low < tile.high;
    if (ptx::elect()) {
      ptx::arrive_expecting(barrier, (any ? kBlocks * Config::kKeys * 128 : 0) + more);
      if (any) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (copies(tile, i))
            copy_box(to + i * Config::kKeys * 128, map, barrier, Config::kChannelsPerLine * i, kv_head, row, outer);
        }
      }
    }
    __syncwarp();
  }

  // Copies a cached tile: kBlocks boxes of kChannels channels, in rows of kPitch bytes. page: from prefetch_page().
  template <int kBlocks, int kPitch, int kChannels>
  __device__ __forceinline__ void copy_cached(const WorkTile& work, const Tile& tile, int page, bool values,
                                              const ptx::TensorMap& map, unsigned to, unsigned barrier,
                                              int kv_head) const {
    const Boxes b = boxes_of(tile);
    const int block = lane_ / kBoxLanes;
    if (lane_ == 0) ptx::arrive_expecting(barrier, b.count * kBlocks * b.keys * kPitch);
    __syncwarp();
    if (block < kBlocks && copies(tile, block)) {
#pragma unroll 1
      for (int i = lane_ % kBoxLanes; i < b.count; i += kBoxLanes) {
        const int box = b.first + i;
        if (i >= kBoxLanes) page = find_box(work, tile, box, values).page;
        // An invalid page becomes the first one beyond the tensor, which the TMA fills with zeros.
        const int outer = page_exists(p_, page) ? page : static_cast<int>(p_.num_pages);
        copy_box(to + box * b.keys * kPitch + block * Config::kKeys * kPitch, map, barrier, kChannels * block, kv_head,
                 slot_in_page(p_, tile.start + box * b.keys), outer);
      }
    }
    __syncwarp();
  }
  // Copies an x-packed tile, one box for each lane: K in groups of 8 keys, V in groups of 16, with all channels each.
  __device__ __forceinline__ void copy_packed(const WorkTile& work, const Tile& tile, int page, bool values,
                                              const ptx::TensorMap& map, unsigned to, unsigned barrier,
                                              int kv_head) const {
    static_assert(Config::kKeys / 16 <= 32);
    const int key_bytes = values ? Config::kXpackedVBytes : Config::kXpackedKBytes;
    const Boxes b = boxes_of(tile);
    if (lane_ == 0) ptx::arrive_expecting(barrier, b.count * b.keys * key_bytes);
    __syncwarp();
    if (lane_ < b.count) {
      const int key = (b.first + lane_) * b.keys;
      const int outer = page_exists(p_, page) ? page : static_cast<int>(p_.num_pages);
      ptx::tma_load(to + key * key_bytes, map, barrier, 0, 0, slot_in_page(p_, tile.start + key) / (values ? 16 : 8),
                    kv_head, outer);
    }
    __syncwarp();
  }
  template <int kBlocks>
  __device__ __forceinline__ void copy(const WorkTile& work, const Tile& tile, int page, bool values, unsigned to,
                                       unsigned barrier, int kv_head, int more = 0) const {
    if (Config::kXpackedK && tile.cached) {
      copy_packed(work, tile, page, values, values ? maps_.v : maps_.k, to, barrier, kv_head);
    } else if (Config::kCached && tile.cached) {
      copy_cached<kBlocks, 128, 64>(work, tile, page, values, values ? maps_.v : maps_.k, to, barrier, kv_head);
    } else {
      copy_dense<kBlocks>(work, tile, values ? maps_.dense_v : maps_.dense_k, to, barrier, kv_head, more);
    }
  }

  __device__ __forceinline__ bool loads_v() const { return lane_ >= 16; }

  __device__ __forceinline__ void load_k_and_v(const WorkTile& work, int kv_head, const Tile& tile, int page) {
    const PipelineState k = raw_pipe_;
    raw_pipe_.next<Config::kRawStages>();
    const PipelineState v = raw_pipe_;
    last_raw_ = v;
    raw_pipe_.next<Config::kRawStages>();
    k_pipe_.next<Config::kStages>(), v_pipe_.next<Config::kValueStages>();
    ptx::wait_phase(smem_.raw_empty(k.stage), k.phase ^ 1);
    write_tile_mask(smem_.raw_mask(k.stage), work, tile, page);
    ptx::wait_phase(smem_.raw_empty(v.stage), v.phase ^ 1);
    const Boxes b = boxes_of(tile);
    const int stage = loads_v() ? v.stage : k.stage;
    const ptx::TensorMap& map = loads_v() ? maps_.v : maps_.k;
    const unsigned to = smem_.raw(stage), full = smem_.raw_full(stage);
    const int key_bytes = !Config::kXpacked ? kernels::kRawPitch : loads_v() ? Config::kChannels : Config::kHeadDimQk;
    if (lane_ % kBoxLanes == 0) ptx::arrive_expecting(full, b.count * b.keys * key_bytes);
    __syncwarp();
#pragma unroll 1
    for (int i = lane_ % kBoxLanes; i < b.count; i += kBoxLanes) {
      const int box = b.first + i;
      if (i >= kBoxLanes) page = find_box(work, tile, box, loads_v()).page;
      const int outer = page_exists(p_, page) ? page : static_cast<int>(p_.num_pages);
      const int slot = slot_in_page(p_, tile.start + box * b.keys);
      if constexpr (Config::kXpacked) {
        ptx::tma_load(to + box * b.keys * key_bytes, map, full, loads_v() ? slot : 0, 0, loads_v() ? 0 : slot / 8,
                      kv_head, outer);
      } else {
        ptx::tma_load(to + box * b.keys * key_bytes, map, full, 0, kv_head, slot, outer);
      }
    }
    __syncwarp();
  }

  // Copies an 8-bit tile to a raw stage, for the dequant warps or, with fp8, for the warps that transpose V.
  template <int kHeadDim, bool kValues>
  __device__ __forceinline__ void load_quantized(const WorkTile& work, int kv_head, const Tile& tile, int page) {
    const PipelineState pipe = raw_pipe_;
    if (Config::kQuantized) last_raw_ = pipe;
    raw_pipe_.next<Config::kRawStages>();
    ptx::wait_phase(smem_.raw_empty(pipe.stage), pipe.phase ^ 1);
    if constexpr (!kValues) write_tile_mask(smem_.raw_mask(pipe.stage), work, tile, page);
    constexpr int kBlocks = kernels::raw_blocks(kHeadDim);
    const unsigned to = smem_.raw(pipe.stage), full = smem_.raw_full(pipe.stage);
    if constexpr (Config::kFp8) {
      copy_dense<kBlocks>(work, tile, maps_.dense_v, to, full, kv_head, 0);
    } else {
      copy_cached<kBlocks, kernels::kRawPitch, 128>(work, tile, page, kValues, kValues ? maps_.v : maps_.k, to, full,
                                                    kv_head);
    }
  }

  // more: further bytes that the barrier expects if the tile is dense.
  __device__ __forceinline__ void load_k(const WorkTile& work, int kv_head, const Tile& tile, int page, int more) {
    const PipelineState pipe = k_pipe_;
    k_pipe_.next<Config::kStages>();
    if (Config::kQuantized && tile.cached) return load_quantized<Config::kHeadDimQk, false>(work, kv_head, tile, page);
    // Waits until the dequant warps have filled all earlier stages, so that the phases of K and V never lag by two.
    if (Config::kQuantized) ptx::wait_phase(smem_.raw_empty(last_raw_.stage), last_raw_.phase);
    ptx::wait_phase(smem_.k_empty(pipe.stage), pipe.phase ^ 1);
    write_tile_mask(smem_.mask(pipe.stage), work, tile, page);
    copy<Config::kBlocksQk>(work, tile, page, false, smem_.k(pipe.stage), smem_.k_full(pipe.stage), kv_head, more);
  }

  __device__ __forceinline__ void load_v(const WorkTile& work, int kv_head, const Tile& tile, int page) {
    const PipelineState pipe = v_pipe_;
    v_pipe_.next<Config::kValueStages>();
    if (Config::kFp8 || (Config::kQuantized && tile.cached))
      return load_quantized<Config::kHeadDimV, true>(work, kv_head, tile, page);
    const unsigned full = smem_.v_full(pipe.stage), at = smem_.v(pipe.stage), edge = smem_.edge(pipe.stage);
    const bool whole = tile.low == tile.start && tile.high == tile.start + Config::kKeys;
    ptx::wait_phase(smem_.v_empty(pipe.stage), pipe.phase ^ 1);
    copy<Config::kBlocksV>(work, tile, page, true, at, whole ? full : edge, kv_head);
    if (whole) return;
    const int bit = Config::kCluster > 1 ? pipe.stage : 0;
    ptx::wait_phase(edge, edge_phases_ >> bit & 1);
    edge_phases_ ^= 1u << bit;
    if (Config::kXpackedK && tile.cached) {
      zero_v_columns<32>(at, tile.low - tile.start, tile.high - tile.start, lane_);
    } else {
      zero_v_rows(at, 0, tile.low - tile.start);
      zero_v_rows(at, tile.high - tile.start, Config::kKeys);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::arrive(full);
    __syncwarp();
  }

  // Writes the TileMask: which keys are on pages that do not exist.
  __device__ __forceinline__ void write_tile_mask(unsigned at, const WorkTile& work, const Tile& tile, int page) const {
    if constexpr (!Config::kCached) return;
    bool bad = false;
    if (tile.cached) {
      const Boxes b = boxes_of(tile);
      bad = lane_ < kBoxLanes && !page_exists(p_, page);
#pragma unroll 1
      for (int i = lane_ + kBoxLanes; i < b.count; i += 32)
        bad |= !page_exists(p_, find_box(work, tile, b.first + i, false).page);
      if (p_.v_page_table.data != nullptr) {
#pragma unroll 1
        for (int i = lane_; i < b.count; i += 32) bad |= !page_exists(p_, find_box(work, tile, b.first + i, true).page);
      }
    }
    const bool any = __any_sync(0xffffffffu, bad) != 0;
    // racecheck reports this with Softmax::mask_edge(): it does not model a barrier that copies complete.
    if (lane_ == 0) ptx::store_shared_u32(at, any ? 1u : 0u);
    if (any) mask_boxes(at, work, tile);
    __syncwarp();
  }
  __device__ __forceinline__ void mask_boxes(unsigned at, const WorkTile& work, const Tile& tile) const {
    // Each lane writes the word of 32 keys. This is rare, so the code is simple rather than fast.
    if (lane_ < Config::kKeys / 32) {
      const Boxes b = boxes_of(tile);
      unsigned bits = 0;
#pragma unroll 1
      for (int key = 0; key < 32; ++key) {
        const int box = (32 * lane_ + key) >> p_.box_shift;
        if (box < b.first || box >= b.first + b.count) continue;
        if (!(page_exists(p_, find_box(work, tile, box, false).page) &&
              has_value(p_, work.batch, tile.start + (box << p_.box_shift))))
          bits |= 1u << key;
      }
      ptx::store_shared_u32(at + 4 + 4 * lane_, bits);
    }
  }

  // Zeroes rows [begin, end) of V. The swizzle permutes within a row only.
  __device__ __forceinline__ void zero_v_rows(unsigned at, int begin, int end) {
#pragma unroll 1
    for (int i = lane_; i < (end - begin) * 8; i += 32) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksV; ++block)
        ptx::store_shared_zero(at + block * Config::kKeys * 128 + begin * 128 + i * 16);
    }
  }

  const WorkTileParams& p_;
  const Maps& maps_;
  const Smem& smem_;
  const int lane_;
  PipelineState q_pipe_, k_pipe_, v_pipe_, raw_pipe_;
  PipelineState last_raw_{0, 1};  // the last raw stage in use; initially one that counts as read
  unsigned edge_phases_ = 0;  // a bit for each edge barrier
};

}  // namespace attune::prefill
