// SPDX-License-Identifier: Apache-2.0
// The mainloop of the gradient kernel. A warpgroup has 64 of the block's 128 resident rows, and half of the channels of
// dq's sums. Step i, if all gradients are computed in one pass:
//
//   S (issued in step i - 1) | issue dP | P = 2^(S scale - lse2) | issue dv += P dO | wait for dP |
//   dS = P (dP - delta) | wait for dv | dS to shared memory | both warpgroups have written | issue dq = dS K |
//   issue dk += dS Q | issue S of step i + 1 | wait for dq, pass it to dq_writer.cuh | wait for all, release the stages
//
// P and dS are rounded to 16 bits and stay in registers as the left operands of dv and dk; dq needs dS of all keys. dq
// comes before dk, because the next block waits for dq's sums. In a pass of one gradient the warpgroups do not
// synchronise:
//
//   dk, dq:  S (issued before) | issue dP | P | wait for dP, release vdo | dS | issue dqk += dS qk, S of step i + 1 |
//            wait
//   dv:      S (issued before) | P | issue dv += P dO, S of step i + 1 | wait
#pragma once

#include "backward/mainloop_ops.cuh"

namespace attune::backward {

template <class Sums>
__device__ __forceinline__ void run_mainloop(const BackwardParams& p, const Smem& smem, const WorkTile& work, Sums& a) {
  constexpr int kScores = Config::kTile / 2;
  using Scores = Softmax<kScores>;
  const int group = consumer_warpgroup(), steps = work.steps(), resident = work.begin + 64 * group + row_of_thread();
  const unsigned resident_rows = group * (64 * 128);  // the warpgroup's byte offset in a line
  Scores softmax(p, smem, work, resident);
  ptx::wait_phase(smem.resident_full(), 0);
  if constexpr (Config::kSumsDq) zero_keys_past_end(smem, work);
  const ptx::Descriptor resident_qk = descriptor_of(smem.resident_qk() + resident_rows),
                        resident_vdo = descriptor_of(smem.resident_vdo() + resident_rows);
  float s[kScores], d[kScores], dq[Config::kDqRegisters];
  unsigned ds_regs[kScores / 2], p_regs[kScores / 2];
  common::PipelineState pipe;  // of qk, and of vdo if it has as many stages
  Step step(work);
  ptx::wait_phase(smem.qk_full(0), 0);
  multiply<Config::kStepsQk>(resident_qk, smem.qk(0), s);
  ptx::wgmma_wait<0>();
  ptx::fence_operand(s);
  for (int i = 0; i < steps; ++i) {
    constexpr bool kOneVdo = Config::kVdoStages == 1;
    const int vdo_stage = kOneVdo ? 0 : pipe.stage;
    ptx::wait_phase(smem.vdo_full(vdo_stage), kOneVdo ? i & 1 : pipe.phase);
    zero_tile_past_end(smem, work, step.row, pipe.stage, vdo_stage);
    if constexpr (Config::kWithDqk)
      multiply<Config::kStepsV>(kRematerialize ? descriptor_of(smem.resident_vdo() + resident_rows) : resident_vdo,
                                smem.vdo(vdo_stage), d);
    const ScoreCoords coords{p, work, work.begin + 64 * group + row_of_thread(), work.q_head(p, step.head)};
    const bool unmasked = softmax.unmasked(coords, step.row);
    const float slope = slope_of(p, work.batch, coords.head);
    softmax.forward(coords, unmasked, step.row, pipe.stage, slope, s, p_regs);
    if constexpr (Config::kWithDv) accumulate(smem.vdo(vdo_stage), p_regs, a.dv);
    if constexpr (Config::kWithDqk) {
      ptx::wgmma_wait<Config::kWithDv ? 1 : 0>();
      ptx::fence_operand(d);
      if constexpr (!Config::kWithDv) release(smem.vdo_empty(vdo_stage));
      softmax.backward(unmasked, step.row, pipe.stage, s, d);
      if constexpr (Config::kWithDv) {
        ptx::wgmma_wait<0>();  // dS will use the registers of P
        ptx::fence_operand(a.dv);
      }
      Scores::pack(d, ds_regs);
      if constexpr (Config::kSumsDq) {
        const unsigned ds = smem.ds(i % Config::kDsBuffers);
        store_scores_transposed(ds + group * (Config::kTile * 128), ds_regs);
        ptx::fence_async_proxy();
        sync_consumers();
        multiply_dq(ds, smem.resident_qk(), group, dq);
      }
      accumulate(smem.qk(pipe.stage), ds_regs, a.dqk);
    }
    common::PipelineState next = pipe;
    next.template next<Config::kQkStages>();
    // If there is no next step, computes S of the last step again: ptxas serializes wgmma that are under a condition.
    const bool is_last = i + 1 == steps;
    if (!is_last) ptx::wait_phase(smem.qk_full(next.stage), next.phase);
    multiply<Config::kStepsQk>(kRematerialize ? descriptor_of(smem.resident_qk() + resident_rows) : resident_qk,
                               smem.qk(is_last ? pipe.stage : next.stage), s);
    if constexpr (Config::kSumsDq) {
      ptx::wgmma_wait<2>();
      ptx::fence_operand(dq);
      publish_dq(smem, group, i, dq);
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
    if constexpr (Config::kWithDqk) ptx::fence_operand(a.dqk);
    if constexpr (Config::kWithDv) ptx::fence_operand(a.dv);
    release(smem.qk_empty(pipe.stage));
    if constexpr (Config::kWithDv) release(smem.vdo_empty(vdo_stage));
    pipe = next;
    step.next(work);
  }
}

}  // namespace attune::backward
