// SPDX-License-Identifier: Apache-2.0
// The main loop of the gradient kernel for blocks of 128 keys. Each warpgroup has 64 of the block's keys, and half of
// the channels of dq. Of step i:
//
//   S (issued in step i - 1) | issue dP | P = 2^(S scale - lse2) | issue dv += P dO | wait for dP |
//   dS = P (dP - delta) | wait for dv | dS to shared memory | both warpgroups have written | issue dq = dS K |
//   issue dk += dS Q | issue S of step i + 1 | wait for dq, hand it to dq_writer.cuh | wait for all, release the stages
//
// P and dS are rounded to 16 bits and stay in registers as the left operands of dv and dk; dq needs dS of all keys. dq
// comes before dk: the next block waits for its sums.
#pragma once

#include "backward/math.cuh"

namespace attune::backward {

template <class Sums>
__device__ __forceinline__ void run_mainloop(const BackwardParams& p, const Smem& smem, const Work& work, Sums& a) {
  constexpr int kScores = Config::kTile / 2;
  using Scores = Softmax<kScores>;
  const int group = math_group(), steps = work.steps();
  Scores softmax(p, smem, work, work.begin + 64 * group + row_of_thread(), 0);
  ptx::wait_phase(smem.own_full(), 0);
  clear_keys_behind_the_last(smem, work);
  const ptx::Descriptor k = keys_of(smem.k() + group * (64 * 128)), v = keys_of(smem.v() + group * (64 * 128));
  float s[kScores], d[kScores], dq[Config::kDqRegisters];
  unsigned ds_regs[kScores / 2], p_regs[kScores / 2];
  common::PipelineState pipe;  // of q and of dout
  Step step(work);
  ptx::wait_phase(smem.q_full(0), 0);
  multiply<Config::kStepsQk>(k, smem.q(0), s);
  ptx::wgmma_wait<0>();
  ptx::pin(s);
  for (int i = 0; i < steps; ++i) {
    ptx::wait_phase(smem.dout_full(pipe.stage), pipe.phase);
    clear_queries_behind_the_last(smem, work, step.row, pipe.stage, pipe.stage);
    multiply<Config::kStepsV>(kMadeAnew ? keys_of(smem.v() + group * (64 * 128)) : v, smem.dout(pipe.stage), d);
    const Place place{p, work, work.begin + 64 * group + row_of_thread(), work.head * p.group + step.head};
    const bool all_seen = softmax.all_seen(place, step.row);
    const float slope = slope_of(p, work.batch, work.head * p.group + step.head);
    softmax.forward(place, all_seen, step.row, pipe.stage, slope, s, p_regs);
    accumulate(smem.dout(pipe.stage), p_regs, a.v);
    ptx::wgmma_wait<1>();
    ptx::pin(d);
    softmax.backward(all_seen, step.row, pipe.stage, s, d);
    ptx::wgmma_wait<0>();  // dS takes the registers of P
    ptx::pin(a.v);
    Scores::pack(d, ds_regs);
    if constexpr (Config::kWithDq) {
      const unsigned ds = smem.ds(i % Config::kDsBuffers);
      store_scores_transposed(ds + group * (Config::kTile * 128), 0, ds_regs);
      ptx::fence_async_proxy();
      sync_math();
      multiply_dq(ds, smem.k(), group, dq);
    }
    accumulate(smem.q(pipe.stage), ds_regs, a.k);
    common::PipelineState next = pipe;
    next.template next<Config::kQStages>();
    // S of the last step once more where there is no next one: ptxas serializes products that are under a condition.
    const bool is_last = i + 1 == steps;
    if (!is_last) ptx::wait_phase(smem.q_full(next.stage), next.phase);
    multiply<Config::kStepsQk>(kMadeAnew ? keys_of(smem.k() + group * (64 * 128)) : k,
                               smem.q(is_last ? pipe.stage : next.stage), s);
    if constexpr (Config::kWithDq) {
      ptx::wgmma_wait<2>();
      ptx::pin(dq);
      hand_over_dq(smem, group, i, dq);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    ptx::pin(a.k);
    release(smem.q_empty(pipe.stage));
    release(smem.dout_empty(pipe.stage));
    pipe = next;
    step.next(work);
  }
}

}  // namespace attune::backward
