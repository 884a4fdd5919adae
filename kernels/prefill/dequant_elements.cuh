// SPDX-License-Identifier: Apache-2.0
// Exact conversion of 8-bit elements to 16 bits, sixteen at a time, and the software pipeline of a dequant thread.
#pragma once

#include "common/operand.cuh"
#include "prefill/shared_storage.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

constexpr int kDequantThreads = 96;  // threads

// Two elements of a word, its lower or upper pair, as fp16. Exact.
template <int kType, bool kUpper>
__device__ __forceinline__ unsigned dequant_pair(unsigned word) {
  const auto pair = static_cast<unsigned short>(kUpper ? word >> 16 : word);
  if constexpr (kType == common::kE4m3) return ptx::e4m3_to_f16(pair);
  if constexpr (kType == common::kE5m2) return ptx::permute_bytes(word, 0, kUpper ? 0x3424 : 0x1404);
  // An fp16 number from 1,024 to 2,047 has its integer part in its low bits.
  const unsigned raised = ptx::permute_bytes(word ^ 0x80808080u, 0x64646464u, kUpper ? 0x4342 : 0x4140);
  return ptx::subtract_f16x2(raised, 0x64806480u);
}

// Converts sixteen elements to kTo. Exact.
template <int kFrom, int kTo>
__device__ __forceinline__ void dequant_16(const unsigned (&words)[4], unsigned (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kTo == common::kBFloat16) {
      common::quad_to_operands<kFrom, kTo>(words[i], out[2 * i], out[2 * i + 1]);
    } else {
      out[2 * i] = dequant_pair<kFrom, false>(words[i]), out[2 * i + 1] = dequant_pair<kFrom, true>(words[i]);
    }
  }
}

// Runs steps of 16 bytes as a software pipeline: load(step, words) is kAhead steps ahead of dequant(step, words).
template <int kSteps, int kAhead, class Has, class Load, class Dequant>
__device__ __forceinline__ void dequant_steps(const Has& has, const Load& load, const Dequant& dequant) {
  constexpr int kBatches = (kSteps + kAhead - 1) / kAhead;
  unsigned words[2][kAhead][4];
#pragma unroll
  for (int batch = 0; batch <= kBatches; ++batch) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = batch * kAhead + i;
      if (step < kSteps && has(step)) load(step, words[batch % 2][i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = (batch - 1) * kAhead + i;
      if (step >= 0 && step < kSteps && has(step)) dequant(step, words[(batch + 1) % 2][i]);
    }
  }
}
// How many steps are loaded ahead.
constexpr int kLoadsAhead = Config::kFp16P ? 2 : 1;

}  // namespace attune::prefill
