// SPDX-License-Identifier: Apache-2.0
// A row of a new token into the cache, rounded or quantised once, by one warp, from fp32 in shared memory.
#pragma once

#include "decode/config.cuh"
#include "decode/slot.cuh"
#include "tile/kv_codec.cuh"

namespace attune::decode {

// What codes are multiplied with; a scale per token and head is computed and stored.
__device__ __forceinline__ float scale_of_row(const kernels::KvScale& scale, int page, int offset, int head,
                                              const float* row, int head_dim) {
  if (scale.mode == 1) return scale.data[0];
  if (scale.mode == 2) return scale.data[head * scale.head_stride];
  const int lane = threadIdx.x % 32;
  float amax = 0;
  for (int d = lane; d < head_dim; d += 32) amax = tile::larger_magnitude(amax, row[d]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const float chosen = tile::token_scale(Config::kKvType, amax);
  if (lane == 0) {
    const_cast<float*>(scale.data)[page * scale.page_stride + offset * scale.slot_stride + head * scale.head_stride] =
        chosen;
  }
  return chosen;
}

__device__ __noinline__ void write_row(const kernels::KvPlane& plane, const kernels::KvScale& scale, int page,
                                       int offset, int head, const float* row, int head_dim) {
  const bool scaled = scale.mode != 0;
  const tile::Divider over(scaled ? scale_of_row(scale, page, offset, head, row, head_dim) : 1.0f);
  char* to =
      const_cast<char*>(plane.data) + page * plane.page_stride + offset * plane.slot_stride + head * plane.head_stride;
#pragma unroll 1
  for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
    const float code[1] = {scaled ? over(row[d]) : row[d]};
    const long long at =
        plane.contiguous ? d : d / plane.pack * plane.outer_stride + d % plane.pack * plane.inner_stride;
    tile::store_run<1>(Config::kKvType, tile::encode_run<1>(Config::kKvType, code), to + at * Config::kElement, 0,
                       false);
  }
}

// Where position `position` of sequence `batch` goes; page -1: the cache does not hold it.
__device__ __forceinline__ Slot slot_of_new(const DecodeParams& p, int batch, int position) {
  if (p.ring_capacity == 0 && position >= p.capacity) return {-1, -1, 0};
  return find_slot(p, batch, p.ring_capacity > 0 ? position % p.ring_capacity : position);
}

// k, v: rows in shared memory, written by other lanes too.
__device__ __forceinline__ void append_rows(const DecodeParams& p, const Slot& slot, int head, const float* k,
                                            const float* v) {
  if (!slot.exists(p)) return;
  __syncwarp();
  write_row(p.k, p.k_scale, slot.k_page, slot.offset, head, k, Config::kHeadDimQk);
  if (!p.v_is_k) write_row(p.v, p.v_scale, slot.v_page, slot.offset, head, v, Config::kHeadDimV);
}

}  // namespace attune::decode
