// SPDX-License-Identifier: Apache-2.0
// Four channels of a row of any element type, layout and strides, to fp32.
#pragma once

#include "common/kv_codec.cuh"
#include "common/run.cuh"
#include "prefill/strided.cuh"

namespace attune::prefill {

// data null: an invalid or invisible row, read as zeros.
struct RowSource {
  const char* data;
  common::RowScale scale;
};
struct Vec4 {
  unsigned words[4];  // the elements, in order from the low bits
  float scale;
};

// Loads four channels of a row from `channel` on; zeros beyond kHeadDim.
template <int kType, int kHeadDim, bool kVec4>
__device__ __forceinline__ Vec4 load_vec4(const RowSource& row, const Strided& strides, int channel) {
  constexpr int kSize = common::element_size(kType);
  Vec4 vec{{0, 0, 0, 0}, row.scale.at(channel)};
  if constexpr (!kVec4) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (row.data != nullptr && channel + k < kHeadDim)
        vec.words[k * kSize / 4] |= common::load_bits(kSize, row.data + strides.offset(channel + k) * kSize)
                                      << (k * kSize % 4 * 8);
    }
  } else if (row.data != nullptr && (kHeadDim % 64 == 0 || channel < kHeadDim)) {
    const char* const at = row.data + strides.offset(channel) * kSize;
    if constexpr (kSize == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      vec.words[0] = x.x, vec.words[1] = x.y, vec.words[2] = x.z, vec.words[3] = x.w;
    } else if constexpr (kSize == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      vec.words[0] = x.x, vec.words[1] = x.y;
    } else {
      vec.words[0] = *reinterpret_cast<const unsigned*>(at);
    }
  }
  return vec;
}
template <int kType>
__device__ __forceinline__ void to_floats(const Vec4& vec, float (&x)[4]) {
  if constexpr (common::element_size(kType) == 4) {
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = __uint_as_float(vec.words[k]);
  } else {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const unsigned bits =
          common::element_size(kType) == 2 ? vec.words[k / 2] : vec.words[0] >> (8 * k) & 0xffff;
      const float2 pair = common::decode_pair(kType, bits);
      x[k] = pair.x * vec.scale, x[k + 1] = pair.y * vec.scale;
    }
  }
}

}  // namespace attune::prefill
