// SPDX-License-Identifier: Apache-2.0
// Stores dq from its sums, and notes which blocks of rows have a NaN or infinity. Grid: blocks of queries times query
// heads.
#include "backward/dq.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace attune::backward {

constexpr int kThreads = 256, kHeadDimQk = ATTUNE_HEAD_DIM_QK;
using Tile = DqTile<kHeadDimQk>;

// The two rows that this thread has of one half of a tile. Returns whether all is finite.
__device__ __forceinline__ bool store_half(const BackwardParams& p, const SequenceInfo& s, const BackwardTile& tile,
                                           int head, int begin, int half) {
  const int thread = static_cast<int>(threadIdx.x) % 128, row = begin + Tile::row_of(thread);
  const char* const sums = reinterpret_cast<const char*>(
      p.dq_sums + (2 * dq_tile_at(p, s, tile.batch, head, begin) + half) * (Tile::kFloats / 2));
  bool sees[2];
  long long at[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Span keys = keys_of_query(p, s, row + 8 * h);
    sees[h] = row + 8 * h < s.num_q && keys.begin < keys.end;
    at[h] = query_offset(p, s, tile.batch, p.dq, row + 8 * h, head);
  }
  const bool pairs = takes_pairs<kHeadDimQk>(p.dq);
  bool finite = true;
#pragma unroll
  for (int four = 0; four < Tile::kThreadFloats / 4; ++four) {
    const int channel = half * Tile::kChannels + Tile::channel_of(four, thread);
    if (channel >= kHeadDimQk || row >= s.num_q) continue;
    // Nobody has written a tile that sees nothing.
    const float4 x = sees[0] || sees[1] ? *reinterpret_cast<const float4*>(sums + Tile::byte_of(four, thread))
                                        : float4{0, 0, 0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= s.num_q) continue;
      const float a = sees[h] ? p.scale * (h == 0 ? x.x : x.z) : 0.0f;
      const float b = sees[h] ? p.scale * (h == 0 ? x.y : x.w) : 0.0f;
      finite &= fabsf(a) < ptx::infinity() && fabsf(b) < ptx::infinity();
      store_pair<kHeadDimQk>(p.dq, pairs, at[h], channel, a, b);
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
  for (int begin = tile.begin; begin < min(tile.begin + kBackwardRows, s.num_q); begin += kBackwardTile)
    finite &= store_half(p, s, tile, block.head, begin, static_cast<int>(threadIdx.x) / 128);
  const int any = __syncthreads_or(finite ? 0 : 1);
  if (threadIdx.x == 0) p.q_nonfinite[blockIdx.x] = any;
}
