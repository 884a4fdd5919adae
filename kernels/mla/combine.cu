// SPDX-License-Identifier: Apache-2.0
// Merges the partial outputs of the splits of MLA, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks
//
// Grid: blocks of 512 threads, persistent over pairs of rows. A warpgroup has two rows (fp32 partial outputs: half of
// their channels), 16 bytes of each split a thread, in the layout of mla/partial_out.cuh. If there are few rows, a team
// of two or four warpgroups shares a pair: each takes every second or fourth split, and two of them finish one row
// each. A thread loads four splits at a time; meanwhile the team's first warpgroup computes the scales of up to 32
// splits.
#include "common/finish.cuh"
#include "mla/partial_out.cuh"
#include "mla/row_max.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/reduce.cuh"
#include "ptx/registers.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::mla {

constexpr int kBlockM = kernels::kMlaBlockM, kSplitsAtATime = 4;
constexpr int kWarpgroups = kernels::kMlaCombineThreads / 128;

// Pairs of channels of a thread, eight channels apart; parts into which warpgroups divide a row's channels.
constexpr int kChannelPairs = kFp16Partials ? 2 : 1, kChannelHalves = kFp16Partials ? 1 : 2;

// Scales of a row of a split. fp16 partial outputs have one for each scale group of 64 channels, and each of four warps
// computes two of them. fp32 ones have one, which one warp computes. All channels of a thread have the same scale.
constexpr int kScaleGroups = kFp16Partials ? 2 * kScalesOfHalf : 1, kScaleThreads = kFp16Partials ? 128 : 32;

// Two rows of an M block, eight rows apart, and which half of their channels.
struct RowPair {
  int head_tile, row, channel_half;
};

// Shared by the warpgroups of a team.
struct Shared {
  float2 scales[kScaleGroups][32];           // of each split and scale group, for both rows
  float row_max[2], row_sum[2], rescale[2];  // rescale: the factor for all earlier splits
};

// The thread's first channel.
__device__ __forceinline__ int channel_of(const RowPair& rows) {
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x)) % 128;
  return kFp16Partials ? thread / 4 * 16 + thread % 4 * 2 : rows.channel_half * kChannelsOfHalf + thread * 2;
}
__device__ __forceinline__ int unit_of(const kernels::WorkTileParams& p, const kernels::WorkTile& t,
                                       const RowPair& rows, int split_idx) {
  return (t.first_split + split_idx) * p.num_head_tiles + rows.head_tile;
}

// O of both rows, in pairs of channels.
struct Accum {
  float2 o[2][kChannelPairs];
  __device__ __forceinline__ void add(const float4& x, const float2& scale) {
    const float* const words = &x.x;
#pragma unroll
    for (int i = 0; i < kChannelPairs; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float first, second;
        if constexpr (kFp16Partials) {
          const unsigned two = __float_as_uint(words[2 * i + h]);
          first = ptx::f16_to_float(static_cast<unsigned short>(two));
          second = ptx::f16_to_float(static_cast<unsigned short>(two >> 16));
        } else {
          first = words[2 * h], second = words[2 * h + 1];
        }
        o[h][i].x = fmaf(h == 0 ? scale.x : scale.y, first, o[h][i].x);
        o[h][i].y = fmaf(h == 0 ? scale.x : scale.y, second, o[h][i].y);
      }
    }
  }
};

// The maximum over the warp, of floats that are not NaN: redux.sync on unsigned integers in the same order.
__device__ __forceinline__ float largest_of_warp(float x) {
  const unsigned bits = __float_as_uint(x);
  const unsigned largest = ptx::max_of_warp(bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u));
  return __uint_as_float(largest ^ ((largest >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// The stats of both rows.
struct SplitStats {
  float row_max[2], row_sum[2];
};
// Called by a warp: folds in the row max of 32 splits, one for each lane, and stores their scales. first: there are no
// earlier splits. Returns the row max, and the lane's row sum, which must still be reduced.
__device__ __forceinline__ SplitStats split_scales(const float4 (&stats)[2], Shared& shared, bool first) {
  float new_row_max[2], scale[2], row_sum[2];
  const unsigned thread = ptx::opaque(threadIdx.x) % kScaleThreads, warp = thread / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float prev_row_max = first ? -ptx::infinity() : shared.row_max[h];
    new_row_max[h] = fmaxf(largest_of_warp(stats[h].x), prev_row_max);
    const float finite_max = finite_row_max(new_row_max[h]);
    scale[h] = ptx::exp2_approx(stats[h].x - finite_max);
    row_sum[h] = scale[h] * stats[h].y;
    scale[h] *= stats[h].z;
    if (thread == 0) shared.rescale[h] = ptx::exp2_approx(prev_row_max - finite_max);
  }
  constexpr int kGroupsOfWarp = kFp16Partials ? 2 : 1;  // of the scale groups, those of a warp
  float2* const scales = &shared.scales[0][kGroupsOfWarp * 32 * warp + thread % 32];
#pragma unroll
  for (int i = 0; i < kGroupsOfWarp; ++i) {
    float both[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned inverses = __float_as_uint(stats[h].w) >> warp % 2 * 16;
      both[h] = kFp16Partials ? scale[h] * __uint_as_float(inverses >> 8 * i << 23 & 0x7f800000) : scale[h];
    }
    scales[32 * i] = make_float2(both[0], both[1]);
  }
  return {{new_row_max[0], new_row_max[1]}, {row_sum[0], row_sum[1]}};
}
// Called by the first warp, once all warps have read the row max.
__device__ __forceinline__ void reduce_row_sum(const SplitStats& own, Shared& shared, bool first) {
  float row_sum[2] = {own.row_sum[0], own.row_sum[1]};
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], step);
  }
  if (ptx::opaque(threadIdx.x) % 32 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shared.row_max[h] = own.row_max[h];
    shared.row_sum[h] = fmaf(first ? 0.0f : shared.row_sum[h], shared.rescale[h], row_sum[h]);
  }
}

