// SPDX-License-Identifier: Apache-2.0
// The sums of dq: tiles of 64 queries in fp32, to which every block of keys that a query of the tile sees adds, in the
// order of the keys. The first one stores. A warpgroup has half of the channels.
#pragma once

#include "backward/rows.cuh"

namespace attune::backward {

template <int kHeadDimQk>
struct DqTile {
  static constexpr int kFloats = kernels::dq_tile_floats(kHeadDimQk);
  static constexpr int kChannels = kFloats / kBackwardTile / 2;  // of a half
  static constexpr int kHalfBytes = kFloats * 4 / 2;
  // Where eight channels of a query are in a half: rows whose eights are swizzled, so that the registers of wgmma go to
  // shared memory without bank conflicts.
  static constexpr int kEights = kChannels / 8;
  __device__ __forceinline__ static int byte_of(int row, int eight) {
    return row * (kChannels * 4) + (eight ^ row % kEights) * 32;
  }
};

// The number of a sequence's first tile. Those of sequences do not overlap.
__device__ __forceinline__ int first_dq_tile(const BackwardParams& p, const SequenceInfo& s, int b) {
  const long long row = p.cu_seqlens_q.data != nullptr ? s.q_begin : static_cast<long long>(b) * p.fixed_q;
  return static_cast<int>(row / kBackwardTile) + b;
}
// The tile of a head that begins at query `row`, a multiple of 64.
__device__ __forceinline__ long long dq_tile_at(const BackwardParams& p, const SequenceInfo& s, int b, int head,
                                                int row) {
  return static_cast<long long>(head) * p.dq_tiles + first_dq_tile(p, s, b) + row / kBackwardTile;
}
// How many blocks of keys add to a tile before that of key `key`. Every block from the first that the tile's first
// query sees on adds: what a query sees begins no earlier than what the one before it sees.
__device__ __forceinline__ int dq_turn(const BackwardParams& p, const SequenceInfo& s, int row, int key) {
  return key / kBackwardRows - keys_of_query(p, s, row).begin / kBackwardRows;
}

}  // namespace attune::backward
