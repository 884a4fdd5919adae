// SPDX-License-Identifier: Apache-2.0
// The TMA producer: four warps, one for each of the two stages and each half of V, so that a full region of one warp
// does not hold up the others. They copy tiles from the last to the first, and run ahead of the consumer warpgroups as
// far as the stages allow, into the next work tile too. The first warp also fetches work tiles and copies q.
//
// In a cluster, each of the two blocks multicasts every other chunk of a tile to both.
//
// Rows outside of the block's keys may hold anything, NaN included, and 0 * NaN in the PV GEMM would be NaN. They are
// set to zero before the tile is published.
#pragma once

#include "mla/producers/kv_source.cuh"
#include "mla/producers/work_tile_reader.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// masked: a bit for each key of the tile that no row sees; start: the tile's first key; needs_row_mask: rows see
// different keys.
__device__ __forceinline__ void store_mask(const Smem& smem, int stage, unsigned long long masked, int start,
                                           bool needs_row_mask) {
  const unsigned words[4] = {static_cast<unsigned>(masked), static_cast<unsigned>(masked >> 32),
                             static_cast<unsigned>(start), needs_row_mask ? 1u : 0u};
  ptx::store_shared_four(smem.mask(stage), words);
}

class TmaProducer {
 public:
  __device__ __forceinline__ TmaProducer(const WorkTileParams& p, const QueryMaps& q, const ptx::TensorMap& k,
                                         const ptx::TensorMap& dense_k, const Smem& smem)
      : p_(p), q_(q), k_(k), dense_k_(dense_k), smem_(smem), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {}

  __device__ __forceinline__ void run(const WorkTileReader::Scheduler::Prefetched& first_work) {
    WorkTileReader reader(p_, smem_, q_);
    for (reader.fetch_first(first_work); reader.has_work(); reader.advance()) {
      load_all(reader.work(), reader.head_tile() * p_.heads_of_tile / p_.group, [&] {
        reader.load_next_q();
        reader.fetch_next();
      });
    }
  }

 private:
  // The warp's stage and half of V. The first half comes together with the channels that only K has.
  __device__ __forceinline__ int stage() const { return warp_ % 2; }
  __device__ __forceinline__ bool second_half() const { return warp_ >= 2; }

  // after_first: called once, when the copies of the warp's first tile have been issued.
  template <class AfterFirst>
  __device__ __forceinline__ void load_all(const WorkTile& work, int kv_head, AfterFirst&& after_first) {
    // Tiles are numbered within the sequence, like a page's keys.
    const int skipped = work.first_key / Config::kBlockN, begin = work.tile_begin + skipped, batch = work.batch;
    const TileRange unmasked = unmasked_tiles(work);
    int i = work.tile_end + skipped - 1 - (has(kOddTiles) != (stage() != 0) ? 1 : 0);
    if ((work.tile_end - work.tile_begin) % 2 != 0) state_ ^= kOddTiles;
    bool first_unmasked = true, first = true;
    do {  // runs once even if the warp has no tile
      if (i < begin) {
      } else if (unmasked.begin <= i && i < unmasked.end) {
        load_unmasked(batch, i * Config::kBlockN, kv_head, first_unmasked, i - 2 >= max(begin, unmasked.begin));
        first_unmasked = false;
      } else {
        const KeyTiles key_tiles(work.num_cached, work.first_key, work.end_key);
        const Tile tile = tile_at(work, key_tiles, i - key_tiles.cached_begin);
        load(work, tile, kv_head, load_index(work, tile));
      }
      if (first) after_first();
      first = false;
      i -= 2;
    } while (i >= begin);
  }

  __device__ __forceinline__ void wait_empty(int half) const {
    ptx::wait_phase(smem_.k_empty(stage(), half), state_ & kPhase);
  }

  // ---- tiles whose keys are all in the cache and are seen by all rows of the M block

  struct TileRange {
    int begin, end;
  };
  __device__ __forceinline__ TileRange unmasked_tiles(const WorkTile& t) const {
    const KeyRange keys = cached_keys_of_all_rows(p_, t);
    return {(keys.begin + Config::kBlockN - 1) / Config::kBlockN, keys.end / Config::kBlockN};
  }

