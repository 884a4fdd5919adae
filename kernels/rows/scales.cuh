// SPDX-License-Identifier: Apache-2.0
// The scales of rows of plain caches, for threads that hold runs of the channels: read, or computed with the row.
#pragma once

#include "common/lanes.cuh"
#include "rows/addresses.cuh"

namespace attune::rows {

// The scale of channels that are read. at: the address of head 0's scale.
struct StoredScale {
  float all = 1.0f;
  __device__ __forceinline__ StoredScale(const KvScale& scale, const char* at, int head) {
    if (kFormat == 0 && scale_mode(scale) != ScaleMode::kNone)
      all = *reinterpret_cast<const float*>(global(at + 4 * head * scale.head_stride));
  }
  __device__ __forceinline__ float of(int /*channel*/) const { return all; }
};

// The largest magnitude of the row. Has shuffles: all kLanes threads must call it, also for rows that do not exist.
template <class Units, class Row, class Channels>
__device__ __forceinline__ float amax_of_row(const Units& units, const Row& r, const Channels& x) {
  float amax = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (unit.first >= 0) amax = common::larger_magnitude(amax, x[u][0][k]);
      if (unit.second >= 0) amax = common::larger_magnitude(amax, x[u][1][k]);
    }
  }
  return common::max_of_lanes<kLanes>(amax);
}

// The scale with which a row is stored, if the row has its own; otherwise any number. All kLanes threads must call it.
template <class Units, class Row, class Channels>
__device__ __forceinline__ float computed_scale(const kernels::RowCache& cache, int dtype, const Units& units,
                                                const Row& r, const Channels& x) {
  if (kScales != static_cast<int>(ScaleMode::kTokenHead) && kScales != kernels::kScalesAtRunTime) return 1.0f;
  return common::token_scale(dtype, amax_of_row(units, r, x), cache.power_of_two_scales != 0);
}

// Divides the runs of a row by its scale, and stores the scale if it was computed. at: the address of the row's scale.
struct RowDivider {
  bool scaled;
  common::Divider over;
  __device__ __forceinline__ RowDivider(ScaleMode mode, float computed, char* at, int lane)
      : scaled(mode != ScaleMode::kNone), over(stored(mode, computed, at, lane)) {}
  __device__ __forceinline__ void divide(int /*unit*/, int /*side*/, float (&x)[kWidth]) const {
    if (scaled) over.divide(x);
  }

 private:
  __device__ __forceinline__ static float stored(ScaleMode mode, float computed, char* at, int lane) {
    auto* stored = reinterpret_cast<float*>(global(at));
    if (mode == ScaleMode::kTokenHead) {
      if (lane == 0) *stored = computed;
    } else if (mode != ScaleMode::kNone) {
      computed = *stored;
    }
    return computed;
  }
};

}  // namespace attune::rows
