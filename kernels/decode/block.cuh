// SPDX-License-Identifier: Apache-2.0
// What a block does with one split before the epilogue: loads queries and new tokens, then runs the mainloop.
#pragma once

#include "common/stamp.cuh"
#include "decode/combine.cuh"
#include "decode/new_tokens.cuh"
#include "decode/producer.cuh"

namespace attune::decode {

__device__ __forceinline__ void clear_stages(SharedStorage& shared) {
  constexpr int kWords = sizeof(SharedStorage::stages) / 16;
  auto* words = reinterpret_cast<uint4*>(shared.stages);
  for (int i = threadIdx.x; i < kWords; i += Config::kThreads) words[i] = uint4{0, 0, 0, 0};
  __syncthreads();
}

// Sets *next to the range at its next split, by warp 0: while keys are in flight, not when the split has ended.
__device__ __forceinline__ void walk_ahead(const AttentionParams& p, const kernels::StreamKRange& range,
                                           kernels::StreamKRange* next) {
  constexpr int kVectors = sizeof(kernels::StreamKRange) / 16;
  if (threadIdx.x < kVectors)
    reinterpret_cast<uint4*>(next)[threadIdx.x] = reinterpret_cast<const uint4*>(&range)[threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0) scheduler::advance<Config::kTileKeys, Config::kRows>(p, *next);
  __syncwarp();
}

// The state of a block across splits: its stream-K range, in shared memory, and the registers of its warps.
struct Block {
  // With larger tiles no registers are left for inputs in flight.
  static constexpr int kAccumulators = Config::kBlocksV * Config::kRowTiles;
  static constexpr bool kScalesValues = Config::kNewTokens && Config::kElement == 1;
  static constexpr bool kPrefetchQuery = Config::kVectors && kAccumulators <= 16;
  // The query rows of a warp, if no prologue takes the registers: loaded together, not one after the other.
  static constexpr int kQueriesOfWarp = Config::kRows / Config::kWarps,
                       kQueryInputs = kPrefetchQuery && !Config::kPrologue && kQueriesOfWarp > 1
                                          ? (kQueriesOfWarp < 4 ? kQueriesOfWarp : 4)
                                          : 1;
  static constexpr bool kPrefetchToken = Config::kNewTokens && kPrefetchQuery && Config::kHeadDimQk <= 128 &&
                                         kAccumulators <= (Config::kKeyFactors ? 8 : 16);

  // The inputs of a prologue leave few registers to blocks of which three share a multiprocessor.
  static constexpr int kStampRounds = Config::kPrologue && Config::kBlocksPerSm > 2 ? 2 : 8;

  kernels::StreamKRange* stream_k;  // SharedStorage::stream_k; in a cluster only the ranges of the warps are set
  Producer producer;
  Mainloop mainloop;
  QueryOperand queries;
  float* query_scales;
  QueryRows rows;
  AttentionState state;
  int stage;
  bool begun;  // the first copies have been issued

  // first: the initial range of this warp's producer.
  __device__ __forceinline__ Block(const AttentionParams& p, const kernels::StreamKRange& first, SharedStorage& shared)
      : stream_k(shared.stream_k),
        producer(p, first, stream_k, shared),
        mainloop(threadIdx.x % 32),
        queries(shared.queries[0][0]),
        query_scales(shared.query_scales),
        stage(0),
        begun(false) {}

  // What a warp loads at the start of a split, besides keys.
  struct Inputs {
    QueryInput queries[kQueryInputs];
    NewTokens::Input token;
  };

  // In a cluster: issues loads before the lengths have arrived. A token that does not exist is ignored later.
  __device__ __forceinline__ static void request_rows(const AttentionParams& p, const Split& split,
                                                      SharedStorage& shared, Inputs& inputs) {
    const int r = threadIdx.x / 32;
    if constexpr (kPrefetchQuery) {
#pragma unroll
      for (int i = 0; i < kQueryInputs; ++i) {
        const int row = r + i * Config::kWarps;
        inputs.queries[i].load_row(p, query_row(p, split, {}, row), p.q, row < split.num_rows);
      }
    }
    if constexpr (kPrefetchToken) {
      const int token = NewTokens(shared).warp;
      inputs.token.load_rows(p, split.batch, split.head, token,
                             split.is_first != 0 && p.new_k.data != nullptr && token < p.fixed_q);
    }
  }

  __device__ __forceinline__ static void load_queries(const AttentionParams& p, const kernels::StreamKRange& range,
                                                      Inputs& inputs) {
#pragma unroll
    for (int i = 0; i < kQueryInputs; ++i) {
      const int r = threadIdx.x / 32 + i * Config::kWarps;
      inputs.queries[i].load(p, query_row(p, range.split, range.sequence, r), p.q, r < range.split.num_rows);
    }
  }

