// SPDX-License-Identifier: Apache-2.0
// The sums of dq: tiles of queries in fp32. Every block of keys that a query of the tile sees adds to a tile, in the
// order of the keys; the first block stores instead of adding.
#pragma once

#include "backward/masks.cuh"

namespace attune::backward {

// The channels of a head that a warpgroup has: half of the lines of 64 channels, and half of the channels of an odd
// line.
template <int kHeadDim>
struct HalfHead {
  static constexpr int kLines = kernels::lines_of(kHeadDim);
  static constexpr int kWhole = kLines / 2 * 64, kRest = kLines % 2 * 32, kChannels = kWhole + kRest;
  // The first channel of the group of eight channels that registers 4 eight .. 4 eight + 3 of an accumulator have.
  __device__ __forceinline__ static int channel_of(int group, int eight) {
    return 8 * eight < kWhole ? group * kWhole + 8 * eight : (kLines - 1) * 64 + group * 32 + 8 * eight - kWhole;
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

  // The byte offset of eight channels of a query. Groups of eight channels are swizzled within a row, so that the wgmma
  // accumulators are stored to shared memory without bank conflicts.
  __device__ __forceinline__ static int byte_of(int group, int row, int eight) {
    return (group * kQueries + row) * (kChannels * 4) + (eight ^ row % 4) * 32;
  }
  // The byte offset of eight queries of a channel, in a transposed tile.
  __device__ __forceinline__ static int byte_of(int channel, int eight) {
    return channel * (kQueries * 4) + (eight ^ channel % 4) * 32;
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

// The number of blocks of keys that add to a tile before the block of key `key`. Blocks add from the first key on that
// the tile's queries, or later ones, have in sight.
__device__ __forceinline__ int dq_adds_before(const BackwardParams& p, const SequenceInfo& s, int b, int row, int key) {
  return key / kBackwardRows - first_key_from(p, s, b, row) / kBackwardRows;
}

}  // namespace attune::backward
