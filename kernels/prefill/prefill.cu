// SPDX-License-Identifier: Apache-2.0
// Prefill attention: many query rows a sequence over dense keys, over a KV cache, or over both.
//
// Rows are packed (pack-GQA): a row is a token of a sequence and one of the query heads that share a KV head, so K and
// V are loaded once for all of these heads. A work tile is a block of kRows packed rows and the tiles of keys that
// these rows may see. scheduler/persistent.cu lists the work tiles, longest first; the thread blocks of a persistent
// grid take them in that order. Only tiles at the edges are masked. Tiles that no row sees are not listed.
//
// Grid: persistent, or clusters of two blocks (Config::kCluster). Tiles: kRows rows x kKeys keys x the head dims.
// Warpgroup 0 is the producer, with one or two warps (producer.cuh). Warpgroups 1 and 2, and 3 with 192 rows, are the
// consumers and have 64 rows each (mainloop.cuh, softmax.cuh), with O in kChannels / 2 registers a thread and S in
// kKeys / 2.
//
//   producer: K0 Q   K1 V0   K2 V1   K3 V2 ..    (K and V by one warp each)
//   group 1:       S0 |softmax| S1 PV0 |softmax    | S2 PV1 |softmax ..
//   group 2:          S0 |softmax|     S1 PV0 |softmax    | S2 PV1 |softmax ..
//
// mbarriers: q and each stage of K and V have a full barrier (one arrival and the bytes of the copies) and an empty
// barrier (one lane of each consumer warp arrives). With two stages of q, the full barrier of a work tile's first K
// counts the bytes of q. Two blocks of a cluster may copy the tiles of keys together, by multicast: the full barriers
// of both count all bytes, and the consumer warps of both release the stages of both.
//
// Tiles of an 8-bit cache arrive in a ring of raw stages; three dequant warps beside the producer convert them to K and
// V (dequant.cuh). Four warps gather a cache that the TMA cannot copy (producer_gather.cuh). Work tiles
// (scheduler/tile_scheduler.cuh) pass through three slots that have full and empty barriers, too. The epilogue is
// epilogue.cuh.
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

__device__ __forceinline__ void run_consumer(const WorkTileParams& p, const Smem& smem) {
  const int group = threadIdx.x / 128 - 1;
  open_warp_scheduler(group);
  check_stamp(p, smem);
  Mainloop mainloop(p, smem, group);
  float s[Config::kKeys / 2];
  Accumulators a;
  PipelineState slot;
  // Reads the next work tile during the last PV GEMM of this one.
  constexpr bool kPeekNextWork = Config::kPrecomputeMask;
  int next = kPeekNextWork ? head_tile_of(smem, slot) : 0;
  if (Config::kOverlapNextQK) mainloop.start_next_qk(next != kNoMoreWork, s);
  while (kPeekNextWork ? next != kNoMoreWork : has_work(smem, slot)) {
    if constexpr (Config::kDeferredMaxSoftcap)  // a warp-uniform slot takes a uniform register
      slot = {__shfl_sync(0xffffffffu, slot.stage, 0), __shfl_sync(0xffffffffu, slot.phase, 0)};
    const int at = slot.stage;
    const WorkTile& work = smem.work(at);  // read from shared memory at each use: registers are scarce
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
        // All warps of the warpgroup have read q for the last time.
        if (Config::kStoreOutThroughQ) ptx::named_barrier_sync(kGroupBarriers + group, 128);
      }
    });
    if constexpr (Config::kOverlapNextQK) {
      epilogue(p, smem, at, rows, a, whole, &out, mainloop.old_q());
      if (Config::kStoreOutThroughQ) mainloop.release_old_q();
    } else {
      if constexpr (Config::kDeferredMaxSoftcap)
        rows.start(p, work, smem.head_tile(at));  // recomputed: no registers are left to keep it
      epilogue(p, smem, at, rows, a, work.num_splits == 1);
    }
    if (!kPeekNextWork) slot.next<kernels::kWorkSlots>();
  }
  if (Config::kOverlapNextQK) {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
  }
}

}  // namespace attune::prefill

extern "C" __global__ void __launch_bounds__(attune::prefill::Config::kThreads, 1)
    attune_prefill(const __grid_constant__ attune::kernels::WorkTileParams p,
                   const __grid_constant__ attune::ptx::TensorMap q, const __grid_constant__ attune::ptx::TensorMap k,
                   const __grid_constant__ attune::ptx::TensorMap v,
                   const __grid_constant__ attune::ptx::TensorMap dense_k,
                   const __grid_constant__ attune::ptx::TensorMap dense_v) {
  using namespace attune;
  using namespace attune::prefill;
  const Smem smem(ptx::dynamic_shared());
  init_barriers(smem);
  start_after_previous_kernels(p);
  const Maps maps{q, k, v, dense_k, dense_v};
  if (threadIdx.x < 128) {
    ptx::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if constexpr (Config::kGathers) {
      GatherProducer(p, maps, smem).run();
      end_after_previous_kernels(p);
    } else if (threadIdx.x < 32) {
      Producer(p, maps, smem).run();
      end_after_previous_kernels(p);
    } else if constexpr (Config::kQuantized) {
      Dequantizer(p, smem).run();
    } else if (Config::kTwoProducerWarps && threadIdx.x < 64) {
      Producer(p, maps, smem).run_v();
    }
  } else {
    ptx::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    run_consumer(p, smem);
  }
  if constexpr (Config::kCluster > 1) {  // a block must not exit while the other one writes to its shared memory
    __syncwarp();
    ptx::cluster_barrier();
  }
}
