// SPDX-License-Identifier: Apache-2.0
// The mainloop of the gradient kernel if each gradient has a pass. A warpgroup has 64 of the block's 128 resident rows.
// The warpgroups synchronise only where the sequence ends in a tile, so S of the next step is issued before this one
// ends. A step:
//
//   dk, dq:  S (issued before) | issue dP | P | wait for dP, release vdo | dS | issue dqk += dS qk, S of step i + 1 |
//            wait
//   dv:      S (issued before) | P | issue dv += P dO, S of step i + 1 | wait
#pragma once

#include "backward/mainloop_ops.cuh"

namespace attune::backward {

__device__ __forceinline__ void run_gradient(const BackwardParams& p, const Smem& smem, const WorkTile& work,
                                             Accumulators& a) {
  constexpr int kScores = Config::kTile / 2;
  using Scores = Softmax<kScores>;
  const int group = consumer_warpgroup(), steps = work.steps(), resident = work.begin + 64 * group + row_of_thread();
  const unsigned resident_rows = group * (64 * 128);  // the warpgroup's byte offset in a line
  Scores softmax(p, smem, work, resident);
  ptx::wait_phase(smem.resident_full(), 0);
  const ResidentOperand resident_qk(smem.resident_qk() + resident_rows),
      resident_vdo(smem.resident_vdo() + resident_rows);
  float s[kScores], d[kScores];
  unsigned ds_regs[kScores / 2], p_regs[kScores / 2];
  common::PipelineState pipe;  // of qk, and of vdo if it has as many stages
  Step step(work);
  ptx::wait_phase(smem.qk_full(0), 0);
  multiply<Config::kStepsQk>(resident_qk.descriptor(), smem.qk(0), s);
  ptx::wgmma_wait<0>();
  ptx::fence_operand(s);
  for (int i = 0; i < steps; ++i) {
    const int vdo_stage = kOneVdo ? 0 : pipe.stage;
    ptx::wait_phase(smem.vdo_full(vdo_stage), kOneVdo ? i & 1 : pipe.phase);
    if (ends_in_tile(work, step.row)) {
      sync_consumers();  // both warpgroups have its S
      zero_tile_past_end(smem, work, step.row, pipe.stage, vdo_stage);
    }
    if constexpr (Config::kWithDqk) multiply<Config::kStepsV>(resident_vdo.descriptor(), smem.vdo(vdo_stage), d);
    const ScoreCoords coords{p, work, work.begin + 64 * group + row_of_thread(), work.q_head(p, step.head)};
    const bool unmasked = softmax.unmasked(coords, step.row);
    const float slope = slope_of(p, work.batch, coords.head);
    softmax.forward(coords, unmasked, step.row, pipe.stage, slope, s, p_regs);
    if constexpr (Config::kWithDqk) {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(d);
      release(smem.vdo_empty(vdo_stage));
      softmax.backward(unmasked, step.row, pipe.stage, s, d);
      Scores::pack(d, ds_regs);
      accumulate(smem.qk(pipe.stage), ds_regs, a.dqk);
    } else {
      accumulate(smem.vdo(vdo_stage), p_regs, a.dv);
    }
    common::PipelineState next = pipe;
    next.template next<Config::kQkStages>();
    // If there is no next step, computes S of the last step again: ptxas serializes wgmma that are under a condition.
    const bool is_last = i + 1 == steps;
    if (!is_last) ptx::wait_phase(smem.qk_full(next.stage), next.phase);
    multiply<Config::kStepsQk>(resident_qk.descriptor(), smem.qk(is_last ? pipe.stage : next.stage), s);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
    if constexpr (Config::kWithDqk) {
      ptx::fence_operand(a.dqk);
    } else {
      ptx::fence_operand(a.dv);
      release(smem.vdo_empty(vdo_stage));
    }
    release(smem.qk_empty(pipe.stage));
    pipe = next;
    step.next(work);
  }
}

}  // namespace attune::backward
