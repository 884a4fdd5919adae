// SPDX-License-Identifier: Apache-2.0
// Masks and score terms of the two rows of a consumer thread, which are rows l / 4 and l / 4 + 8 of its warp's sixteen.
#pragma once

#include "common/masks.cuh"
#include "common/row_max.cuh"
#include "common/score_terms.cuh"
#include "common/softcap.cuh"
#include "prefill/shared_storage.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill {

template <bool kFirst, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

using common::finite_row_max;

// fp8: the product of the scales of q and k, or the scale of v.
__device__ __forceinline__ float code_scale(const WorkTileParams& p, bool values) {
  if (!Config::kFp8 || p.prologue.qkv_scale == nullptr) return 1.0f;
  const float* const scale = p.prologue.qkv_scale;
  const long long step = p.prologue.qkv_scale_stride;
  return values ? scale[2 * step] : scale[0] * scale[step];
}

// The token of a packed row, counted within the block.
__device__ __forceinline__ int token_of_row(const WorkTileParams& p, int row) {
  return static_cast<int>(static_cast<unsigned>(row) * p.inverse_heads >> 16);
}

struct Rows {
  static constexpr bool kAlibiOn = (Config::kScore & (use::kAlibi | use::kAlibiSqrt)) != 0;
  // kProducts: scores stay raw products Q K^T until exp2. That needs scores that are monotonic in the product, so that
  // row_max may be the largest product. ALiBi alone is added to the products, in their units. Otherwise scores are
  // computed before the softmax; also where raw products would spill registers or lose precision.
  static constexpr bool kWide = Config::kCached && Config::kChannels > 128;
  static constexpr bool kPlain = Config::kScore == 0,
                        kSloped = Config::kScore == use::kAlibi && !kWide && !Config::kFp32,
                        kCapped = Config::kScore == use::kSoftcap && !kWide && !Config::kLowRegisters && !Config::kFp32,
                        kProducts = kPlain || kCapped || kSloped;
  static constexpr bool kTables = (Config::kScore & use::kTables) != 0;
  using KeyMask = common::KeyMask<Config::kMask>;

  int token[2], head[2];                 // in the sequence; among all query heads; token -1: a padding row
  int position[2];                       // absolute
  int first[2], end[2];                  // visible keys
  int first_of_all, end_of_all;          // the keys that all rows of the block see
  float slope[kAlibiOn ? 2 : 1];         // for scores in base 2
  float product_slope[kSloped ? 2 : 1];  // for products
  int batch, num_keys, before;           // before: the number of keys before the sequence's first query
  KeyMask key_mask;

