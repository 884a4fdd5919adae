// SPDX-License-Identifier: Apache-2.0
// The configuration, shared memory and work of gradients_mma.cu, and of dbias.cu and dt5_bias.cu, which compute the
// same GEMMs. On each side qk is the operand of the scores, q or k, and vdo the other, v or dout. A block has
// resident rows of one side and streams tiles of the other.
#pragma once

#include "backward/masks.cuh"
#include "backward/mma/shared_bytes.h"
#include "ptx/async_copy.cuh"

namespace attune::backward::mma {

struct Config {
  static constexpr int kType = ATTUNE_TYPE, kGradients = ATTUNE_GRADIENTS;
  static constexpr bool kOfTables = (kGradients & kernels::kGradientTables) != 0;  // sums of dZ, without a slope
  static constexpr bool kOfQueries = kOfTables || kGradients == kernels::kGradientDq;
  static constexpr bool kWithDqk = kGradients != kernels::kGradientDv,
                        kWithDv = (kGradients & kernels::kGradientDv) != 0;
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr bool kIsFp32 = kType == common::kFloat32;
  // Bytes of a number in shared memory: 2 if the GEMMs are of 16 bits, otherwise those of TF32, which holds 16 bits
  // unchanged.
  static constexpr int kNumberBytes = kernels::mma_number_bytes(kGradients, common::element_size(kType));
  static constexpr bool kIn16Bits = kNumberBytes == 2;
  static constexpr int kLinesQk = kernels::mma_lines(kHeadDimQk, kNumberBytes),
                       kLinesV = kernels::mma_lines(kHeadDimV, kNumberBytes);
  static constexpr int kWarps = ATTUNE_WARPS, kThreads = 32 * kWarps, kRows = 16 * kWarps, kTile = ATTUNE_TILE;
  // Whether a step takes half of a tile's rows: dk and dv leave no registers for S, dP and their sums of a whole tile.
  static constexpr bool kHalves = kTile > 16 && kGradients == kernels::kGradientDkDv && kLinesQk + kLinesV > 4;
  static constexpr int kStep = kHalves ? kTile / 2 : kTile;
  static constexpr int kN8Tiles = kStep / 8;
  static constexpr int kBlocksOfTile = kBackwardRows / kRows;  // blocks of a tile of the list
  static_assert(kTile == 16 || kTile == 32, "a thread's pairs fit a word: four tiles of N = 8");
  static_assert(kBackwardRows % kRows == 0, "blocks would cross the tiles of the lists");
  static_assert(kGradients != kernels::kGradients, "dq has a separate pass");
  static_assert(kGradients != kernels::kGradientDkDv || kernels::mma_has_dk_beside_dv(kHeadDimQk, kHeadDimV),
                "dk and dv would not fit the registers");
};

// Rows are lines of 32 channels in fp32, or 64 in 16 bits; rows after the last one are 0.
template <int kLines>
struct Layout {
  static constexpr int kPitch = kLines * 128;  // bytes
  // The swizzle: chunk numbers are XORed with this in each line; a chunk is 16 bytes. Eight lanes are one
  // shared-memory transaction, and their chunks hit distinct banks: four chunks of two rows (GEMMs along the channels),
  // two chunks of the four rows 2t (GEMMs along the rows), or in 16 bits one chunk of eight rows.
  __device__ __forceinline__ static constexpr int swizzle(int row) {
    return Config::kIn16Bits ? row & 7 : (row & 2) | ((row ^ row >> 2) & 1) << 2;
  }
  __device__ __forceinline__ static constexpr int offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ swizzle(row)) << 4);
  }
};
using LayoutQk = Layout<Config::kLinesQk>;
using LayoutVdo = Layout<Config::kLinesV>;

// The resident rows of a block, and the streamed rows that they see.
struct WorkTile {
  SequenceInfo s;
  int batch, head;  // head: of the resident side
  int begin, end;   // resident rows
  int first, last;  // streamed rows [first, last); first is the first row of a tile
  int vectors;      // bits: q, dout, k and v are aligned to 16 bytes and have contiguous channels

  // The first resident row: a block of dbias.cu has positions, which may begin before the sequence's queries.
  __device__ __forceinline__ int first_row() const { return Config::kOfTables ? max(begin, 0) : begin; }
  __device__ __forceinline__ bool has(int row) const { return row < end && (!Config::kOfTables || row >= 0); }
  // The streamed rows that are visible to a resident row by causality and windows.
  __device__ __forceinline__ Span visible_to(const BackwardParams& p, int row) const {
    if (!has(row)) return {0, 0};
    return Config::kOfQueries ? keys_of_query(p, s, row) : queries_of_key(p, s, row);
  }
  // The query and the key of a pair of a resident row and a streamed row.
  __device__ __forceinline__ static int query(int resident, int other) { return Config::kOfQueries ? resident : other; }
  __device__ __forceinline__ static int key(int resident, int other) { return Config::kOfQueries ? other : resident; }
};