// Stores row h of the pair.
__device__ __forceinline__ void store_row(const kernels::WorkTileParams& p, const kernels::WorkTile& t,
                                          const RowPair& rows, int h, float row_max, float row_sum,
                                          const float2 (&o)[kChannelPairs]) {
  const int row = rows.row + 8 * h, local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const int token = t.token_begin + local, head = rows.head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
  const int channel = channel_of(rows);
  const float factor = common::finish_row(p, t.batch, t.q_begin, token, head, row_max, row_sum, channel == 0);
  const long long to = out_at(p, t, token, head) + channel * p.out_dim_stride;
#pragma unroll
  for (int i = 0; i < kChannelPairs; ++i) {
    const float x = o[i].x * factor, y = o[i].y * factor;
    const long long at = to + 8 * i * p.out_dim_stride;
    if (common::is_16_bit(ATTUNE_OUT_TYPE) && p.store_vectors) {
      *reinterpret_cast<unsigned*>(p.out + at * 2) = common::pack<ATTUNE_OUT_TYPE>(x, y);
    } else {
      common::store_element(ATTUNE_OUT_TYPE, p.out, at, x);
      common::store_element(ATTUNE_OUT_TYPE, p.out, at + p.out_dim_stride, y);
    }
  }
}

// A team of 1, 2 or 4 warpgroups that share a pair of rows: team idx() of the block, in which this warpgroup is number
// rank().
struct WarpgroupTeam {
  int shift;
  __device__ __forceinline__ static int own() { return static_cast<int>(ptx::opaque(threadIdx.x)) / 128; }
  __device__ __forceinline__ int size() const { return 1 << shift; }
  __device__ __forceinline__ int idx() const { return own() >> shift; }
  __device__ __forceinline__ int rank() const { return own() & (size() - 1); }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + idx(), 128 * size()); }
};

// from: the work tile that was split.
__device__ __forceinline__ void combine_rows(const kernels::WorkTileParams& p, const kernels::WorkTile& from,
                                             const RowPair& rows, const WarpgroupTeam& team) {
  __shared__ Shared shared_by[kWarpgroups];
  __shared__ kernels::WorkTile work_tiles[kWarpgroups];
  __shared__ RowPair all_rows[kWarpgroups];
  __shared__ float2 out[kWarpgroups][2][kChannelPairs][128];
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x)) % 128;
  const int lane = thread % 32;
  Shared& shared = shared_by[team.idx()];
  kernels::WorkTile& t = work_tiles[team.idx()];  // for store_row(); read after a sync
  if (team.rank() == 0 && thread < static_cast<int>(sizeof(kernels::WorkTile) / 16))
    reinterpret_cast<uint4*>(&t)[thread] = reinterpret_cast<const uint4*>(&from)[thread];
  if (team.rank() == 0 && thread == 32) all_rows[team.idx()] = rows;
  int count = min(from.num_splits, 32);
  const bool computes_scales = team.rank() == 0 && thread < kScaleThreads;
  Accum accum{};
  const auto step = [&] {  // from one split to the next
    return ptx::opaque(p.num_head_tiles) * (kBlockM * kernels::kMlaHeadDimV * kPartialBytes);
  };
  // all partial outputs are less than 2^32 bytes
  const char* const partials = reinterpret_cast<const char*>(p.partial_out);
  auto partial = static_cast<unsigned>(
      partial_out_at(p.partial_out, unit_of(p, from, rows, 0), rows.row, channel_of(rows)) - partials);
  const float* own_stats = partial_stats_at(p.partial_stats, unit_of(p, from, rows, lane), rows.row,
                                            kFp16Partials ? thread / 64 : rows.channel_half);
  ptx::wait_for_previous_kernels();  // waits once; later calls return at once
  ptx::allow_next_kernel();
