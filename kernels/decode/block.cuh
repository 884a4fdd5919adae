// SPDX-License-Identifier: Apache-2.0
// What the decode kernels do with one piece, between finding it and merging its result.
#pragma once

#include "decode/combine.cuh"
#include "decode/loader.cuh"
#include "decode/new_tokens.cuh"
#include "schedule/stamp.cuh"

namespace attune::decode {

__device__ __forceinline__ void clear_stages(SharedStorage& shared) {
  constexpr int kWords = sizeof(SharedStorage::stages) / 16;
  auto* words = reinterpret_cast<uint4*>(shared.stages);
  for (int i = threadIdx.x; i < kWords; i += Config::kThreads) words[i] = uint4{0, 0, 0, 0};
  __syncthreads();
}

// This warp's tiles of a piece.
__device__ __forceinline__ void attend_piece(const DecodeParams& p, const Piece& piece, const Rows& rows,
                                             const QueryOperand& queries, const Attend& attend, Loader& loader,
                                             int& stage, State& state) {
  const int end = loader.first_key_of(piece.end_tile);
  for (int first = loader.first_key_of(piece.first_tile); first < end; first += Config::kTileKeys) {
    ptx::wait_copies<Config::kStages - 2>();
    __syncwarp();
    const unsigned there = loader.keys_of_oldest(stage);
    loader.issue(p);
    if (there != 0) {
      attend(p, piece, rows, queries, loader.ring + stage * Config::kStageBytes, first, there, state);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
}

// Where a block is: its share, in shared memory, and what its warps hold.
struct Block {
  // Longer and more rows take all registers.
  static constexpr int kAccumulators = Config::kBlocksV * Config::kRowTiles;
  static constexpr bool kScalesValues = Config::kNewTokens && Config::kElement == 1;
  static constexpr bool kQueryAhead = Config::kVectors && kAccumulators <= 16;
  static constexpr bool kTokenAhead = Config::kNewTokens && kQueryAhead && Config::kHeadDimQk <= 128 &&
                                      kAccumulators <= (Config::kTokenScales ? 8 : 16);

  kernels::Share* shares;  // one of the block, one of each warp's loader; in a cluster one of each warp
  Loader loader;
  Attend attend;
  QueryOperand queries;
  float* query_scales;
  Rows rows;
  State state;
  int stage;
  bool begun;  // the first copies are requested

  // The shares are there; first: what this warp's loader begins with.
  __device__ __forceinline__ Block(const DecodeParams& p, const kernels::Share& first, SharedStorage& shared)
      : shares(shared.shares),
        loader(p, first, shares, shared),
        attend(threadIdx.x % 32),
        queries(shared.queries[0][0]),
        query_scales(shared.query_scales),
        stage(0),
        begun(false) {}

  // What a warp waits for at the start of a piece beside keys.
  struct Inputs {
    QueryInput query;
    NewTokens::Input token;
  };

  // In a cluster: asks for what does not depend on lengths, before they are there. A token that turns out to be none is
  // not looked at.
  __device__ __forceinline__ static void request_rows(const DecodeParams& p, const Piece& piece, SharedStorage& shared,
                                                      Inputs& inputs) {
    const int r = threadIdx.x / 32;
    if constexpr (kQueryAhead) inputs.query.load_row(p, query_row(p, piece, {}, r), p.q, r < piece.num_rows);
    if constexpr (kTokenAhead) {
      const int token = NewTokens(shared).warp;
      inputs.token.load_rows(p, piece.batch, piece.head, token,
                             piece.starts != 0 && p.new_k.data != nullptr && token < p.fixed_q);
    }
  }

  // What warps wait for at the start of a piece, all of it requested before anything is waited for: a query, a new
  // token, and in the first piece its keys.
  __device__ __forceinline__ void fetch_rows(const DecodeParams& p, const kernels::Share& share,
                                             const NewTokens& tokens, int num_new, bool append, Inputs& inputs,
                                             SharedStorage& shared) {
    const Piece& piece = share.piece;
    QueryInput& query = inputs.query;
    NewTokens::Input& token = inputs.token;
    const int r = threadIdx.x / 32;
    const bool has_token = Config::kNewTokens && tokens.warp < num_new;
    if constexpr (!Config::kCluster) {
      if constexpr (kQueryAhead) query.load(p, query_row(p, piece, share.sequence, r), p.q, r < piece.num_rows);
      if constexpr (kTokenAhead)
        token.load(p, share.sequence, piece.batch, piece.head, tokens.warp, has_token, append);
    }
    if (!begun) {
      for (int i = 0; i < Config::kStages - 1; ++i) loader.issue(p);
      begun = true;
    }
    if constexpr (Config::kCluster && kQueryAhead) {
      tile::PrologueToken terms{};
      const bool has_query = r < piece.num_rows;
      const TokenRow row = query_row(p, piece, share.sequence, r);
      if (has_query) terms = row.prologue_token(p);
      query.load_terms(p, row.head, terms, has_query);
      if constexpr (kTokenAhead) {
        const TokenRow at = NewTokens::key_row(p, share.sequence, piece.batch, piece.head, tokens.warp);
        if (has_token && !(has_query && at.row == row.row)) terms = at.prologue_token(p);
        token.load_terms(p, piece.head, terms, has_token);
        token.slot = {-1, -1, 0};
        if (!NewTokens::kAppendsLate && append && has_token) token.slot = slot_of_new(p, piece.batch, at.position);
      }
    }
    if constexpr (Config::kVectors && !kQueryAhead)
      query.load(p, query_row(p, piece, share.sequence, r), p.q, r < piece.num_rows);
    store_queries(p, piece, share.sequence, query, shared.queries[0][0], query_scales, tokens.scratch);
    if constexpr (kTokenAhead) {
      if (has_token) tokens.put(p, token, piece.head);
    } else if constexpr (Config::kNewTokens) {
      if (has_token) {
        NewTokens::fetch(p, far_sequence(share), piece.batch, piece.head, tokens.warp, append, tokens.scratch);
      }
    }
  }

  // In a cluster, when the block's part is sent: the token of fetch_rows() to the cache, where that was not done.
  __device__ __forceinline__ void append_late(const DecodeParams& p, const kernels::Share& share, Inputs& inputs,
                                              SharedStorage& shared) const {
    if constexpr (kTokenAhead && NewTokens::kAppendsLate) {
      const NewTokens tokens(shared);
      const Piece& piece = share.piece;
      if (!appends(p, piece) || !piece.starts || tokens.warp >= share.sequence.num_new) return;
      const TokenRow at = NewTokens::key_row(p, share.sequence, piece.batch, piece.head, tokens.warp);
      inputs.token.slot = slot_of_new(p, piece.batch, at.position);
      tokens.append(p, inputs.token, piece.head);
    }
  }
  // Rings and beams are appended to when all readers are done.
  __device__ __forceinline__ static bool appends(const DecodeParams& p, const Piece& piece) {
    return p.append && p.tiles_done == nullptr && piece.row_begin == 0;
  }

  // For functions that are not inlined: in shared memory, as what has an address leaves its registers.
  __device__ __forceinline__ const Sequence& far_sequence(const kernels::Share& share) const {
    return Config::kCluster ? loader.share.sequence : share.sequence;
  }

  __device__ __forceinline__ void attend_to_tokens(const DecodeParams& p, const kernels::Share& share,
                                                   const NewTokens& tokens, int num_new, bool append,
                                                   SharedStorage& shared) {
    if constexpr (Config::kNewTokens) {
#pragma unroll 1
      for (int i = tokens.warp; i < num_new; i += Config::kWarps) {
        __syncwarp();
        if (i != tokens.warp)
          NewTokens::fetch(p, far_sequence(share), share.piece.batch, share.piece.head, i, append, tokens.scratch);
        __syncwarp();
        tokens.attend(p, share.piece, rows, shared.queries[0][0], query_scales,
                      share.sequence.num_keys - num_new + i, state);
      }
    }
  }

  // inputs: in a cluster, what request_rows() has begun.
  __device__ __forceinline__ void attend_to_piece(const DecodeParams& p, const kernels::Share& share, Inputs& inputs,
                                                  SharedStorage& shared) {
    const Piece& piece = share.piece;
    const NewTokens tokens(shared);
    const int num_new = Config::kNewTokens && piece.starts ? share.sequence.num_new : 0;
    const bool append = appends(p, piece);
    const bool checks_stamp = !Config::kCluster && p.checks_stamp != 0 && !begun;
    fetch_rows(p, share, tokens, num_new, append, inputs, shared);
    if (checks_stamp) schedule::add_stamps(p, threadIdx.x, Config::kThreads, &shared.stamp);
    __syncthreads();
    queries.load();
    rows.start(p, piece, share.sequence, query_scales);
    state.clear(Config::kCluster ? 0.0f : schedule::first_sum(shared.stamp, share.stamp));
    // While the first keys are on their way, unless o must be scaled before it takes new values.
    if constexpr (!kScalesValues) attend_to_tokens(p, share, tokens, num_new, append, shared);
    attend_piece(p, piece, rows, queries, attend, loader, stage, state);
    if constexpr (kScalesValues) {
      scale_cached_values(p, piece.head, state);
      attend_to_tokens(p, share, tokens, num_new, append, shared);
    }
  }
};

}  // namespace attune::decode
