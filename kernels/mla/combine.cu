// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  out = sum_i o_i 2^(m_i - M) / L, with sinks as everywhere
//
// A thread block has 16 rows and all of their channels, or a share of them where there are few rows. Each warp computes
// what the parts of one row are multiplied with, and adds up parts of its eights of channels; several warps share an
// eight where there are more of them. A thread has four channels of a row, of each of the warp's eights, and asks for 16
// pieces of parts before all else.
#include "mla/parts.cuh"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kAtATime = 16, kWarps = kernels::kMlaMergeThreads / 32;
constexpr int kKept = 3;  // of a row's parts a lane has every 32nd: of so many it keeps the statistics
static_assert(kWarps == kRowsOfBand, "each warp has a row");
static_assert(kEights == 4 * kWarps, "each warp has four eights of a band, or fewer");
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float2 stats_of(const kernels::PrefillParams& p, const Parts& parts, int part, int row) {
  return ptx::load_from_l2(parts.stats + part * p.num_head_tiles * kernels::kMlaRowsOfBlock + row);
}

// All lanes of a warp: factors[part][row] of one row.
__device__ __forceinline__ void weigh(const kernels::PrefillParams& p, const kernels::Task& t, const Parts& parts,
                                      int head_tile, int band, bool stores, float (*factors)[kRowsOfBand]) {
  const int lane = threadIdx.x % 32, row = static_cast<int>(threadIdx.x) / 32, num_parts = t.num_parts;
  float2 kept[kKept];
  float max = -ptx::infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = make_float2(-ptx::infinity(), 0);
    if (lane + 32 * i < num_parts) kept[i] = stats_of(p, parts, lane + 32 * i, row);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) max = fmaxf(max, kept[i].x);
  for (int i = lane + 32 * kKept; i < num_parts; i += 32) max = fmaxf(max, stats_of(p, parts, i, row).x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(kAll, max, step));
  const float reference = max == -ptx::infinity() ? 0.0f : max;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i].x = ptx::exp2_approx(kept[i].x - reference);
    sum += kept[i].x * kept[i].y;
  }
  for (int i = lane + 32 * kKept; i < num_parts; i += 32) {
    const float2 stats = stats_of(p, parts, i, row);
    sum += ptx::exp2_approx(stats.x - reference) * stats.y;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  const int of_block = band * kRowsOfBand + row, local = of_block / p.heads_of_tile;
  if (local >= t.num_tokens) return;  // nobody stores the row
  const int head = head_tile * p.heads_of_tile + of_block - local * p.heads_of_tile;
  const float factor =
      tile::finish_row(p, t.batch, t.q_begin, t.token_begin + local, head, max, sum, stores && lane == 0);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (lane + 32 * i < num_parts) factors[lane + 32 * i][row] = kept[i].x * factor;
  }
  for (int i = lane + 32 * kKept; i < num_parts; i += 32)
    factors[i][row] = ptx::exp2_approx(stats_of(p, parts, i, row).x - reference) * factor;
}

// Four channels of a row, of each of kOwn neighbouring eights, of as many parts as can be asked for at a time.
template <int kOwn>
struct Pieces {
  static constexpr int kParts = kAtATime / kOwn;
  float4 x[kOwn][kParts];

  // Parts first, first + step .. at: the place of the first of all, and part_size: between two of them, in partial_out.
  __device__ __forceinline__ void load(const float* partial_out, int at, int first, int step, int num_parts,
                                       int part_size) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i * step >= num_parts) break;
#pragma unroll
      for (int e = 0; e < kOwn; ++e)
        x[e][i] = ptx::load_from_l2(
            reinterpret_cast<const float4*>(partial_out + at + (first + i * step) * part_size) + e * (2 * kRowsOfBand));
    }
  }
  __device__ __forceinline__ void add_to(float4 (&sum)[kOwn], const float (*factors)[kRowsOfBand], int row, int first,
                                         int step, int num_parts) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i * step >= num_parts) break;
      const float factor = factors[first + i * step][row];
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        sum[e].x += factor * x[e][i].x, sum[e].y += factor * x[e][i].y;
        sum[e].z += factor * x[e][i].z, sum[e].w += factor * x[e][i].w;
      }
    }
  }
};

