// SPDX-License-Identifier: Apache-2.0
// What the decode kernels do with one piece, between finding it and merging its result.
#pragma once

#include "decode/combine.cuh"
#include "decode/loader.cuh"

namespace attune::decode {

__device__ __forceinline__ void clear_stages(unsigned char* shared) {
  auto* words = reinterpret_cast<uint4*>(shared);
  for (int i = threadIdx.x; i < Config::kShared.queries / 16; i += Config::kThreads) words[i] = uint4{0, 0, 0, 0};
  __syncthreads();
}

// This warp's tiles of a piece.
__device__ __forceinline__ void attend_piece(const DecodeParams& p, const Piece& piece, const Rows& rows,
                                             const QueryOperand& queries, const Attend& attend, Loader& loader,
                                             int& stage, State& state) {
  const int end_tile = piece.end_tile;
  for (int tile = piece.first_tile; tile < end_tile; ++tile) {
    ptx::wait_copies<Config::kStages - 2>();
    __syncwarp();
    const unsigned there = loader.notes[stage];
    loader.issue(p);
    if (there != 0) {
      const int first_token = tile * Config::kTileKeys + loader.warp * kernels::kKeysOfWarp;
      attend(p, piece, rows, queries, loader.ring + stage * Config::kStageBytes, first_token, there, state);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
}

// Where a block is: its share, in shared memory, and what its warps hold.
struct Block {
  kernels::Share* shares;  // one of the block, one of each warp's loader
  Loader loader;
  Attend attend;
  QueryOperand queries;
  float* query_scales;
  Rows rows;
  State state;
  int stage;

  __device__ __forceinline__ static kernels::Share* shares_in(unsigned char* shared) {
    return reinterpret_cast<kernels::Share*>(shared + Config::kShared.walks);
  }
  // The shares are there; the first copies are requested.
  __device__ __forceinline__ Block(const DecodeParams& p, unsigned char* shared)
      : shares(shares_in(shared)),
        loader(p, shares, shared),
        attend(threadIdx.x % 32),
        queries(shared + Config::kShared.queries),
        query_scales(reinterpret_cast<float*>(shared + Config::kShared.stats) + 3 * Config::kWarps * Config::kRows),
        stage(0) {
    for (int i = 0; i < Config::kStages - 1; ++i) loader.issue(p);
  }

  __device__ __forceinline__ void attend_to_piece(const DecodeParams& p, unsigned char* shared) {
    const kernels::Share& share = shares[0];
    store_queries(p, share.piece, share.sequence.q_begin, shared + Config::kShared.queries, query_scales);
    __syncthreads();
    queries.load();
    rows.start(p, share.piece, share.sequence, query_scales);
    state.clear();
    attend_piece(p, share.piece, rows, queries, attend, loader, stage, state);
  }
};

}  // namespace attune::decode
