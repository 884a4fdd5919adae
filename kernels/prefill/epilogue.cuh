// SPDX-License-Identifier: Apache-2.0
// The end of a work tile in a math warp of all prefill kernels.
#pragma once

#include "prefill/recompute.cuh"

namespace attune::prefill {

// Stores what `a` has of the work tile in `slot`, merges its parts where this block has the last of them, and frees the
// slot. whole: it is no part; out: what finish_rows() has said then, or null if nobody has asked; shared: where outputs
// may pass through.
__device__ __forceinline__ void epilogue(const PrefillParams& p, const Smem& smem, int slot, const Rows& rows,
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
  // there NaN sums are repaired
  if (!Config::kFp8 || smem.first_sum() == 0.0f) nonfinite.recompute(p, work, head_tile, rows);
  if (!whole) combine_last(p, work, head_tile, smem.is_last());
  __syncwarp();
  // Over x-packed pages no register is left for the address of the slot's barriers: it is computed anew.
  const int again = Config::kXpacked ? __shfl_sync(0xffffffffu, slot, 0) : slot;
  if (threadIdx.x % 32 == 0) ptx::arrive(smem.work_empty(again));
}

}  // namespace attune::prefill
