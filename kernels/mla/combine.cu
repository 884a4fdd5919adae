// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks as everywhere
//
// A group of 128 threads has two rows, or of those half of the channels where parts are fp32, as parts hold them
// (mla/partial_out.cuh): 16 bytes of each part a thread. Where there are so few that all are merged at a time, two or four groups
// share them, with every second or fourth part each, and two of these finish a row each. Up to four parts are asked for
// at a time; while they come, one of the groups computes the parts' weights.
#include "mla/partial_out.cuh"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/reduce.cuh"
#include "ptx/registers.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kRows = kernels::kMlaRowsOfBlock, kAtATime = 4;
constexpr int kGroups = kernels::kMlaMergeThreads / 128;

// A thread's channels of a row, in pairs, eight channels apart; pieces of the channels of two rows that groups have.
constexpr int kPairs = kHalfParts ? 2 : 1, kPieces = kHalfParts ? 1 : 2;

// Scales of a row of a part. A thread's channels have one; of a group that weighs parts, a warp does it for two.
constexpr int kScales = kHalfParts ? 2 * kScalesOfHalf : 1, kWeighing = kHalfParts ? 128 : 32;

// Two rows, eight apart, of a block of rows; which piece of their channels.
struct Pair {
  int head_tile, row, piece;
};

// What the groups that share a pair of rows share.
struct Shared {
  float2 weights[kScales][32];       // of parts, for each scale: of each row
  float max[2], sum[2], lowered[2];  // lowered: what came before these parts counts so much less
};

// The thread's first.
__device__ __forceinline__ int channel_of(const Pair& pair) {
  const int thread = static_cast<int>(ptx::kept(threadIdx.x)) % 128;
  return kHalfParts ? thread / 4 * 16 + thread % 4 * 2 : pair.piece * kChannelsOfHalf + thread * 2;
}
__device__ __forceinline__ int unit_of(const kernels::PrefillParams& p, const kernels::WorkTile& t, const Pair& pair,
                                       int part) {
  return (t.first_split + part) * p.num_head_tiles + pair.head_tile;
}

// Pairs of channels of both rows.
struct Sums {
  float2 o[2][kPairs];
  __device__ __forceinline__ void add(const float4& x, const float2& weight) {
    const float* const words = &x.x;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float first, second;
        if constexpr (kHalfParts) {
          const unsigned two = __float_as_uint(words[2 * i + h]);
          first = ptx::f16_to_float(static_cast<unsigned short>(two));
          second = ptx::f16_to_float(static_cast<unsigned short>(two >> 16));
        } else {
          first = words[2 * h], second = words[2 * h + 1];
        }
        o[h][i].x = fmaf(h == 0 ? weight.x : weight.y, first, o[h][i].x);
        o[h][i].y = fmaf(h == 0 ? weight.x : weight.y, second, o[h][i].y);
      }
    }
  }
};

// Of numbers that are not NaN: as whole numbers that compare as they do, which one instruction takes.
__device__ __forceinline__ float largest_of_warp(float x) {
  const unsigned bits = __float_as_uint(x);
  const unsigned largest = ptx::max_of_warp(bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u));
  return __uint_as_float(largest ^ ((largest >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// A warp: the weights of 32 parts for its scales, a lane's its own, from what has been loaded of them, and with those
// before the maxima, and sums to be added up. first: there are none before.
struct Weighed {
  float max[2], sum[2];
};
__device__ __forceinline__ Weighed weigh(const float4 (&stats)[2], Shared& shared, bool first) {
  float top[2], weight[2], part[2];
  const unsigned thread = ptx::kept(threadIdx.x) % kWeighing, warp = thread / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float before = first ? -ptx::infinity() : shared.max[h];
    top[h] = fmaxf(largest_of_warp(stats[h].x), before);
    const float reference = top[h] == -ptx::infinity() ? 0.0f : top[h];
    weight[h] = ptx::exp2_approx(stats[h].x - reference);
    part[h] = weight[h] * stats[h].y;
    weight[h] *= stats[h].z;
    if (thread == 0) shared.lowered[h] = ptx::exp2_approx(before - reference);
  }
  constexpr int kOwn = kHalfParts ? 2 : 1;  // of the scales
  float2* const weights = &shared.weights[0][kOwn * 32 * warp + thread % 32];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float both[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned inverses = __float_as_uint(stats[h].w) >> warp % 2 * 16;
      both[h] = kHalfParts ? weight[h] * __uint_as_float(inverses >> 8 * i << 23 & 0x7f800000) : weight[h];
    }
    weights[32 * i] = make_float2(both[0], both[1]);
  }
  return {{top[0], top[1]}, {part[0], part[1]}};
}
// The first warp, when nobody needs the maxima before any more.
__device__ __forceinline__ void add_up(const Weighed& own, Shared& shared, bool first) {
  float sum[2] = {own.sum[0], own.sum[1]};
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], step);
  }
  if (ptx::kept(threadIdx.x) % 32 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shared.max[h] = own.max[h];
    shared.sum[h] = fmaf(first ? 0.0f : shared.sum[h], shared.lowered[h], sum[h]);
  }
}

