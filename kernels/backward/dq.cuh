// SPDX-License-Identifier: Apache-2.0
// The sums of dq: tiles of queries in fp32, to which every block of keys that a query of the tile sees adds, in the
// order of the keys. The first one stores.
#pragma once

#include "backward/masks.cuh"

namespace attune::backward {

// The channels that a warpgroup has of a head: half of the lines of 64, and of an odd line half of its channels.
template <int kHeadDim>
struct HalfHead {
  static constexpr int kLines = kernels::lines_of(kHeadDim);
  static constexpr int kWhole = kLines / 2 * 64, kRest = kLines % 2 * 32, kChannels = kWhole + kRest;
  // The first of its eight channels number `eight`, which registers 4 eight .. + 3 of an accumulator have.
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

  // Where eight channels of a query are: rows whose eights are swizzled, so that the registers of wgmma go to shared
  // memory without bank conflicts.
  __device__ __forceinline__ static int byte_of(int group, int row, int eight) {
    return (group * kQueries + row) * (kChannels * 4) + (eight ^ row % 4) * 32;
  }
  // The same of a transposed tile: eight queries of a channel.
  __device__ __forceinline__ static int byte_of(int channel, int eight) {
    return channel * (kQueries * 4) + (eight ^ channel % 4) * 32;
  }

  // The number of a sequence's first tile. Those of sequences do not overlap.
  __device__ __forceinline__ static int first(const BackwardParams& p, const SequenceInfo& s, int b) {
    const long long row = p.cu_seqlens_q.data != nullptr ? s.q_begin : static_cast<long long>(b) * p.fixed_q;
    return static_cast<int>(row / kQueries) + b;
  }
  // The number of the tile of a head that begins at query `row`, a multiple of kQueries.
  __device__ __forceinline__ static long long at(const BackwardParams& p, const SequenceInfo& s, int b, int head,
                                                 int row) {
    return static_cast<long long>(head) * p.dq_tiles + first(p, s, b) + row / kQueries;
  }
};

// How many blocks of keys add to a tile before that of key `key`. Every block adds from the first one on that the
// tile's queries, or later ones, have in sight.
__device__ __forceinline__ int dq_adds_before(const BackwardParams& p, const SequenceInfo& s, int b, int row, int key) {
  return key / kBackwardRows - first_key_from(p, s, b, row) / kBackwardRows;
}

}  // namespace attune::backward
