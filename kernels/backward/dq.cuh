// SPDX-License-Identifier: Apache-2.0
// The sums of dq: tiles of 64 queries in fp32, to which every block of keys that a query of the tile sees adds, in the
// order of the keys. The first one stores. Two halves of the channels are added to by themselves.
#pragma once

#include "backward/rows.cuh"

namespace attune::backward {

template <int kHeadDimQk>
struct DqTile {
  static constexpr int kFloats = kernels::dq_tile_floats(kHeadDimQk);
  static constexpr int kChannels = kFloats / kBackwardTile / 2;  // of a half
  static constexpr int kHalfBytes = kFloats * 4 / 2;
  // A half as wgmma leaves it in a warpgroup: float i of thread t is at 4 (128 (i / 4) + t) + i % 4.
  static constexpr int kThreadFloats = kChannels / 2;
  __device__ __forceinline__ static constexpr int byte_of(int four, int thread) { return (four * 128 + thread) * 16; }
  // The query and the channel within the half, of the first two floats of a four; the others are eight queries further.
  __device__ __forceinline__ static int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
  __device__ __forceinline__ static int channel_of(int four, int thread) { return 8 * four + thread % 4 * 2; }
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
