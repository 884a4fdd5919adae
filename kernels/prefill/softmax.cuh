// SPDX-License-Identifier: Apache-2.0
// Online softmax of a consumer warpgroup: S becomes P, in place and as a wgmma operand; row_max_ref is updated. The
// arithmetic of a tile is in softmax_ops.cuh.
#pragma once

#include "prefill/accumulators.cuh"
#include "prefill/block.cuh"
#include "prefill/softmax_ops.cuh"
#include "ptx/convert.cuh"

namespace attune::prefill {

class Softmax {
 protected:
  __device__ __forceinline__ Softmax(const WorkTileParams& p, const Smem& smem)
      : p_(p), smem_(smem), c_(Rows::kProducts ? p.scale * kLog2e : 1.0f) {}

  // A work tile may have dense tiles and tiles in the cache's form. Dense tiles come first and use q's type.
  static constexpr bool kTwoForms = (Config::kQuantized || Config::kXpacked) && Config::kDense;

  // O is rescaled only if P would exceed 2^kRescaleThreshold, which is rare after the first tile. The largest P is then
  // 2^kMaxOffset. fp16 drops numbers below 2^-25, so P in fp16 starts as high as its range allows.
  template <bool kCacheForm>
  static constexpr float kMaxOffset = kCacheForm && Config::kFp16P ? 7 : 0;
  template <bool kCacheForm>
  static constexpr float kRescaleThreshold = 8 + kMaxOffset<kCacheForm>;
  static constexpr int kLastGroup = Config::kKeys / 2 - kExpGroup;  // registers of S before the last group
  // With a deferred max, row_max_ref is raised if P is larger than this.
  static constexpr float kMaxP = Config::kType == common::kBFloat16 ? 0x1p64f : 0x1p15f;

  // Turns row h's max of products into a score in base 2.
  __device__ __forceinline__ float scaled_score(float max, int h) const {
    return Rows::kCapped ? Rows::score_of(p_, max, {}, 0, 0.0f) : max * score_scale(h);
  }
  __device__ __forceinline__ float score_scale(int h) const {
    return Config::kQuantized && Rows::kPlain ? factor_[h] : c_;
  }
  // Whether the stage of K is released only after P is packed, because the scales of the tile are stored beside K.
  template <bool kCacheForm>
  static constexpr bool kReleaseKAfterPack = Config::kCached && !(kCacheForm && Config::kFp16P);

  static constexpr int kScores = Config::kKeys / 2;  // of both rows