  // Loads the inputs of a split: a query, a new token and, in the first split, the first keys. Issues all loads before
  // it waits for any.
  __device__ __forceinline__ void fetch_rows(const AttentionParams& p, const kernels::StreamKRange& range,
                                             const NewTokens& tokens, int num_new, bool append, Inputs& inputs,
                                             SharedStorage& shared) {
    const Split& split = range.split;
    NewTokens::Input& token = inputs.token;
    const int r = threadIdx.x / 32;
    const bool has_token = Config::kNewTokens && tokens.warp < num_new;
    if constexpr (!Config::kCluster) {
      if constexpr (kPrefetchQuery) load_queries(p, range, inputs);
      if constexpr (kPrefetchToken)
        token.load(p, range.sequence, split.batch, split.head, tokens.warp, has_token, append);
    }
    if (!begun) {
      const bool checks_stamp = !Config::kCluster && p.checks_stamp != 0;
      common::StampLoads<kStampRounds> stamps;
      if (checks_stamp) stamps.load(p, threadIdx.x, Config::kThreads);
      for (int i = 0; i < Config::kStages - 1; ++i) producer.issue_tile(p);
      if (checks_stamp) stamps.add(p, threadIdx.x, Config::kThreads, &shared.stamp);
      begun = true;
    }
    if constexpr (Config::kCluster && kPrefetchQuery) {
      common::PrologueToken terms{};
      const bool has_query = r < split.num_rows;
      const TokenRow row = query_row(p, split, range.sequence, r);
      if (has_query) terms = row.prologue_token(p);
      inputs.queries[0].load_terms(p, row.head, terms, has_query);
      if constexpr (kPrefetchToken) {
        const TokenRow at = NewTokens::key_row(p, range.sequence, split.batch, split.head, tokens.warp);
        if (has_token && !(has_query && at.row == row.row)) terms = at.prologue_token(p);
        token.load_terms(p, split.head, terms, has_token);
        token.slot = {-1, -1, 0};
        if (!NewTokens::kAppendsLate && append && has_token) token.slot = slot_of_new(p, split.batch, at.position);
      }
    }
    if constexpr (Config::kVectors && !kPrefetchQuery) load_queries(p, range, inputs);
    store_queries(p, split, range.sequence, inputs.queries, shared.queries[0][0], query_scales, tokens.scratch);
    if constexpr (kPrefetchToken) {
      if (has_token) tokens.store_to_scratch(p, token, split.head);
    } else if constexpr (Config::kNewTokens) {
      if (has_token) {
        NewTokens::fetch(p, sequence_in_shared(range), split.batch, split.head, tokens.warp, append, tokens.scratch);
      }
    }
  }

  // In a cluster: appends the token of fetch_rows() after the block has sent its rows by DSMEM, unless fetch_rows() has
  // appended it already.
  __device__ __forceinline__ void append_late(const AttentionParams& p, const kernels::StreamKRange& range,
                                              Inputs& inputs, SharedStorage& shared) const {
    if constexpr (kPrefetchToken && NewTokens::kAppendsLate) {
      const NewTokens tokens(shared);
      const Split& split = range.split;
      if (!appends(p, split) || !split.is_first || tokens.warp >= range.sequence.num_new) return;
      const TokenRow at = NewTokens::key_row(p, range.sequence, split.batch, split.head, tokens.warp);
      inputs.token.slot = slot_of_new(p, split.batch, at.position);
      tokens.append(p, inputs.token, split.head);
    }
  }
  // Not for rings and beams, which are appended to when all readers are done (append_last()).
  __device__ __forceinline__ static bool appends(const AttentionParams& p, const Split& split) {
    return p.append && p.tiles_done == nullptr && split.row_begin == 0;
  }

  // For functions that are not inlined. It is in shared memory, because an object whose address is taken is not kept in
  // registers.
  __device__ __forceinline__ const Sequence& sequence_in_shared(const kernels::StreamKRange& range) const {
    return Config::kCluster ? producer.range.sequence : range.sequence;
  }

  __device__ __forceinline__ void attend_new_tokens(const AttentionParams& p, const kernels::StreamKRange& range,
                                                    const NewTokens& tokens, int num_new, bool append,
                                                    SharedStorage& shared) {
    if constexpr (Config::kNewTokens) {
#pragma unroll 1
      for (int i = tokens.warp; i < num_new; i += Config::kWarps) {
        __syncwarp();
        if (i != tokens.warp)
          NewTokens::fetch(p, sequence_in_shared(range), range.split.batch, range.split.head, i, append,
                           tokens.scratch);
        __syncwarp();
        tokens.attend(p, range.split, rows, shared.queries[0][0], query_scales, range.sequence.num_keys - num_new + i,
                      state);
      }
    }
  }

  // All of a split but its epilogue. next: gets the range at its next split; null in a cluster. inputs: in a cluster,
  // from request_rows().
  __device__ __forceinline__ void attend_split(const AttentionParams& p, const kernels::StreamKRange& range,
                                               kernels::StreamKRange* next, Inputs& inputs, SharedStorage& shared) {
    const Split& split = range.split;
    const NewTokens tokens(shared);
    const int num_new = Config::kNewTokens && split.is_first ? range.sequence.num_new : 0;
    const bool append = appends(p, split);
    fetch_rows(p, range, tokens, num_new, append, inputs, shared);
    __syncthreads();
    queries.load();
    rows.start(p, split, range.sequence, query_scales);
    state.clear(Config::kCluster ? 0.0f : common::first_sum(shared.stamp, range.stamp));
    // Runs while the first keys are in flight, unless O must be scaled before new values are added.
    if constexpr (!kScalesValues) attend_new_tokens(p, range, tokens, num_new, append, shared);
    if (!Config::kCluster && threadIdx.x < 32) walk_ahead(p, range, next);
    attend_split_tiles(p, split, rows, queries, mainloop, producer, stage, state);
    if constexpr (kScalesValues) {
      scale_cached_values(p, split.head, state);
      attend_new_tokens(p, range, tokens, num_new, append, shared);
    }
  }
};

}  // namespace attune::decode
