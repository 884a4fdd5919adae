// SPDX-License-Identifier: Apache-2.0
// Converts q to fp16 in place, to match 8-bit caches dequantized to fp16. Each row of bf16 is multiplied by a power of
// two that brings its largest number to between 2^15 and 2^16. This is exact except for numbers below 2^-32 of the
// row's largest, which are rounded to multiples of 2^-39 of it. Rows of fp16 take at most the sign of the scale.
#pragma once

#include "prefill/shared_storage.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

class Fp16Queries {
 public:
  // Converts the thread's two rows; a quad shares a row. k_scale: for all keys of the head; its sign moves to q. Sets
  // factor[h], by which products of row h must be multiplied.
  __device__ __forceinline__ static void convert(const Smem& smem, int group, float k_scale, float (&factor)[2]) {
    if constexpr (!kRaises) {
      factor[0] = factor[1] = fabsf(k_scale);
      if (k_scale > 0.0f) return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned row = row_of_thread() + 8 * h;
      // The quad's chunks alternate between the halves of a line, so that neighbouring rows use different banks.
      const unsigned at = smem.q() + row * 128 + ((threadIdx.x % 4 * 16) ^ (row % 2 * 64));
      float raise = 1.0f;
      if constexpr (kRaises) {
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          unsigned words[4];
          ptx::load_shared_four(chunk_at(at, i), words);
#pragma unroll
          for (unsigned word : words) top = max(max(top, word & 0x7fff0000u), word << 16 & 0x7fff0000u);
        }
        top = common::quad_max(top);
        // As fp32 bits. A row below 2^-100 is scaled like one of 2^-100.
        const unsigned exponent = max(top & 0x7f800000u, 27u << 23);
        raise = __uint_as_float((269u << 23) - exponent);
        factor[h] = fabsf(k_scale) * __uint_as_float(exponent - (15u << 23));
      }
      const float scale = k_scale == 0.0f ? 0.0f : raise, times = k_scale < 0.0f ? -scale : scale;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        unsigned words[4];  // loaded a second time: registers are scarce
        ptx::load_shared_four(chunk_at(at, i), words);
#pragma unroll
        for (unsigned& word : words) word = ptx::pack_f16(lower_of(word) * times, upper_of(word) * times);
        ptx::store_shared_four(chunk_at(at, i), words);
      }
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kGroupBarriers + group, 128);
  }

 private:
  static constexpr bool kRaises = Config::kType == common::kBFloat16;
  __device__ __forceinline__ static float lower_of(unsigned word) {
    return kRaises ? __uint_as_float(word << 16) : ptx::f16_to_float(static_cast<unsigned short>(word));
  }
  __device__ __forceinline__ static float upper_of(unsigned word) {
    return kRaises ? __uint_as_float(word & 0xffff0000u) : ptx::f16_to_float(static_cast<unsigned short>(word >> 16));
  }
  static constexpr int kChunks = 2 * Config::kBlocksQk;
  __device__ __forceinline__ static unsigned chunk_at(unsigned at, int i) {
    return (at ^ (i % 2 * 64)) + i / 2 * Config::kRows * 128;
  }
};

}  // namespace attune::prefill