  // Turns S into P in place, updates row_max and row_max_ref, and sets `rescale` for what has been accumulated. Returns
  // whether a row of the warp is rescaled. kCount: registers in use. nonnegative: all_nonnegative(a.row_max), unused in
  // a first tile.
  template <bool kCacheForm, int kCount = kScores, bool kFirst = false, class Last = NoOp,
            class OverlapLast = NoOp>
  __device__ __forceinline__ bool online_softmax(const Rows& rows, const WorkTile& work, const Tiles& tiles, int i,
                                                 const TileSpan& whole, bool nonnegative, float (&s)[Config::kKeys / 2],
                                                 float (&rescale)[2], Accumulators& a,
                                                 const Rows::VisibleKeys* visible_keys = nullptr, const Last& last = {},
                                                 const OverlapLast& overlap_last = {}) {
    // Such tiles are always cached. The branch, here and below, stops ptxas from loading all scales early, which
    // spills.
    if (kCacheForm && Config::kKeyFactors && tiles.is_cached(i))
      scale_columns(smem_.scales(k_pipe_.stage, false), s);
    if constexpr (kCacheForm && Config::kQuantized && !Rows::kPlain) scale_rows(factor_, s);
    const int start = tiles.start(i);
    if constexpr (Rows::kSloped && !Config::kDeferredMax) rows.add_slope(s);
    if constexpr (!Rows::kProducts) rows.score(p_, start, s);
    const auto apply_mask = [&] { return mask_edge<kCount>(rows, work, tiles, i, whole, s, visible_keys); };
    const bool edge = apply_mask();
    if (Config::kCached && !kReleaseKAfterPack<kCacheForm>) release_k();
    rescale[0] = rescale[1] = 1.0f;
    bool rescales = false;
    if (!Config::kDeferredMax || needs_row_max_) {
      const bool max_nonnegative = Config::kDeferredMax && !kFirst ? all_nonnegative(a.row_max) : nonnegative;
      if constexpr (kSlopedDeferredMax) {
        float sloped[Config::kKeys / 2];
#pragma unroll
        for (int j = 0; j < kCount; ++j) sloped[j] = s[j];
        rows.add_slope(sloped);
        update_row_max<kCount, kFirst>(rows, start, sloped, max_nonnegative, a);
      } else {
        update_row_max<kCount, kFirst>(rows, start, s, max_nonnegative, a);
      }
      rescales = update_row_max_ref<kCacheForm, kFirst>(rescale, a);
      needs_row_max_ =
          p_.max_logits != nullptr || __any_sync(0xffffffffu, needs_next_max(rows, a, 0) || needs_next_max(rows, a, 1));
    }
    float row_max_ref[2], c[2] = {score_scale(0), score_scale(1)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max_ref[h] = finite_row_max(a.row_max_ref[h]);
      if constexpr (Rows::kSloped) row_max_ref[h] = fmaf(rows.slope[h], rows.distance_of(h, start), row_max_ref[h]);
    }
    p_max_bits_ = 0;
    const auto reduce = [&](int first, int end) { reduce_p(first, end, s, a); };
    if constexpr (Rows::kCapped) {
      if (Rows::all_take(p_.cap_short, a.row_max, a.row_max_limit)) {
        exponentiate<kCount>(
            i, s, [&](int j) { return Rows::capped_exponent(p_.cap_short, s[j], row_max_ref[j / 2 % 2]); }, reduce);
        return rescales;
      }
      if (Rows::all_take(p_.cap_long, a.row_max, a.row_max_limit)) {
        exponentiate<kCount>(
            i, s, [&](int j) { return Rows::capped_exponent(p_.cap_long, s[j], row_max_ref[j / 2 % 2]); }, reduce);
        return rescales;
      }
      if (Rows::all_take(p_.cap_wide, a.row_max, a.row_max_limit, [&](int h) { return least_bits<kCount>(s, h); })) {
        exponentiate<kCount>(
            i, s, [&](int j) { return Rows::capped_exponent(p_.cap_wide, s[j], row_max_ref[j / 2 % 2]); }, reduce);
        return rescales;
      }
      rows.score(p_, start, s);
      if (edge) apply_mask();  // a finite score may have replaced -inf
      c[0] = c[1] = 1;
    }
    // The slope is added last; otherwise the compiler moves what depends on it alone to before the group.
    const auto exponent = [&](int j) {
      const int h = j / 2 % 2;
      const float x = fmaf(s[j], c[h], -row_max_ref[h]);
      return kSlopedDeferredMax ? fmaf(rows.slope[Rows::kSloped ? h : 0], Rows::place_of(j), x) : x;
    };
    exponentiate<kCount>(i, s, exponent, reduce, last, overlap_last);
    return rescales;
  }

  static constexpr bool kSlopedDeferredMax = Rows::kSloped && Config::kDeferredMax;
  // Whether row h needs its max before the next tile's exponentials: it has no row_max_ref yet, or its ALiBi slope lets
  // scores grow from tile to tile without bound.
  __device__ __forceinline__ static bool needs_next_max(const Rows& rows, const Accumulators& a, int h) {
    return a.row_max_ref[h] == -ptx::infinity() || (kSlopedDeferredMax && rows.slope[Rows::kSloped ? h : 0] < 0.0f);
  }

  // Masks a tile at an edge with -inf. Returns whether the tile is at an edge.
  template <int kCount = kScores>
  __device__ __forceinline__ bool mask_edge(const Rows& rows, const WorkTile& work, const Tiles& tiles, int i,
                                            const TileSpan& whole, float (&s)[Config::kKeys / 2],
                                            const Rows::VisibleKeys* visible_keys = nullptr) const {
    const unsigned tile_mask = Config::kCached ? smem_.mask(k_pipe_.stage) : 0;
    const bool any_invalid = Config::kCached && ptx::load_shared_u32(tile_mask) != 0;
    if (!Rows::KeyMask::kAny && !any_invalid && whole.has(i)) return false;
    const Tile tile = tile_at(work, tiles, i);
    rows.template apply_mask<kCount>(p_, tile, visible_keys != nullptr ? *visible_keys : rows.visible_keys(p_, tile),
                                     any_invalid, tile_mask, s);
    return true;
  }