__device__ __forceinline__ void store(const kernels::PrefillParams& p, const kernels::Task& t, int head_tile, int row,
                                      int channel, const float4& x) {
  const int local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const long long to = tile::row_offset(p, t.batch, t.q_begin, t.token_begin + local,
                                        head_tile * p.heads_of_tile + row - local * p.heads_of_tile, p.out_batch_stride,
                                        p.out_row_stride, p.out_head_stride) +
                       channel * p.out_dim_stride;
  if (ATTUNE_OUT_TYPE == tile::kBFloat16 || ATTUNE_OUT_TYPE == tile::kFloat16) {
    if (p.store_vectors) {
      constexpr auto pack = ATTUNE_OUT_TYPE == tile::kBFloat16 ? ptx::pack_bf16 : ptx::pack_f16;
      *reinterpret_cast<uint2*>(p.out + 2 * to) = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
      return;
    }
  }
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to, x.x);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + p.out_dim_stride, x.y);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + 2 * p.out_dim_stride, x.z);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + 3 * p.out_dim_stride, x.w);
}

// Most bands of a block.
__device__ __forceinline__ int num_bands(const kernels::PrefillParams& p) {
  const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
  return (tokens * p.heads_of_tile + kRowsOfBand - 1) / kRowsOfBand;
}

// All bands, each shared by 2^shift thread blocks. kOwn: eights of a warp.
template <int kOwn>
__device__ __forceinline__ void combine(const kernels::PrefillParams& p, int items, int shift) {
  __shared__ float4 shares[kWarps][32];
  float(*const factors)[kRowsOfBand] = reinterpret_cast<float(*)[kRowsOfBand]>(ptx::dynamic_shared());
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32, eights = kEights >> shift;
  const int bands = num_bands(p);
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const int at = item >> shift, chunk = item & (1 << shift) - 1;
    const int band = at % bands, head_tile = at / bands % p.num_head_tiles;
    const kernels::Task& task = p.split_tasks[at / bands / p.num_head_tiles];
    if (!has_rows(p, task, band)) continue;
    // Kept, so that what follows from them is computed where needed. All parts are below 2^31 numbers.
    const int sharing = kOwn > 1 ? 1 : static_cast<int>(ptx::kept(max(kWarps / eights, 1)));  // warps of an eight
    const int part_size =
        static_cast<int>(ptx::kept(p.num_head_tiles * kernels::kMlaRowsOfBlock * kernels::kMlaHeadDimV));
    const int num_parts = task.num_parts, share = warp % sharing, eight = chunk * eights + warp / sharing * kOwn;
    const Parts parts(p, task.first_part, head_tile, band);
    const int from = static_cast<int>(parts.out_of(lane / 2, 8 * eight + lane % 2 * 4) - p.partial_out);
    ptx::wait_for_previous_kernels();
    Pieces<kOwn> pieces;
    pieces.load(p.partial_out, from, share, sharing, num_parts, part_size);
    weigh(p, task, parts, head_tile, band, chunk == 0, factors);
    __syncthreads();
    float4 sum[kOwn] = {};
    pieces.add_to(sum, factors, lane / 2, share, sharing, num_parts);
#pragma unroll 1
    for (int first = share + pieces.kParts * sharing; first < num_parts; first += pieces.kParts * sharing) {
      pieces.load(p.partial_out, from, first, sharing, num_parts, part_size);
      pieces.add_to(sum, factors, lane / 2, first, sharing, num_parts);
    }
    if (sharing > 1) {
      shares[warp][lane] = sum[0];
      __syncthreads();
#pragma unroll 1
      for (int i = 1; i < sharing && share == 0; ++i) {
        const float4 x = shares[warp + i][lane];
        sum[0].x += x.x, sum[0].y += x.y, sum[0].z += x.z, sum[0].w += x.w;
      }
    }
    if (share == 0) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e)
        store(p, task, head_tile, band * kRowsOfBand + lane / 2, 8 * (eight + e) + lane % 2 * 4, sum[e]);
    }
    __syncthreads();
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaMergeThreads, 1)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  using namespace attune::mla;
  // The list is that of the schedule, which has ended: the attention began after it, and this kernel after that.
  const int all_bands = p.list->num_splits * p.num_head_tiles * num_bands(p);
  int shift = 0;  // log2 of the thread blocks that share a band's channels
  while (1 << shift < kEights && all_bands << (shift + 1) <= static_cast<int>(gridDim.x)) ++shift;
  if (shift == 0) {
    combine<4>(p, all_bands, 0);
  } else if (shift == 1) {
    combine<2>(p, all_bands << 1, 1);
  } else {
    combine<1>(p, all_bands << shift, shift);
  }
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
