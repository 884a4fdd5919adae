// SPDX-License-Identifier: Apache-2.0
// V of an x-packed tile, in the layout that wgmma reads: for each 16 keys a row of 32 bytes for each channel, 32B
// swizzle.
#pragma once

#include "prefill/shared_storage.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

// Zeroes all keys outside of [low, high). 8 keys are 16 bytes of each channel. thread: one of kThreads.
template <int kThreads>
__device__ __forceinline__ void zero_v_columns(unsigned at, int low, int high, int thread) {
#pragma unroll 1
  for (int key = 0; key < Config::kKeys; key += 8) {
    const int first = min(max(low - key, 0), 8), end = min(max(high - key, first), 8);
    if (first == 0 && end == 8) continue;
    const unsigned kept = (1u << end) - (1u << first);  // a bit for each key that is not zeroed
    unsigned keep[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) keep[i] = (kept >> (2 * i) & 1) * 0xffffu | (kept >> (2 * i + 1) & 1) * 0xffff0000u;
#pragma unroll 2
    for (int i = 0; i < (Config::kChannels + kThreads - 1) / kThreads; ++i) {
      const int row = kThreads * i + thread;
      if (Config::kChannels % kThreads != 0 && row >= Config::kChannels) break;
      const unsigned chunk = at + (key / 16 * Config::kChannels + row) * 32 + ((key / 8 ^ row / 4) % 2) * 16;
      unsigned x[4] = {};
      if (kept != 0) {
        ptx::load_shared_four(chunk, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] &= keep[j];
      }
      ptx::store_shared_four(chunk, x);
    }
  }
}

}  // namespace attune::prefill
