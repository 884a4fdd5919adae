// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of (sequence, KV head, block of rows)s that the decode kernel split over blocks.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L,  in the order of the keys, so the same bits always
//
// Block c of the grid takes the pair that begins in block c of the decode grid and does not end there, if there is one. Parts lie in slot
// 2c + 1 (the beginning), then 2(c + 1), 2(c + 2).. Each warp merges one row, or, where there are fewer rows than warps, a run of the
// parts of one row; runs are added through shared memory, again in order.
#include "ptx/grid.cuh"
#include "tile/finish.cuh"

namespace attune::combine {

using kernels::DecodeParams;
using kernels::Split;

struct Config {
  static constexpr int kHeadDimV = ATTUNE_HEAD_DIM_V, kRows = 8 * ATTUNE_ROW_TILES;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kVectors = (kHeadDimV + 127) / 128;  // of four channels, a lane
  static_assert(kHeadDimV % 4 == 0, "rows are read in vectors of four");
};

struct Row {
  float max, sum;
  float4 o[Config::kVectors];
};

__device__ __forceinline__ long long slot_row(int block, int part, int row) {
  return (2ll * (block + part) + (part == 0 ? 1 : 0)) * Config::kRows + row;
}

__device__ __forceinline__ float weight_of(float max, float top) { return exp2f(max - (top == -__builtin_huge_valf() ? 0.0f : top)); }

__device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Parts [begin, end) of a row.
__device__ __forceinline__ Row merge_parts(const DecodeParams& p, int block, int row, int begin, int end) {
  const int lane = threadIdx.x % 32;
  Row r;
  r.max = -__builtin_huge_valf();
  r.sum = 0;
#pragma unroll
  for (int v = 0; v < Config::kVectors; ++v) r.o[v] = {0, 0, 0, 0};
  for (int i = begin + lane; i < end; i += 32) r.max = fmaxf(r.max, p.partial_stats[2 * slot_row(block, i, row)]);
  r.max = max_over_lanes(r.max);
#pragma unroll 8
  for (int i = begin; i < end; ++i) {
    const long long at = slot_row(block, i, row);
    const float2 stats = *reinterpret_cast<const float2*>(p.partial_stats + 2 * at);
    const float weight = weight_of(stats.x, r.max);
    r.sum += weight * stats.y;
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
      const int channel = (v * 32 + lane) * 4;
      if (channel >= Config::kHeadDimV) continue;
      const float4 x = *reinterpret_cast<const float4*>(p.partial_out + at * Config::kHeadDimV + channel);
      r.o[v].x += weight * x.x, r.o[v].y += weight * x.y, r.o[v].z += weight * x.z, r.o[v].w += weight * x.w;
    }
  }
  return r;
}

__device__ __forceinline__ void store_row(const DecodeParams& p, const Split& split, int row, const Row& r) {
  const int lane = threadIdx.x % 32, packed = split.row_begin + row, query = packed / p.group;
  const int head = split.head * p.group + packed - query * p.group;
  const long long q_begin = tile::query_begin(p, split.batch);
  float factor = 0;
  if (lane == 0) factor = tile::finish_row(p, split.batch, q_begin, query, head, r.max, r.sum);
  factor = __shfl_sync(0xffffffffu, factor, 0);
  const long long at = tile::row_offset(p, split.batch, q_begin, query, head, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
#pragma unroll
  for (int v = 0; v < Config::kVectors; ++v) {
    const int channel = (v * 32 + lane) * 4;
    if (channel >= Config::kHeadDimV) continue;
    tile::store_element(p.out_dtype, p.out, at + channel * p.out_dim_stride, r.o[v].x * factor);
    tile::store_element(p.out_dtype, p.out, at + (channel + 1) * p.out_dim_stride, r.o[v].y * factor);
    tile::store_element(p.out_dtype, p.out, at + (channel + 2) * p.out_dim_stride, r.o[v].z * factor);
    tile::store_element(p.out_dtype, p.out, at + (channel + 3) * p.out_dim_stride, r.o[v].w * factor);
  }
}

}  // namespace attune::combine

extern "C" __global__ void __launch_bounds__(attune::combine::Config::kThreads)
    attune_combine_decode(const __grid_constant__ attune::kernels::DecodeParams p) {
  using namespace attune;
  using namespace attune::combine;
  __shared__ float exchange[Config::kWarps][2 + Config::kHeadDimV];
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  const int block = static_cast<int>(blockIdx.x), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Split split = p.splits[block];
  if (split.last_block < 0) return;
  const int parts = split.last_block - block + 1;

  // Warps a row: a power of two.
  int warps = 1;
  while (warps * 2 * split.num_rows <= Config::kWarps && warps * 2 <= parts) warps *= 2;
  const int rows_at_once = Config::kWarps / warps;
  for (int first = 0; first < split.num_rows; first += rows_at_once) {
    const int row = first + warp / warps, run = warp % warps;
    const int begin = parts * run / warps, end = parts * (run + 1) / warps;
    Row r;
    if (row < split.num_rows) r = merge_parts(p, block, row, begin, end);
    if (warps == 1) {
      if (row < split.num_rows) store_row(p, split, row, r);
      continue;
    }
    __syncthreads();
    if (row < split.num_rows) {
      if (lane == 0) exchange[warp][0] = r.max, exchange[warp][1] = r.sum;
#pragma unroll
      for (int v = 0; v < Config::kVectors; ++v) {
        const int channel = (v * 32 + lane) * 4;
        if (channel >= Config::kHeadDimV) continue;
        float* to = &exchange[warp][2 + channel];
        to[0] = r.o[v].x, to[1] = r.o[v].y, to[2] = r.o[v].z, to[3] = r.o[v].w;
      }
    }
    __syncthreads();
    if (run != 0 || row >= split.num_rows) continue;
    float top = -__builtin_huge_valf();
    for (int w = 0; w < warps; ++w) top = fmaxf(top, exchange[warp + w][0]);
    r.sum = 0;
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) r.o[v] = {0, 0, 0, 0};
    for (int w = 0; w < warps; ++w) {
      const float* from = exchange[warp + w];
      const float weight = weight_of(from[0], top);
      r.sum += weight * from[1];
#pragma unroll
      for (int v = 0; v < Config::kVectors; ++v) {
        const int channel = (v * 32 + lane) * 4;
        if (channel >= Config::kHeadDimV) continue;
        const float* x = from + 2 + channel;
        r.o[v].x += weight * x[0], r.o[v].y += weight * x[1], r.o[v].z += weight * x[2], r.o[v].w += weight * x[3];
      }
    }
    r.max = top;
    store_row(p, split, row, r);
  }
}
