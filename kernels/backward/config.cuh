// SPDX-License-Identifier: Apache-2.0
// The compile-time configuration and the shared memory of the gradient kernel. A block has rows of k and v, and walks
// over tiles of q and dout:
//
//   S^T = K Q^T    dP^T = V dO^T    dv += P^T dO    dk += dS^T Q    dq of the tile += dS K
#pragma once

#include "backward/dq.cuh"
#include "common/pipeline_state.cuh"
#include "common/shared_view.cuh"
#include "ptx/wgmma.cuh"

namespace attune::backward {

struct Config {
  static constexpr bool kWithDq = ATTUNE_WITH_DQ != 0;
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kKeys = kernels::backward_keys(kHeadDimQk, kHeadDimV),
                       kTile = kernels::backward_tile(kHeadDimQk, kHeadDimV);
  using DqTile = backward::DqTile<kHeadDimQk, kHeadDimV>;
  // Warpgroups have half of the channels of dk and dv, not of the keys.
  static constexpr bool kWide = kKeys == 64;
  static constexpr int kQStages = ATTUNE_Q_STAGES, kDoutStages = ATTUNE_DOUT_STAGES;
  static constexpr int kMathGroups = 2, kMathWarps = 4 * kMathGroups, kThreads = 128 + 32 * kMathWarps;
  static constexpr int kWriters = 3;  // warps
  static constexpr int kProducerRegisters = 24, kMathRegisters = 240;
  static constexpr ptx::Type kMmaType = ATTUNE_TYPE == common::kBFloat16 ? ptx::Type::kBf16 : ptx::Type::kF16;
  // Lines of 64 channels, steps of 16, and channels of the accumulators of a warpgroup.
  static constexpr int kLinesQk = kernels::lines_of(kHeadDimQk), kLinesV = kernels::lines_of(kHeadDimV);
  static constexpr int kStepsQk = (kHeadDimQk + 15) / 16, kStepsV = (kHeadDimV + 15) / 16;
  static constexpr int kChannelsQk = kWide ? HalfHead<kHeadDimQk>::kChannels : (kHeadDimQk + 31) / 32 * 32;
  static constexpr int kChannelsV = kWide ? HalfHead<kHeadDimV>::kChannels : (kHeadDimV + 31) / 32 * 32;
  // Registers of dq in a warpgroup.
  static constexpr int kDqRegisters = HalfHead<kHeadDimQk>::kChannels * kTile / 128;
  static constexpr int kQBytes = kLinesQk * kTile * 128, kDoutBytes = kLinesV * kTile * 128;
  static constexpr int kDsBuffers = kWide ? 1 : 2, kDqBuffers = kWide ? 1 : 2;
  static_assert(ATTUNE_TYPE == common::kBFloat16 || ATTUNE_TYPE == common::kFloat16, "what wgmma takes");
  static_assert(kProducerRegisters + kMathGroups * kMathRegisters <= 65536 / kThreads / 8 * 8 * kThreads / 128,
                "a block has no more than it began with: it would wait for what others on its multiprocessor hold");
  static_assert(kHeadDimQk <= 256 && kHeadDimV <= 256, "the accumulators would not fit the registers");
  static_assert(kWide || kQStages == kDoutStages, "mainloop.cuh has one pipeline state for both");
  static_assert(!DqTile::kTransposed || kLinesQk <= 3, "a warpgroup has one whole line of a transposed dq");
  static_assert(kQStages >= 2, "S of the next step reads its q while this step still uses its own");
};

// Rows of 128 bytes, swizzled in atoms of 1,024: [lines of 64 channels][rows].
struct SharedStorage {
  alignas(1024) unsigned char k[Config::kLinesQk * Config::kKeys * 128];
  unsigned char v[Config::kLinesV * Config::kKeys * 128];
  unsigned char q[Config::kQStages][Config::kQBytes];
  unsigned char dout[Config::kDoutStages][Config::kDoutBytes];
  // dS, rows of queries: [64 keys][queries]. The wide kernel also has P^T and dS^T, rows of keys.
  unsigned char scores[Config::kDsBuffers + (Config::kWide ? 2 : 0)][Config::kKeys * Config::kTile * 2];
  unsigned char dq[Config::kDqBuffers][Config::DqTile::kPieceFloats * 4];
  RowStats stats[Config::kQStages][Config::kTile];
  kernels::Barrier own_full, q_full[Config::kQStages], q_empty[Config::kQStages], dout_full[Config::kDoutStages],
      dout_empty[Config::kDoutStages];
  int item;  // what the block has taken of the list
};
static_assert(sizeof(SharedStorage) == kernels::backward_shared_bytes(Config::kHeadDimQk, Config::kHeadDimV,
                                                                      Config::kQStages, Config::kDoutStages,
                                                                      sizeof(RowStats)),
              "the host asks for another size");

struct Smem : common::SharedView<SharedStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ int& item() const { return ATTUNE_SHARED_FIELD(SharedStorage, item); }
  __device__ __forceinline__ unsigned k() const { return ATTUNE_SHARED_AT(SharedStorage, k); }
  __device__ __forceinline__ unsigned v() const { return ATTUNE_SHARED_AT(SharedStorage, v); }
  __device__ __forceinline__ unsigned q(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, q, i); }
  __device__ __forceinline__ unsigned dout(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, dout, i); }
  __device__ __forceinline__ unsigned ds(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, scores, i); }
  __device__ __forceinline__ unsigned p_transposed() const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, scores, Config::kDsBuffers);
  }
  __device__ __forceinline__ unsigned ds_transposed() const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, scores, Config::kDsBuffers + 1);
  }
  __device__ __forceinline__ unsigned dq(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, dq, i); }
  __device__ __forceinline__ unsigned stats(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, stats, i); }
  __device__ __forceinline__ unsigned own_full() const { return ATTUNE_SHARED_AT(SharedStorage, own_full); }
  __device__ __forceinline__ unsigned q_full(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, q_full, i); }
  __device__ __forceinline__ unsigned q_empty(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, q_empty, i); }
  __device__ __forceinline__ unsigned dout_full(int i) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, dout_full, i);
  }
  __device__ __forceinline__ unsigned dout_empty(int i) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, dout_empty, i);
  }
};

