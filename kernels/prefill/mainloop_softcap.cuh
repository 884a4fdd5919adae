// SPDX-License-Identifier: Apache-2.0
// Softcap loops of the mainloop. While scores are small compared to the cap, the exponentials need no row max first.
#pragma once

#include "prefill/mainloop.cuh"

namespace attune::prefill {

template <bool kCacheForm>
__device__ __forceinline__ void Mainloop::run_softcap_tiles(TileLoop& t) {
  SoftcapState state{t.end - 4};
  for (int i = t.end - 2; i >= t.begin; --i) {
    if (state.may_try(i) && p_.max_logits == nullptr) {
      i = run_softcap<kCacheForm>(i, t, state);
      if (i < t.begin) break;
    }
    run_next_tile<kCacheForm>(i, t, state);
    if (!state.redo) state.holds_barrier = false;  // else it is the next tile's
    state.redo = false;
  }
}

template <bool kCacheForm>
__device__ __forceinline__ int Mainloop::run_softcap(int i, TileLoop& t, SoftcapState& state) {
  // The decision is the whole warpgroup's, because wgmma is warpgroup-wide.
  int limit[2];
  find_limits(t.a, limit);
  // The loop condition must be warp-uniform; otherwise each group of exponentials costs 40 clocks more.
  const TileSpan full = {__shfl_sync(0xffffffffu, t.whole.begin, 0), __shfl_sync(0xffffffffu, t.whole.end, 0)};
  if (consumer_thread() % 128 == 0) ptx::store_shared_two(smem_.over_cap(group_, 0), 0, 0);
  if (state.may_run_small && full.has(i) && !any_of_group(limit[0] < 0 || limit[1] < 0)) {
    i = run_softcap_small<kCacheForm>(max(t.begin, full.begin), i, limit, t, state.redo, state.holds_barrier);
    i = __shfl_sync(0xffffffffu, i, 0);
    state.redo = __any_sync(0xffffffffu, state.redo);
    state.holds_barrier = __any_sync(0xffffffffu, state.holds_barrier);
    state.may_run_small = false, state.retry_end = i - 3;
  } else if (!any_of_group(!may_defer_max(t.a))) {
    i = run_softcap_deferred<kCacheForm>(i, t, state.redo);
  }
  return i;
}

template <bool kCacheForm>
__device__ __forceinline__ int Mainloop::run_softcap_deferred(int i, TileLoop& t, bool& redo) {
  Accumulators& a = t.a;
  auto& s = t.s;
  auto& p_regs = t.p_regs;
  const float edge = Rows::score_of(p_, p_.cap_short.high, {}, 0, 0.0f);
  for (; i >= t.begin; --i) {
    const KDescriptor<kCacheForm> k = k_descriptor<kCacheForm>();
    const VDescriptor<kCacheForm> v = v_descriptor<kCacheForm>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    warp_scheduler_sync(group_);
    qk_gemm<QkMma<kCacheForm>>(q_, k, s);
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    pv_gemm<kCacheForm>(p_regs, v, t.accumulate, a.o);
    t.accumulate = 1;
    warp_scheduler_arrive(group_);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s);
    mask_edge(t.rows, t.work, t.tiles, i, t.whole, s);
    const float saved_sum[2] = {a.row_sum[0], a.row_sum[1]};
    const auto last = [&] {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(a.o);
      release_v();
    };
    softmax_softcap_deferred(i, s, a, last, [&] { pack_p<kCacheForm, 0, kLastGroup>(s, p_regs); });
    add_row_sum<true>(kScores - kReduceLag, kScores, s, a);
    pack_p<kCacheForm, kLastGroup>(s, p_regs);
    const float added[2] = {a.row_sum[0] - saved_sum[0], a.row_sum[1] - saved_sum[1]};
    ptx::fence_operand(p_regs);  // otherwise the compiler packs them after the vote
    redo = any_of_group(may_exceed_range(added, edge, a));
    if (redo) {
      a.row_sum[0] = saved_sum[0], a.row_sum[1] = saved_sum[1];
#pragma unroll
      for (int j = 0; j < Config::kKeys / 4; ++j) p_regs[j] = ptx::opaque(0);
      break;
    }
    if (__any_sync(0xffffffffu, added[0] > kMaxP || added[1] > kMaxP)) {
      float rescale[2] = {1.0f, 1.0f};
      raise_row_max_ref<kCacheForm>(s, rescale, a, p_regs);
      rescale_o(rescale, a.o);
    }
    release_k();
    if (i == t.begin && t.last_use) release_q();
  }
  return i;
}

template <bool kCacheForm>
__device__ __forceinline__ int Mainloop::run_softcap_small(int least, int i, const int (&limit)[2], TileLoop& t,
                                                           bool& redo, bool& holds_barrier) {
  Accumulators& a = t.a;
  auto& s = t.s;
  auto& p_regs = t.p_regs;
  float saved_sum[2] = {a.row_sum[0], a.row_sum[1]};  // without the tile whose range check is pending
  PipelineState pending = k_pipe_;                    // the stage of that tile's K
  bool has_pending = false, out_of_range = false;
  const auto discard = [&] {
    a.row_sum[0] = saved_sum[0], a.row_sum[1] = saved_sum[1];
#pragma unroll
    for (int j = 0; j < Config::kKeys / 4; ++j) p_regs[j] = ptx::opaque(0);
    k_pipe_ = pending;
    redo = true;
  };
  const auto release_pending = [&] {
    if (has_pending) release_stage(smem_.k_empty(pending.stage));
  };
  for (; i >= least; --i) {
    const KDescriptor<kCacheForm> k = k_descriptor<kCacheForm>();
    const VDescriptor<kCacheForm> v = v_descriptor<kCacheForm>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    if (Config::kCached && __any_sync(0xffffffffu, ptx::load_shared_u32(smem_.mask(k_pipe_.stage)) != 0)) break;
    warp_scheduler_sync(group_);
    qk_gemm<QkMma<kCacheForm>>(q_, k, s);
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    if (__any_sync(0xffffffffu, ptx::load_shared_u32(smem_.over_cap(group_, i + 1)) != 0)) {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(s);
      discard();
      holds_barrier = true;
      ptx::named_barrier_sync(kGroupBarriers + group_, 128);  // all warps have read the flag before it may be cleared
      return i + 1;
    }
    release_pending();
    pv_gemm<kCacheForm>(p_regs, v, t.accumulate, a.o);
    t.accumulate = 1;
    warp_scheduler_arrive(group_);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s);
    saved_sum[0] = a.row_sum[0], saved_sum[1] = a.row_sum[1];
    const auto last = [&] {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(a.o);
      release_v();
    };
    out_of_range = softmax_softcap_small(i, s, limit, a, last, [&] { pack_p<kCacheForm, 0, kLastGroup>(s, p_regs); });
    add_row_sum<true>(kScores - kReduceLag, kScores, s, a);
    pack_p<kCacheForm, kLastGroup>(s, p_regs);
    // racecheck reports this with the load above: it does not model named_barrier_arrive().
    if (out_of_range) ptx::store_shared_u32(smem_.over_cap(group_, i), 1);
    pending = k_pipe_, has_pending = true;
    k_pipe_.next<Config::kStages>();
  }
  if (!has_pending) return i;
  if (any_of_group(out_of_range)) {
    discard();
    return i + 1;
  }
  release_pending();
  if (i < t.begin && t.last_use) release_q();
  return i;
}

}  // namespace attune::prefill
