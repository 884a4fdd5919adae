// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks as everywhere
//
// A group of 128 threads has half of the channels of two rows, as parts hold them (parts.cuh). Where there are so few
// that all are merged at a time, two or four groups share them, with every second or fourth part each, and two of these
// finish a row each. Up to eight parts are asked for at a time; while they come, a warp computes the parts' weights.
#include "mla/parts.cuh"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kRows = kernels::kMlaRowsOfBlock, kAtATime = 8;
constexpr int kGroups = kernels::kMlaMergeThreads / 128;

// Two rows, eight apart, of a block of rows; of each the channels of half `half`.
struct Pair {
  int head_tile, row, half;
};

// What the groups that share a pair of rows share.
struct Shared {
  float2 weights[32];  // of parts: of each row
  float max[2], sum[2], lowered[2];  // lowered: what came before these parts counts so much less
};

__device__ __forceinline__ int channel_of(const Pair& pair) {
  return pair.half * kChannelsOfHalf + static_cast<int>(threadIdx.x) % 128 * 2;
}
__device__ __forceinline__ long long unit_of(const kernels::PrefillParams& p, const kernels::Task& t, const Pair& pair,
                                             int part) {
  return static_cast<long long>(t.first_part + part) * p.num_head_tiles + pair.head_tile;
}

// A warp: the weights of 32 parts, a lane's its own, from what has been loaded of them, and the maxima and sums so far.
__device__ __forceinline__ void weigh(const float4 (&stats)[2], Shared& shared, float (&max)[2], float (&sum)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top[2] = {stats[0].x, stats[1].x}, weight[2], part[2], lowered[2];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], step));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = fmaxf(top[h], max[h]);
    const float reference = top[h] == -ptx::infinity() ? 0.0f : top[h];
    weight[h] = ptx::exp2_approx(stats[h].x - reference);
    part[h] = weight[h] * stats[h].y;
    lowered[h] = ptx::exp2_approx(max[h] - reference);
    max[h] = top[h];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) part[h] += __shfl_xor_sync(0xffffffffu, part[h], step);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = fmaf(sum[h], lowered[h], part[h]);
    if (lane == 0) shared.max[h] = max[h], shared.sum[h] = sum[h], shared.lowered[h] = lowered[h];
  }
  shared.weights[lane] = make_float2(weight[0] * stats[0].z, weight[1] * stats[1].z);
}

// Row h of the pair.
__device__ __forceinline__ void finish(const kernels::PrefillParams& p, const kernels::Task& t, const Pair& pair, int h,
                                       float max, float sum, const float2& o) {
  constexpr bool kHalves = ATTUNE_OUT_TYPE == tile::kBFloat16 || ATTUNE_OUT_TYPE == tile::kFloat16;
  const int row = pair.row + 8 * h, local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const int token = t.token_begin + local, head = pair.head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
  const int channel = channel_of(pair);
  const float factor = tile::finish_row(p, t.batch, t.q_begin, token, head, max, sum, channel == 0);
  const long long to = tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride,
                                        p.out_head_stride) +
                       channel * p.out_dim_stride;
  const float x = o.x * factor, y = o.y * factor;
  if (kHalves && p.store_vectors) {
    *reinterpret_cast<unsigned*>(p.out + to * 2) =
        ATTUNE_OUT_TYPE == tile::kBFloat16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
  } else {
    tile::store_element(ATTUNE_OUT_TYPE, p.out, to, x);
    tile::store_element(ATTUNE_OUT_TYPE, p.out, to + p.out_dim_stride, y);
  }
}

