// SPDX-License-Identifier: Apache-2.0
// Detects a schedule that was made for another call. One schedule serves every layer of a step (attune_run_scheduled).
// Used with other lengths it would silently skip rows, so it carries a stamp: a hash of all its inputs, which are what
// the host knows (stamp_of_call), lengths, offsets, finished sequences, ranges and lengths of index lists. The
// attention kernel recomputes the stamp while its first copies are in flight. If the two differ, it writes NaN to every
// row.
#pragma once

#include "common/masks.cuh"
#include "ptx/atomic.cuh"
#include "ptx/reduce.cuh"

namespace attune::common {

__device__ __forceinline__ unsigned mixed(unsigned x, int with) {
  x = (x ^ static_cast<unsigned>(with)) * 0x9e3779b1u;
  return x ^ x >> 15;
}

// The terms of a sequence's stamp. Each is loaded from global memory where it is used.
struct StampTerms {
  const AttentionParams& p;
  int b;
  __device__ __forceinline__ int q_begin() const { return int_at(p.cu_seqlens_q, b); }
  __device__ __forceinline__ int q_end() const { return int_at(p.cu_seqlens_q, b + 1); }
  __device__ __forceinline__ int used() const { return int_at(p.seqused_kv, b); }
  __device__ __forceinline__ int kv_begin() const { return int_at(p.stamped_kv, b); }
  __device__ __forceinline__ int kv_end() const { return int_at(p.stamped_kv, b + 1); }
  __device__ __forceinline__ int finished() const { return p.finished[b * p.finished_stride]; }
};

// The same, loaded ahead of use by load(). Terms that the call does not have are 0.
struct LoadedStampTerms {
  int from_q = 0, to_q = 0, keys = 0, from_kv = 0, to_kv = 0, is_finished = 0;
  __device__ __forceinline__ void load(const AttentionParams& p, int b) {
    const StampTerms terms{p, b};
    if (p.cu_seqlens_q.data != nullptr) from_q = terms.q_begin(), to_q = terms.q_end();
    if (p.seqused_kv.data != nullptr) keys = terms.used();
    if (p.stamped_kv.data != nullptr) from_kv = terms.kv_begin(), to_kv = terms.kv_end();
    if (p.finished != nullptr) is_finished = terms.finished();
  }
  __device__ __forceinline__ int q_begin() const { return from_q; }
  __device__ __forceinline__ int q_end() const { return to_q; }
  __device__ __forceinline__ int used() const { return keys; }
  __device__ __forceinline__ int kv_begin() const { return from_kv; }
  __device__ __forceinline__ int kv_end() const { return to_kv; }
  __device__ __forceinline__ int finished() const { return is_finished; }
};

// The stamp of sequence b. The stamp of a batch is the sum over its sequences, in any order.
template <class Terms>
__device__ __forceinline__ unsigned stamp_of(const AttentionParams& p, int b, const Terms& terms) {
  unsigned x = mixed(p.stamp_of_call, b);
  if (p.cu_seqlens_q.data != nullptr) x = mixed(mixed(x, terms.q_begin()), terms.q_end());
  if (p.seqused_kv.data != nullptr) {
    const int used = terms.used();  // layers may have tables of different widths
    x = mixed(x, p.capacity > 0 && p.ring_capacity == 0 ? min(used, p.capacity) : used);
  }
  if (p.stamped_kv.data != nullptr) x = mixed(mixed(x, terms.kv_begin()), terms.kv_end());
  if (p.finished != nullptr) x = mixed(x, terms.finished());
#pragma unroll 1
  for (int i = 0; kMayHaveRanges && i < p.num_ranges; ++i) {
    const Range range = range_at(p, b, i);
    x = mixed(mixed(x, range.first), range.last);
  }
  return x;
}

// One thread's terms of the stamp of an index list (prefill/prefill_params.h): the lengths of its sequences or rows.
template <class List>
__device__ __forceinline__ unsigned stamp_of_list(const AttentionParams& p, const List& list, int number, int thread,
                                                  int threads) {
  if (list.indices == nullptr || list.length.data == nullptr) return 0;
  int begin = 0, end = p.batch;
  if (list.length_by_row && p.cu_seqlens_q.data != nullptr) {
    begin = clamp_int(int_at(p.cu_seqlens_q, 0), 0, p.total_q);
    end = clamp_int(int_at(p.cu_seqlens_q, p.batch), 0, p.total_q);
  } else if (list.length_by_row) {
    end = p.batch * p.fixed_q;
  }
  unsigned sum = 0;
#pragma unroll 1
  for (int i = begin + thread; i < end; i += threads)
    sum += mixed(mixed(mixed(p.stamp_of_call, number), i), int_at(list.length, i));
  return sum;
}

// Adds a warp's terms to *sum, in shared memory.
__device__ __forceinline__ void add_of_warp(unsigned mine, unsigned* sum) {
  mine = static_cast<unsigned>(ptx::sum_of_warp(static_cast<int>(mine)));
  if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}

// Adds the batch's stamp to *sum, in shared memory. threads: whole warps, from thread 0 on. kSparse: keys come from
// lists.
template <bool kSparse = false, class Params>
__device__ __forceinline__ void add_stamps(const Params& p, int thread, int threads, unsigned* sum) {
  unsigned mine = 0;
#pragma unroll 1
  for (int b = thread; b < p.batch; b += threads) mine += stamp_of(p, b, StampTerms{p, b});
  if constexpr (kSparse) {
    mine += stamp_of_list(p, p.list_of_slots, -1, thread, threads);
    mine += stamp_of_list(p, p.list_of_extra, -2, thread, threads);
  }
  add_of_warp(mine, sum);
}

// The same in two steps, for few threads and without lists of keys. load() issues the loads for a thread's first
// kRounds sequences; call it before cp.async copies fill the memory queue, behind which a load takes microseconds.
// add() waits for what was loaded.
template <int kRounds>
class StampLoads {
 public:
  __device__ __forceinline__ void load(const AttentionParams& p, int thread, int threads) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (thread + i * threads < p.batch) terms_[i].load(p, thread + i * threads);
    }
  }
  __device__ __forceinline__ void add(const AttentionParams& p, int thread, int threads, unsigned* sum) const {
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (thread + i * threads < p.batch) mine += stamp_of(p, thread + i * threads, terms_[i]);
    }
#pragma unroll 1
    for (int b = thread + kRounds * threads; b < p.batch; b += threads) mine += stamp_of(p, b, StampTerms{p, b});
    add_of_warp(mine, sum);
  }

 private:
  LoadedStampTerms terms_[kRounds];
};

// The initial row_sum: NaN if the schedule was made for another call.
__device__ __forceinline__ float first_sum(unsigned sum, unsigned stamp) {
  return sum == stamp ? 0.0f : __uint_as_float(0x7fffffffu);
}

// Called by threads 0 to threads - 1 before their first work tile. sync() synchronises these threads; check is {} at
// first.
template <bool kSparse = false, class Params, class Check, class Sync>
__device__ __forceinline__ void check_stamp(const Params& p, int thread, int threads, Check& check, const Sync& sync) {
  if (p.checks_stamp == 0) return;
  add_stamps<kSparse>(p, thread, threads, &check.stamp);
  sync();
  if (thread == 0) check.first_sum = first_sum(check.stamp, p.list->stamp);
  sync();
}

}  // namespace attune::common
