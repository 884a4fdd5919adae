// SPDX-License-Identifier: Apache-2.0
// Which keys a consumer thread's rows see. A thread has rows l / 4 and l / 4 + 8 of its warp's sixteen.
#pragma once

#include "mla/config.cuh"
#include "mla/row_max.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// The thread's first row in the M block.
__device__ __forceinline__ int row_of_thread() {
  return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Recomputed at each use: registers are scarce.
struct Rows {
  const WorkTileParams& p;
  const WorkTile& t;
  const int head_tile;

  __device__ __forceinline__ int local_token(int h) const { return (row_of_thread() + 8 * h) / p.heads_of_tile; }
  // The token in its sequence; -1: there is no such row.
  __device__ __forceinline__ int token(int h) const {
    return local_token(h) < t.num_tokens ? t.token_begin + local_token(h) : -1;
  }
  // The query head.
  __device__ __forceinline__ int head(int h) const {
    return head_tile * p.heads_of_tile + row_of_thread() + 8 * h - local_token(h) * p.heads_of_tile;
  }

  // Stores the key range of each row. Called by one warpgroup, before apply_mask().
  __device__ __forceinline__ void store_row_limits(const Smem& smem) const {
    if constexpr (!Config::kSparse) {
      if (threadIdx.x % 4 != 0) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int position = t.num_keys - t.num_q + t.token_begin + local_token(h);
        *smem.row_limits(row_of_thread() + 8 * h) = make_int2(
            scheduler::first_visible(p, position), token(h) >= 0 ? scheduler::end_visible(p, t.num_keys, position) : 0);
      }
    }
  }
};

// The thread's keys before key x of a tile: bit 2 j + e is key 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ unsigned keys_before(int x) {
  x = min(max(x, 0), Config::kBlockN);
  return (1u << (x / 8 * 2 + min(max(x % 8 - static_cast<int>(threadIdx.x % 4) * 2, 0), 2))) - 1;
}

// A tile's mask as the producers wrote it.
struct TileMask {
  unsigned masked[2];  // a bit for each key that no row sees
  int start;
  bool needs_row_mask;
  __device__ __forceinline__ TileMask(const Smem& smem, int stage) {
    unsigned last[4];
    ptx::load_shared_four(smem.mask(stage) + 4 * Config::kMaskWords - (Config::kTma ? 8 : 0), last);
    if constexpr (Config::kTma) {
      masked[0] = last[0], masked[1] = last[1];
    } else {
      unsigned words[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::load_shared_four(smem.mask(stage) + 16 * i, words[i]);
        masked[i] = words[i][0] | words[i][1] | words[i][2] | words[i][3];
      }
    }
    start = static_cast<int>(last[Config::kTma ? 2 : 0]);
    needs_row_mask = !Config::kSparse && last[Config::kTma ? 3 : 1] != 0;
  }
};

// Those of the thread's keys that KeyMask shows to row h, in a tile that begins at key `start`; bits as in
// keys_before().
__device__ __forceinline__ unsigned keys_shown(const Rows& rows, int h, int start) {
  if (!KeyMask::kAny || rows.token(h) < 0) return ~0u;
  KeyMask key_mask;
  key_mask.start(rows.p, rows.t.batch, rows.t.q_begin);
  unsigned shown = 0;
#pragma unroll 1
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    const int key = start + i / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2;
    if (key_mask.sees(rows.p, rows.token(h), rows.head(h), key)) shown |= 1u << i;
  }
  return shown;
}

// Sets scores of masked keys to -inf.
__device__ __forceinline__ void apply_mask(const Smem& smem, const TileMask& mask, const Rows& rows,
                                           float (&s)[Config::kBlockN / 2]) {
  if (mask.needs_row_mask || (mask.masked[0] | mask.masked[1]) != 0) [[unlikely]] {
    unsigned visible_to_all = 0;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const unsigned bits = ~mask.masked[word] >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) visible_to_all |= (bits >> (8 * j) & 3) << (8 * word + 2 * j);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned visible = visible_to_all;
      if (mask.needs_row_mask) {
        const int2 row_limits = *smem.row_limits(row_of_thread() + 8 * h);
        visible &= keys_before(row_limits.y - mask.start) & ~keys_before(row_limits.x - mask.start);
        visible &= keys_shown(rows, h, mask.start);
      }
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 4; ++i) {
        if ((visible >> i & 1) == 0) s[i / 2 * 4 + 2 * h + i % 2] = -ptx::infinity();
      }
    }
  }
}

}  // namespace attune::mla
