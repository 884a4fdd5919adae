// SPDX-License-Identifier: Apache-2.0
// What every MLA kernel is compiled for, from the macros of the host.
#pragma once

#include "common/cached_slot.cuh"
#include "common/element.cuh"
#include "common/mla_codec.cuh"
#include "mla/mla_params.h"
#include "scheduler/work_tiles.cuh"

namespace attune::mla {

using common::kLog2e;
using kernels::WorkTile;
using kernels::WorkTileParams;
using scheduler::Tile;
using scheduler::tile_at;

struct ProblemConfig {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = kernels::kMlaHeadDimV;
  static constexpr int kType = ATTUNE_TYPE, kOutType = ATTUNE_OUT_TYPE;
  static constexpr int kProducer = ATTUNE_LOADER;
  static constexpr bool kSparse = ATTUNE_SPARSE != 0;
  static constexpr bool kDense = ATTUNE_DENSE != 0;  // there are rows outside of a cache
  static constexpr bool kTma = kProducer == kernels::kMlaTma, kGather = kProducer == kernels::kMlaGather,
                        kDequant = kProducer >= kernels::kMlaDequant656;

  static_assert(kType == common::kBFloat16 || kType == common::kFloat16, "the GEMMs take 16-bit operands");
  static_assert(kHeadDimQk == kHeadDimV || kHeadDimQk == kHeadDimV + 64,
                "K has the channels of V and 64 rope channels, or none");
  static_assert(!kDequant || kType == common::kBFloat16, "fp8 is dequantized to bf16");
};

// The cache's packed format, if it has one.
using Packed = common::MlaRow<ProblemConfig::kProducer == kernels::kMlaDequant584 ? 584 : 656>;

// The page of a slot or key.
__device__ __forceinline__ int page_of(const kernels::RowPool& pool, int x) {
  return kernels::divide(x, pool.by_page_size);
}

}  // namespace attune::mla
