// SPDX-License-Identifier: Apache-2.0
// The scores of a key tile and row_max_ref, for 16-bit and for fp32 rows.
#pragma once

#include "common/lanes.cuh"
#include "common/row_max.cuh"
#include "prefill/mma/mask.cuh"
#include "ptx/math.cuh"

namespace attune::prefill_mma {

using common::finite_row_max, common::quad_max, common::quad_sum;

constexpr unsigned kAllKeys = 0xffffffffu;  // of 32 keys
using ValidKeys = unsigned[2];  // a bit for each key of a tile; tiles of 32 keys have all bits of the second word set
__device__ __forceinline__ bool all_valid(const ValidKeys& valid_keys) {
  return (valid_keys[0] & valid_keys[1]) == kAllKeys;
}
constexpr int kM = Config::kRowTiles, kKeyTiles8 = Config::kKeys / 8;

// The fragments of S, and of P: [row tile][eight keys][row h, key e as 2h + e].
using Scores = float[kM][kKeyTiles8][4];

// A warp's running result.
struct State {
  float o[kM][2 * Config::kBlocksV][4];      // [row tile][eight channels], relative to row_max_ref
  float row_max_ref[kM][2], row_sum[kM][2];  // in base 2; row_sum is of this thread's keys, relative to row_max_ref

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < 2 * Config::kBlocksV; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[m][c][j] = 0;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) row_max_ref[m][h] = -ptx::infinity(), row_sum[m][h] = 0;
    }
  }
};

// Turns products into scores; plain products stay products if rows.scale() says so. masked: keys that rows do not see
// become -inf. tile_at: finds a tile's keys.
template <class FindTile>
__device__ __forceinline__ void score_tile(const WorkTileParams& p, const WorkTile& t, int i, const FindTile& tile_at,
                                           const Rows& rows, bool masked, const ValidKeys& valid_keys, Scores& s) {
  if (Rows::kPlain && !rows.scales_first() && !masked) return;
  const Tile tile = tile_at(i);
  const int first = tile.start + static_cast<int>(threadIdx.x % 4) * 2;
  const auto of_all = [&](const auto& change) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = t.token_begin + Rows::row(m, h);
#pragma unroll
        for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) change(s[m][n][2 * h + e], token, first + 8 * n + e, n);
        }
      }
    }
  };
  if (!Rows::kPlain || rows.scales_first())
    of_all([&](float& x, int token, int key, int) { x = rows.score(p, t, token, x, key); });
  if (!masked) return;
  if constexpr (Rows::kOneRange) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const KeySpan span = rows.seen_keys(p, t, t.token_begin + Rows::row(m, h), tile);
        const int begin = span.begin - first, end = span.end - first;
#pragma unroll
        for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e < begin || 8 * n + e >= end) s[m][n][2 * h + e] = -ptx::infinity();
          }
        }
      }
    }
    if (all_valid(valid_keys)) return;
  }
  of_all([&](float& x, int token, int key, int n) {
    const bool is_valid = (valid_keys[n / 4] >> (key - tile.start) % 32 & 1) != 0;
    if (!is_valid || !(Rows::kOneRange || rows.sees(p, t, token, key))) x = -ptx::infinity();
  });
}

// The max of row h over all keys of a tile, from this lane and its three neighbours.
__device__ __forceinline__ float max_of_row(const float (&s)[kKeyTiles8][4], int h) {
  float largest = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
  for (int n = 1; n < kKeyTiles8; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
  return quad_max(largest);
}

// Sets row_max_ref of the rows of tile m to their max if that is more than `threshold` above it.
__device__ __forceinline__ void raise_row_max_ref(int m, const float (&row_max)[2], float threshold, State& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!(row_max[h] - state.row_max_ref[m][h] > threshold)) continue;
    const float rescale = ptx::exp2_approx(state.row_max_ref[m][h] - row_max[h]);
    state.row_max_ref[m][h] = row_max[h];
    state.row_sum[m][h] *= rescale;
#pragma unroll
    for (int c = 0; c < 2 * Config::kBlocksV; ++c) {
      state.o[m][c][2 * h] *= rescale;
      state.o[m][c][2 * h + 1] *= rescale;
    }
  }
}

}  // namespace attune::prefill_mma
