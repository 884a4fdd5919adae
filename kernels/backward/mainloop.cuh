// SPDX-License-Identifier: Apache-2.0
// The math of the gradient kernel. Each warpgroup has 64 of the block's keys, and half of the channels of dq. Of step i:
//
//   S (issued in step i - 1) | issue dP | P = 2^(S scale - lse2) | issue dv += P dO | wait for dP | dS = P (dP - delta) |
//   wait for dv | dS to shared memory | both warpgroups have written | issue dq = dS K | issue dk += dS Q |
//   issue S of step i + 1 | wait for dq, hand it to dq_writer.cuh | wait for all, release the stage
//
// dq comes before dk: the next block waits for its sums.
//
// P and dS are rounded to 16 bits and stay in registers as the left operands of dv and dk; dq needs dS of all keys.
#pragma once

#include "backward/config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

namespace attune::backward {

struct Accumulators {
  float k[Config::kChannelsQk / 2];  // dk, without the scale
  float v[Config::kChannelsV / 2];   // dv
};

class Mainloop {
 public:
  __device__ __forceinline__ Mainloop(const BackwardParams& p, const Smem& smem, const Work& work)
      : smem_(smem), work_(work), scale_log2_(p.scale * common::kLog2e) {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    group_ = __shfl_sync(0xffffffffu, thread / 128, 0);
    const int row = work.begin + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) seen_[h] = work.seen_by(p, row + 8 * h);
  }

  __device__ __forceinline__ void run(Accumulators& a) {
    ptx::wait_phase(smem_.own_full(), 0);
    const ptx::Descriptor k = ptx::uniform(ptx::descriptor_k_major(smem_.k() + group_ * (64 * 128)));
    const ptx::Descriptor v = ptx::uniform(ptx::descriptor_k_major(smem_.v() + group_ * (64 * 128)));
    float s[kScores], d[kScores], dq[kDqFloats];
    unsigned ds_regs[kScores / 2], p_regs[kScores / 2];
    common::PipelineState pipe;
    Step step(work_);
    const int steps = work_.steps();
    ptx::wait_phase(smem_.full(0), 0);
    multiply<Config::kStepsQk>(k, smem_.q(0), s);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    for (int i = 0; i < steps; ++i) {
      multiply<Config::kStepsV>(v, smem_.dout(pipe.stage), d);
      const int row = step.row;
      const bool all_seen = !__any_sync(0xffffffffu, !sees_all(row));
      softmax(all_seen, row, pipe.stage, s);
      pack(s, p_regs);
      accumulate(smem_.dout(pipe.stage), p_regs, a.v);
      ptx::wgmma_wait<1>();
      ptx::pin(d);
      softmax_backward(all_seen, row, pipe.stage, s, d);
      ptx::wgmma_wait<0>();  // dS takes the registers of P
      ptx::pin(a.v);
      pack(d, ds_regs);
      if constexpr (Config::kWithDq) store_ds(i % 2, ds_regs);
      if constexpr (Config::kWithDq) {
        ptx::named_barrier_sync(kMathBarrier, 32 * Config::kMathWarps);
        multiply_dq(i % 2, dq);
      }
      accumulate(smem_.q(pipe.stage), ds_regs, a.k);
      common::PipelineState next = pipe;
      next.template next<Config::kStages>();
      // S of the last step once more where there is no next one: ptxas serializes products that are under a condition.
      const bool is_last = i + 1 == steps;
      if (!is_last) ptx::wait_phase(smem_.full(next.stage), next.phase);
      multiply<Config::kStepsQk>(k, smem_.q(is_last ? pipe.stage : next.stage), s);
      if constexpr (Config::kWithDq) {
        ptx::wgmma_wait<2>();
        ptx::pin(dq);
        hand_over(i, dq);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      ptx::pin(a.k);
      release(pipe.stage);
      pipe = next;
      step.next(work_);
    }
  }

 private:
  static constexpr int kScores = Config::kTile / 2, kDqFloats = Config::kChannelsDq / 2;
  using Dq = DqTile<Config::kHeadDimQk>;

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
  // Units of 16 bytes from the first k-step's operand to that of k-step i, K-major; and with K along the rows.
  __device__ __forceinline__ static constexpr int step(int i, int rows) {
    return i / 4 * (rows * 8) + i % 4 * ptx::kStepK;
  }
  static constexpr int kStepOfRows = 16 * 128 >> 4;

  // Issues to += left * tile.
  template <int kChannels, int kCount>
  __device__ __forceinline__ static void accumulate_channels(ptx::Descriptor tile, unsigned (&left)[kCount],
                                                             float (&to)[kChannels / 2]) {
    ptx::pin(to);
    ptx::pin(left);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kTile / 16; ++i)
      ptx::Wgmma<kChannels, Config::kMmaType>::registers(to, left + 4 * i, tile + i * kStepOfRows, 1);
    ptx::wgmma_commit();
  }
  template <int kHalf, int kCount>
  __device__ __forceinline__ static void accumulate(unsigned tile, unsigned (&left)[kCount], float (&to)[kHalf]) {
    accumulate_channels<2 * kHalf>(ptx::uniform(ptx::descriptor_mn_major(tile, Config::kTile * 128)), left, to);
  }