// Row h of the pair.
__device__ __forceinline__ void finish(const kernels::PrefillParams& p, const kernels::WorkTile& t, const Pair& pair,
                                       int h, float max, float sum, const float2 (&o)[kPairs]) {
  constexpr bool kHalves = ATTUNE_OUT_TYPE == tile::kBFloat16 || ATTUNE_OUT_TYPE == tile::kFloat16;
  const int row = pair.row + 8 * h, local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const int token = t.token_begin + local, head = pair.head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
  const int channel = channel_of(pair);
  const float factor = tile::finish_row(p, t.batch, t.q_begin, token, head, max, sum, channel == 0);
  const long long to = tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride,
                                        p.out_head_stride) +
                       channel * p.out_dim_stride;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float x = o[i].x * factor, y = o[i].y * factor;
    const long long at = to + 8 * i * p.out_dim_stride;
    if (kHalves && p.store_vectors) {
      *reinterpret_cast<unsigned*>(p.out + at * 2) =
          ATTUNE_OUT_TYPE == tile::kBFloat16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
    } else {
      tile::store_element(ATTUNE_OUT_TYPE, p.out, at, x);
      tile::store_element(ATTUNE_OUT_TYPE, p.out, at + p.out_dim_stride, y);
    }
  }
}

// Groups that share a pair: a power of two, the set-th of a block; the thread is in the group-th.
struct Team {
  int shift;
  __device__ __forceinline__ static int own() { return static_cast<int>(ptx::kept(threadIdx.x)) / 128; }
  __device__ __forceinline__ int sharing() const { return 1 << shift; }
  __device__ __forceinline__ int set() const { return own() >> shift; }
  __device__ __forceinline__ int group() const { return own() & (sharing() - 1); }
  __device__ __forceinline__ void meet() const { ptx::sync_some(1 + set(), 128 * sharing()); }
};

