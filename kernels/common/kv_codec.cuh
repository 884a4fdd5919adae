// SPDX-License-Identifier: Apache-2.0
// Reads and stores rows of plain caches with their scales (common/kv_scale.h). Quantisation has the same bits as on the
// CPU backend (docs/semantics.md, "Caches"). It works element by element, so kernels may spread rows over threads as
// they like:
//
//   float scale = token_scale(dtype, amax);              // per token and head; amax: the row's largest magnitude
//   const Divider over(scale);                           // fixed scales are used the same way
//   codes = encode_pair(dtype, over(x0), over(x1));      // common/run.cuh; or encode_run
//
// The packed formats of MLA: common/mla_codec.cuh.
#pragma once

#include "common/kv_plane.h"
#include "common/kv_scale.h"
#include "common/lanes.cuh"
#include "common/run.cuh"
#include "ptx/math.cuh"

namespace attune::common {

// --- Reading

// The one scale of all channels of a row. find: the page and slot of a token that has its own scale. Returns 0 on a
// page that does not exist.
template <class Params, class Find>
__device__ __forceinline__ float scale_at(const Params& p, const KvScale& scale, int kv_head, const Find& find) {
  if (scale.mode == ScaleMode::kNone) return 1.0f;
  if (scale.mode == ScaleMode::kTensor) return scale.data[0];
  if (scale.mode == ScaleMode::kHead) return scale.data[kv_head * scale.head_stride];
  const auto s = find();
  if (!(s.page >= 0 && s.page < p.num_pages)) return 0.0f;
  return *scale.at(s.page, s.slot, kv_head);
}

// The scale of a row, channel by channel: x = code * scale.at(channel).
struct RowScale {
  float all;
  __device__ __forceinline__ float at(int /*channel*/) const { return all; }
};
// Not by scale_at(), because ptxas would schedule prefill's instructions differently.
template <class Find, class PageExists>
__device__ __forceinline__ RowScale row_scale(const KvScale& scale, int kv_head, const Find& find,
                                              const PageExists& page_exists) {
  if (scale.mode == ScaleMode::kNone) return {1.0f};
  if (scale.mode == ScaleMode::kTensor) return {scale.data[0]};
  if (scale.mode == ScaleMode::kHead) return {scale.data[kv_head * scale.head_stride]};
  const auto s = find();
  if (!page_exists(s.page)) return {0.0f};
  return {*scale.at(s.page, s.slot, kv_head)};
}

// --- Quantisation

// The larger magnitude. fmaxf ignores NaN.
__device__ __forceinline__ float larger_magnitude(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// Replaces an infinite amax by the largest float.
__device__ __forceinline__ float finite_amax(float amax) { return fminf(amax, __uint_as_float(0x7f7fffffu)); }

__device__ __forceinline__ float largest_code(int dtype) {
  return dtype == kInt8 ? 127.0f : dtype == kE4m3 ? 448.0f : 57344.0f;
}

// 2^ceil(log2(x)), exactly, for a normal number above 0.
__device__ __forceinline__ float power_of_two_at_least(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u);
}

// The scale of a row whose largest magnitude is amax (from larger_magnitude). A row of zeros has 1, or the smallest
// power of two.
__device__ __forceinline__ float token_scale(int dtype, float amax, bool power_of_two = false) {
  if (power_of_two) return power_of_two_at_least(__fdiv_rn(fmaxf(finite_amax(amax), 1e-4f), largest_code(dtype)));
  const float scale = __fdiv_rn(finite_amax(amax), largest_code(dtype));
  return scale == 0.0f ? 1.0f : scale;
}

// x / scale rounded to nearest even, as on the CPU: a multiplication by the reciprocal, and one Newton step with an
// exact remainder. If the scale is far from 1, both are first multiplied by a power of two, so that no remainder that
// matters to 8 bits is rounded. Quotients that leave fp32's range saturate or become 0 in any case.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(float scale) {
    const float magnitude = fabsf(scale);
    move_ = magnitude < 0x1p-60f ? 0x1p80f : magnitude > 0x1p60f ? 0x1p-80f : 1.0f;
    scale_ = scale * move_;
    reciprocal_ = __frcp_rn(scale_);
  }
  __device__ __forceinline__ float operator()(float x) const { return quotient(x * move_); }
  // Divides several numbers and checks the factor once.
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount]) const {
    if (move_ != 1.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= move_;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = quotient(x[i]);
  }
  // The same for numbers that are NaN or at most amax, which need the checks only if amax is infinite.
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount], float amax) const {
    if (move_ != 1.0f || amax > __uint_as_float(0x7f7fffffu)) return divide(x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = corrected(x[i], x[i] * reciprocal_);
  }

 private:
  // Subtracts the remainder rather than add it, so that -0 stays -0.
  __device__ __forceinline__ float corrected(float x, float q) const {
    return fmaf(fmaf(q, scale_, -x), -reciprocal_, q);
  }
  __device__ __forceinline__ float quotient(float x) const {
    const float q = x * reciprocal_;
    const float exact = corrected(x, q);
    return exact == exact ? exact : q;  // infinity: the remainder is NaN
  }
  float scale_, reciprocal_, move_;
};