  // Updates row_max_ref if row_max is too far above it, and always in a first tile. Returns whether any row_max_ref of
  // the warp was updated.
  template <bool kCacheForm, bool kFirst>
  __device__ __forceinline__ bool update_row_max_ref(float (&rescale)[2], Accumulators& a) const {
    const auto is_far = [&](int h) {
      return Rows::kCapped ? a.row_max[h] > a.row_max_limit[Rows::kCapped ? h : 0]
                           : a.row_max[h] * score_scale(h) - a.row_max_ref[h] > kRescaleThreshold<kCacheForm>;
    };
    if (!kFirst && !__any_sync(0xffffffffu, is_far(0) || is_far(1))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (kThreadRowMax) a.row_max[h] = quad_max(a.row_max[h]);
      if (is_far(h)) {
        float level = scaled_score(a.row_max[h], h) - kMaxOffset<kCacheForm>;
        if (Config::kDeferredMaxSoftcap) level = fmaxf(level, a.row_max_ref[h]);  // it may already be above row_max
        rescale[h] = ptx::exp2_approx(a.row_max_ref[h] - level);
        a.row_sum[h] *= rescale[h];
        a.row_max_ref[h] = level;
        if constexpr (Rows::kCapped)  // scores grow more slowly than products
          a.row_max_limit[h] =
              a.row_max[h] + (Config::kDeferredMaxSoftcap ? kRescaleThreshold<kCacheForm> * ptx::reciprocal_approx(c_)
                                                          : kRescaleThreshold<kCacheForm> / c_);
      }
    }
    return true;
  }

  // With softcap: once all row maxima are known to be small, a short polynomial replaces tanh and row_max_ref stays.
  // Beyond its range the polynomial grows faster than tanh, so P shows afterwards whether a score left the range.
  __device__ __forceinline__ bool may_defer_max(const Accumulators& a) const {
    return Rows::all_take(p_.cap_short, a.row_max, a.row_max_limit);
  }
  // Turns S of such a tile into P in place. The last group is not in row_sum yet.
  template <class Last, class OverlapLast>
  __device__ __forceinline__ void softmax_softcap_deferred(int i, float (&s)[Config::kKeys / 2], Accumulators& a,
                                                           const Last& last, const OverlapLast& overlap_last) const {
    const float row_max_ref[2] = {finite_row_max(a.row_max_ref[0]), finite_row_max(a.row_max_ref[1])};
    exponentiate<kScores, true>(
        i, s, [&](int j) { return Rows::capped_exponent(p_.cap_short, s[j], row_max_ref[j / 2 % 2]); },
        [&](int first, int end) { add_row_sum(first, end, s, a); }, last, overlap_last);
  }
  // Whether a score of the thread's rows may have left the range; `edge` is the score at the end of the range. The test
  // is conservative: P is not negative, so a tile's sum is at least its largest P.
  __device__ __forceinline__ static bool may_exceed_range(const float (&added)[2], float edge, const Accumulators& a) {
    bool beyond[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = ptx::exp2_approx(edge - finite_row_max(a.row_max_ref[h]));
      beyond[h] = !(added[h] <= largest) & !Rows::is_padding(a.row_max_limit, h);
    }
    return beyond[0] | beyond[1];
  }

  // Sets the limits of softmax_softcap_small(). Its polynomial of two terms is valid in its range only, so squares of
  // products are tested. limit[h] is the largest allowed square of row h as integer bits, which also keeps P in range.
  // Padding rows allow any square. A negative limit means that the row has not started with small products.
  __device__ __forceinline__ void find_limits(const Accumulators& a, int (&limit)[2]) const {
    constexpr float kPowers = Config::kType == common::kBFloat16 ? 64 : 15;  // log2 of kMaxP
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float high = fminf(p_.cap_small.high, (a.row_max_ref[h] + kPowers) * ptx::reciprocal_approx(c_));
      const bool begun = fabsf(a.row_max[h]) <= high && high > 0.0f;
      limit[h] = Rows::is_padding(a.row_max_limit, h) ? 0x7fffffff : begun ? bits_of(high * high) : -1;
    }
  }
  template <class Last, class OverlapLast>
  __device__ __forceinline__ bool softmax_softcap_small(int i, float (&s)[Config::kKeys / 2], const int (&limit)[2],
                                                        Accumulators& a, const Last& last,
                                                        const OverlapLast& overlap_last) const {
    const float row_max_ref[2] = {a.row_max_ref[0], a.row_max_ref[1]};
    int top[2] = {0, 0};
    float before = 0.0f;
    exponentiate<kScores, true>(
        i, s,
        [&](int j) {
          const int h = j / 2 % 2;
          const float square = s[j] * s[j];
          if (j % 2 == 0)
            before = square;
          else
            top[h] = max(max(top[h], bits_of(before)), bits_of(square));
          return Rows::capped_exponent(p_.cap_small, s[j], square, row_max_ref[h]);
        },
        [&](int first, int end) { add_row_sum(first, end, s, a); }, last, overlap_last);
    return top[0] > limit[0] || top[1] > limit[1];
  }