#pragma unroll 1
  for (int first = 0;;) {
    float4 stats[2] = {{-ptx::infinity(), 0, 0, 0}, {-ptx::infinity(), 0, 0, 0}};
    if (computes_scales && static_cast<int>(ptx::opaque(threadIdx.x)) % 32 < count) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        stats[h] = ptx::load_from_l2(reinterpret_cast<const float4*>(own_stats + 8 * kPartialStats * h));
    }
    bool first_loads = true;
#pragma unroll 1
    for (int i = team.rank(); i < count || first_loads; i += kSplitsAtATime << team.shift) {
      // After the last split, reloads the last one, because the compiler would wait for each conditional load.
      float4 x[kSplitsAtATime];
      const unsigned bytes = step();
#pragma unroll
      for (int j = 0; j < kSplitsAtATime; ++j) {
        const unsigned split_idx = min(i + (j << team.shift), count - 1);
        x[j] = ptx::load_from_l2(reinterpret_cast<const float4*>(partials + (partial + split_idx * bytes)));
      }
      if (first_loads) {
        SplitStats split_stats;
        if (computes_scales) split_stats = split_scales(stats, shared, first == 0);
        team.sync();
        if (computes_scales && ptx::opaque(threadIdx.x) % 128 < 32) reduce_row_sum(split_stats, shared, first == 0);
        first_loads = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float rescale = shared.rescale[h];
#pragma unroll
          for (int k = 0; k < kChannelPairs; ++k) accum.o[h][k].x *= rescale, accum.o[h][k].y *= rescale;
        }
      }
      const unsigned own = ptx::opaque(ptx::opaque(threadIdx.x) % 128 / (128 / kScaleGroups) * 32 + i);
#pragma unroll
      for (int j = 0; j < kSplitsAtATime; ++j) {
        if (i + (j << team.shift) < count) accum.add(x[j], (&shared.scales[0][0])[own + (j << team.shift)]);
      }
    }
    first += 32;
    if (first >= t.num_splits) break;
    count = min(t.num_splits - first, 32);
    partial += 32 * step(), own_stats += 32 * kPartialStats * kBlockM * p.num_head_tiles;
    team.sync();  // before the scales are overwritten
  }
  const RowPair& shared_rows = all_rows[team.idx()];
  const int own = WarpgroupTeam::own(), column = static_cast<int>(ptx::opaque(threadIdx.x)) % 128;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int k = 0; k < kChannelPairs; ++k) out[own][h][k][column] = accum.o[h][k];
  }
  team.sync();
#pragma unroll 1
  for (int h = team.rank(); h < 2; h += team.size()) {
    float2 all[kChannelPairs] = {};
#pragma unroll 1
    for (int i = 0; i < team.size(); ++i) {
#pragma unroll
      for (int k = 0; k < kChannelPairs; ++k) {
        const float2 x = out[own - team.rank() + i][h][k][column];
        all[k].x += x.x, all[k].y += x.y;
      }
    }
    store_row(p, t, shared_rows, h, shared.row_max[h], shared.row_sum[h], all);
  }
  team.sync();  // before the next pair's sums are written
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaCombineThreads, 2)
    attune_combine_mla(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  // In shared memory to save registers. What follows from threadIdx is recomputed.
  __shared__ unsigned num_pairs, pairs_of_tile;
  __shared__ int shift;  // 2^shift warpgroups share a row pair
  if (threadIdx.x == 0) {
    // The schedule kernel, which wrote the list, ended before the attention kernel began; a block of that kernel sets
    // `seen`.
    ptx::wait_for_change(&p.list->seen, 0);
    const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
    pairs_of_tile = (tokens * p.heads_of_tile + 15) / 16 * 8 * mla::kChannelHalves;
    num_pairs = p.list->num_split_tiles * p.num_head_tiles * pairs_of_tile;
    shift = num_pairs <= gridDim.x ? 2 : num_pairs <= 2 * gridDim.x ? 1 : 0;
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned block = blockIdx.x;; block += gridDim.x) {
    const mla::WarpgroupTeam team{shift};
    const unsigned i = block * (mla::kWarpgroups >> shift) + team.idx();
    if (i >= num_pairs) break;
    const unsigned tile = i / pairs_of_tile, pair = (i - tile * pairs_of_tile) / mla::kChannelHalves,
                   split = tile / p.num_head_tiles;
    const int head_tile = static_cast<int>(tile - split * p.num_head_tiles);
    const int row = static_cast<int>(pair / 8 * 16 + pair % 8),
              channel_half = static_cast<int>(i % mla::kChannelHalves);
    mla::combine_rows(p, p.split_tiles[split], {head_tile, row, channel_half}, team);
  }
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
