// SPDX-License-Identifier: Apache-2.0
// The compile-time configuration and shared memory of the gradient kernel. A block keeps 128 rows of one side in shared
// memory, the resident rows: keys, or queries in the pass of dq. It streams tiles of the other side. On each side qk
// is the operand of the scores, q or k, and vdo the other operand, v or dout (dO):
//
//   S = resident qk * tile qk^T    dP = resident vdo * tile vdo^T
//   dqk += dS * tile qk            dv += P * tile vdo (resident keys)
//
// If all gradients are computed in one pass, with resident keys, dS K is also added to dq of the tile.
#pragma once

#include "backward/dq.cuh"
#include "common/pipeline_state.cuh"
#include "common/shared_view.cuh"
#include "ptx/wgmma.cuh"

namespace attune::backward {

struct Config {
  static constexpr int kGradients = ATTUNE_GRADIENTS;
  static constexpr bool kOfQueries = kGradients == kernels::kGradientDq, kSumsDq = kGradients == kernels::kGradients;
  static constexpr bool kWithDqk = kGradients != kernels::kGradientDv,
                        kWithDv = (kGradients & kernels::kGradientDv) != 0;
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kTile = kernels::backward_tile(kHeadDimQk, kHeadDimV);
  using DqTile = backward::DqTile<kHeadDimQk, kHeadDimV>;
  static constexpr int kQkStages = ATTUNE_QK_STAGES, kVdoStages = ATTUNE_VDO_STAGES;
  static constexpr int kConsumerGroups = 2, kConsumerWarps = 4 * kConsumerGroups, kThreads = 128 + 32 * kConsumerWarps;
  static constexpr int kWriters = 3;  // warps that add dq
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr ptx::Type kMmaType = ATTUNE_TYPE == common::kBFloat16 ? ptx::Type::kBf16 : ptx::Type::kF16;
  // Lines of 64 channels, steps of 16 channels, and channels of the accumulators.
  static constexpr int kLinesQk = kernels::lines_of(kHeadDimQk), kLinesV = kernels::lines_of(kHeadDimV);
  static constexpr int kLinesResident = kLinesQk + (kWithDqk ? kLinesV : 0);
  static constexpr int kStepsQk = (kHeadDimQk + 15) / 16, kStepsV = (kHeadDimV + 15) / 16;
  static constexpr int kChannelsQk = (kHeadDimQk + 31) / 32 * 32, kChannelsV = (kHeadDimV + 31) / 32 * 32;
  // Registers of a tile's dq in a thread of a warpgroup.
  static constexpr int kDqRegisters = HalfHead<kHeadDimQk>::kChannels * kTile / 128;
  static constexpr int kQkBytes = kLinesQk * kTile * 128, kVdoBytes = kLinesV * kTile * 128;
  static constexpr int kDsBuffers = 2, kDqBuffers = 2;
  static_assert(ATTUNE_TYPE == common::kBFloat16 || ATTUNE_TYPE == common::kFloat16, "wgmma takes 16-bit types");
  static_assert(kProducerRegisters + kConsumerGroups * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * kThreads / 128,
                "setmaxnreg would wait for registers that the block never had");
  static_assert(kHeadDimQk <= 256 && kHeadDimV <= 256, "the accumulators would not fit the registers");
  static_assert(kernels::has_one_pass(kHeadDimQk, kHeadDimV) == ((kGradients & (kGradients - 1)) != 0),
                "one gradient where each has a pass, otherwise several");
  static_assert(kVdoStages == kQkStages || kVdoStages == 1, "mainloop.cuh has one pipeline state for both");
  static_assert(kQkStages >= 2, "the next tile is copied, and its S issued, while this step uses its own");
};

// The resident rows of a block, of one head, and the tiles of the streamed side that they see.
struct WorkTile {
  SequenceInfo s;
  int batch, head;   // head: of the resident side
  int begin, end;    // resident rows
  int first, tiles;  // the first row of the first tile; the number of tiles for each head
  int heads;         // heads that stream through the block: of q, if the resident rows are keys
  bool walks_up;     // from the first tile to the last
  __device__ __forceinline__ int steps() const { return heads * tiles; }

