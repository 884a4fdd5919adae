// SPDX-License-Identifier: Apache-2.0
// The math of the gradient kernel. Each warpgroup has 64 of the block's own rows. Of tile i:
//
//   issue S and dP | wait for S and for dx of tile i - 1, release its stage | P = 2^(S scale - lse2) |
//   wait for dP | dS = P (dP - delta) | issue dv += P y and dx += dS x | wait for dv
//
// P and dS are rounded to 16 bits and stay in registers, as the left operands.
#pragma once

#include "backward/config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attune::backward {

struct Accumulators {
  float x[Config::kChannelsX / 2];                         // dq or dk, without the scale
  float y[Config::kOfKeys ? Config::kChannelsY / 2 : 16];  // dv; not used for queries
};

class Mainloop {
 public:
  __device__ __forceinline__ Mainloop(const BackwardParams& p, const Smem& smem, const Work& work)
      : smem_(smem), work_(work), scale_log2_(p.scale * common::kLog2e) {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    group_ = __shfl_sync(0xffffffffu, thread / 128, 0);
    const int row = work.begin + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      seen_[h] = work.seen_by(p, row + 8 * h);
      own_[h] = {ptx::infinity(), 0.0f};
      if (!Config::kOfKeys && row + 8 * h < work.end)
        own_[h] = stats_of(p, work.s, work.batch, work.head)[row + 8 * h];
    }
  }

  __device__ __forceinline__ void run(Accumulators& a) {
    ptx::wait_phase(smem_.own_full(), 0);
    const ptx::Descriptor own_x = ptx::uniform(ptx::descriptor_k_major(smem_.own_x() + group_ * (64 * 128)));
    const ptx::Descriptor own_y = ptx::uniform(ptx::descriptor_k_major(smem_.own_y() + group_ * (64 * 128)));
    float s[kScores], d[kScores];
    unsigned ds_regs[kScores / 2], p_regs[kScores / 2];
    common::PipelineState pipe, before;
    int row = work_.first, left = work_.tiles;
    const int steps = work_.heads * work_.tiles;
    for (int i = 0; i < steps; ++i) {
      ptx::wait_phase(smem_.full(pipe.stage), pipe.phase);
      multiply<Config::kStepsX>(own_x, smem_.tile_x(pipe.stage), s);
      multiply<Config::kStepsY>(own_y, smem_.tile_y(pipe.stage), d);
      ptx::wgmma_wait<1>();  // S, and the products of the tile before
      ptx::pin(s);
      ptx::pin(a.x);
      if (i > 0) release(before.stage);
      const bool all_seen = !__any_sync(0xffffffffu, !sees_all(row));
      softmax(all_seen, row, pipe.stage, s);
      ptx::wgmma_wait<0>();
      ptx::pin(d);
      softmax_backward(all_seen, row, pipe.stage, s, d);
      pack(d, ds_regs);
      if constexpr (Config::kOfKeys) {
        pack(s, p_regs);
        accumulate(smem_.tile_y(pipe.stage), p_regs, a.y);
      }
      accumulate(smem_.tile_x(pipe.stage), ds_regs, a.x);
      // The registers of P are needed for the next S.
      if constexpr (Config::kOfKeys) ptx::wgmma_wait<1>(), ptx::pin(a.y);
      before = pipe;
      pipe.template next<Config::kStages>();
      row += Config::kTile;
      if (--left == 0) row = work_.first, left = work_.tiles;  // the next head
    }
    ptx::wgmma_wait<0>();
    pin(a);
  }

 private:
  static constexpr int kScores = Config::kTile / 2;

  __device__ __forceinline__ static void pin(Accumulators& a) {
    ptx::pin(a.x);
    if constexpr (Config::kOfKeys) ptx::pin(a.y);
  }

  // Issues to = own * tile^T.
  template <int kSteps>
  __device__ __forceinline__ static void multiply(ptx::Descriptor own, unsigned tile, float (&to)[kScores]) {
    const ptx::Descriptor other = ptx::uniform(ptx::descriptor_k_major(tile));
    ptx::pin(to);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::Wgmma<Config::kTile, Config::kMmaType>::shared(to, own + step(i, Config::kRows),
                                                          other + step(i, Config::kTile), i == 0 ? 0 : 1);
    }
    ptx::wgmma_commit();
  }
  // Units of 16 bytes from the first k-step's operand to that of k-step i.
  __device__ __forceinline__ static constexpr int step(int i, int rows) {
    return i / 4 * (rows * 8) + i % 4 * ptx::kStepK;
  }

  // Issues to += left * tile.
  template <int kChannels, int kCount>
  __device__ __forceinline__ static void accumulate_channels(ptx::Descriptor tile, unsigned (&left)[kCount],
                                                             float (&to)[kChannels / 2]) {
    ptx::pin(to);
    ptx::pin(left);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kTile / 16; ++i)
      ptx::Wgmma<kChannels, Config::kMmaType>::registers(to, left + 4 * i, tile + i * (16 * 128 >> 4), 1);
    ptx::wgmma_commit();
  }
  template <int kHalf, int kCount>
  __device__ __forceinline__ static void accumulate(unsigned tile, unsigned (&left)[kCount], float (&to)[kHalf]) {
    accumulate_channels<2 * kHalf>(ptx::uniform(ptx::descriptor_mn_major(tile, Config::kTile * 128)), left, to);
  }

  __device__ __forceinline__ bool sees_all(int row) const {
    return max(seen_[0].begin, seen_[1].begin) <= row && row + Config::kTile <= min(seen_[0].end, seen_[1].end);
  }
  // Of register j: its row, 0 or 1, and its column in the tile.
  __device__ __forceinline__ static constexpr int half_of(int j) { return j / 2 % 2; }
  __device__ __forceinline__ static int column_of(int j) {
    return j / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2;
  }
  __device__ __forceinline__ bool sees(int j, int row) const {
    const int column = row + column_of(j);
    return column >= seen_[half_of(j)].begin && column < seen_[half_of(j)].end;
  }
  // The stats of the query of register j's column. racecheck reports these loads with the copy of a later tile: it does
  // not follow one lane's arrival for its warp at the stage's empty barrier.
  __device__ __forceinline__ RowStats column_stats(int j, int stage) const {
    const float2 x = ptx::load_shared_pair(smem_.stats(stage) + column_of(j) * static_cast<int>(sizeof(RowStats)));
    return {x.x, x.y};
  }

  // x[i] = value(i, stats of its query); 0 where query and key do not see each other.
  template <class Value>
  __device__ __forceinline__ void map_scores(bool all_seen, int row, int stage, float (&x)[kScores],
                                             const Value& value) const {
#pragma unroll
    for (int j = 0; j < kScores; j += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const RowStats of_column = Config::kOfKeys ? column_stats(j + e, stage) : RowStats{};
#pragma unroll
        for (int h = 0; h < 2; ++h)
          x[j + 2 * h + e] = value(j + 2 * h + e, Config::kOfKeys ? of_column : own_[h]);
      }
    }
    if (all_seen) return;
