// SPDX-License-Identifier: Apache-2.0
// The two rows of a math thread (l / 4 and l / 4 + 8 of its warp's sixteen): who they are and what they may see.
#pragma once

#include "mla/config.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

constexpr float kLog2e = 1.4426950408889634f;

// Exponents are taken against this: a row that has seen nothing has no maximum yet.
__device__ __forceinline__ float reference_of(float max) { return max == -ptx::infinity() ? 0.0f : max; }

// The first of the thread's two rows of the block.
__device__ __forceinline__ int row_of_thread() {
  return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Computed where needed: registers are scarce.
struct Rows {
  const PrefillParams& p;
  const WorkTile& t;
  const int head_tile;

  __device__ __forceinline__ int local_token(int h) const { return (row_of_thread() + 8 * h) / p.heads_of_tile; }
  // In the sequence; -1: there is no such row.
  __device__ __forceinline__ int token(int h) const {
    return local_token(h) < t.num_tokens ? t.token_begin + local_token(h) : -1;
  }
  // Of all query heads.
  __device__ __forceinline__ int head(int h) const {
    return head_tile * p.heads_of_tile + row_of_thread() + 8 * h - local_token(h) * p.heads_of_tile;
  }

  // Lays down what the block's rows may see. One group's threads, before hide().
  __device__ __forceinline__ void note_limits(const Smem& smem) const {
    if constexpr (!Config::kSparse) {
      if (threadIdx.x % 4 != 0) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int position = t.num_keys - t.num_q + t.token_begin + local_token(h);
        *smem.limits(row_of_thread() + 8 * h) = make_int2(
            prefill::first_visible(p, position), token(h) >= 0 ? prefill::end_visible(p, t.num_keys, position) : 0);
      }
    }
  }
};

// The thread's keys before key x of a tile: bit 2 j + e is key 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ unsigned keys_before(int x) {
  x = min(max(x, 0), Config::kKeys);
  return (1u << (x / 8 * 2 + min(max(x % 8 - static_cast<int>(threadIdx.x % 4) * 2, 0), 2))) - 1;
}

// What lies beside a tile.
struct Note {
  unsigned hidden[2];  // a bit for each key that nobody sees
  int start;
  bool edge;
  __device__ __forceinline__ Note(const Smem& smem, int stage) {
    unsigned last[4];
    ptx::load_shared_four(smem.note(stage) + 4 * Config::kHiddenWords - (Config::kCopiesBoxes ? 8 : 0), last);
    if constexpr (Config::kCopiesBoxes) {
      hidden[0] = last[0], hidden[1] = last[1];
    } else {
      unsigned words[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::load_shared_four(smem.note(stage) + 16 * i, words[i]);
        hidden[i] = words[i][0] | words[i][1] | words[i][2] | words[i][3];
      }
    }
    start = static_cast<int>(last[Config::kCopiesBoxes ? 2 : 0]);
    edge = !Config::kSparse && last[Config::kCopiesBoxes ? 3 : 1] != 0;
  }
};

// Scores of keys that a row may not see become -inf.
__device__ __forceinline__ void hide(const Smem& smem, const Note& note, float (&s)[Config::kKeys / 2]) {
  if (note.edge || (note.hidden[0] | note.hidden[1]) != 0) [[unlikely]] {
    unsigned seen_by_all = 0;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const unsigned bits = ~note.hidden[word] >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) seen_by_all |= (bits >> (8 * j) & 3) << (8 * word + 2 * j);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned seen = seen_by_all;
      if (note.edge) {
        const int2 limits = *smem.limits(row_of_thread() + 8 * h);
        seen &= keys_before(limits.y - note.start) & ~keys_before(limits.x - note.start);
      }
#pragma unroll
      for (int i = 0; i < Config::kKeys / 4; ++i) {
        if ((seen >> i & 1) == 0) s[i / 2 * 4 + 2 * h + i % 2] = -ptx::infinity();
      }
    }
  }
}

}  // namespace attune::mla
