// SPDX-License-Identifier: Apache-2.0
// The epilogue of a work tile, for the consumer warps of all prefill kernels.
#pragma once

#include "prefill/combine.cuh"
#include "prefill/recompute.cuh"

namespace attune::prefill {

// Stores the output of the work tile in `slot`, or its split; combines the splits if this block finished the last one;
// releases the slot. whole: there is one split. out: from finish_rows(), or null. shared: where output rows may be
// staged, or 0.
__device__ __forceinline__ void epilogue(const WorkTileParams& p, const Smem& smem, int slot, const Rows& rows,
                                         Accumulators& a, bool whole, const OutRows* out = nullptr,
                                         unsigned shared = 0) {
  const WorkTile& work = smem.work(slot);
  const int head_tile = smem.head_tile(slot);
  const NonfiniteRows nonfinite(rows, a);
  if (whole) {
    store_out(p, out != nullptr ? *out : finish_rows(p, work, rows, a), a, shared);
  } else {
    store_split(p, work, head_tile, a);
  }
  __syncwarp();
  // A failed ScheduleCheck makes all sums NaN, and they must stay NaN.
  if (!NonfiniteRows::kLooksAtSum || smem.first_sum() == 0.0f) nonfinite.recompute(p, work, head_tile, rows);
  if (!whole) combine_last(p, work, head_tile, smem.is_last());
  __syncwarp();
  // The slot is recomputed: with x-packed pages no register is left to keep it.
  const int again = Config::kXpacked ? __shfl_sync(0xffffffffu, slot, 0) : slot;
  if (threadIdx.x % 32 == 0) ptx::arrive(smem.work_empty(again));
}

}  // namespace attune::prefill