  // Adds P of registers first..end - 1 to row_sum and, with a deferred max, to the largest P.
  template <bool kPairs = false>
  __device__ __forceinline__ void reduce_p(int first, int end, const float (&s)[Config::kKeys / 2], Accumulators& a) {
    add_row_sum<kPairs>(first, end, s, a);
    if (Config::kDeferredMax) update_p_max_bits(first, end, s, p_max_bits_);
  }

  // Deferred rescale: raises row_max_ref of rows whose P is too large, by whole powers of two, which round nothing. An
  // infinite P stays infinite, and the row is recomputed (recompute.cuh).
  template <bool kCacheForm>
  __device__ __forceinline__ static void raise_row_max_ref(const float (&s)[Config::kKeys / 2], float (&rescale)[2],
                                                           Accumulators& a, unsigned (&p_regs)[Config::kPRegs]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int top = 0;
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j)
        top = max(max(top, bits_of(s[4 * j + 2 * h])), bits_of(s[4 * j + 2 * h + 1]));
      top = quad_max(top);
      if (top <= bits_of(kMaxP)) continue;
      const int powers = min((top >> 23) - 127, 126);
      const float factor = __uint_as_float(static_cast<unsigned>(127 - powers) << 23);
      rescale[h] *= factor;
      a.row_sum[h] *= factor;
      a.row_max_ref[h] += static_cast<float>(powers);
#pragma unroll
      for (int i = h; i < Config::kKeys / 4; i += 2)
        p_regs[i] = pack_p_pair<kCacheForm>(s[2 * i] * factor, s[2 * i + 1] * factor);
    }
  }

  template <bool kCacheForm>
  __device__ __forceinline__ void scale_p(bool cached, float (&s)[Config::kKeys / 2]) const {
    if (kCacheForm && Config::kKeyFactors && cached) scale_columns(smem_.scales(k_pipe_.stage, true), s);
  }
  // Packs P of registers kFirst..kEnd - 1 as a wgmma operand.
  template <bool kCacheForm, int kFirst = 0, int kEnd = Config::kKeys / 2>
  __device__ __forceinline__ static void pack_p(const float (&s)[Config::kKeys / 2],
                                                unsigned (&p_regs)[Config::kPRegs]) {
#pragma unroll
    for (int i = kFirst / 2; i < kEnd / 2; ++i) {
      p_regs[i] = pack_p_pair<kCacheForm>(s[2 * i], s[2 * i + 1]);
      if constexpr (kCacheForm && Config::kPParts == 2) {  // the remainder after rounding to bf16
        p_regs[Config::kKeys / 4 + i] = pack_p_pair<kCacheForm>(
            s[2 * i] - __uint_as_float(p_regs[i] << 16), s[2 * i + 1] - __uint_as_float(p_regs[i] & 0xffff0000u));
      }
    }
  }
  template <bool kCacheForm>
  __device__ __forceinline__ static unsigned pack_p_pair(float x, float y) {
    return Config::kPvMmaType<kCacheForm> == ptx::Type::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
  }

  __device__ __forceinline__ void release_k() {
    if (Config::kCached) __syncwarp();  // all lanes have read the scales and masks beside K
    release_stage(smem_.k_empty(k_pipe_.stage));
    k_pipe_.next<Config::kStages>();
  }

  const WorkTileParams& p_;
  const Smem& smem_;
  const float c_;
  float factor_[2];            // the scale of products with fp16 queries; includes c_ if scores need nothing else
  bool needs_row_max_ = true;  // some row has no row_max_ref yet, or max_logits are wanted
  int p_max_bits_ = 0;         // the largest P of the tile, as integer bits
  PipelineState k_pipe_;
};

}  // namespace attune::prefill