  // start: the first key. first_unmasked: this is the warp's first unmasked tile of the work tile; more: its next tile
  // is unmasked too.
  __device__ __forceinline__ void load_unmasked(int batch, int start, int kv_head, bool first_unmasked, bool more) {
    if (first_unmasked) next_page_ = page_of_box(batch, start);
    const int page = next_page_;
    if (more) next_page_ = page_of_box(batch, start - 2 * Config::kBlockN);
    const bool invalid = !common::page_exists(p_, page);
    // Page num_pages is out of bounds, so the TMA fills with zeros.
    const int outer = invalid ? static_cast<int>(p_.num_pages) : page,
              row = common::slot_in_page(p_, start + box_of_lane());
    if (!second_half()) {
      wait_empty(kKOnly);
      if (__any_sync(0xffffffffu, invalid) || has(kMaskSet)) store_unmasked_tile_mask(invalid);
      copy_slices<0, 1>(kv_head, row, outer);
      wait_empty(1);
      copy_slices<1, 3>(kv_head, row, outer);
    } else {
      wait_empty(2);
      copy_slices<3, kSlices>(kv_head, row, outer);
    }
    state_ ^= kPhase;
  }
  // The first key of the lane's box. Lanes beyond the number of boxes repeat them.
  __device__ __forceinline__ int box_of_lane() const {
    return (lane_ & ((Config::kBlockN >> p_.box_shift) - 1)) << p_.box_shift;
  }
  // Copies slices whose region is empty. The code is short, because the consumer warpgroups wait for it.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void copy_slices(int kv_head, int row, int outer) const {
    const int shift = p_.box_shift;
    if (ptx::elect()) {
#pragma unroll
      for (int slice = kBegin; slice < kEnd; ++slice) {
        if (slice_at(slice).count != 0)
          ptx::arrive_expecting(smem_.k_full(stage(), slice), slice_at(slice).count * Config::kChunkBytes);
      }
    }
#pragma unroll 1
    for (int b = 0; b < Config::kBlockN >> shift; ++b) {
      const int row_of_box = __shfl_sync(0xffffffffu, row, b), outer_of_box = __shfl_sync(0xffffffffu, outer, b);
      if (ptx::elect()) {
#pragma unroll
        for (int slice = kBegin; slice < kEnd; ++slice) {
          const unsigned to = smem_.k(stage()) + (b << shift) * 128, barrier = smem_.k_full(stage(), slice);
          if constexpr (Config::kCluster > 1) {
            // Multicasts every other chunk of a slice to both blocks.
            const int odd = (stage() + ptx::cluster_rank()) % 2, chunk = slice_at(slice).chunk + odd;
            if (odd < slice_at(slice).count) {
              ptx::tma_load_multicast(3, to + chunk * Config::kChunkBytes, k_, barrier, 64 * chunk, kv_head, row_of_box,
                                      outer_of_box);
            }
          } else {
#pragma unroll
            for (int j = 0; j < slice_at(slice).count; ++j) {
              const int chunk = slice_at(slice).chunk + j;
              ptx::tma_load(to + chunk * Config::kChunkBytes, k_, barrier, 64 * chunk, kv_head, row_of_box,
                            outer_of_box);
            }
          }
        }
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ int page_of_box(int batch, int start) const {
    // Recomputes where the row of the page table begins, rather than keep it in registers.
    return common::find_slot(p_, ptx::opaque(batch), start + box_of_lane(), false).page;
  }
  __device__ __forceinline__ void store_unmasked_tile_mask(bool invalid) {
    const unsigned boxes = __ballot_sync(0xffffffffu, invalid && lane_ < Config::kBlockN >> p_.box_shift);
    if (lane_ == 0) {
      unsigned long long masked = 0;
#pragma unroll 1
      for (int b = 0; b < kMostBoxes; ++b)
        if ((boxes >> b & 1) != 0) masked |= keys_between(b << p_.box_shift, (b + 1) << p_.box_shift);
      store_mask(smem_, stage(), masked, 0, false);
    }
    state_ = (state_ & ~kMaskSet) | (boxes != 0 ? kMaskSet : 0);
    __syncwarp();
  }
  // ---- all other tiles

  // Lanes 2 b and 2 b + 1 copy box b of a tile. page: -1 if no key of the box is read.
  static constexpr int kMostBoxes = 8;
  __device__ __forceinline__ int box() const { return lane_ / 2; }
  __device__ __forceinline__ int shift_of(const Tile& tile) const { return tile.cached ? p_.box_shift : 6; }
  __device__ __forceinline__ bool has_box(const Tile& tile) const {
    const int begin = tile.start + (box() << shift_of(tile));
    return box() < Config::kBlockN >> shift_of(tile) && begin < tile.high && begin + (1 << shift_of(tile)) > tile.low;
  }
  __device__ __forceinline__ int load_index(const WorkTile& work, const Tile& tile) const {
    if (!tile.cached || !has_box(tile)) return -1;
    return common::find_slot(p_, work.batch, max(tile.start + (box() << p_.box_shift), tile.low), false).page;
  }

  __device__ __forceinline__ void load(const WorkTile& work, const Tile& tile, int kv_head, int page) {
    const bool whole = tile.low == tile.start && tile.high == tile.start + Config::kBlockN, mine = has_box(tile);
    const int keys = 1 << shift_of(tile);
    const unsigned bytes = __popc(__ballot_sync(0xffffffffu, mine)) / 2 * keys * 128;
    const ptx::TensorMap& map = tile.cached ? k_ : dense_k_;
    const Origin from = origin_of(work, tile, page);
    const unsigned to = smem_.k(stage()) + lane_ % 2 * Config::kChunkBytes + box() * keys * 128;
    if (!second_half()) {
      wait_empty(kKOnly);
      store_tile_mask(work, tile, page);
    }
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const Slice channels = slice_at(slice);
      if ((slice >= 3) != second_half() || channels.count == 0) continue;
      if (slice == 1 || slice == 3) wait_empty(half_of(slice));
      const unsigned full = smem_.k_full(stage(), slice), barrier = whole ? full : smem_.partial_full(warp_);
      if (lane_ == 0) ptx::arrive_expecting(barrier, channels.count * bytes);
      __syncwarp();
      if (mine && lane_ % 2 < channels.count) {
        ptx::tma_load(to + channels.chunk * Config::kChunkBytes, map, barrier, 64 * (channels.chunk + lane_ % 2),
                      kv_head, from.row, from.outer);
      }
      __syncwarp();
      if (whole) continue;
      ptx::wait_phase(barrier, has(kPartialPhase) ? 1 : 0);
      state_ ^= kPartialPhase;
#pragma unroll 1
      for (int j = 0; j < channels.count; ++j) {
        const unsigned at = smem_.k(stage()) + (channels.chunk + j) * Config::kChunkBytes;
        clear_rows(at, 0, tile.low - tile.start);
        clear_rows(at, tile.high - tile.start, Config::kBlockN);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane_ == 0) ptx::arrive(full);
      __syncwarp();
    }
    state_ ^= kPhase;
  }

  // The two outer coordinates of the lane's box.
  struct Origin {
    int row, outer;
  };
  __device__ __forceinline__ Origin origin_of(const WorkTile& work, const Tile& tile, int page) const {
    if (!tile.cached)
      return {static_cast<int>(work.kv_row) + tile.start - work.num_cached, p_.kv_flat ? 0 : work.batch};
    // Page num_pages is out of bounds, so the TMA fills with zeros.
    return {common::slot_in_page(p_, tile.start + (box() << p_.box_shift)),
            common::page_exists(p_, page) ? page : static_cast<int>(p_.num_pages)};
  }

  // Masks keys that no row sees, or whose page is invalid.
  __device__ __forceinline__ void store_tile_mask(const WorkTile& work, const Tile& tile, int page) {
    const bool invalid = tile.cached && has_box(tile) && !common::page_exists(p_, page);
    unsigned long long masked = ~keys_between(tile.low - tile.start, tile.high - tile.start);
    if (__any_sync(0xffffffffu, invalid)) {
#pragma unroll 1
      for (int b = 0; b < kMostBoxes; ++b) {
        if (__shfl_sync(0xffffffffu, invalid ? 1 : 0, 2 * b) != 0)
          masked |= keys_between(b << p_.box_shift, (b + 1) << p_.box_shift);
      }
    }
    if (lane_ == 0) store_mask(smem_, stage(), masked, tile.start, needs_row_mask(p_, work, tile));
    state_ |= kMaskSet;
    __syncwarp();
  }
  // The bits of keys [begin, end) of a tile.
  __device__ __forceinline__ static unsigned long long keys_between(int begin, int end) {
    const auto before = [](int x) { return x >= Config::kBlockN ? ~0ull : (1ull << x) - 1; };
    return before(end) & ~before(begin);
  }

  // Zeroes rows. The swizzle permutes bytes within a row only.
  __device__ __forceinline__ void clear_rows(unsigned at, int begin, int end) const {
#pragma unroll 1
    for (int i = 8 * begin + lane_; i < 8 * end; i += 32) ptx::store_shared_zero(at + 16 * i);
  }

  const WorkTileParams& p_;
  const QueryMaps q_;
  const ptx::TensorMap &k_, &dense_k_;
  const Smem& smem_;
  const int lane_, warp_;
  // State bits in one register, because registers are scarce: the phase of the stage's next use; the phase of the
  // barrier for partial tiles; whether the stage's mask has bits set; whether the number of tiles so far, over all work
  // tiles, is odd.
  static constexpr unsigned kPhase = 1, kPartialPhase = 2, kMaskSet = 4, kOddTiles = 8;
  __device__ __forceinline__ bool has(unsigned bit) const { return (state_ & bit) != 0; }
  unsigned state_ = kPhase | kMaskSet;
  int next_page_ = -1;  // of the lane's box in the next unmasked tile
};

}  // namespace attune::mla