  // dS of this warpgroup's keys, for both: rows are queries.
  __device__ __forceinline__ void store_ds(int buffer, const unsigned (&x)[kScores / 2]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;  // of eight keys
    const unsigned to = smem_.ds(buffer) + group_ * (Config::kTile * 128) + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16;
#pragma unroll
    for (int m = 0; m < kScores / 8; ++m) {
      const unsigned r[4] = {x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3]};
      ptx::store_matrix_x4_transposed(to + m * (16 * 128), r);
    }
    ptx::fence_async_proxy();
  }
  // Issues dq = dS K of this warpgroup's channels.
  __device__ __forceinline__ void multiply_dq(int buffer, float (&to)[kDqFloats]) const {
    const ptx::Descriptor ds = ptx::uniform(ptx::descriptor_k_major(smem_.ds(buffer)));
    const unsigned channels = Config::kLinesQk == 1 ? group_ * (Config::kChannelsDq * 2) : group_ * (Config::kRows * 128);
    const ptx::Descriptor k = ptx::uniform(ptx::descriptor_mn_major(smem_.k() + channels, 0));
    ptx::pin(to);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kRows / 16; ++i) {
      ptx::WgmmaAlongN<Config::kChannelsDq, Config::kMmaType>::shared(to, ds + step(i, Config::kTile),
                                                                      k + i * kStepOfRows, i == 0 ? 0 : 1);
    }
    ptx::wgmma_commit();
  }
  // Gives dq of step i to the warp that adds it.
  __device__ __forceinline__ void hand_over(int i, const float (&x)[kDqFloats]) const {
    if (i >= 2) ptx::named_barrier_sync(kDqEmptyBarrier + i % 2, kDqThreads);
    const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4;
    const unsigned to = smem_.dq(i % 2) + group_ * Dq::kHalfBytes + thread % 4 * 8;
#pragma unroll
    for (int j = 0; j < kDqFloats; j += 2) {
      ptx::store_shared_two(to + Dq::byte_of(row + 8 * half_of(j), j / 4), __float_as_uint(x[j]),
                            __float_as_uint(x[j + 1]));
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_arrive(kDqFullBarrier + i % Config::kWriters, kDqThreads);
  }

  __device__ __forceinline__ bool sees_all(int row) const {
    return max(seen_[0].begin, seen_[1].begin) <= row && row + Config::kTile <= min(seen_[0].end, seen_[1].end);
  }
  // Of register j: its key, 0 or 1, and its query in the tile.
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
        const RowStats of_column = column_stats(j + e, stage);
#pragma unroll
        for (int h = 0; h < 2; ++h) x[j + 2 * h + e] = value(j + 2 * h + e, of_column);
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
};

}  // namespace attune::backward