// kSharing: groups that share the pair.
template <int kSharing>
__device__ __forceinline__ void merge_pair(const kernels::PrefillParams& p, const kernels::Task& t, const Pair& pair,
                                           bool waits) {
  __shared__ Shared shared_by[kGroups / kSharing];
  const int own = static_cast<int>(threadIdx.x) / 128, group = own % kSharing, set = own / kSharing;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  Shared& shared = shared_by[set];
  const bool weighs = group == 0 && thread < 32;
  const auto meet = [&] { ptx::sync_some(1 + set, 128 * kSharing); };
  float max[2] = {-ptx::infinity(), -ptx::infinity()}, sum[2] = {0, 0};
  float4 o = {0, 0, 0, 0};
  const unsigned step = p.num_head_tiles * (kRows * kernels::kMlaHeadDimV);  // floats, from a part to the next
  const float* parts = p.partial_out + part_channel(unit_of(p, t, pair, 0), pair.row, channel_of(pair));
  const float* own_stats = p.partial_stats + kPartStats * (unit_of(p, t, pair, lane) * kRows + pair.row);
  if (waits) ptx::wait_for_previous_kernels();
#pragma unroll 1
  for (int first = 0; first < t.num_parts; first += 32) {
    const int count = min(t.num_parts - first, 32);
    float4 stats[2] = {{-ptx::infinity(), 0, 0, 0}, {-ptx::infinity(), 0, 0, 0}};
    if (weighs && lane < count) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        stats[h] = ptx::load_from_l2(reinterpret_cast<const float4*>(own_stats + 8 * kPartStats * h));
    }
#pragma unroll 1
    for (int i = group; i < count || i == group; i += kSharing * kAtATime) {
      // Where there are fewer, the last again: around loads that may be left out the compiler waits for each.
      float4 x[kAtATime];
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        const unsigned part = min(i + j * kSharing, count - 1);
        x[j] = ptx::load_from_l2(reinterpret_cast<const float4*>(parts + static_cast<unsigned long long>(part) * step));
      }
      if (i == group) {
        if (weighs) weigh(stats, shared, max, sum);
        meet();
        o.x *= shared.lowered[0], o.y *= shared.lowered[0], o.z *= shared.lowered[1], o.w *= shared.lowered[1];
      }
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        if (i + j * kSharing >= count) continue;
        const float2 weight = shared.weights[i + j * kSharing];
        o.x = fmaf(weight.x, x[j].x, o.x), o.y = fmaf(weight.x, x[j].y, o.y);
        o.z = fmaf(weight.y, x[j].z, o.z), o.w = fmaf(weight.y, x[j].w, o.w);
      }
    }
    parts += 32ull * step, own_stats += 32ull * (step / (kernels::kMlaHeadDimV / kPartStats));
    if (first + 32 < t.num_parts) meet();  // before other weights are written
  }
  if constexpr (kSharing == 1) {
#pragma unroll 1
    for (int h = 0; h < 2; ++h)
      finish(p, t, pair, h, shared.max[h], shared.sum[h], h == 0 ? make_float2(o.x, o.y) : make_float2(o.z, o.w));
  } else {
    __shared__ float2 out[kGroups][2][128];
    out[own][0][thread] = make_float2(o.x, o.y), out[own][1][thread] = make_float2(o.z, o.w);
    meet();
    if (group < 2) {
      float2 all = {0, 0};
#pragma unroll
      for (int i = 0; i < kSharing; ++i) {
        const float2 x = out[set * kSharing + i][group][thread];
        all.x += x.x, all.y += x.y;
      }
      finish(p, t, pair, group, shared.max[group], shared.sum[group], all);
    }
  }
  meet();  // before the next pair's are written
}

// All pairs' halves, of which each block of rows has so many.
template <int kSharing>
__device__ __forceinline__ void merge_pairs(const kernels::PrefillParams& p, unsigned of_tile, unsigned all) {
  constexpr unsigned kPairs = kGroups / kSharing;  // at a time
  bool first = true;
#pragma unroll 1
  for (unsigned i = blockIdx.x * kPairs + threadIdx.x / (128 * kSharing); i < all; i += gridDim.x * kPairs) {
    const unsigned tile = i / of_tile, pair = (i - tile * of_tile) / 2, split = tile / p.num_head_tiles;
    const kernels::Task task = p.split_tasks[split];
    const int head_tile = static_cast<int>(tile - split * p.num_head_tiles);
    const int row = static_cast<int>(pair / 8 * 16 + pair % 8);
    merge_pair<kSharing>(p, task, {head_tile, row, static_cast<int>(i % 2)}, first);
    first = false;
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaMergeThreads, 1)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  // The list is that of the schedule, which has ended: the attention began after it, and this kernel after that.
  const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
  const unsigned of_tile = (tokens * p.heads_of_tile + 15) / 16 * 16;
  const unsigned all = p.list->num_splits * p.num_head_tiles * of_tile;
  if (all <= gridDim.x) {
    mla::merge_pairs<4>(p, of_tile, all);
  } else if (all <= 2 * gridDim.x) {
    mla::merge_pairs<2>(p, of_tile, all);
  } else {
    mla::merge_pairs<1>(p, of_tile, all);
  }
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
