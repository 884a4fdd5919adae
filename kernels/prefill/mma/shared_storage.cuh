// SPDX-License-Identifier: Apache-2.0
// The shared memory of prefill_mma.cu.
#pragma once

#include "prefill/mma/config.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill_mma {

using Tiles = scheduler::KeyTiles<Config::kKeys, Config::kCached>;

// Adjacent tiles; found by one comparison.
struct TileRun {
  int begin;
  unsigned count;
  __device__ __forceinline__ bool has(int i) const { return static_cast<unsigned>(i - begin) < count; }
};

// Tiles whose copies need no bounds (steady_tiles.cuh).
struct SteadyTiles {
  TileRun all;   // the steady tiles
  TileRun seen;  // those of which all rows of the block see all keys
  const char *k, *v;         // rows of the KV head: cached ones in slot 0 of page 0, or the dense ones of tile 0
  const int* page_ids;       // of the sequence; null: it is one page
  int slot_mask;             // the bits of a key's position that are its slot
};

template <bool kThere>
struct QueryRows {};
template <>
struct QueryRows<true> {
  alignas(128) unsigned char q[Config::kRows * Config::LayoutK::kPitch];
};
template <bool kThere>
struct Codes {};
template <>
struct Codes<true> {
  // A chunk of 16 bytes for each thread that copies and converts them (dequant.cuh).
  alignas(128) unsigned char codes_k[Config::kKeys * Config::kBlocksQk * 16];
  unsigned char codes_v[Config::kKeys * Config::kBlocksV * 16];
};
template <bool kThere>
struct TokenScales {};
template <>
struct TokenScales<true> {
  // Scales of a tile. Those of V have two buffers, because the next tile's arrive while this tile's are in use.
  alignas(128) float k_scales[Config::kKeys];
  float v_scales[2][Config::kKeys];
};

// Each member that a specialisation lacks is an empty base.
struct SharedStorage : QueryRows<!Config::kQInRegisters>, Codes<Config::kQuantized>, TokenScales<Config::kTokenScales> {
  alignas(128) unsigned char k[Config::kKeys * Config::LayoutK::kPitch];
  alignas(128) unsigned char v[Config::kKeys * Config::LayoutV::kPitch];
  WorkTile work;  // in registers it would displace others
  Tiles tiles;
  SteadyTiles steady;
  int head, kv_head;
  // A bit for each key of the tile: whether its pages exist; and whether a part of its value has a NaN or infinity.
  unsigned valid_keys[Config::kKeyWords], nonfinite[Config::kThreads / Config::kKeys][Config::kKeyWords];
  float threshold;         // of softmax(), if it would otherwise be in a register
  float k_scale, v_scale;  // of an 8-bit cache: the scales that all keys of the head share
  bool v_scale_is_nonfinite;           // v_scale is not finite; it is then stored as 1
  int pages[Config::kCached ? Config::kKeys / Config::kRowsOfId : 1];  // of the next tile (cached_rows.cuh)
};
static_assert(Config::kType == common::kFloat16 || Config::kType == common::kBFloat16, "16-bit rows");
static_assert(Config::kHeadDimQk % 8 == 0 && Config::kHeadDimV % 8 == 0, "rows are whole chunks");
static_assert(Config::kKeys >= 32 && Config::kWarps == 4, "a warp copies whole rows");
static_assert(sizeof(SharedStorage) <= kernels::mma_shared_bytes(Config::kRows, Config::kKeys, Config::kHeadDimQk,
                                                                 Config::kHeadDimV, Config::kQuantized,
                                                                 Config::kTokenScales),
              "the host asks for less shared memory than this");

}  // namespace attune::prefill_mma
