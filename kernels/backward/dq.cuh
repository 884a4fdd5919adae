// SPDX-License-Identifier: Apache-2.0
// The sums of dq: tiles of queries in fp32. Every block of keys that a query of the tile sees adds to a tile, in the
// order of the keys, or in turn (takes_turns()): series after series, those of a series from the last keys to the first
// keys. The first block in this order stores instead of adding.
#pragma once

#include "backward/masks.cuh"

namespace attune::backward {

// The channels of a head that a warpgroup has: half of the lines of 64 channels, and half of the channels of an odd
// line.
template <int kHeadDim>
struct HalfHead {
  static constexpr int kLines = kernels::lines_of(kHeadDim);
  static constexpr int kWhole = kLines / 2 * 64, kRest = kLines % 2 * 32, kChannels = kWhole + kRest;
  // The first of the eight channels of registers 4 n8 .. 4 n8 + 3 of an accumulator: tile n8 of N = 8.
  __device__ __forceinline__ static int channel_of(int group, int n8) {
    return 8 * n8 < kWhole ? group * kWhole + 8 * n8 : (kLines - 1) * 64 + group * 32 + 8 * n8 - kWhole;
  }
};

// A tile is [warpgroups][queries][channels of a warpgroup], or [channels][queries] if it is transposed.
template <int kHeadDimQk, int kHeadDimV>
struct DqTile {
  using Half = HalfHead<kHeadDimQk>;
  static constexpr int kQueries = kernels::backward_tile(kHeadDimQk, kHeadDimV);
  static constexpr int kFloats = kernels::dq_tile_floats(kHeadDimQk, kHeadDimV);
  static constexpr int kChannels = Half::kChannels;
  static constexpr bool kTransposed = kQueries == 32;
  static_assert(!kTransposed || Half::kLines <= 3, "a warpgroup has one whole line of a transposed dq");

  // The byte offset of tile n8 of eight channels of a query. These tiles are swizzled within a row, so that the wgmma
  // accumulators are stored to shared memory without bank conflicts.
  __device__ __forceinline__ static int byte_of(int group, int row, int n8) {
    return (group * kQueries + row) * (kChannels * 4) + (n8 ^ row % 4) * 32;
  }
  // The byte offset of tile n8 of eight queries of a channel, in a transposed tile.
  __device__ __forceinline__ static int byte_of(int channel, int n8) {
    return channel * (kQueries * 4) + (n8 ^ channel % 4) * 32;
  }

  // The index of a sequence's first tile. Indices of sequences do not overlap.
  __device__ __forceinline__ static int first(const BackwardParams& p, const SequenceInfo& s, int b) {
    const long long row = p.cu_seqlens_q.data != nullptr ? s.q_begin : static_cast<long long>(b) * p.fixed_q;
    return static_cast<int>(row / kQueries) + b;
  }
  // The index of a head's tile that begins at query `row`, a multiple of kQueries.
  __device__ __forceinline__ static long long at(const BackwardParams& p, const SequenceInfo& s, int b, int head,
                                                 int row) {
    return static_cast<long long>(head) * p.dq_tiles + first(p, s, b) + row / kQueries;
  }
};

// The number of key blocks that add to the tile of query `row` before that of key `key`, which adds to it, too. Called
// by a warp. The lowest block that adds has first_key_from(): the first key that the tile's queries, or later ones,
// see. From it to the highest that adds all do, because both ends of the queries that see a block grow with its keys.
__device__ __forceinline__ int dq_adds_before(const BackwardParams& p, const SequenceInfo& s, int b, int row, int key) {
  constexpr int kQueries = kernels::backward_tile(ATTUNE_HEAD_DIM_QK, ATTUNE_HEAD_DIM_V);
  static_assert(kSeriesInTurn <= 32, "a lane looks at a block");
  const int block = key / kBackwardRows, lowest = first_key_from(p, s, b, row) / kBackwardRows;
  if (!takes_turns(p)) return block - lowest;
  const int series = block / kSeriesInTurn * kSeriesInTurn, higher = block + 1 + static_cast<int>(threadIdx.x) % 32;
  const bool of_series = higher < series + kSeriesInTurn;
  const Span seen = of_series ? queries_of_block(p, s, b, higher * kBackwardRows) : Span{0, 0};
  const bool adds = seen.begin < seen.end && seen.begin / kQueries * kQueries <= row;
  return max(series - lowest, 0) + __popc(__ballot_sync(0xffffffffu, adds));
}

}  // namespace attune::backward
