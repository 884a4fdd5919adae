// SPDX-License-Identifier: Apache-2.0
// The mainloop of the gradient kernel if dk and dv are computed in one pass. A warpgroup has 64 of the block's 128
// resident rows, and half of the channels of dq's sums. A step; without dq it has no dS in shared memory, and
// releases both stages at its end:
//
//   issue S | issue dP | wait for S | P = 2^(S scale - lse2) | wait for dP | dS = P (dP - delta) |
//   dS to shared memory | issue dv += P dO | both warpgroups have written dS | issue dq = dS K |
//   wait for dv, release vdo | issue dk += dS Q | wait for dq, pass it to dq_writer.cuh | wait for dk, release qk
//
// P and dS are rounded to 16 bits and stay in registers as the left operands of dv and dk; dq needs dS of all keys. dq
// comes before dk, because the next block waits for dq's sums.
#pragma once

#include "backward/mainloop_ops.cuh"

namespace attune::backward {

__device__ __forceinline__ void run_one_pass(const BackwardParams& p, const Smem& smem, const WorkTile& work,
                                             Accumulators& a) {
  constexpr int kScores = Config::kTile / 2;
  using Scores = Softmax<kScores>;
  const int group = consumer_warpgroup(), steps = work.steps(), resident = work.begin + 64 * group + row_of_thread();
  const unsigned resident_rows = group * (64 * 128);  // the warpgroup's byte offset in a line
  Scores softmax(p, smem, work, resident);
  ptx::wait_phase(smem.resident_full(), 0);
  if constexpr (Config::kSumsDq) zero_keys_past_end(smem, work);
  const ResidentOperand k(smem.resident_qk() + resident_rows), v(smem.resident_vdo() + resident_rows);
  float s[kScores], d[kScores], dq[Config::kDqRegisters];
  unsigned ds_regs[kScores / 2], p_regs[kScores / 2];
  common::PipelineState pipe;  // of qk, and of vdo if it has as many stages
  Step step(work);
  for (int i = 0; i < steps; ++i) {
    const int vdo_stage = kOneVdo ? 0 : pipe.stage;
    const unsigned qk = smem.qk(pipe.stage), vdo = smem.vdo(vdo_stage), vdo_phase = kOneVdo ? i & 1 : pipe.phase;
    ptx::wait_phase(smem.qk_full(pipe.stage), pipe.phase);
    if (ends_in_tile(work, step.row)) {
      ptx::wait_phase(smem.vdo_full(vdo_stage), vdo_phase);
      zero_tile_past_end(smem, work, step.row, pipe.stage, vdo_stage);
    }
    multiply<Config::kStepsQk>(k.descriptor(), qk, s);
    ptx::wait_phase(smem.vdo_full(vdo_stage), vdo_phase);
    multiply<Config::kStepsV>(v.descriptor(), vdo, d);
    const ScoreCoords coords{p, work, work.begin + 64 * group + row_of_thread(), work.q_head(p, step.head)};
    const bool unmasked = softmax.unmasked(coords, step.row);
    const float slope = slope_of(p, work.batch, coords.head);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s);
    softmax.forward(coords, unmasked, step.row, pipe.stage, slope, s, p_regs);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(d);
    softmax.backward(unmasked, step.row, pipe.stage, s, d);
    Scores::pack(d, ds_regs);
    const unsigned ds = smem.ds(i % Config::kDsBuffers);
    if constexpr (Config::kSumsDq) store_scores_transposed(ds + group * (Config::kTile * 128), ds_regs);
    accumulate(vdo, p_regs, a.dv);
    if constexpr (Config::kSumsDq) {
      ptx::fence_async_proxy();
      sync_consumers();
      multiply_dq(ds, smem.resident_qk(), group, dq);
      ptx::wgmma_wait<1>();
      ptx::fence_operand(a.dv);
      release(smem.vdo_empty(vdo_stage));
    }
    accumulate(qk, ds_regs, a.dqk);
    if constexpr (Config::kSumsDq) {
      ptx::wgmma_wait<1>();
      ptx::fence_operand(dq);
      publish_dq(smem, group, i, dq);
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(a.dqk);
    if constexpr (!Config::kSumsDq) {
      ptx::fence_operand(a.dv);
      release(smem.vdo_empty(vdo_stage));
    }
    release(smem.qk_empty(pipe.stage));
    pipe.next<Config::kQkStages>();
    step.next(work);
  }
}

}  // namespace attune::backward