// Named barriers: one of the math warps alone; the others of the math warps and a writer of dq, for each buffer and for
// each writer.
constexpr int kMathBarrier = 1, kDqEmptyBarrier = 2, kDqFullBarrier = 4, kDqThreads = 32 * Config::kMathWarps + 32;

// What a block of threads has to do.
struct Work {
  SequenceInfo s;
  int batch, head;   // head: of k and v
  int begin, end;    // keys
  int first, tiles;  // the first query of the first tile; tiles of each head
  int heads;         // of q
  __device__ __forceinline__ int steps() const { return heads * tiles; }

  // Queries that see a key.
  __device__ __forceinline__ Span seen_by(const BackwardParams& p, int key) const {
    return key < end ? queries_of_key(p, s, key) : Span{0, 0};
  }
};

// The steps of a block: its tiles from the last to the first, and all query heads of each. Blocks whose keys the last
// query sees begin with the same tile, so none waits long for the sums of dq.
struct Step {
  int row, head;  // the tile's first query; among the heads of q
  __device__ __forceinline__ explicit Step(const Work& w) : row(w.first + (w.tiles - 1) * Config::kTile), head(0) {}
  __device__ __forceinline__ void next(const Work& w) {
    if (++head == w.heads) head = 0, row -= Config::kTile;
  }
};

// item: a number among the list's blocks of keys times heads; it must be in range.
__device__ __forceinline__ Work work_of(const BackwardParams& p, int item) {
  const BackwardTile tile = tiles_of(p.kv_list)[item / p.num_heads_kv];
  const int head = item % p.num_heads_kv;
  Work w;
  w.s = read_sequence(p, tile.batch);
  w.batch = tile.batch, w.head = head, w.begin = tile.begin;
  w.end = min(tile.begin + Config::kKeys, key_extent(p, tile.batch));
  w.heads = p.group;
  w.first = w.tiles = 0;
  const int last = min(w.end, w.s.num_keys) - 1;  // that is seen
  if (last < w.begin) return w;
  Span seen = {w.seen_by(p, w.begin).begin, w.seen_by(p, last).end};
  widen_by_ranges(p, w.s, w.batch, w.begin, last, seen);
  w.first = seen.begin / Config::kTile * Config::kTile;
  if (seen.end > seen.begin) w.tiles = (seen.end - w.first + Config::kTile - 1) / Config::kTile;
  return w;
}

}  // namespace attune::backward
