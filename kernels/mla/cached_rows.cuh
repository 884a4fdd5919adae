// SPDX-License-Identifier: Apache-2.0
// What the m16 and swap-AB kernels share: stages of cached rows as they are, new tokens one by one.
#pragma once

#include "common/element.cuh"
#include "common/lanes.cuh"
#include "mla/config.cuh"
#include "mla/query_row.cuh"

namespace attune::mla {

struct CachedRowsConfig {
  static constexpr kernels::MlaCachedRowFormat kFormat =
      kernels::mla_cached_row_format(Config::kProducer, Config::kHeadDimQk);
  static constexpr int kBlockN = Config::kBlockN, kStages = kFormat.stages;
  static constexpr int kRowBytes = kFormat.row_bytes, kPitch = kFormat.pitch;  // of cached rows
  static constexpr int kProducerThreads = 128;  // a warpgroup, of which two warps load
  static constexpr int kProducerWarps = 2, kKeysOfProducer = kBlockN / kProducerWarps;

  static_assert(!Config::kTma && Config::kProducer != kernels::kMlaDequant584 && Config::kCluster == 1 &&
                    !(Config::kDense && Config::kSparse),
                "rows of 656 bytes or of 16-bit elements, in a cache");
  static_assert(kPitch % 128 == 16, "the same 16 bytes of eight rows lie in different banks");
};

// The end of a work tile's tiles of cached keys; new tokens come after them.
__device__ __forceinline__ int cached_tile_end(const WorkTile& work) {
  if constexpr (Config::kDense)
    return min(work.tile_end, KeyTiles(work.num_cached, work.first_key, work.end_key).num_cached_tiles);
  return work.tile_end;
}

// This thread's consumer warp. Functions named recomputed_ keep nothing between uses, because registers are scarce.
__device__ __forceinline__ int consumer_warp() {
  return static_cast<int>(threadIdx.x) / 32 - CachedRowsConfig::kProducerThreads / 32;
}
__device__ __forceinline__ int recomputed_consumer_warp() {
  return static_cast<int>(ptx::opaque(threadIdx.x) / 32) - CachedRowsConfig::kProducerThreads / 32;
}
__device__ __forceinline__ int recomputed_lane() { return static_cast<int>(ptx::opaque(threadIdx.x) % 32); }

// A row of the M block's queries, if there is one.
__device__ __forceinline__ QueryRow query_row(const WorkTileParams& p, const WorkTile& t, int head_tile, int row) {
  if (row >= p.heads_of_tile) return {};
  return {p, t, t.token_begin, head_tile * p.heads_of_tile + row};
}

// A query's dot product with a new token's row, by a warp; 0 if there is no query.
__device__ __forceinline__ float dot_new_token(const QueryRow& query, const char* row, int lane) {
  float s = 0;
#pragma unroll 1
  for (int d = lane; query.exists() && d < Config::kHeadDimQk; d += 32)
    s = fmaf(common::load_element(Config::kType, query.at(d), 0), common::load_element(Config::kType, row, d), s);
  return common::sum_of_lanes(s);
}

}  // namespace attune::mla
