// SPDX-License-Identifier: Apache-2.0
// Stores dq from its sums, and flags blocks of rows with a NaN or infinity. Grid: blocks of queries times query heads.
#include "backward/dq.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace attune::backward {

constexpr int kThreads = 256, kHeadDimQk = ATTUNE_HEAD_DIM_QK;
using Tile = DqTile<kHeadDimQk, ATTUNE_HEAD_DIM_V>;

// A tile of queries of a sequence and a head.
struct TileOfDq {
  const BackwardParams& p;
  const SequenceInfo& s;
  int b, head, begin;
  const char* sums;
  bool eights;

  __device__ __forceinline__ bool has(int row) const { return begin + row < s.num_q; }
  // Whether any block has added to a row. If not, its sums are uninitialised.
  __device__ __forceinline__ bool sees(int row) const {
    const bool any = sees_any(p, s, b, begin + row);
    return has(row) && any;
  }
  // Scales and stores eight channels of a row; they are 0 if the row sees nothing. Returns whether they are finite.
  __device__ __forceinline__ bool store(int row, int channel, float (&x)[8]) const {
    const bool any = sees(row);
    bool finite = true;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = any ? p.scale * x[j] : 0.0f;
      finite &= fabsf(x[j]) < ptx::infinity();
    }
    store_eight<kHeadDimQk>(p.dq, eights, query_offset(p, s, b, p.dq, begin + row, head), channel, x);
    return finite;
  }
};

// Stores the tile. Returns whether all numbers of this thread were finite.
__device__ __forceinline__ bool store_rows(const TileOfDq& t) {
  constexpr int kN8Tiles = 2 * Tile::Half::kChannels / 8;
  bool finite = true;
  for (int i = threadIdx.x; i < Tile::kQueries * kN8Tiles; i += kThreads) {
    const int row = i / kN8Tiles, group = i % kN8Tiles / (kN8Tiles / 2), n8 = i % (kN8Tiles / 2);
    const int channel = Tile::Half::channel_of(group, n8);
    if (!t.has(row) || channel >= kHeadDimQk) continue;
    const char* const from = t.sums + Tile::byte_of(group, row, n8);
    const bool any = t.sees(row);
    const float4 y = any ? *reinterpret_cast<const float4*>(from) : float4{};
    const float4 z = any ? *reinterpret_cast<const float4*>(from + 16) : float4{};
    float x[8] = {y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w};
    finite &= t.store(row, channel, x);
  }
  return finite;
}
// The same for a transposed tile: a thread has eight channels of two queries; four threads have 32 bytes of each sum's
// line, and eight such groups of four store 128 bytes of a row.
__device__ __forceinline__ bool store_columns(const TileOfDq& t) {
  constexpr int kN8Tiles = (kHeadDimQk + 7) / 8;
  bool finite = true;
  for (int i = threadIdx.x; i < Tile::kQueries / 2 * kN8Tiles; i += kThreads) {
    const int pair = i % 4, channel = i / 4 % kN8Tiles * 8, n8 = i / (4 * kN8Tiles), row = 8 * n8 + 2 * pair;
    float2 x[8] = {};
#pragma unroll
    for (int j = 0; j < 8 && (t.sees(row) || t.sees(row + 1)); ++j)
      x[j] = *reinterpret_cast<const float2*>(t.sums + Tile::byte_of(channel + j, n8) + 8 * pair);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!t.has(row + e)) continue;
      float of_row[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) of_row[j] = e == 0 ? x[j].x : x[j].y;
      finite &= t.store(row + e, channel, of_row);
    }
  }
  return finite;
}

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::kThreads)
    attune_backward_store_dq(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const GridBlock block(p.num_heads_q);
  if (block.index >= p.q_list->num_tiles) return;
  const BackwardTile tile = tiles_of(p.q_list)[block.index];
  const SequenceInfo s = read_sequence(p, tile.batch);
  bool finite = true;
  for (int begin = tile.begin; begin < min(tile.begin + kBackwardRows, s.num_q); begin += Tile::kQueries) {
    const float* const sums = p.dq_sums + Tile::at(p, s, tile.batch, block.head, begin) * Tile::kFloats;
    const TileOfDq t{p,     s, tile.batch, block.head, begin, reinterpret_cast<const char*>(sums),
                     takes_eights<kHeadDimQk>(p.dq)};
    if constexpr (Tile::kTransposed) {
      finite &= store_columns(t);
    } else {
      finite &= store_rows(t);
    }
  }
  const int any = __syncthreads_or(finite ? 0 : 1);
  if (threadIdx.x == 0) p.q_nonfinite[blockIdx.x] = any;
}