// from: the work tile that has been cut.
__device__ __forceinline__ void merge_pair(const kernels::PrefillParams& p, const kernels::WorkTile& from,
                                           const Pair& pair, const Team& team) {
  __shared__ Shared shared_by[kGroups];
  __shared__ kernels::WorkTile work_tiles[kGroups];
  __shared__ Pair pairs[kGroups];
  __shared__ float2 out[kGroups][2][kPairs][128];
  const int thread = static_cast<int>(ptx::kept(threadIdx.x)) % 128;
  const int lane = thread % 32;
  Shared& shared = shared_by[team.set()];
  kernels::WorkTile& t = work_tiles[team.set()];  // for the end; read after they have met
  if (team.group() == 0 && thread < static_cast<int>(sizeof(kernels::WorkTile) / 16))
    reinterpret_cast<uint4*>(&t)[thread] = reinterpret_cast<const uint4*>(&from)[thread];
  if (team.group() == 0 && thread == 32) pairs[team.set()] = pair;
  int count = min(from.num_splits, 32);
  const bool weighs = team.group() == 0 && thread < kWeighing;
  Sums sums{};
  const auto step = [&] {  // from a part to the next
    return ptx::kept(p.num_head_tiles) * (kRows * kernels::kMlaHeadDimV * kPartBytes);
  };
  const char* const outputs = reinterpret_cast<const char*>(p.partial_out);  // all of which are less than 2^32 bytes
  auto parts = static_cast<unsigned>(
      part_channel(p.partial_out, unit_of(p, from, pair, 0), pair.row, channel_of(pair)) - outputs);
  const float* own_stats = part_stats(p.partial_stats, unit_of(p, from, pair, lane), pair.row,
                                      kHalfParts ? thread / 64 : pair.piece);
  ptx::wait_for_previous_kernels();  // once; then it does nothing
  ptx::allow_next_kernel();
#pragma unroll 1
  for (int first = 0;;) {
    float4 stats[2] = {{-ptx::infinity(), 0, 0, 0}, {-ptx::infinity(), 0, 0, 0}};
    if (weighs && static_cast<int>(ptx::kept(threadIdx.x)) % 32 < count) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        stats[h] = ptx::load_from_l2(reinterpret_cast<const float4*>(own_stats + 8 * kPartStats * h));
    }
    bool fresh = true;
#pragma unroll 1
    for (int i = team.group(); i < count || fresh; i += kAtATime << team.shift) {
      // Where there are fewer, the last again: around loads that may be left out the compiler waits for each.
      float4 x[kAtATime];
      const unsigned bytes = step();
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        const unsigned part = min(i + (j << team.shift), count - 1);
        x[j] = ptx::load_from_l2(reinterpret_cast<const float4*>(outputs + (parts + part * bytes)));
      }
      if (fresh) {
        Weighed weighed;
        if (weighs) weighed = weigh(stats, shared, first == 0);
        team.meet();
        if (weighs && ptx::kept(threadIdx.x) % 128 < 32) add_up(weighed, shared, first == 0);
        fresh = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float lowered = shared.lowered[h];
#pragma unroll
          for (int k = 0; k < kPairs; ++k) sums.o[h][k].x *= lowered, sums.o[h][k].y *= lowered;
        }
      }
      const unsigned own = ptx::kept(ptx::kept(threadIdx.x) % 128 / (128 / kScales) * 32 + i);
#pragma unroll
      for (int j = 0; j < kAtATime; ++j) {
        if (i + (j << team.shift) < count) sums.add(x[j], (&shared.weights[0][0])[own + (j << team.shift)]);
      }
    }
    first += 32;
    if (first >= t.num_splits) break;
    count = min(t.num_splits - first, 32);
    parts += 32 * step(), own_stats += 32 * kPartStats * kRows * p.num_head_tiles;
    team.meet();  // before other weights are written
  }
  const Pair& same = pairs[team.set()];
  const int own = Team::own(), column = static_cast<int>(ptx::kept(threadIdx.x)) % 128;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) out[own][h][k][column] = sums.o[h][k];
  }
  team.meet();
#pragma unroll 1
  for (int h = team.group(); h < 2; h += team.sharing()) {
    float2 all[kPairs] = {};
#pragma unroll 1
    for (int i = 0; i < team.sharing(); ++i) {
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const float2 x = out[own - team.group() + i][h][k][column];
        all[k].x += x.x, all[k].y += x.y;
      }
    }
    finish(p, t, same, h, shared.max[h], shared.sum[h], all);
  }
  team.meet();  // before the next pair's are written
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaMergeThreads, 2)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  // In shared memory to save registers; what follows from the thread's number is computed anew.
  __shared__ unsigned all, of_tile;
  __shared__ int shift;  // 2^shift groups share a pair
  if (threadIdx.x == 0) {
    // The list is that of the schedule, which ended before the attention began: a block of that has it, and says so.
    ptx::wait_for_change(&p.list->seen, 0);
    const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
    of_tile = (tokens * p.heads_of_tile + 15) / 16 * 8 * mla::kPieces;
    all = p.list->num_split_tiles * p.num_head_tiles * of_tile;
    shift = all <= gridDim.x ? 2 : all <= 2 * gridDim.x ? 1 : 0;
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned block = blockIdx.x;; block += gridDim.x) {
    const mla::Team team{shift};
    const unsigned i = block * (mla::kGroups >> shift) + team.set();
    if (i >= all) break;
    const unsigned tile = i / of_tile, pair = (i - tile * of_tile) / mla::kPieces, split = tile / p.num_head_tiles;
    const int head_tile = static_cast<int>(tile - split * p.num_head_tiles);
    const int row = static_cast<int>(pair / 8 * 16 + pair % 8), piece = static_cast<int>(i % mla::kPieces);
    mla::merge_pair(p, p.split_tiles[split], {head_tile, row, piece}, team);
  }
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
