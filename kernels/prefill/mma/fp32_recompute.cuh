// SPDX-License-Identifier: Apache-2.0
// Recomputes rows whose output is not finite, from visible keys alone. P is 0 if a row may not see a key, but 0 times a
// NaN or infinite V is NaN; and the parts of an infinity, or of a number beyond the range of bf16, do not add up to it.
// This is slow, and needed for such numbers only.
#pragma once

#include "prefill/mma/fp32_producer.cuh"
#include "prefill/mma/softmax.cuh"

namespace attune::prefill_mma {

constexpr int kLaneChannels = (Config::kHeadDimV + 31) / 32;  // channels of O in a lane

template <bool kValues>
__device__ __forceinline__ RowSource row_of_key(const WorkTileParams& p, const WorkTile& t, int kv_head, int key) {
  const bool cached = Config::kCached && (!Config::kDense || key < t.num_cached);
  return cached ? cached_row<kValues>(p, t, kv_head, key) : dense_row<kValues>(p, t, kv_head, key);
}
template <bool kValues>
__device__ __forceinline__ float element(const WorkTileParams& p, const WorkTile& t, int key, const RowSource& row,
                                         int channel) {
  if (Config::kCached && (!Config::kDense || key < t.num_cached)) {
    const Strided strides = Strided::of(kValues ? p.v : p.k);
    return common::load_element(Config::kCacheType, row.data, strides.offset(channel)) * row.scale.at(channel);
  }
  return common::load_element(common::kFloat32, row.data,
                              Strided::of(kValues ? p.new_v : p.new_k).offset(channel));
}

// Called by all lanes of a warp. A lane has one key of 32, and every 32nd channel of O.
__device__ __forceinline__ void recompute_row(const WorkTileParams& p, const WorkTile& t, int head, int kv_head,
                                              int token) {
  const Rows rows(p, t, head);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const char* const q = p.q + 4 * common::row_offset(p, t.batch, t.q_begin, token, rows.head, p.q_batch_stride,
                                                     p.q_row_stride, p.q_head_stride);
  float o[kLaneChannels] = {}, row_max = -ptx::infinity(), row_sum = 0;
  for (int begin = t.first_key; begin < t.end_key; begin += 32) {
    const int key = begin + lane;
    bool counts = key < t.end_key && rows.sees(p, t, token, key);
    RowSource k{nullptr, {1.0f}};
    if (counts) k = row_of_key<false>(p, t, kv_head, key);
    counts = counts && k.data != nullptr && (key >= t.num_cached || common::has_value(p, t.batch, key));
    float s = -ptx::infinity();
    if (counts) {
      s = 0;
      for (int d = 0; d < Config::kHeadDimQk; ++d)
        s = fmaf(common::load_element(common::kFloat32, q, d * p.q_dim_stride), element<false>(p, t, key, k, d), s);
      s = rows.score(p, t, token, s, key);
      counts = s != -ptx::infinity();  // otherwise P is 0, and V must not count either
    }
    const float new_max = common::max_of_lanes(fmaxf(row_max, s));
    const float ref = finite_row_max(new_max), rescale = ptx::exp2_approx(row_max - ref),
                own_p = ptx::exp2_approx(s - ref);
    row_max = new_max;
    row_sum *= rescale;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) o[i] *= rescale;
    for (int j = 0; j < min(32, t.end_key - begin); ++j) {
      const float key_p = __shfl_sync(0xffffffffu, own_p, j);
      if (__shfl_sync(0xffffffffu, counts ? 1 : 0, j) == 0) continue;
      const RowSource v = row_of_key<true>(p, t, kv_head, begin + j);
      row_sum += key_p;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        const int channel = 32 * i + lane;
        if (channel < Config::kHeadDimV) o[i] = fmaf(key_p, element<true>(p, t, begin + j, v, channel), o[i]);
      }
    }
  }
  float factor = 0;
  if (lane == 0) factor = common::finish_row(p, t.batch, t.q_begin, token, rows.head, row_max, row_sum);
  factor = __shfl_sync(0xffffffffu, factor, 0);
  const long long out = common::out_at(p, t, token, rows.head);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int channel = 32 * i + lane;
    if (channel < Config::kHeadDimV)
      common::store_element(Config::kOutType, p.out, out + channel * p.out_dim_stride, o[i] * factor);
  }
}

// Called by all lanes of a warp after the epilogue, whose rows it overwrites.
__device__ __forceinline__ void recompute_rows(const WorkTileParams& p, const WorkTile& t, int head, int kv_head,
                                               const State& state) {
  unsigned nonfinite[2];  // a bit for each lane
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // NaN if one is not finite, or the scores are large.
    float probe = fmaf(0.0f, state.row_sum[0][h], common::nan_if_large(state.row_max_ref[0][h]));
#pragma unroll
    for (int c = 0; c < 2 * Config::kBlocksV; ++c) {
      probe = fmaf(state.o[0][c][2 * h], 0.0f, probe);
      probe = fmaf(state.o[0][c][2 * h + 1], 0.0f, probe);
    }
    nonfinite[h] = __ballot_sync(0xffffffffu, Rows::row(0, h) < t.num_tokens && probe != 0.0f);
  }
  if ((nonfinite[0] | nonfinite[1]) == 0) return;
  __syncwarp();  // these rows are stored after the epilogue's
  for (int row = 0; row < 16; ++row) {
    const unsigned lanes = row < 8 ? nonfinite[0] : nonfinite[1];
    if ((lanes >> (row % 8 * 4) & 15) == 0) continue;
    recompute_row(p, t, head, kv_head, t.token_begin + static_cast<int>(threadIdx.x) / 32 * 16 + row);
  }
}

}  // namespace attune::prefill_mma
