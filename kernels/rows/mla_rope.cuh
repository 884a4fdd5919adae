// SPDX-License-Identifier: Apache-2.0
// RoPE of the last 64 channels of a row, the bf16 channels of packed rows: eight neighbouring lanes have a run of 8
// each.
#pragma once

#include "common/prologue_row.cuh"

namespace attune::rows {

constexpr int kTail = 64, kTailLanes = kTail / 8;

// Cosines and sines of run `run` (0..7) of the last 64 channels: of its 4 pairs if pairs are interleaved; otherwise of
// its 8 channels, whose partners are 4 lanes away.
struct TailRope {
  float c[8], s[8];
  bool rotates;
};

// table: the position's row, whose cosines and sines are aligned vectors; null: no RoPE.
__device__ __forceinline__ void load_tail_rope(bool interleaved, const float* table, int run, TailRope& r) {
  r.rotates = table != nullptr;
  if (r.rotates) {
    const float4* c = reinterpret_cast<const float4*>(table + (interleaved ? run * 4 : run % 4 * 8));
    const float4* s = c + kTail / 2 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && interleaved) continue;
      const float4 of_c = c[i], of_s = s[i];
      r.c[4 * i] = of_c.x, r.c[4 * i + 1] = of_c.y, r.c[4 * i + 2] = of_c.z, r.c[4 * i + 3] = of_c.w;
      r.s[4 * i] = of_s.x, r.s[4 * i + 1] = of_s.y, r.s[4 * i + 2] = of_s.z, r.s[4 * i + 3] = of_s.w;
    }
  }
}

// Has shuffles: all lanes of the warp must call it.
__device__ __forceinline__ void rotate_tail(bool interleaved, const TailRope& r, int run, float (&x)[8]) {
  if (interleaved) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (r.rotates) common::rotate_pair(x[2 * k], x[2 * k + 1], r.c[k], r.s[k]);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float first = x[k], second = __shfl_xor_sync(0xffffffffu, x[k], 4);
    if (run >= 4) {
      const float own = first;
      first = second, second = own;
    }
    if (!r.rotates) continue;
    common::rotate_pair(first, second, r.c[k], r.s[k]);
    x[k] = run < 4 ? first : second;
  }
}

}  // namespace attune::rows