  // The streamed rows that are visible to a resident row by causality and windows.
  __device__ __forceinline__ Span visible_to(const BackwardParams& p, int row) const {
    if (row >= end) return {0, 0};
    return Config::kOfQueries ? keys_of_query(p, s, row) : queries_of_key(p, s, row);
  }
  // The query and the key of a pair of a resident row and a streamed row.
  __device__ __forceinline__ static int query(int resident, int other) { return Config::kOfQueries ? resident : other; }
  __device__ __forceinline__ static int key(int resident, int other) { return Config::kOfQueries ? other : resident; }
  // step_head: the head of a step.
  __device__ __forceinline__ int q_head(const BackwardParams& p, int step_head) const {
    return Config::kOfQueries ? head : head * p.group + step_head;
  }
};

// dS, [64 keys][queries], and dq of tiles, if dq is summed.
template <bool kSumsDq>
struct DqStorage {
  unsigned char ds[Config::kDsBuffers][kBackwardRows * Config::kTile * 2];
  unsigned char dq[Config::kDqBuffers][Config::DqTile::kFloats * 4];
};
template <>
struct DqStorage<false> {};

// Rows of 128 bytes, in swizzle atoms of 1,024 bytes: [lines of 64 channels][rows].
struct SharedStorage {
  alignas(1024) unsigned char resident[Config::kLinesResident * kBackwardRows * 128];  // qk, then vdo
  unsigned char qk[Config::kQkStages][Config::kQkBytes];
  unsigned char vdo[Config::kVdoStages][Config::kVdoBytes];
  DqStorage<Config::kSumsDq> sums;
  alignas(16) RowStats stats[Config::kQkStages][Config::kTile];  // of tiles of queries
  kernels::Barrier resident_full, qk_full[Config::kQkStages], qk_empty[Config::kQkStages], vdo_full[Config::kVdoStages],
      vdo_empty[Config::kVdoStages];
  int work_tile_idx;  // from the tile scheduler
  alignas(16) WorkTile work;
};
static_assert(sizeof(WorkTile) + 16 <= kernels::kBackwardWorkTileBytes, "the host asks for less");
static_assert(sizeof(SharedStorage) == kernels::backward_shared_bytes(Config::kHeadDimQk, Config::kHeadDimV,
                                                                      Config::kGradients, Config::kQkStages,
                                                                      Config::kVdoStages, sizeof(RowStats)),
              "the host asks for another size");

struct Smem : common::SharedView<SharedStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ int& work_tile_idx() const { return ATTUNE_SHARED_FIELD(SharedStorage, work_tile_idx); }
  __device__ __forceinline__ WorkTile& work() const { return ATTUNE_SHARED_FIELD(SharedStorage, work); }
  __device__ __forceinline__ unsigned resident_qk() const { return ATTUNE_SHARED_AT(SharedStorage, resident); }
  __device__ __forceinline__ unsigned resident_vdo() const {
    return resident_qk() + Config::kLinesQk * kBackwardRows * 128;
  }
  __device__ __forceinline__ unsigned qk(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, qk, i); }
  __device__ __forceinline__ unsigned vdo(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, vdo, i); }
  __device__ __forceinline__ unsigned ds(int i) const { return sums() + i * (kBackwardRows * Config::kTile * 2); }
  __device__ __forceinline__ unsigned dq(int i) const {
    return ds(Config::kDsBuffers) + i * (Config::DqTile::kFloats * 4);
  }
  __device__ __forceinline__ unsigned stats(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, stats, i); }
  __device__ __forceinline__ unsigned resident_full() const { return ATTUNE_SHARED_AT(SharedStorage, resident_full); }
  __device__ __forceinline__ unsigned qk_full(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, qk_full, i); }
  __device__ __forceinline__ unsigned qk_empty(int i) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, qk_empty, i);
  }
  __device__ __forceinline__ unsigned vdo_full(int i) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, vdo_full, i);
  }
  __device__ __forceinline__ unsigned vdo_empty(int i) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, vdo_empty, i);
  }

 private:
  __device__ __forceinline__ unsigned sums() const { return ATTUNE_SHARED_AT(SharedStorage, sums); }
};