// --- Storing

// The scale with which a warp stores a row. A scale per token and head is computed and stored here. amax: of this
// lane's channels.
template <int kType>
__device__ __forceinline__ float scale_to_store(const KvScale& scale, int page, int offset, int head,
                                                float amax) {
  if (scale.mode == ScaleMode::kTensor) return scale.data[0];
  if (scale.mode == ScaleMode::kHead) return scale.data[head * scale.head_stride];
  const float chosen = token_scale(kType, max_of_lanes(amax));
  if (threadIdx.x % 32 == 0) *scale.at(page, offset, head) = chosen;
  return chosen;
}

__device__ __forceinline__ char* row_to_store(const kernels::KvPlane& plane, int page, int offset, int head) {
  return plane.data + page * plane.page_stride + offset * plane.slot_stride + head * plane.head_stride;
}

// A warp stores a row from registers, as vectors: this lane has channels [d, d + kVec). Each element is rounded once.
template <int kType, int kHeadDim, int kVec>
__device__ __forceinline__ void store_vector(const kernels::KvPlane& plane, const KvScale& scale, int page,
                                             int offset, int head, const float (&row)[kVec], int d) {
  constexpr int kSize = element_size(kType), kWords = kVec * kSize / 4;
  float x[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = row[i];
  if (kSize == 1 && scale.mode != ScaleMode::kNone) {
    float amax = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) amax = larger_magnitude(amax, x[i]);
    const Divider over(scale_to_store<kType>(scale, page, offset, head, amax));
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = over(x[i]);
  }
  if (d >= kHeadDim) return;
  unsigned words[kWords] = {};
  if constexpr (kSize == 4) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) words[i] = __float_as_uint(x[i]);
  }
#pragma unroll
  for (int i = 0; i < kVec && kSize < 4; i += 2) {
    const unsigned pair = encode_pair(kType, x[i], x[i + 1]);
    if constexpr (kSize == 2) {
      words[i / 2] = pair;
    } else {
      words[i / 4] |= pair << (i % 4 * 8);
    }
  }
  char* to = row_to_store(plane, page, offset, head) + d * kSize;
  if constexpr (kWords == 1) {
    *reinterpret_cast<unsigned*>(to) = words[0];
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The same from shared memory, in a loop: slower, but less code.
template <int kType>
__device__ __forceinline__ void store_row(const kernels::KvPlane& plane, const KvScale& scale, int page,
                                          int offset, int head, const float* row, int head_dim) {
  const bool scaled = scale.mode != ScaleMode::kNone;
  const int lane = threadIdx.x % 32;
  float amax = 0;
  for (int d = lane; d < head_dim; d += 32) amax = larger_magnitude(amax, row[d]);
  const Divider over(scaled ? scale_to_store<kType>(scale, page, offset, head, amax) : 1.0f);
  char* to = row_to_store(plane, page, offset, head);
#pragma unroll 1
  for (int d = lane; d < head_dim; d += 32) {
    const float code[1] = {scaled ? over(row[d]) : row[d]};
    const long long at = plane.contiguous ? d : plane.element(d);
    store_run<1>(kType, encode_run<1>(kType, code), to + at * element_size(kType), 0, false);
  }
}

}  // namespace attune::common
