// SPDX-License-Identifier: Apache-2.0
// The gather producer: copies rows of 16-bit elements, found by a list or a page table, by cp.async, in the TMA's
// swizzle. Rows that are invalid, or that no row of the M block sees, are zero-filled.
//
// A warp has sixteen rows of every tile. While no stage is empty, its lanes locate the rows of two tiles, one row for
// each lane, so that the copies are issued as soon as a stage is empty. Eight neighbouring lanes copy 128 bytes of one
// row.
#pragma once

#include "mla/producers/kv_source.cuh"
#include "mla/producers/work_tile_reader.cuh"

namespace attune::mla {

// Tile i of a work tile. Recomputed at each use: it is cheap, and registers are scarce.
__device__ __forceinline__ Tile tile_of(const WorkTile& work, int i) {
  return tile_at(work, KeyTiles(work.num_cached, work.first_key, work.end_key), i);
}

// Stores the words of the mask for the whole of tile i: its first key, and whether rows see different keys. Called
// after the stage is empty and before it is published.
__device__ __forceinline__ void store_tile_start(const WorkTileParams& p, const Smem& smem, int stage,
                                                 const WorkTile& work, int i) {
  if (Config::kSparse || threadIdx.x != 0) return;
  const Tile tile = tile_of(work, i);
  const unsigned at = smem.mask(stage) + 4 * Config::kMaskWords;
  ptx::store_shared_u32(at, static_cast<unsigned>(tile.start));
  ptx::store_shared_u32(at + 4, needs_row_mask(p, work, tile) ? 1 : 0);
}

__device__ __forceinline__ void wait_empty(const Smem& smem, const PipelineState& pipe, int half) {
  ptx::wait_phase(smem.k_empty(pipe.stage, half), pipe.phase ^ 1);
}

// The channels of a region: those that only K has, or half of V; and the slice whose full barrier covers the region.
__device__ __forceinline__ constexpr Slice channels_of(int half) {
  return half == kKOnly ? slice_at(0) : Slice{4 * (half - 1), 4};
}
__device__ __forceinline__ constexpr int slice_of_half(int half) { return 2 * half; }

// Copies a warp's rows of a tile.
class GatherCopies {
 public:
  static constexpr int kLanes = 8, kRowsAtATime = 32 / kLanes,
                       kRowsOfWarp = Config::kBlockN / (Config::kProducerThreads / 32),
                       kRowsOfLane = kRowsOfWarp / kRowsAtATime;
  static constexpr int kTilesLocated = Config::kGather ? 32 / kRowsOfWarp : 1;  // tiles that are located together

  __device__ __forceinline__ GatherCopies(const WorkTileParams& p, const Smem& smem) : p_(p), smem_(smem) {}

