// SPDX-License-Identifier: Apache-2.0
// Prefill attention: many query rows a sequence over dense keys, over a cache, or over both, at the speed of the tensor
// cores.
//
// Rows are packed: the tokens of a sequence times the query heads that share a KV head, so that K and V come once for
// all of them. A work tile is a block of 128 packed rows and the tiles of keys that they may see; prefill/schedule.cu
// lists work tiles, longest first, and the blocks of a persistent grid take them one after the other. Masks touch only
// tiles at the edges; tiles that nobody sees are not in the list.
//
// Tiles: 128 rows x kKeys keys x the whole head dims. Warpgroup 0 is the producer, of one warp or two (producer.cuh);
// groups 1 and 2 have 64 rows each (mainloop.cuh), O in kChannels / 2 registers a thread, S in kKeys / 2.
//
//   producer: K0 Q   K1 V0   K2 V1   K3 V2 ..    (K and V by warps of their own)
//   group 1:       S0 |softmax| S1 PV0 |softmax    | S2 PV1 |softmax ..
//   group 2:          S0 |softmax|     S1 PV0 |softmax    | S2 PV1 |softmax ..
//
// Barriers: q, and each stage of K and V, have one for "full" (one arrival and the copies' bytes) and one for "empty"
// (a lane of each of the eight math warps); q that comes early is counted with the work tile's first K. Where the cache
// has 8 bits, its tiles come to a ring of their own, and three warps beside the producer make them K and V
// (dequant.cuh). Where the TMA does not take the cache, four warps copy it in its place (producer_gather.cuh). Work
// tiles go through three slots the same way.
#include "prefill/block.cuh"
#include "prefill/dequant.cuh"
#include "prefill/epilogue.cuh"
#include "prefill/mainloop_softcap.cuh"
#include "prefill/producer.cuh"
#include "prefill/producer_gather.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

__device__ __forceinline__ void run_math(const PrefillParams& p, const Smem& smem) {
  const int group = threadIdx.x / 128 - 1;
  // The first group's first turn.
  if (group == 1) ptx::arrive_some(kWarpSchedulerBarrier, Config::kMathThreads);
  check_stamp(p, smem);
  Mainloop mainloop(p, smem, group);
  float s[Config::kKeys / 2];
  Accumulators a;
  PipelineState slot;
  // The next work tile may be looked up beside the last product of one.
  constexpr bool kPeekNextWork = Config::kPrecomputeMask;
  int next = kPeekNextWork ? head_tile_of(smem, slot) : 0;
  if (Config::kOverlapNextQK) mainloop.start_next_qk(next != kNoMoreWork, s);
  while (kPeekNextWork ? next != kNoMoreWork : has_work(smem, slot)) {
    if constexpr (Config::kDeferredMaxSoftcap)  // what is the warp's takes no registers of lanes
      slot = {__shfl_sync(0xffffffffu, slot.stage, 0), __shfl_sync(0xffffffffu, slot.phase, 0)};
    const int at = slot.stage;
    const WorkTile& work = smem.work(at);  // read where needed: registers are scarce
    const int kv_head = Config::kQuantized ? smem.head_tile(at) * p.heads_of_tile / p.group : 0;
    if (!Config::kOverlapNextQK) mainloop.start_first_qk(work, kv_head, s);
    Rows rows;
    rows.start(p, work, smem.head_tile(at));
    OutRows out;
    bool whole = true;
    mainloop.run(work, kv_head, rows, s, a, [&] {
      if (kPeekNextWork) slot.next<kernels::kWorkSlots>(), next = head_tile_of(smem, slot);
      if constexpr (Config::kOverlapNextQK) {
        mainloop.start_next_qk(next != kNoMoreWork, s);
        whole = work.num_splits == 1;
        mainloop.reduce_row_sum(a);
        a.o_scale[0] = a.o_scale[1] = 1.0f;
        if (whole && p.plain_out) {
          out = finish_plain_rows(p, rows, a, smem.out_base(at));
        } else {
          mainloop.finalize(a);
          if (whole) out = finish_rows(p, work, rows, a);
        }
        // All warps of the group have done with q as such.
        if (Config::kStoreOutThroughQ) ptx::sync_some(kGroupBarrier + group, 128);
      }
    });
    if constexpr (Config::kOverlapNextQK) {
      epilogue(p, smem, at, rows, a, whole, &out, mainloop.old_q());
      if (Config::kStoreOutThroughQ) mainloop.release_old_q();
    } else {
      if constexpr (Config::kDeferredMaxSoftcap)
        rows.start(p, work, smem.head_tile(at));  // no registers for it meanwhile
      epilogue(p, smem, at, rows, a, work.num_splits == 1);
    }
    if (!kPeekNextWork) slot.next<kernels::kWorkSlots>();
  }
  if (Config::kOverlapNextQK) {
    ptx::wait_products<0>();
    ptx::pin(s);
  }
}

}  // namespace attune::prefill

extern "C" __global__ void __launch_bounds__(attune::prefill::Config::kThreads, 1)
    attune_prefill(const __grid_constant__ attune::kernels::PrefillParams p,
                   const __grid_constant__ attune::ptx::TensorMap q, const __grid_constant__ attune::ptx::TensorMap k,
                   const __grid_constant__ attune::ptx::TensorMap v,
                   const __grid_constant__ attune::ptx::TensorMap dense_k,
                   const __grid_constant__ attune::ptx::TensorMap dense_v) {
  using namespace attune;
  using namespace attune::prefill;
  const Smem smem(ptx::dynamic_shared());
  init_barriers(smem);
  start_after_previous_kernels(p);
  if (threadIdx.x < 128) {
    ptx::give_up_registers<Config::kProducerRegisters>();
    if constexpr (Config::kGathers) {
      const Maps maps{q, k, v, dense_k, dense_v};
      GatherProducer producer(p, maps, smem);
      producer.run();
      end_after_previous_kernels(p);
    } else if (threadIdx.x < 32) {
      const Maps maps{q, k, v, dense_k, dense_v};
      Producer producer(p, maps, smem);
      producer.run();
      end_after_previous_kernels(p);
    } else if constexpr (Config::kQuantized) {
      Dequantizer dequantizer(p, smem);
      dequantizer.run();
    } else if (Config::kTwoProducerWarps && threadIdx.x < 64) {
      const Maps maps{q, k, v, dense_k, dense_v};
      Producer producer(p, maps, smem);
      producer.run_v();
    }
  } else {
    ptx::take_registers<Config::kMathRegisters>();
    run_math(p, smem);
  }
}
