// SPDX-License-Identifier: Apache-2.0
// Masks and score terms of a thread's rows. Of row tile m (16 rows) a thread has rows g and g + 8, h = 0 and 1 (g =
// lane / 4).
#pragma once

#include "common/masks.cuh"
#include "common/score_terms.cuh"
#include "common/softcap.cuh"
#include "prefill/mma/config.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill_mma {

using scheduler::Tile;

// The bits of a word below bit `end`.
__device__ __forceinline__ unsigned bits_below(int end) {
  return end <= 0 ? 0u : end >= 32 ? 0xffffffffu : (1u << end) - 1;
}

// The keys [begin, end).
struct KeySpan {
  int begin, end;
};

struct Rows {
  static constexpr bool kPlain = Config::kScore == 0;  // a score is a product times a factor
  static constexpr bool kAnyAlibi = (Config::kScore & (use::kAlibi | use::kAlibiSqrt)) != 0;
  using KeyMask = common::KeyMask<Config::kMask>;

  int head, first_position;  // the position of query 0
  float factor, slope;       // turns <q, k> into a score in base 2 (with softcap: into z)
  KeyMask key_mask;

  __device__ __forceinline__ Rows(const WorkTileParams& p, const WorkTile& t, int q_head)
      : head(q_head), first_position(t.num_keys - t.num_q) {
    factor = (Config::kScore & use::kSoftcap) != 0 ? p.scale : p.scale * common::kLog2e;
    if constexpr (kAnyAlibi)
      slope = p.alibi[t.batch * p.alibi_batch_stride + head * p.alibi_head_stride] * common::kLog2e;
    if constexpr (KeyMask::kAny) key_mask.start(p, t.batch, t.q_begin);
  }

  // The row within the block.
  __device__ __forceinline__ static int row(int m, int h) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (warp * Config::kRowTiles + m) * 16 + lane / 4 + 8 * h;
  }

  // Whether all rows of the block see all keys of the tile, if these are all valid.
  __device__ __forceinline__ bool all_see(const WorkTileParams& p, const WorkTile& t, const Tile& tile) const {
    if (KeyMask::kAny || tile.low != tile.start || tile.high != tile.start + Config::kKeys) return false;
    const int position = first_position + t.token_begin;
    return scheduler::first_visible(p, position + t.num_tokens - 1) <= tile.low &&
           tile.high <= scheduler::end_visible(p, t.num_keys, position);
  }

  // Whether a row sees one range of keys.
  static constexpr bool kOneRange = !common::kMayHaveRanges && !KeyMask::kAny;
  // If so, the keys [begin, end) of the tile that a row sees.
  __device__ __forceinline__ KeySpan seen_keys(const WorkTileParams& p, const WorkTile& t, int token,
                                               const Tile& tile) const {
    const int position = first_position + token;
    return {max(scheduler::first_visible(p, position), tile.low),
            min(scheduler::end_visible(p, t.num_keys, position), tile.high)};
  }

  // Whether a row sees a valid key of the tile. token: in the sequence.
  __device__ __forceinline__ bool sees(const WorkTileParams& p, const WorkTile& t, int token, int key) const {
    const int position = first_position + token;
    bool seen = scheduler::first_visible(p, position) <= key && key < scheduler::end_visible(p, t.num_keys, position);
    for (int i = 0; common::kMayHaveRanges && i < p.num_ranges; ++i) {
      const common::Range range = common::range_at(p, t.batch, i);
      seen |= common::holds(range, position) && range.first <= key && key <= range.last;
    }
    if constexpr (KeyMask::kAny) seen = seen && token < t.num_q && key_mask.sees(p, token, head, key);
    return seen;
  }

  // Products with a factor that is not positive are scaled before their max is taken and before they are masked.
  __device__ __forceinline__ bool scales_first() const { return !(factor > 0.0f); }
  // The scale that score_tile() leaves to the softmax.
  __device__ __forceinline__ float scale() const { return kPlain && !scales_first() ? factor : 1.0f; }

  // Turns x = <q, k> into a score in base 2: softcap, ALiBi, biases.
  __device__ __forceinline__ float score(const WorkTileParams& p, const WorkTile& t, int token, float x,
                                         int key) const {
    x *= factor;
    if constexpr ((Config::kScore & use::kSoftcap) != 0) x = common::capped_score(x * p.cap_inverse, p.cap_level);
    if constexpr ((Config::kScore & ~static_cast<unsigned>(use::kSoftcap)) != 0) {
      const int distance = first_position + token - key;
      if constexpr ((Config::kScore & use::kAlibi) != 0) x -= slope * static_cast<float>(distance);
      if constexpr ((Config::kScore & use::kAlibiSqrt) != 0) {
        if (distance > 0) x -= slope * sqrtf(static_cast<float>(distance));
      }
      if constexpr ((Config::kScore & use::kTables) != 0) {
        if (token < t.num_q)
          x += common::kLog2e * common::table_terms<Config::kScore>(p, head, token, first_position, key, distance);
      }
    }
    return x;
  }
};

}  // namespace attune::prefill_mma
