// SPDX-License-Identifier: Apache-2.0
// Whether lengths are those that a schedule was made of. A schedule serves every layer of a step
// (attune_run_scheduled); made of other lengths it would leave rows out, and nobody would see it. It carries a stamp, a
// number that follows from all lengths and offsets. The kernel that attends computes it again while its first copies
// are on their way. Where the two differ, every row that it writes is NaN.
#pragma once

#include "ptx/atomic.cuh"
#include "ptx/reduce.cuh"
#include "schedule/sequence.cuh"

namespace attune::schedule {

__device__ __forceinline__ unsigned mixed(unsigned x, int with) {
  x = (x ^ static_cast<unsigned>(with)) * 0x9e3779b1u;
  return x ^ x >> 15;
}

// Of sequence b. The stamp of a batch is the sum over its sequences, in any order.
__device__ __forceinline__ unsigned stamp_of(const DecodeParams& p, int b) {
  unsigned x = mixed(0x85ebca6bu, b);
  if (p.cu_seqlens_q.data != nullptr) x = mixed(mixed(x, int_at(p.cu_seqlens_q, b)), int_at(p.cu_seqlens_q, b + 1));
  if (p.seqused_kv.data != nullptr) x = mixed(x, int_at(p.seqused_kv, b));
  if (p.stamped_kv.data != nullptr) x = mixed(mixed(x, int_at(p.stamped_kv, b)), int_at(p.stamped_kv, b + 1));
  if (p.finished != nullptr) x = mixed(x, p.finished[b * p.finished_stride]);
  return x;
}

// Adds the stamps of the batch to *sum, in shared memory, by `threads` threads (whole warps) that are numbered from 0.
__device__ __forceinline__ void add_stamps(const DecodeParams& p, int thread, int threads, unsigned* sum) {
  unsigned mine = 0;
#pragma unroll 1
  for (int b = thread; b < p.batch; b += threads) mine += stamp_of(p, b);
  mine = static_cast<unsigned>(ptx::sum_of_warp(static_cast<int>(mine)));
  if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}

// What the sum of a row's probabilities begins with: NaN where lengths are not the schedule's.
__device__ __forceinline__ float first_sum(unsigned sum, unsigned stamp) {
  return sum == stamp ? 0.0f : __uint_as_float(0x7fffffffu);
}

// By threads that are numbered from 0, before their first task; they meet by sync(). check was {} at the beginning.
template <class List, class Check, class Sync>
__device__ __forceinline__ void check_stamp(const DecodeParams& p, int thread, int threads, const List* list,
                                            Check& check, const Sync& sync) {
  if (p.checks_stamp == 0) return;
  add_stamps(p, thread, threads, &check.stamp);
  sync();
  if (thread == 0) check.first_sum = first_sum(check.stamp, list->stamp);
  sync();
}

}  // namespace attune::schedule
