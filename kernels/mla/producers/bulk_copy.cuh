// SPDX-License-Identifier: Apache-2.0
// The producer of the m16 and swap-AB kernels: two warps copy cached rows to shared memory unchanged (cp.async.bulk),
// from a work tile's last tile to its first. Each warp has half of every tile, one row for each lane. Sixteen rows that
// are contiguous in the cache are one copy. Rows that are invalid, or that no row of queries sees, are copied from
// zeros. The warps run ahead of the consumer warps as far as the stages allow, into the next work tile too.
#pragma once

#include "mla/cached_rows.cuh"
#include "mla/producers/cached_source.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::mla {

static __device__ const uint4 kZeroRow[CachedRowsConfig::kRowBytes / 16] = {};

// Sizes, Layout: the kernel's CachedRowsConfig and shared addresses.
template <class Sizes, class Layout>
class BulkCopyProducer {
 public:
  using Scheduler = scheduler::TileScheduler<Layout, 1, false, true>;

  __device__ __forceinline__ BulkCopyProducer(const WorkTileParams& p, const Layout& smem)
      : p_(p), smem_(smem), scheduler_(p, smem) {}

  // Waits for the previous kernels first.
  __device__ __forceinline__ void run(const typename Scheduler::Prefetched& first_work) {
    if (warp() >= Sizes::kProducerWarps) return;
    if (warp() == 0) scheduler_.first(first_work);
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (warp() == 0) scheduler_.prefetch_next_tile_idx();
    for (unsigned count = 0;; ++count) {
      const int slot = slot_of_work(count);
      ptx::wait_phase(smem_.work_full(slot), count / kernels::kWorkSlots % 2);
      const int head_tile = smem_.head_tile(slot);
      if (head_tile == scheduler::kNoMoreWork) return;
      load(smem_.work(slot), head_tile);
      __syncwarp();
      count = ptx::opaque(count);  // recomputes the slot, rather than keep it in a register
      if (warp() != 0 && lane() == 0) ptx::arrive(smem_.work_empty(slot_of_work(count)));
    }
  }

 private:
  static constexpr int kRun = 16;  // rows of one copy
  static constexpr bool kHasRuns = Sizes::kPitch == Sizes::kRowBytes && !Config::kSparse;

  __device__ __forceinline__ void fetch_next() {
    if (warp() == 0) scheduler_.next();
  }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int key() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ void load(const WorkTile& work, int head_tile) {
    const CachedSource rows(p_, work, head_tile);
    int i = cached_tile_end(work) - 1, index = -1;
    if (i >= work.tile_begin) index = rows.load_index(i, key());
    bool first = true;
#pragma unroll 1
    do {  // runs once even if there is no tile
      if (i >= work.tile_begin) {
        const char* const row = rows.locate(i, key(), index).row;
        if (i > work.tile_begin) index = rows.load_index(i - 1, key());
        copy(row);
      }
      if (first) fetch_next();
      first = false;
    } while (--i >= work.tile_begin);
  }

  // low, high: the halves of the first row's address.
  template <int kCount>
  __device__ __forceinline__ static void copy_rows(unsigned to, unsigned low, unsigned high, unsigned full) {
    const unsigned long long from = static_cast<unsigned long long>(high) << 32 | low;
    ptx::copy_bytes(to, reinterpret_cast<const char*>(from), kCount * Sizes::kRowBytes, full);
  }

  // row: the lane's row of the next tile, or null. One lane issues all copies (elect.sync) and reads the rows'
  // addresses from shared memory, because for copies that each lane issues the compiler adds a loop of 80 clocks a
  // copy.
  __device__ __forceinline__ void copy(const char* row) {
    const unsigned invalid = __ballot_sync(0xffffffffu, row == nullptr);
    unsigned runs = 0;  // a bit for each lane whose row is in a run
    if constexpr (kHasRuns) {
      const auto at = reinterpret_cast<unsigned long long>(row);
      const unsigned long long begin = __shfl_sync(0xffffffffu, at, 0, kRun);
      const bool strays = row == nullptr || at != begin + lane() % kRun * Sizes::kRowBytes;
      const unsigned apart = __ballot_sync(0xffffffffu, strays);
      runs = (apart & 0xffffu) == 0 ? 0xffffu : 0;
      if (apart >> 16 == 0) runs |= 0xffff0000u;
    }
    const unsigned full = smem_.full(pipe_.stage);
    ptx::wait_phase(smem_.empty(pipe_.stage), pipe_.phase ^ 1);
    if (lane() == 0) {
      ptx::store_shared_u32(smem_.mask(pipe_.stage) + 4 * warp(), invalid);
      ptx::arrive_expecting(full, Sizes::kKeysOfProducer * Sizes::kRowBytes);
    }
    __syncwarp();
    const unsigned to = smem_.row(pipe_.stage, Sizes::kKeysOfProducer * warp());
    const char* const from = row != nullptr ? row : reinterpret_cast<const char*>(kZeroRow);
    const auto bits = reinterpret_cast<unsigned long long>(from);
    const unsigned sources = smem_.row_source(Sizes::kKeysOfProducer * warp());
    ptx::store_shared_two(sources + 8 * lane(), static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32));
    __syncwarp();
    if (ptx::elect()) {
      constexpr int kRowsPerStep = kHasRuns ? kRun : Sizes::kKeysOfProducer;
#pragma unroll 1
      for (int begin = 0; begin < Sizes::kKeysOfProducer; begin += kRowsPerStep) {
        unsigned x[4];  // addresses of two rows
        if (kHasRuns && (runs >> begin & 1) != 0) {
          ptx::load_shared_four(sources + 8 * begin, x);
          copy_rows<kRun>(to + begin * Sizes::kPitch, x[0], x[1], full);
          continue;
        }
#pragma unroll 2
        for (int i = begin; i < begin + kRowsPerStep; i += 2) {
          ptx::load_shared_four(sources + 8 * i, x);
          copy_rows<1>(to + i * Sizes::kPitch, x[0], x[1], full);
          copy_rows<1>(to + (i + 1) * Sizes::kPitch, x[2], x[3], full);
        }
      }
    }
    __syncwarp();
    pipe_.template next<Sizes::kStages>();
  }

  const WorkTileParams& p_;
  const Layout& smem_;
  Scheduler scheduler_;
  PipelineState pipe_;
};

}  // namespace attune::mla
