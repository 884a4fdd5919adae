// SPDX-License-Identifier: Apache-2.0
// One warp appends a row of a new token to the cache, rounded or quantised once: from registers where rows take vector
// stores, else from shared memory in loops.
#pragma once

#include "common/kv_codec.cuh"
#include "common/lanes.cuh"
#include "decode/config.cuh"
#include "decode/slot.cuh"

namespace attune::decode {

// The scale of the row; a scale per token and head is computed and stored. amax: of this lane's channels.
__device__ __forceinline__ float scale_of_row(const kernels::KvScale& scale, int page, int offset, int head,
                                              float amax) {
  if (scale.mode == ScaleMode::kTensor) return scale.data[0];
  if (scale.mode == ScaleMode::kHead) return scale.data[head * scale.head_stride];
  const float chosen = common::token_scale(Config::kKvType, common::max_of_lanes(amax));
  if (threadIdx.x % 32 == 0) *scale.at(page, offset, head) = chosen;
  return chosen;
}

__device__ __forceinline__ char* row_of(const kernels::KvPlane& plane, int page, int offset, int head) {
  return plane.data + page * plane.page_stride + offset * plane.slot_stride + head * plane.head_stride;
}

// Stores the row; this lane has channels [d, d + kVec).
template <int kHeadDim, int kVec>
__device__ __forceinline__ void write_vector(const kernels::KvPlane& plane, const kernels::KvScale& scale, int page,
                                             int offset, int head, const float (&row)[kVec], int d) {
  constexpr int kWords = kVec * Config::kElement / 4;
  float x[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = row[i];
  if (Config::kElement == 1 && scale.mode != ScaleMode::kNone) {
    float amax = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) amax = common::larger_magnitude(amax, x[i]);
    const common::Divider over(scale_of_row(scale, page, offset, head, amax));
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = over(x[i]);
  }
  if (d >= kHeadDim) return;
  unsigned words[kWords] = {};
  if constexpr (Config::kElement == 4) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) words[i] = __float_as_uint(x[i]);
  }
#pragma unroll
  for (int i = 0; i < kVec && Config::kElement < 4; i += 2) {
    const unsigned pair = common::encode_pair(Config::kKvType, x[i], x[i + 1]);
    if constexpr (Config::kElement == 2) {
      words[i / 2] = pair;
    } else {
      words[i / 4] |= pair << (i % 4 * 8);
    }
  }
  char* to = row_of(plane, page, offset, head) + d * Config::kElement;
  if constexpr (kWords == 1) {
    *reinterpret_cast<unsigned*>(to) = words[0];
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __noinline__ void write_row(const kernels::KvPlane& plane, const kernels::KvScale& scale, int page,
                                       int offset, int head, const float* row, int head_dim) {
  const bool scaled = scale.mode != ScaleMode::kNone;
  const int lane = threadIdx.x % 32;
  float amax = 0;
  for (int d = lane; d < head_dim; d += 32) amax = common::larger_magnitude(amax, row[d]);
  const common::Divider over(scaled ? scale_of_row(scale, page, offset, head, amax) : 1.0f);
  char* to = row_of(plane, page, offset, head);
#pragma unroll 1
  for (int d = lane; d < head_dim; d += 32) {
    const float code[1] = {scaled ? over(row[d]) : row[d]};
    const long long at = plane.contiguous ? d : plane.element(d);
    common::store_run<1>(Config::kKvType, common::encode_run<1>(Config::kKvType, code), to + at * Config::kElement, 0,
                         false);
  }
}

// The slot for a position of a sequence. Page -1: the cache is too short.
__device__ __forceinline__ Slot slot_of_new(const AttentionParams& p, int batch, int position) {
  if (p.ring_capacity == 0 && position >= p.capacity) return {-1, -1, 0};
  return find_slot(p, batch, p.ring_capacity > 0 ? position % p.ring_capacity : position);
}

// k, v: rows in shared memory, which other lanes have written too.
__device__ __forceinline__ void append_rows(const AttentionParams& p, const Slot& slot, int head, const float* k,
                                            const float* v) {
  if (!slot.exists(p)) return;
  __syncwarp();
  write_row(p.k, p.k_scale, slot.k_page, slot.offset, head, k, Config::kHeadDimQk);
  if (!p.v_is_k) write_row(p.v, p.v_scale, slot.v_page(p), slot.offset, head, v, Config::kHeadDimV);
}

}  // namespace attune::decode