// Named barriers: one for the consumer warps alone. dq of a buffer has been read: for a warpgroup and a dq writer, so
// that the warpgroups do not wait for each other there. dq of a tile is there: for all consumer warps and its writer.
constexpr int kConsumerBarrier = 1, kDqEmptyBarrier = 2,
              kDqFullBarrier = kDqEmptyBarrier + Config::kDqBuffers * Config::kConsumerGroups;
constexpr int kDqEmptyThreads = 128 + 32, kDqFullThreads = 32 * Config::kConsumerWarps + 32;
__device__ __forceinline__ int dq_empty_barrier(int buffer, int group) {
  return kDqEmptyBarrier + buffer * Config::kConsumerGroups + group;
}

// The row of a block's i-th tile.
__device__ __forceinline__ int row_of_tile(const WorkTile& w, int i) {
  return w.first + (w.walks_up ? i : w.tiles - 1 - i) * Config::kTile;
}
// The steps of a block: its tiles, and all heads of each.
struct Step {
  int row, head;  // the tile's first row; the head among those of a tile
  __device__ __forceinline__ explicit Step(const WorkTile& w) : row(row_of_tile(w, 0)), head(0) {}
  __device__ __forceinline__ void next(const WorkTile& w) {
    if (++head == w.heads) head = 0, row += w.walks_up ? Config::kTile : -Config::kTile;
  }
};

__device__ __forceinline__ BackwardList* resident_list(const BackwardParams& p) {
  return Config::kOfQueries ? p.q_list : p.kv_list;
}
__device__ __forceinline__ int resident_heads(const BackwardParams& p) {
  return Config::kOfQueries ? p.num_heads_q : p.num_heads_kv;
}

// The work tile of a ticket. Tickets number the work tiles in the order in which thread blocks take them: in turn, 16
// tiles of the list for one head, then for the next; otherwise a tile for each head. Beyond the list it is the ticket.
__device__ __forceinline__ int work_tile_of_ticket(const BackwardParams& p, int ticket) {
  const int heads = resident_heads(p), num_tiles = resident_list(p)->num_tiles;
  if (Config::kOfQueries || !takes_turns(p) || ticket / heads >= num_tiles) return ticket;
  const int first = ticket / (kSeriesInTurn * heads) * kSeriesInTurn, rest = ticket - first * heads;
  const int count = min(kSeriesInTurn, num_tiles - first);
  return (first + rest % count) * heads + rest / count;
}
// work_tile_idx: less than list->num_tiles * resident_heads().
__device__ __forceinline__ WorkTile work_tile_at(const BackwardParams& p, int work_tile_idx) {
  const BackwardTile tile = tiles_of(resident_list(p))[work_tile_idx / resident_heads(p)];
  WorkTile w;
  w.s = read_sequence(p, tile.batch);
  w.batch = tile.batch, w.head = work_tile_idx % resident_heads(p), w.begin = tile.begin;
  w.end = min(tile.begin + kBackwardRows, Config::kOfQueries ? w.s.num_q : key_extent(p, tile.batch));
  w.heads = Config::kOfQueries ? 1 : p.group;
  w.walks_up = !Config::kOfQueries && takes_turns(p);
  Span seen{0, 0};
  if constexpr (!Config::kOfQueries) {
    seen = queries_of_block(p, w.s, w.batch, w.begin);
  } else if (w.begin < w.end) {
    seen = {w.visible_to(p, w.begin).begin, w.visible_to(p, w.end - 1).end};
    widen_keys_by_ranges(p, w.s, w.batch, w.begin, w.end - 1, seen);
  }
  w.first = seen.begin / Config::kTile * Config::kTile;
  w.tiles = 0;
  if (seen.end > seen.begin) w.tiles = (seen.end - w.first + Config::kTile - 1) / Config::kTile;
  return w;
}

}  // namespace attune::backward
