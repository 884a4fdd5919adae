// SPDX-License-Identifier: Apache-2.0
// The main loop of the gradient kernel for wide heads, where a block has 64 keys. The warpgroups share them:
// each computes the scores of half of a tile's queries, and half of the channels of dk, dv and dq. Of step i:
//
//   S (issued in step i - 1) | issue dP | P | both have done step i - 1 | P to shared memory | wait for dP |
//   dS, to shared memory | both have written | issue dq = dS K, dv += P dO, dk += dS Q | wait for dq, hand it to
//   dq_writer.cuh | issue S of step i + 1 | wait for dv, release dout | wait for all, release q
#pragma once

#include "backward/math.cuh"

namespace attune::backward {

template <class Sums>
__device__ __forceinline__ void run_mainloop_wide(const BackwardParams& p, const Smem& smem, const Work& work,
                                                  Sums& a) {
  constexpr int kScores = Config::kTile / 4, kQueries = Config::kTile / 2;
  using Scores = Softmax<kScores>;
  const int group = math_group(), steps = work.steps();
  const unsigned queries = group * (kQueries * 128);  // bytes of a line
  Scores softmax(p, smem, work, work.begin + row_of_thread(), group * kQueries);
  ptx::wait_phase(smem.own_full(), 0);
  clear_keys_behind_the_last(smem, work);
  const ptx::Descriptor k = keys_of(smem.k()), v = keys_of(smem.v());
  float s[kScores], d[kScores], dq[Config::kDqRegisters];
  unsigned packed[kScores / 2];
  common::PipelineState q, dout;
  Step step(work);
  ptx::wait_phase(smem.q_full(0), 0);
  multiply<Config::kStepsQk>(k, smem.q(0) + queries, s);
  ptx::wgmma_wait<0>();
  ptx::pin(s);
  for (int i = 0; i < steps; ++i) {
    ptx::wait_phase(smem.dout_full(dout.stage), dout.phase);
    clear_queries_behind_the_last(smem, work, step.row, q.stage, dout.stage);
    multiply<Config::kStepsV>(kMadeAnew ? keys_of(smem.v()) : v, smem.dout(dout.stage) + queries, d);
    const Place place{p, work, work.begin + row_of_thread(), work.head * p.group + step.head};
    const bool all_seen = softmax.all_seen(place, step.row);
    softmax.forward(place, all_seen, step.row, q.stage, slope_of(p, work.batch, work.head * p.group + step.head), s,
                    packed);
    if (i > 0) sync_math();
    store_scores(smem.p_transposed(), group * kQueries, packed);
    ptx::wgmma_wait<0>();
    ptx::pin(d);
    softmax.backward(all_seen, step.row, q.stage, s, d);
    Scores::pack(d, packed);
    store_scores(smem.ds_transposed(), group * kQueries, packed);
    if constexpr (Config::kWithDq) store_scores_transposed(smem.ds(0), group * kQueries, packed);
    ptx::fence_async_proxy();
    sync_math();
    if constexpr (Config::kWithDq) multiply_dq(smem.ds(0), smem.k(), group, dq);
    multiply_half<Config::kHeadDimV, Config::kTile, true>(smem.p_transposed(), smem.dout(dout.stage), group, a.v);
    multiply_half<Config::kHeadDimQk, Config::kTile, true>(smem.ds_transposed(), smem.q(q.stage), group, a.k);
    if constexpr (Config::kWithDq) {
      ptx::wgmma_wait<2>();
      ptx::pin(dq);
      hand_over_dq(smem, group, i, dq);
    }
    common::PipelineState next = q;
    next.template next<Config::kQStages>();
    // As in mainloop.cuh.
    const bool is_last = i + 1 == steps;
    if (!is_last) ptx::wait_phase(smem.q_full(next.stage), next.phase);
    multiply<Config::kStepsQk>(kMadeAnew ? keys_of(smem.k()) : k, smem.q(is_last ? q.stage : next.stage) + queries, s);
    ptx::wgmma_wait<2>();
    ptx::pin(a.v);
    release(smem.dout_empty(dout.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    ptx::pin(a.k);
    release(smem.q_empty(q.stage));
    q = next;
    dout.template next<Config::kDoutStages>();
    step.next(work);
  }
}

}  // namespace attune::backward
