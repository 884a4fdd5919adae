// SPDX-License-Identifier: Apache-2.0
// The mainloop of tiles whose scores are small beside a softcap: loops without a row max before the exponentials.
#pragma once

#include "prefill/mainloop.cuh"

namespace attune::prefill {

template <bool kCodes>
__device__ __forceinline__ int Mainloop::run_softcap_deferred(const WorkTile& work, const Rows& rows,
                                                              const Tiles& tiles, const TileSpan& whole, int i,
                                                              int begin, bool last_use, int& accumulate, bool& again,
                                                              unsigned (&p_regs)[Config::kPRegs],
                                                              float (&s)[Config::kKeys / 2], Accumulators& a) {
  const float edge = Rows::score_of(p_, p_.cap_short.high, {}, 0, 0.0f);
  for (; i >= begin; --i) {
    const KDescriptor<kCodes> k = k_descriptor<kCodes>();
    const VDescriptor<kCodes> v = v_descriptor<kCodes>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    ptx::sync_some(kWarpSchedulerBarrier + group_, Config::kMathThreads);
    qk_gemm<QkMma<kCodes>>(q_, k, s);
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    pv_gemm<kCodes>(p_regs, v, accumulate, a.o);
    accumulate = 1;
    ptx::arrive_some(kWarpSchedulerBarrier + 1 - group_, Config::kMathThreads);
    ptx::wait_products<1>();
    ptx::pin(s);
    mask_edge(rows, work, tiles, i, whole, s);
    const float sum[2] = {a.row_sum[0], a.row_sum[1]};
    const auto last = [&] {
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release_v();
    };
    softmax_softcap_deferred(i, s, a, last, [&] { pack_p<kCodes, 0, kLastGroup>(s, p_regs); });
    add_row_sum<true>(kScores - kReduceLag, kScores, s, a);
    pack_p<kCodes, kLastGroup>(s, p_regs);
    const float added[2] = {a.row_sum[0] - sum[0], a.row_sum[1] - sum[1]};
    ptx::pin(p_regs);  // else they are packed behind the vote
    again = any_of_group(may_exceed_range(added, edge, a));
    if (again) {
      a.row_sum[0] = sum[0], a.row_sum[1] = sum[1];
#pragma unroll
      for (int j = 0; j < Config::kKeys / 4; ++j) p_regs[j] = ptx::kept(0);
      break;
    }
    if (__any_sync(0xffffffffu, added[0] > kMaxP || added[1] > kMaxP)) {
      float rescale[2] = {1.0f, 1.0f};
      raise_row_max_ref<kCodes>(s, rescale, a, p_regs);
      rescale_o(rescale, a.o);
    }
    release_k();
    if (i == begin && last_use) release_q();
  }
  return i;
}

template <bool kCodes>
__device__ __forceinline__ int Mainloop::run_softcap_small(int least, int i, int begin, bool last_use,
                                                           const int (&limit)[2], int& accumulate, bool& again,
                                                           bool& held, unsigned (&p_regs)[Config::kPRegs],
                                                           float (&s)[Config::kKeys / 2], Accumulators& a) {
  float sum[2] = {a.row_sum[0], a.row_sum[1]};  // before the tile that has not been asked for yet
  PipelineState asked = k_pipe_;                // its keys
  bool any = false, beyond = false;
  const auto forget = [&] {
    a.row_sum[0] = sum[0], a.row_sum[1] = sum[1];
#pragma unroll
    for (int j = 0; j < Config::kKeys / 4; ++j) p_regs[j] = ptx::kept(0);
    k_pipe_ = asked;
    again = true;
  };
  const auto release_asked = [&] {
    if (any && threadIdx.x % 32 == 0) ptx::arrive(smem_.k_empty(asked.stage));
  };
  for (; i >= least; --i) {
    const KDescriptor<kCodes> k = k_descriptor<kCodes>();
    const VDescriptor<kCodes> v = v_descriptor<kCodes>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    if (Config::kCached && __any_sync(0xffffffffu, ptx::load_shared_u32(smem_.mask(k_pipe_.stage)) != 0)) break;
    ptx::sync_some(kWarpSchedulerBarrier + group_, Config::kMathThreads);
    qk_gemm<QkMma<kCodes>>(q_, k, s);
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    if (__any_sync(0xffffffffu, ptx::load_shared_u32(smem_.over_cap(group_, i + 1)) != 0)) {
      ptx::wait_products<0>();
      ptx::pin(s);
      forget();
      held = true;
      ptx::sync_some(kGroupBarrier + group_, 128);  // all have read it, before it may be cleared
      return i + 1;
    }
    release_asked();
    pv_gemm<kCodes>(p_regs, v, accumulate, a.o);
    accumulate = 1;
    ptx::arrive_some(kWarpSchedulerBarrier + 1 - group_, Config::kMathThreads);
    ptx::wait_products<1>();
    ptx::pin(s);
    sum[0] = a.row_sum[0], sum[1] = a.row_sum[1];
    const auto last = [&] {
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release_v();
    };
    beyond = softmax_softcap_small(i, s, limit, a, last, [&] { pack_p<kCodes, 0, kLastGroup>(s, p_regs); });
    add_row_sum<true>(kScores - kReduceLag, kScores, s, a);
    pack_p<kCodes, kLastGroup>(s, p_regs);
    // racecheck reports this beside the load above: it does not follow arrive_some(), for which the group waits.
    if (beyond) ptx::store_shared_u32(smem_.over_cap(group_, i), 1);
    asked = k_pipe_, any = true;
    k_pipe_.next<Config::kStages>();
  }
  if (!any) return i;
  if (any_of_group(beyond)) {
    forget();
    return i + 1;
  }
  release_asked();
  if (i < begin && last_use) release_q();
  return i;
}

}  // namespace attune::prefill