  __device__ __forceinline__ void start(const WorkTileParams& p, const WorkTile& t, int head_tile) {
    const int row = row_of_thread();
    before = t.num_keys - t.num_q;
    if constexpr (Config::kMask != 0) batch = t.batch, num_keys = t.num_keys;
    if constexpr (KeyMask::kAny) key_mask.start(p, t.batch, t.q_begin);
    first_of_all = first_visible(p, before + t.token_begin + t.num_tokens - 1);
    end_of_all = end_visible(p, t.num_keys, before + t.token_begin);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int local = token_of_row(p, row + 8 * h);
      const bool there = local < t.num_tokens;
      token[h] = there ? t.token_begin + local : -1;
      head[h] = head_tile * p.heads_of_tile + row + 8 * h - local * p.heads_of_tile;
      position[h] = before + t.token_begin + local;
      first[h] = max(first_visible(p, position[h]), t.first_key);
      end[h] = there ? min(end_visible(p, t.num_keys, position[h]), t.end_key) : 0;
      if constexpr (kAlibiOn)
        slope[h] = there ? p.alibi[t.batch * p.alibi_batch_stride + head[h] * p.alibi_head_stride] * kLog2e : 0.0f;
      if constexpr (kSloped) product_slope[h] = slope[h] * ptx::reciprocal_approx(p.scale * kLog2e);
    }
  }

  // What the terms of a score depend on.
  struct Terms {
    int head, query, before;
    float slope;
  };
  __device__ __forceinline__ Terms terms(int h) const { return {head[h], token[h], before, slope[kAlibiOn ? h : 0]}; }
  // Turns a product into a score in base 2. distance: from key to query, as a float, because conversions occupy the
  // SFU.
  __device__ __forceinline__ static float score_of(const WorkTileParams& p, float s, const Terms& t, int key,
                                                   float distance) {
    if constexpr ((Config::kScore & use::kSoftcap) != 0) {
      s = common::capped_score(s * p.cap_unit, p.cap_level);
    } else {
      s *= p.scale * kLog2e;
    }
    if constexpr ((Config::kScore & use::kAlibi) != 0) s = fmaf(-t.slope, distance, s);
    if constexpr ((Config::kScore & use::kAlibiSqrt) != 0) s -= t.slope * sqrtf(fmaxf(distance, 0.0f));
    if constexpr (kTables) {
      if (t.query >= 0) {
        s += kLog2e * common::table_terms<Config::kScore>(p, t.head, t.query, t.before, key, t.before + t.query - key);
      }
    }
    return s;
  }
  // start: the tile's first key.
  __device__ __forceinline__ void score(const WorkTileParams& p, int start, float (&s)[Config::kKeys / 2]) const {
    const int key = start + threadIdx.x % 4 * 2;  // the thread's first key
    const float distance[2] = {distance_of(0, start), distance_of(1, start)};
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) {
      const int beyond = i / 4 * 8 + i % 2, h = i / 2 % 2;
      s[i] = score_of(p, s[i], terms(h), key + beyond, distance[h] - static_cast<float>(beyond));
    }
  }

  // The distance from the thread's first key of the tile to row h.
  __device__ __forceinline__ float distance_of(int h, int start) const {
    return static_cast<float>(position[h] - start - static_cast<int>(threadIdx.x % 4) * 2);
  }
  // The distance from the thread's first key to the key of register i.
  __device__ __forceinline__ static constexpr float place_of(int i) { return static_cast<float>(i / 4 * 8 + i % 2); }
  // Adds ALiBi relative to the thread's first key.
  __device__ __forceinline__ void add_slope(float (&s)[Config::kKeys / 2]) const {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) s[i] = fmaf(product_slope[kSloped ? i / 2 % 2 : 0], place_of(i), s[i]);
  }
  // The exponent of P by the polynomial. A masked product, -inf, stays -inf.
  template <int kTerms>
  __device__ __forceinline__ static float capped_exponent(const kernels::CapPolynomial<kTerms>& cap, float s,
                                                          float row_max_ref) {
    return capped_exponent(cap, s, s * s, row_max_ref);
  }
  template <int kTerms>
  __device__ __forceinline__ static float capped_exponent(const kernels::CapPolynomial<kTerms>& cap, float s,
                                                          float square, float row_max_ref) {
    float factor = cap.terms[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) factor = fmaf(factor, square, cap.terms[i]);
    return fmaf(s, factor, -row_max_ref);
  }
  // Whether all rows of the warp may use a polynomial, by this thread's row_max of products. Padding rows have queries
  // of another sequence and do not vote: their limit is NaN (Accumulators).
  template <int kTerms>
  __device__ __forceinline__ static bool all_take(const kernels::CapPolynomial<kTerms>& cap, const float (&max)[2],
                                                  const float (&limit)[kCapped ? 2 : 1]) {
    bool both = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) both = both && ((cap.low <= max[h] && max[h] <= cap.high) || is_padding(limit, h));
    return !__any_sync(0xffffffffu, !both);
  }
  // The same if row_max is not far enough above the polynomial's range, but no product is below the range.
  // least_bits(h): the bits of this thread's smallest product of row h.
  template <int kTerms, class LeastBits>
  __device__ __forceinline__ static bool all_take(const kernels::CapPolynomial<kTerms>& cap, const float (&max)[2],
                                                  const float (&limit)[kCapped ? 2 : 1], const LeastBits& least_bits) {
    bool high = false, low[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      high = high || (max[h] > cap.high && !is_padding(limit, h));
      low[h] = max[h] < cap.low && !is_padding(limit, h);
    }
    if (__any_sync(0xffffffffu, high)) return false;
    bool below = low[0] || low[1];
    if (__any_sync(0xffffffffu, below)) {
      const unsigned lowest = __float_as_uint(-cap.high);
      below = (low[0] && least_bits(0) > lowest) || (low[1] && least_bits(1) > lowest);
    }
    return !__any_sync(0xffffffffu, below);
  }
  __device__ __forceinline__ static bool is_padding(const float (&limit)[kCapped ? 2 : 1], int h) {
    const float x = limit[kCapped ? h : 0];
    return x != x;
  }

  // The tiles that need no mask: of the cached tiles or, without a cache, of the dense tiles.
  __device__ __forceinline__ TileSpan whole_tiles(const WorkTile& t, const Tiles& tiles) const {
    const bool cached = Config::kCached && tiles.num_cached_tiles > 0;
    const int base = cached ? 0 : tiles.dense_start, origin = cached ? tiles.cached_begin : 0;
    int low = max(t.first_key, first_of_all), high = min(t.end_key, end_of_all);
    if (cached) high = min(high, t.num_cached);
    return {(max(low - base, 0) + Config::kKeys - 1) / Config::kKeys - origin,
            max(high - base, 0) / Config::kKeys - origin};
  }

  // Bit 2 j + e: this thread's key 8 j + 2 (lane % 4) + e of the tile.
  using KeyBits = typename Conditional<(Config::kKeys > 128), unsigned long long, unsigned>::Type;

  // This thread's keys before key x of the tile.
  __device__ __forceinline__ static KeyBits keys_before(int x) {
    x = min(max(x - static_cast<int>(threadIdx.x % 4) * 2, 0), Config::kKeys);
    const int count = x / 8 * 2 + min(x % 8, 2);
    return count >= static_cast<int>(8 * sizeof(KeyBits)) ? ~KeyBits{0} : (KeyBits{1} << count) - 1;
  }
  __device__ __forceinline__ static KeyBits keys_between(int first, int end) {
    return first < end ? keys_before(end) & ~keys_before(first) : KeyBits{0};
  }
  // Masks the keys of row h that are not in `visible`.
  template <int kCount = Config::kKeys / 2>
  __device__ __forceinline__ static void mask_row(int h, KeyBits visible, float (&s)[Config::kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if ((visible >> i & 1) == 0) s[i / 2 * 4 + 2 * h + i % 2] = -ptx::infinity();
    }
  }
  // The keys of a tile that each row sees by position.
  struct VisibleKeys {
    KeyBits row[2];
  };
  __device__ __forceinline__ VisibleKeys visible_keys(const WorkTileParams& p, const Tile& tile) const {
    return {{visible_by_position(p, tile, 0), visible_by_position(p, tile, 1)}};
  }
  // any_invalid: keys of the tile are on pages that do not exist, according to the TileMask at shared address
  // tile_mask.
  template <int kCount>
  __device__ __forceinline__ void apply_mask(const WorkTileParams& p, const Tile& tile, const VisibleKeys& visible_keys,
                                             bool any_invalid, unsigned tile_mask,
                                             float (&s)[Config::kKeys / 2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      KeyBits visible = visible_keys.row[h];
      if (any_invalid) visible &= ~invalid_keys(tile_mask);
      if constexpr (KeyMask::kAny) visible = visible_key_by_key(p, tile, h, visible);
      mask_row<kCount>(h, visible, s);
    }
  }

 private:
  __device__ __forceinline__ KeyBits visible_by_position(const WorkTileParams& p, const Tile& tile, int h) const {
    // first and end lie within the work tile's keys; ranges and cached tiles may not.
    if constexpr (!common::kMayHaveRanges)
      return keys_between(first[h] - tile.start, (Config::kCached ? min(end[h], tile.high) : end[h]) - tile.start);
    KeyBits visible = keys_between(first[h] - tile.start, end[h] - tile.start);
    for (int i = 0; i < p.num_ranges && token[h] >= 0; ++i) {
      const common::Range range = common::range_at(p, batch, i);
      if (common::holds(range, position[h]))
        visible |= keys_between(max(range.first, 0) - tile.start, min(range.last, num_keys - 1) + 1 - tile.start);
    }
    return visible & keys_between(tile.low - tile.start, tile.high - tile.start);
  }
  __device__ __forceinline__ static KeyBits invalid_keys(unsigned tile_mask) {
    KeyBits keys = 0;
#pragma unroll
    for (int word = 0; word < Config::kKeys / 32; ++word) {
      const unsigned bits = ptx::load_shared_u32(tile_mask + 4 + 4 * word) >> (threadIdx.x % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) keys |= static_cast<KeyBits>(bits >> (8 * j) & 3) << (8 * word + 2 * j);
    }
    return keys;
  }
  __device__ __forceinline__ KeyBits visible_key_by_key(const WorkTileParams& p, const Tile& tile, int h,
                                                        KeyBits visible) const {
    if (token[h] < 0) return 0;
#pragma unroll 4
    for (int i = 0; i < Config::kKeys / 4; ++i) {
      const int key = tile.start + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      if ((visible >> i & 1) != 0 && !key_mask.sees(p, token[h], head[h], key)) visible &= ~(KeyBits{1} << i);
    }
    return visible;
  }
};

}  // namespace attune::prefill
