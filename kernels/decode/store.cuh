// SPDX-License-Identifier: Apache-2.0
// What happens to a piece when its last tile is done.
#pragma once

#include "decode/combine.cuh"

namespace attune::decode {

// total: tiles of the whole line.
__device__ __forceinline__ void store_piece(const DecodeParams& p, const Piece& piece, long long q_begin, long long total, const State& state,
                                            unsigned char* shared) {
  const MergeStats stats(shared);
  auto* exchange = reinterpret_cast<float*>(shared + Config::kShared.merge);
  const bool whole = piece.starts && piece.ends;
  share_stats(state, stats);
  __syncthreads();
  for (int row = threadIdx.x; row < Config::kRows; row += Config::kThreads) weigh_row(p, piece, q_begin, whole, stats, row);
  __syncthreads();
#pragma unroll
  for (int block = 0; block < Config::kBlocksV; block += Config::kMergeChannels / 16) {
    if (block != 0) __syncthreads();
    share_channels(state, stats, exchange, block);
    __syncthreads();
    store_channels(p, piece, q_begin, whole, exchange, block * 16);
  }
  if (!whole) combine_parts(p, piece, q_begin, total, reinterpret_cast<int*>(shared + Config::kShared.total - 16));
}

}  // namespace attune::decode
