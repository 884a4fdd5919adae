// SPDX-License-Identifier: Apache-2.0
// Stores dq from its sums, and notes which blocks of rows have a NaN or infinity. Grid: blocks of queries times query
// heads.
#include "backward/dq.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace attune::backward {

constexpr int kThreads = 256, kHeadDimQk = ATTUNE_HEAD_DIM_QK;
using Tile = DqTile<kHeadDimQk>;

// Whether eight channels can be stored by 16 bytes.
__device__ __forceinline__ bool takes_eights(const GradientRows& to) {
  return kHeadDimQk % 8 == 0 && to.dim_stride == 1 && (to.row_stride | to.head_stride | to.batch_stride) % 8 == 0 &&
         reinterpret_cast<unsigned long long>(to.data) % 16 == 0;
}

// Stores channels channel .. channel + 7 of the row that begins at `first`, as far as there are so many.
__device__ __forceinline__ void store_eight(const GradientRows& to, bool eights, long long first, int channel,
                                            const float (&x)[8]) {
  if (eights && to.dtype == common::kFloat32) {
    float4* const at = reinterpret_cast<float4*>(to.data + 4 * (first + channel));
    at[0] = make_float4(x[0], x[1], x[2], x[3]);
    at[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else if (eights) {
    unsigned r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = to.dtype == common::kBFloat16 ? ptx::pack_bf16(x[2 * i], x[2 * i + 1])
                                           : ptx::pack_f16(x[2 * i], x[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(to.data + 2 * (first + channel)) = make_uint4(r[0], r[1], r[2], r[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (channel + i < kHeadDimQk)
        common::store_element(to.dtype, to.data, first + (channel + i) * to.dim_stride, x[i]);
    }
  }
}

// Stores the tile of queries that begins at `begin`. Returns whether what this thread had is finite.
__device__ __forceinline__ bool store_tile(const BackwardParams& p, const SequenceInfo& s, int b, int head, int begin) {
  constexpr int kEights = 2 * Tile::Half::kChannels / 8;
  const char* const sums =
      reinterpret_cast<const char*>(p.dq_sums + dq_tile_at(p, s, b, head, begin) * Tile::kFloats);
  const bool eights = takes_eights(p.dq);
  bool finite = true;
  for (int i = threadIdx.x; i < kBackwardTile * kEights; i += kThreads) {
    const int row = i / kEights, group = i % kEights / (kEights / 2), eight = i % (kEights / 2);
    const int channel = Tile::Half::channel_of(group, eight);
    if (begin + row >= s.num_q || channel >= kHeadDimQk) continue;
    float x[8] = {};
    const Span keys = keys_of_query(p, s, begin + row);
    if (keys.begin < keys.end) {  // else nobody may have written here
      const char* const from =
          sums + eight / Tile::kEights * Tile::kPieceFloats * 4 + Tile::byte_of(group, row, eight % Tile::kEights);
      const float4 y = *reinterpret_cast<const float4*>(from), z = *reinterpret_cast<const float4*>(from + 16);
      const float of_row[8] = {y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = p.scale * of_row[j];
        finite &= fabsf(x[j]) < ptx::infinity();
      }
    }
    store_eight(p.dq, eights, query_offset(p, s, b, p.dq, begin + row, head), channel, x);
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
    finite &= store_tile(p, s, tile.batch, block.head, begin);
  const int any = __syncthreads_or(finite ? 0 : 1);
  if (threadIdx.x == 0) p.q_nonfinite[blockIdx.x] = any;
}
