// SPDX-License-Identifier: Apache-2.0
// The masks and score terms of a thread's query rows of a split. Of each tile of eight rows a thread has rows 2t and 2t
// + 1 (t = lane % 4).
#pragma once

#include "common/masks.cuh"
#include "common/score_terms.cuh"
#include "common/softcap.cuh"
#include "decode/queries.cuh"
#include "ptx/math.cuh"

namespace attune::decode {

struct QueryRows {
  static constexpr bool kAnyAlibi = (Config::kScore & (use::kAlibi | use::kAlibiSqrt)) != 0;
  static constexpr bool kTables = (Config::kScore & use::kTables) != 0;
  using KeyMask = common::KeyMask<Config::kMask>;

  int first_position;  // of the sequence's query 0; negative if there are more queries than keys
  int num_keys, num_q;
  int low_of_all, high_of_all;  // the keys [low, high] that all rows see, within the sequence's first_key and end_key
  float factor[Config::kRowTiles][2];  // for dot products with cached keys
  float slope[kAnyAlibi ? Config::kRowTiles : 1][2];
  KeyMask key_mask;

  __device__ __forceinline__ static int packed(const Split& split, int n, int e) {
    return split.row_begin + 8 * n + threadIdx.x % 4 * 2 + e;
  }

  __device__ __forceinline__ void start(const AttentionParams& p, const Split& split, const kernels::Sequence& s,
                                        const float* scales) {
    num_keys = s.num_keys, num_q = s.num_q;
    if constexpr (KeyMask::kAny) key_mask.start(p, split.batch, s.q_begin);
    first_position = s.num_keys - s.num_q;
    low_of_all = low(p, first_position + kernels::divide(split.row_begin + split.num_rows - 1, p.by_group));
    high_of_all = high(p, first_position + kernels::divide(split.row_begin, p.by_group));
    float k_scale = 1.0f;
    if (p.k_scale.mode == ScaleMode::kTensor) k_scale = p.k_scale.data[0];
    if (p.k_scale.mode == ScaleMode::kHead) k_scale = p.k_scale.data[split.head * p.k_scale.head_stride];
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float query_scale = scales[8 * n + threadIdx.x % 4 * 2 + e];
        factor[n][e] = query_scale * common::code_unit<Config::kKvType>() * (score_scale(p) * k_scale);
        if constexpr (kAnyAlibi) {
          const int head = split.head * p.group + packed(split, n, e) % p.group;
          slope[n][e] = p.alibi[split.batch * p.alibi_batch_stride + head * p.alibi_head_stride] * kLog2e;
        }
      }
    }
  }

  // The factor from <q, k> to a score in base 2 (with softcap: to z).
  __device__ __forceinline__ static float score_scale(const AttentionParams& p) {
    return (Config::kScore & use::kSoftcap) != 0 ? p.scale : p.scale * kLog2e;
  }
  __device__ __forceinline__ int position(const AttentionParams& p, const Split& split, int n, int e) const {
    return first_position + kernels::divide(packed(split, n, e), p.by_group);
  }

  // A position sees the keys [low, high].
  __device__ __forceinline__ static int low(const AttentionParams& p, int position) {
    return p.window_left >= 0 ? static_cast<int>(max(position - p.window_left, 0ll)) : 0;
  }
  __device__ __forceinline__ int high(const AttentionParams& p, int position) const {
    int last = num_keys - 1;  // 32 bits: 64 would cost registers in the mainloop
    if (p.causal) last = min(last, position);
    if (p.window_right >= 0 && position + p.window_right < last) last = static_cast<int>(position + p.window_right);
    return max(last, -1);
  }
  // A bit for each of the 16 keys from first_token on: all rows see it.
  __device__ __forceinline__ unsigned keys_visible_to_all(int first_token) const {
    return range_mask(low_of_all - first_token, high_of_all - first_token);
  }
  __device__ __forceinline__ bool all_visible(int first_token) const {
    return low_of_all <= first_token && first_token + 15 <= high_of_all;
  }
  // Bits [low, high] of 16 bits.
  __device__ __forceinline__ static unsigned range_mask(int low, int high) {
    if (low > 15 || high < 0 || low > high) return 0;
    return (0xffffu >> (15 - min(high, 15))) & (0xffffu << max(low, 0));
  }

  // A bit for each of the 16 keys from first_token on: a position sees it by causality, windows and ranges.
  __device__ __forceinline__ unsigned visible(const AttentionParams& p, int batch, int position,
                                              int first_token) const {
    unsigned keys = range_mask(low(p, position) - first_token, high(p, position) - first_token);
    for (int i = 0; common::kMayHaveRanges && i < p.num_ranges; ++i) {
      const common::Range range = common::range_at(p, batch, i);
      if (common::holds(range, position))
        keys |= range_mask(max(range.first, 0) - first_token, min(range.last, num_keys - 1) - first_token);
    }
    return keys;
  }
  // Returns true if the masks that are looked up key by key show the key to this row of the split.
  __device__ __forceinline__ bool sees(const AttentionParams& p, const Split& split, int n, int e, int key) const {
    const int row = packed(split, n, e), query = kernels::divide(row, p.by_group);
    if (row >= split.row_begin + split.num_rows) return true;
    return key_mask.sees(p, query, split.head * p.group + row - query * p.group, key);
  }

  // Turns x = <q, k> * score_scale(), of row (n, e) and a key, into a score in base 2: softcap, ALiBi, biases.
  __device__ __forceinline__ float score(const AttentionParams& p, const Split& split, int n, int e, float x,
                                         int key) const {
    if constexpr ((Config::kScore & use::kSoftcap) != 0) {
      x = common::capped_score(x * p.cap_inverse, p.cap_level);
    }
    if constexpr ((Config::kScore & ~use::kSoftcap) != 0) {
      const int distance = position(p, split, n, e) - key;
      if constexpr ((Config::kScore & use::kAlibi) != 0) x -= slope[n][e] * static_cast<float>(distance);
      if constexpr ((Config::kScore & use::kAlibiSqrt) != 0) {
        if (distance > 0) x -= slope[n][e] * sqrtf(static_cast<float>(distance));
      }
      if constexpr (kTables) x += kLog2e * table_terms(p, split, n, e, key, distance);
    }
    return x;
  }

 private:
  // Biases that are looked up key by key.
  __device__ __forceinline__ float table_terms(const AttentionParams& p, const Split& split, int n, int e, int key,
                                               int distance) const {
    const int row = packed(split, n, e), query = kernels::divide(row, p.by_group);
    const int head = split.head * p.group + row - query * p.group;
    if (row >= split.row_begin + split.num_rows) return 0.0f;
    return common::table_terms<Config::kScore>(p, head, query, first_position, key, distance);
  }
};

}  // namespace attune::decode