constexpr int kVectorsQ = 1, kVectorsDout = 2, kVectorsK = 4, kVectorsV = 8;
template <class Array>
__device__ __forceinline__ int vectors_bit(const Array& x, int bit) {
  const long long strides = (x.row_stride | x.head_stride | x.batch_stride) * common::element_size(Config::kType);
  const bool fits = strides % 16 == 0 && reinterpret_cast<unsigned long long>(x.data) % 16 == 0;
  return x.dim_stride == 1 && fits ? bit : 0;
}
__device__ __forceinline__ int find_vectors(const BackwardParams& p) {
  const NewRows q = {p.q, p.q_batch_stride, p.q_row_stride, p.q_head_stride, p.q_dim_stride};
  return vectors_bit(q, kVectorsQ) | vectors_bit(p.dout, kVectorsDout) | vectors_bit(p.new_k, kVectorsK) |
         vectors_bit(p.new_v, kVectorsV);
}

// tile: of the list; slice: the block's number in the tile. If there are no resident rows, begin is not below end.
__device__ __forceinline__ WorkTile work_tile_of(const BackwardParams& p, const BackwardTile& tile, int slice,
                                                 int head) {
  WorkTile w;
  w.s = read_sequence(p, tile.batch);
  w.batch = tile.batch, w.head = head, w.begin = tile.begin + slice * Config::kRows;
  w.end = min(w.begin + Config::kRows, Config::kOfQueries ? w.s.num_q : key_extent(p, tile.batch));
  w.first = w.last = 0, w.vectors = find_vectors(p);
  // the last resident row that sees a key, or that is seen
  const int last = (Config::kOfQueries ? w.end : min(w.end, w.s.num_keys)) - 1;
  const int first = w.first_row();
  if (last < first) return w;
  Span seen = {w.visible_to(p, first).begin, w.visible_to(p, last).end};
  if constexpr (Config::kOfQueries) {
    widen_keys_by_ranges(p, w.s, w.batch, first, last, seen);
  } else {
    widen_by_ranges(p, w.s, w.batch, w.begin, last, seen);
  }
  if (seen.begin < seen.end) w.first = seen.begin / Config::kTile * Config::kTile, w.last = seen.end;
  return w;
}

struct Smem {
  static constexpr int kQueries = Config::kOfQueries ? Config::kRows : Config::kTile;
  static constexpr int kResidentQk = 0, kResidentVdo = kResidentQk + Config::kRows * LayoutQk::kPitch,
                       kQk = kResidentVdo + (Config::kWithDqk ? Config::kRows * LayoutVdo::kPitch : 0),
                       kVdo = kQk + Config::kTile * LayoutQk::kPitch, kStats = kVdo + Config::kTile * LayoutVdo::kPitch,
                       kWork = kStats + kQueries * static_cast<int>(sizeof(RowStats)),
                       kBuckets = kWork + kernels::kMmaWorkBytes,
                       kBucketsOfWarp =
                           Config::kGradients == kernels::kGradientDt5Bias ? 4 * kernels::kMostT5Entries : 0,
                       kBytes = kBuckets + Config::kWarps * kBucketsOfWarp;
  static_assert(sizeof(WorkTile) <= kernels::kMmaWorkBytes && kWork % 16 == 0);
  static_assert(kBytes == kernels::mma_backward_shared_bytes(Config::kHeadDimQk, Config::kHeadDimV, Config::kGradients,
                                                             Config::kRows, Config::kTile, sizeof(RowStats),
                                                             common::element_size(Config::kType)),
                "the host asks for another size");
  unsigned char* memory;
  unsigned base;  // the shared address of the storage
  __device__ __forceinline__ explicit Smem(unsigned char* shared) : memory(shared), base(ptx::shared_address(shared)) {}
  __device__ __forceinline__ WorkTile& work() const { return *reinterpret_cast<WorkTile*>(memory + kWork); }
  // A word for each warp, after the work: which sequences use a block's entries (dbias.cu).
  __device__ __forceinline__ unsigned& sequences(int warp) const {
    constexpr int kBegin = kernels::kMmaWorkBytes - 4 * Config::kWarps;
    static_assert(static_cast<int>(sizeof(WorkTile)) <= kBegin);
    return reinterpret_cast<unsigned*>(memory + kWork + kBegin)[warp];
  }
  // A warp's sums of T5's buckets.
  __device__ __forceinline__ unsigned buckets(int warp) const { return base + kBuckets + warp * kBucketsOfWarp; }
  __device__ __forceinline__ unsigned resident_qk() const { return base + kResidentQk; }
  __device__ __forceinline__ unsigned resident_vdo() const { return base + kResidentVdo; }
  __device__ __forceinline__ unsigned qk() const { return base + kQk; }
  __device__ __forceinline__ unsigned vdo() const { return base + kVdo; }
  __device__ __forceinline__ unsigned stats(int row) const {  // of the rows that are queries
    return base + kStats + row * static_cast<int>(sizeof(RowStats));
  }
};

}  // namespace attune::backward::mma