#pragma unroll
    for (int j = 0; j < kScores; ++j) x[j] = sees(j, row) ? x[j] : 0.0f;
  }
  // s becomes P.
  __device__ __forceinline__ void softmax(bool all_seen, int row, int stage, float (&s)[kScores]) const {
    map_scores(all_seen, row, stage, s, [&](int i, const RowStats& stats) {
      return ptx::exp2_approx(fmaf(s[i], scale_log2_, -stats.lse2));
    });
  }
  // d, dP, becomes dS. s: P.
  __device__ __forceinline__ void softmax_backward(bool all_seen, int row, int stage, const float (&s)[kScores],
                                                   float (&d)[kScores]) const {
    map_scores(all_seen, row, stage, d, [&](int i, const RowStats& stats) { return s[i] * (d[i] - stats.delta); });
  }

  // To the left operand of wgmma.
  __device__ __forceinline__ static void pack(const float (&x)[kScores], unsigned (&to)[kScores / 2]) {
#pragma unroll
    for (int j = 0; j < kScores; j += 2) {
      to[j / 2] = Config::kMmaType == ptx::Type::kBf16 ? ptx::pack_bf16(x[j], x[j + 1]) : ptx::pack_f16(x[j], x[j + 1]);
    }
  }

  // All warps of the stage's readers arrive.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.empty(stage));
  }

  const Smem& smem_;
  const Work& work_;
  const float scale_log2_;
  int group_;
  Span seen_[2];
  RowStats own_[2];
};

}  // namespace attune::backward
