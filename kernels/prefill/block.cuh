// SPDX-License-Identifier: Apache-2.0
// What the blocks of all prefill kernels share: PDL, barrier setup, the wait for a work tile.
#pragma once

#include "common/stamp.cuh"
#include "prefill/shared_storage.cuh"
#include "ptx/grid.cuh"
#include "scheduler/tile_scheduler.cuh"

namespace attune::prefill {

// In a mixed batch the launch before this one is decode, which serves the short sequences (max_decode_q). It writes
// nothing that this kernel reads, so this kernel runs beside it. Decode's first block waits for all earlier kernels,
// which wrote q, k, v, the cache and the schedule, and then releases decode_begun (decode/decode.cu). Acquiring
// decode_begun makes their writes visible. One producer of each block waits for decode at the end, so that whoever
// waits for this kernel waits for both.
__device__ __forceinline__ void start_after_previous_kernels(const WorkTileParams& p) {
  if (!Config::kCached || p.max_decode_q == 0) {
    ptx::wait_for_previous_kernels();
  } else {
    if (threadIdx.x == 0) ptx::wait_for_change(&p.list->decode_begun, ptx::load_acquire(&p.list->prefill_ended));
    __syncthreads();
    ptx::fence_async_proxy_global();
  }
  ptx::allow_next_kernel();
}
// Called by the producer warps, including thread 0.
__device__ __forceinline__ void end_after_previous_kernels(const WorkTileParams& p) {
  if constexpr (!Config::kCached) return;
  ptx::wait_for_previous_kernels();
  if (p.max_decode_q == 0 || threadIdx.x != 0) return;
  const unsigned last = gridDim.x - 1;
  if (ptx::count_arrival(&p.list->blocks_done, last) == last) p.list->prefill_ended = p.list->decode_begun;
}

__device__ __forceinline__ void init_barriers(const Smem& smem) {
  constexpr int kQueryWriters = Config::kFp32 ? Config::kBf16x3Warps : 1;
  constexpr int kKeyWriters = Config::kGathers ? Config::kGatherWarps : kQueryWriters;
  constexpr int kValueWriters = Config::kFp8 ? Config::kTransposeWarps : kKeyWriters;
  if (threadIdx.x == 0) {
    smem.check() = {};
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::init_barrier(smem.k_full(i), kKeyWriters);
      ptx::init_barrier(smem.v_full(i), kValueWriters);
      ptx::init_barrier(smem.k_empty(i), Config::kCluster * Config::kConsumerWarps);
      ptx::init_barrier(smem.v_empty(i), Config::kCluster * Config::kConsumerWarps);
    }
    scheduler::init_work_barriers(smem, Config::kWorkReaders);
    for (int i = 0; i < Config::kRawStages; ++i) {
      ptx::init_barrier(smem.raw_full(i), 1);
      ptx::init_barrier(smem.raw_empty(i), kValueWriters);
    }
    for (int i = 0; i < Config::kQueryStages; ++i) {
      ptx::init_barrier(smem.q_full(i), kQueryWriters);
      ptx::init_barrier(smem.q_empty(i), Config::kConsumerWarps);
    }
    for (int i = 0; i < kEdgeBarriers; ++i) ptx::init_barrier(smem.edge(i), 1);
    scheduler::init_tile_idx_barriers(smem);
    ptx::publish_barriers();
  }
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_barrier();
  }
}

// Called by a consumer warp that has read a stage of K or V. In a cluster both blocks' producers write the stage, so
// both are told.
__device__ __forceinline__ void release_stage(unsigned empty) {
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) ptx::arrive(empty);
  } else {
    if (lane < Config::kCluster) ptx::arrive_in_cluster(ptx::shared_in_block(empty, lane));
  }
}

// Called by all consumer threads before their first work tile.
__device__ __forceinline__ void check_stamp(const WorkTileParams& p, const Smem& smem) {
  common::check_stamp(p, consumer_thread(), Config::kConsumerThreads, smem.check(),
                      [] { ptx::named_barrier_sync(kConsumerBarrier, Config::kConsumerThreads); });
}

// Waits for the slot's work tile. Returns its head tile, or kNoMoreWork. The result is warp-uniform.
__device__ __forceinline__ int head_tile_of(const Smem& smem, const PipelineState& slot) {
  ptx::wait_phase(smem.work_full(slot.stage), slot.phase);
  return __shfl_sync(0xffffffffu, smem.head_tile(slot.stage), 0);
}
__device__ __forceinline__ bool has_work(const Smem& smem, const PipelineState& slot) {
  return head_tile_of(smem, slot) != kNoMoreWork;
}

}  // namespace attune::prefill
