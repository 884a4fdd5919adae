// SPDX-License-Identifier: Apache-2.0
// The rows of a piece as a thread sees them: what they may see and what is added to their scores. A thread holds, of
// each tile of eight rows, rows 2t and 2t + 1 (t = lane % 4).
#pragma once

#include "decode/queries.cuh"
#include "ptx/math.cuh"
#include "tile/softcap.cuh"

namespace attune::decode {

struct Rows {
  static constexpr bool kAnyAlibi = (Config::kScore & (kAlibi | kAlibiSqrt)) != 0;
  static constexpr bool kBits = (Config::kMask & kMaskBits) != 0, kRanges = (Config::kMask & kMaskRanges) != 0;

  int first_position;  // of the sequence's query 0; below 0 where there are more queries than keys
  int num_keys, num_q;
  int low_of_all, high_of_all;  // keys that every row sees, of those between the sequence's first_key and end_key
  float factor[Config::kRowTiles][2];  // of raw dot products with cached keys
  float slope[kAnyAlibi ? Config::kRowTiles : 1][2];
  long long first_row;  // of mask_bits: the row of query 0
  int mask_start;

  __device__ __forceinline__ static int packed(const Piece& piece, int n, int e) {
    return piece.row_begin + 8 * n + threadIdx.x % 4 * 2 + e;
  }

  __device__ __forceinline__ void start(const DecodeParams& p, const Piece& piece, const schedule::Sequence& s,
                                        const float* scales) {
    num_keys = s.num_keys, num_q = s.num_q;
    if constexpr (kBits) {
      first_row = p.cu_seqlens_q.data != nullptr ? s.q_begin : static_cast<long long>(piece.batch) * p.fixed_q;
      mask_start = p.mask_start.data != nullptr ? schedule::int_at(p.mask_start, piece.batch) : 0;
    }
    first_position = s.num_keys - s.num_q;
    low_of_all = low(p, first_position + kernels::divide(piece.row_begin + piece.num_rows - 1, p.by_group));
    high_of_all = high(p, first_position + kernels::divide(piece.row_begin, p.by_group));
    float k_scale = 1.0f;
    if (p.k_scale.mode == 1) k_scale = p.k_scale.data[0];
    if (p.k_scale.mode == 2) k_scale = p.k_scale.data[piece.head * p.k_scale.head_stride];
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        factor[n][e] = scales[8 * n + threadIdx.x % 4 * 2 + e] * (unit(p) * k_scale);
        if constexpr (kAnyAlibi) {
          const int head = piece.head * p.group + packed(piece, n, e) % p.group;
          slope[n][e] = p.alibi[piece.batch * p.alibi_batch_stride + head * p.alibi_head_stride] * kLog2e;
        }
      }
    }
  }

  // What <q, k> is multiplied with for the score (softcap: for z).
  __device__ __forceinline__ static float unit(const DecodeParams& p) {
    return (Config::kScore & kSoftcap) != 0 ? p.scale : p.scale * kLog2e;
  }
  __device__ __forceinline__ int position(const DecodeParams& p, const Piece& piece, int n, int e) const {
    return first_position + kernels::divide(packed(piece, n, e), p.by_group);
  }

  // Visible keys [low, high] of a position.
  __device__ __forceinline__ static int low(const DecodeParams& p, int position) {
    return p.window_left >= 0 ? static_cast<int>(max(position - p.window_left, 0ll)) : 0;
  }
  __device__ __forceinline__ int high(const DecodeParams& p, int position) const {
    int last = num_keys - 1;  // 64 bits would be carried into the loop over the tiles
    if (p.causal) last = min(last, position);
    if (p.window_right >= 0 && position + p.window_right < last) last = static_cast<int>(position + p.window_right);
    return max(last, -1);
  }
  // The 16 keys from first_token that every row sees.
  __device__ __forceinline__ unsigned seen_by_all(int first_token) const {
    return range_mask(low_of_all - first_token, high_of_all - first_token);
  }
  __device__ __forceinline__ bool all_see(int first_token) const {
    return low_of_all <= first_token && first_token + 15 <= high_of_all;
  }
  // Bits [low, high] of 16.
  __device__ __forceinline__ static unsigned range_mask(int low, int high) {
    if (low > 15 || high < 0 || low > high) return 0;
    return (0xffffu >> (15 - min(high, 15))) & (0xffffu << max(low, 0));
  }

  // Which of the 16 keys from first_token a position sees, by causality, windows and ranges.
  __device__ __forceinline__ unsigned seen(const DecodeParams& p, int batch, int position, int first_token) const {
    unsigned keys = range_mask(low(p, position) - first_token, high(p, position) - first_token);
    if constexpr (kRanges) {
      for (int i = 0; i < p.num_ranges; ++i) {
        const int* range = p.ranges + batch * p.range_batch_stride + i * p.range_stride;
        const int first = range[0], last = range[p.range_end_stride];
        if (first < last && first <= position && position <= last)
          keys |= range_mask(max(first, 0) - first_token, min(last, num_keys - 1) - first_token);
      }
    }
    return keys;
  }
  // Whether the bit masks let a row of the piece see a key.
  __device__ __forceinline__ bool bit_of(const DecodeParams& p, const Piece& piece, int n, int e, int key) const {
    const int row = packed(piece, n, e), query = kernels::divide(row, p.by_group);
    const long long column = static_cast<long long>(key) - mask_start;
    if (row >= piece.row_begin + piece.num_rows) return true;
    return tile::mask_bit(p, first_row + query, piece.head * p.group + row - query * p.group, column);
  }

  // z of row (n, e) and a key, scaled as unit() says, to a score in base 2.
  __device__ __forceinline__ float score(const DecodeParams& p, const Piece& piece, int n, int e, float x,
                                         int key) const {
    if constexpr ((Config::kScore & kSoftcap) != 0) {
      x = tile::capped_score(x * p.cap_inverse, p.cap_level);
    }
    if constexpr ((Config::kScore & ~kSoftcap) != 0) {
      const int distance = position(p, piece, n, e) - key;
      if constexpr ((Config::kScore & kAlibi) != 0) x -= slope[n][e] * static_cast<float>(distance);
      if constexpr ((Config::kScore & kAlibiSqrt) != 0) {
        if (distance > 0) x -= slope[n][e] * sqrtf(static_cast<float>(distance));
      }
      if constexpr ((Config::kScore & (kBias | kT5)) != 0) x += kLog2e * table_terms(p, piece, n, e, key, distance);
    }
    return x;
  }

 private:
  // Terms that are looked up key by key.
  __device__ __forceinline__ float table_terms(const DecodeParams& p, const Piece& piece, int n, int e, int key,
                                               int distance) const {
    const int row = packed(piece, n, e), query = kernels::divide(row, p.by_group);
    const int head = piece.head * p.group + row - query * p.group;
    if (row >= piece.row_begin + piece.num_rows) return 0.0f;
    return tile::table_terms<Config::kScore>(p, head, query, first_position, key, distance);
  }
};

}  // namespace attune::decode