  // Loads the index of the lane's row, which is of tile i or of the one before it.
  __device__ __forceinline__ int load_index(const WorkTile& work, int head_tile, int i) const {
    i -= located_tile();
    if (kTilesLocated > 1 && i < work.tile_begin) return -1;
    const Tile tile = tile_of(work, i);
    return KvSource(p_, work, kv_head(head_tile), tile).load_index(tile.start + own());
  }
  // Locates these rows. index: from load_index().
  __device__ __forceinline__ void locate(const WorkTile& work, int head_tile, int i, int index) {
    const Tile tile = tile_of(work, i - located_tile());
    const char* const row = KvSource(p_, work, kv_head(head_tile), tile).locate(tile.start + own(), index);
    invalid_ = __ballot_sync(0xffffffffu, row == nullptr);
    located_ = row != nullptr ? row : p_.q;  // not read
    position_ = 0;
  }
  // Where the lane's vectors of the next located tile come from. Invalid rows are not read; they have the address of q,
  // whose rows are as long.
  struct CopySources {
    const char* from[kRowsOfLane];
    unsigned valid[kRowsOfLane], invalid;  // invalid: a bit for each row
  };
  __device__ __forceinline__ CopySources next() {
    CopySources sources;
    const unsigned first_row = kTilesLocated > 1 ? position_++ * kRowsOfWarp : 0;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const unsigned who = first_row + kRowsAtATime * i + lane() / kLanes;
      sources.from[i] = reinterpret_cast<const char*>(__shfl_sync(
                            0xffffffffu, reinterpret_cast<unsigned long long>(located_), static_cast<int>(who))) +
                        16 * (lane() % kLanes);
      sources.valid[i] = (invalid_ >> who & 1) != 0 ? 0 : 16;
    }
    sources.invalid = invalid_ >> first_row;
    return sources;
  }
  // Masks the warp's invalid rows. Called after the stage is empty and before it is published.
  __device__ __forceinline__ void store_row_mask(int stage, const WorkTile& work, int i,
                                                 const CopySources& sources) const {
    if (lane() < kRowsOfWarp / 8) {
      const int word = first_row() / 8 + lane();
      ptx::store_shared_u32(smem_.mask(stage) + 4 * word, (sources.invalid >> (8 * lane()) & 0xff) << (word % 4 * 8));
    }
    store_tile_start(p_, smem_, stage, work, i);
    __syncwarp();
  }
  __device__ __forceinline__ void copy(int stage, Slice channels, const CopySources& sources) const {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = row_of_lane(i);
      const unsigned to =
          smem_.k(stage) + channels.chunk * Config::kChunkBytes + row * 128 + (lane() % kLanes ^ (row & 7)) * 16;
      const char* const from = sources.from[i] + static_cast<unsigned>(128 * channels.chunk);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < channels.count) ptx::copy_async<16>(to + j * Config::kChunkBytes, from + 128 * j, sources.valid[i]);
    }
  }
  // Copies the whole next tile, each region as soon as it is empty.
  __device__ __forceinline__ void copy_tile(const PipelineState& pipe, const WorkTile& work, int i) {
    const CopySources sources = next();
    wait_empty(smem_, pipe, kKOnly);
    store_row_mask(pipe.stage, work, i, sources);
    copy(pipe.stage, channels_of(kKOnly), sources);
#pragma unroll
    for (int half = 1; half <= 2; ++half) {
      wait_empty(smem_, pipe, half);
      copy(pipe.stage, channels_of(half), sources);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int first_row() { return static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp; }
  __device__ __forceinline__ static int own() { return first_row() + lane() % kRowsOfWarp; }
  __device__ __forceinline__ static int located_tile() { return kTilesLocated > 1 ? lane() / kRowsOfWarp : 0; }
  __device__ __forceinline__ static int row_of_lane(int i) { return first_row() + kRowsAtATime * i + lane() / kLanes; }
  __device__ __forceinline__ int kv_head(int head_tile) const { return head_tile * p_.heads_of_tile / p_.group; }

  const WorkTileParams& p_;
  const Smem& smem_;
  const char* located_ = nullptr;  // the lane's row
  unsigned invalid_ = 0;           // a bit for each of these rows
  unsigned position_ = 0;          // of the next tile, among the tiles that are located together
};

class GatherProducer {
 public:
  __device__ __forceinline__ GatherProducer(const WorkTileParams& p, const QueryMaps& q, const Smem& smem)
      : p_(p), q_(q), smem_(smem), copies_(p, smem) {}

  __device__ __forceinline__ void run(const WorkTileReader::Scheduler::Prefetched& first_work) {
    WorkTileReader reader(p_, smem_, q_);
    for (reader.fetch_first(first_work); reader.has_work(); reader.advance()) {
      load(reader);
    }
  }

 private:
  static_assert(GatherCopies::kTilesLocated == 2 || !Config::kGather, "rows are located for two tiles at a time");

  // Rows are located for a pair of tiles at once, while the copies of the previous pair are in flight: the producer
  // must wait for an empty stage then anyway. At that time it also prefetches the indices of the following pair and,
  // one pair before the last, fetches the next work tile. Not between the tiles of a pair, because the second stage is
  // empty soon after the first.
  __device__ __forceinline__ void load(WorkTileReader& reader) {
    const WorkTile& work = reader.work();
    const int head_tile = reader.head_tile();
    int i = work.tile_end - 1;
    copies_.locate(work, head_tile, i, copies_.load_index(work, head_tile, i));
    int index = copies_.load_index(work, head_tile, i - 2);
    const int tiles = i + 1 - work.tile_begin, fetch_at = tiles < 2 ? 0 : max(tiles - 2 - (tiles & 1 ^ 1), 1);
    int tile = 0;
#pragma unroll 1
    for (; i >= work.tile_begin; --i, ++tile) {
      // The shuffle tells the compiler that the value, and so the barriers' addresses, are uniform.
      const unsigned uniform = __shfl_sync(0xffffffffu, tiles_++ << 1 | (tile & 1), 0);
      const PipelineState pipe = pipeline_state(uniform >> 1);
      const GatherCopies::CopySources sources = copies_.next();
      wait_empty(smem_, pipe, kKOnly);
      copies_.store_row_mask(pipe.stage, work, i, sources);
      copy(pipe.stage, kKOnly, sources);
      if ((uniform & 1) == 0) {
        copy_halves<1>(pipe, sources);
      } else {
        copy_halves<2>(pipe, sources);
        if (i > work.tile_begin) {
          copies_.locate(work, head_tile, i - 1, index);
          index = copies_.load_index(work, head_tile, i - 3);
        }
      }
      if (tile == 0) reader.load_next_q();
      if (tile == fetch_at) reader.fetch_next();
    }
  }
  template <int kFirst>
  __device__ __forceinline__ void copy_halves(const PipelineState& pipe,
                                              const GatherCopies::CopySources& sources) const {
#pragma unroll
    for (int half = kFirst; half >= 1 && half <= 2; half += 3 - 2 * kFirst) {
      wait_empty(smem_, pipe, half);
      copy(pipe.stage, half, sources);
    }
  }
  __device__ __forceinline__ void copy(int stage, int half, const GatherCopies::CopySources& sources) const {
    if (channels_of(half).count == 0) return;
    copies_.copy(stage, channels_of(half), sources);
    // cp.async copies arrive when they complete; the warp's stores of the mask arrive now.
    const unsigned full = smem_.k_full(stage, slice_of_half(half));
    ptx::arrive_after_copies(full);
    if (slice_of_half(half) == kMaskSlice && threadIdx.x % 32 == 0) ptx::arrive(full);
  }

  const WorkTileParams& p_;
  const QueryMaps q_;
  const Smem& smem_;
  GatherCopies copies_;
  unsigned tiles_ = 0;  // tiles so far, over all work tiles
};

}  // namespace attune::mla
