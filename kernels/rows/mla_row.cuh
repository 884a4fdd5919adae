// SPDX-License-Identifier: Apache-2.0
// A token of a packed MLA cache in the registers of a warp, in runs of 8 channels. Neighbouring lanes have neighbouring
// runs, so that a warp reads and writes whole sectors.
#pragma once

#include "common/mla_codec.cuh"
#include "rows/tokens.cuh"

namespace attune::rows {

constexpr int kFormat = ATTUNE_FORMAT;     // 656 or 584
constexpr int kRowType = ATTUNE_ROW_TYPE;  // of dense rows: float32, float16, bfloat16

using Mla = common::MlaRow<kFormat>;
using common::RawRun;

constexpr int kRun = 8, kStep = 32 * kRun;  // channels of a run; of a warp's step
constexpr int kRuns = (Mla::kHeadDim + kStep - 1) / kStep;
constexpr int kCodeRuns = (Mla::kNope + kStep - 1) / kStep;  // runs of e4m3 channels
constexpr int kGroupLanes = Mla::kGroup / kRun;              // lanes that share a scale
constexpr int kStepGroups = kStep / Mla::kGroup;
constexpr int kWarps = kernels::kRowsThreads / 32;

static_assert(Mla::kNope % Mla::kGroup == 0 && kStep % Mla::kGroup == 0, "a scale group does not cross steps");

__device__ __forceinline__ constexpr int channel_of(int lane, int run) { return run * kStep + lane * kRun; }

// The addresses of a token.
struct PackedAddresses {
  char* dense;   // null: the token is skipped
  char* row;     // in the cache; null: the cache does not hold it
  char* scales;  // of the token
};

__device__ __forceinline__ void set_packed_addresses(const RowCache& c, const Slot& slot, PackedAddresses& address) {
  if (slot.page < 0) return;
  char* page = c.k.data + slot.page * c.k.page_stride;
  address.row = page + slot.offset * c.k.slot_stride;
  address.scales = Mla::scales(address.row, page, c.page_size, slot.offset);
}

__device__ __forceinline__ char* dense_row(const kernels::RowTensor& t, long long outer, long long inner) {
  return t.data + outer * t.outer_stride + inner * t.row_stride;
}

// Tells the compiler that an address loaded from shared memory points to global memory.
__device__ __forceinline__ char* global(char* at) {
  __builtin_assume(__isGlobal(at));
  return at;
}

}  // namespace attune::rows
