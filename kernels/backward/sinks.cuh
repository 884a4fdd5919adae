// SPDX-License-Identifier: Apache-2.0
// Sinks in the backward: how they change the stats of a row.
#pragma once

#include "backward/rows.cuh"
#include "ptx/math.cuh"

namespace attune::backward {

// The sink of a row's head, and the row's lse, which does not include it.
struct Sink {
  float gap;  // sink - lse, in base 2

  __device__ __forceinline__ Sink(float sink, float lse) : gap((sink - lse) * common::kLog2e) {}
  // The sum of P that is left to the keys, and P of the sink.
  __device__ __forceinline__ float share() const { return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(gap)); }
  __device__ __forceinline__ float probability() const { return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-gap)); }
  // Adds the sink to stats that have neither the sink nor dlse yet: to the lse, or as the share. An infinite sink makes
  // P of all keys 0, but lse2 stays finite, because an infinite lse2 stands for a row that sees no key.
  __device__ __forceinline__ void add_to(kernels::RowStats& stats) const {
    const float more = fmaxf(gap, 0.0f) + ptx::log2_approx(1.0f + ptx::exp2_approx(-fabsf(gap)));
    stats.lse2 = gap == ptx::infinity() ? 3e38f : stats.lse2 + more;
  }
  __device__ __forceinline__ void add_to(kernels::SinkRowStats& stats) const {
    stats.share = share();
    stats.delta *= stats.share;
  }
};

}  // namespace attune::backward
