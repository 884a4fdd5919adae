// SPDX-License-Identifier: Apache-2.0
// The softmax of a warpgroup's tile: products become weights, in place and as an operand, and references follow maxima.
#pragma once

#include "prefill/accumulators.cuh"
#include "prefill/softmax_ops.cuh"
#include "ptx/convert.cuh"

namespace attune::prefill {

class Softmax {
 protected:
  __device__ __forceinline__ Softmax(const PrefillParams& p, const Smem& smem)
      : p_(p), smem_(smem), c_(Rows::kProducts ? p.scale * kLog2e : 1.0f) {}

  // A work tile may have tiles of codes, or x-packed ones, and others, which come first: those meet q as it is.
  static constexpr bool kTwoKinds = (Config::kConverts || Config::kXpacked) && Config::kDense;

  // Weights may reach 2^kMost before o is rescaled, which is seldom after the first tile; then the largest is 2^kLift.
  // fp16 loses what is below 2^-25, so those weights begin as high as their range allows.
  template <bool kCodes>
  static constexpr float kLift = kCodes && Config::kHalfWeights ? 7 : 0;
  template <bool kCodes>
  static constexpr float kMost = 8 + kLift<kCodes>;
  static constexpr int kBeforeLast = Config::kKeys / 2 - kGroup;  // weights
  // With late maxima references rise where weights are larger than this.
  static constexpr float kLargest = Config::kType == tile::kBFloat16 ? 0x1p64f : 0x1p15f;

  // Of a maximum of row h's products: the score in base 2.
  __device__ __forceinline__ float level_of(float max, int h) const {
    return Rows::kCapped ? Rows::score_of(p_, max, {}, 0, 0.0f) : max * unit(h);
  }
  __device__ __forceinline__ float unit(int h) const { return Config::kConverts && Rows::kPlain ? factor_[h] : c_; }
  // Whether keys are handed back after the weights are packed, because scales lie beside them.
  template <bool kCodes>
  static constexpr bool kReleasesLate = Config::kCached && !(kCodes && Config::kHalfWeights);

  static constexpr int kKeysOfThread = Config::kKeys / 2;  // of two rows together

  // Products to weights in place, and how much what came before counts less: whether that is so for a row of the warp.
  // kCount: registers that have products; high: all_high(a.max), but of a first tile.
  template <bool kCodes, int kCount = kKeysOfThread, bool kFirst = false, class Last = Nothing,
            class BesideLast = Nothing>
  __device__ __forceinline__ bool weigh(const Rows& rows, const WorkTile& work, const Line& line, int i,
                                        const Run& whole, bool high, float (&s)[Config::kKeys / 2], float (&lowered)[2],
                                        Accumulators& a, const Rows::View* view = nullptr, const Last& last = {},
                                        const BesideLast& beside_last = {}) {
    if constexpr (kCodes && Config::kTokenScales) multiply_columns(smem_.scales(k_pipe_.stage, false), s);
    if constexpr (kCodes && Config::kConverts && !Rows::kPlain) multiply_rows(factor_, s);
    const int start = line.start(i);
    if constexpr (Rows::kSloped && !Config::kLate) rows.add_slope(s);
    if constexpr (!Rows::kProducts) rows.score(p_, start, s);
    const auto hide = [&] { return hide_edge<kCount>(rows, work, line, i, whole, s, view); };
    const bool edge = hide();
    if (Config::kCached && !kReleasesLate<kCodes>) release_keys();
    lowered[0] = lowered[1] = 1.0f;
    bool lowers = false;
    if (!Config::kLate || takes_maxima_) {
      const bool none_is_negative = Config::kLate && !kFirst ? all_high(a.max) : high;
      if constexpr (kSlopedLate) {
        float sloped[Config::kKeys / 2];
#pragma unroll
        for (int j = 0; j < kCount; ++j) sloped[j] = s[j];
        rows.add_slope(sloped);
        raise<kCount, kFirst>(rows, start, sloped, none_is_negative, a);
      } else {
        raise<kCount, kFirst>(rows, start, s, none_is_negative, a);
      }
      lowers = follow<kCodes, kFirst>(lowered, a);
      takes_maxima_ = p_.max_logits != nullptr || __any_sync(0xffffffffu, waits(rows, a, 0) || waits(rows, a, 1));
    }
    float reference[2], c[2] = {unit(0), unit(1)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = reference_of(a.reference[h]);
      if constexpr (Rows::kSloped) reference[h] = fmaf(rows.slope[h], rows.distance_of(h, start), reference[h]);
    }
    top_ = 0;
    const auto taken = [&](int first, int end) { take(first, end, s, a); };
    if constexpr (Rows::kCapped) {
      if (Rows::all_take(p_.cap_short, a.max, a.limit)) {
        exponentiate<kCount>(
            i, s, [&](int j) { return Rows::capped_exponent(p_.cap_short, s[j], reference[j / 2 % 2]); }, taken);
        return lowers;
      }
      if (Rows::all_take(p_.cap_long, a.max, a.limit)) {
        exponentiate<kCount>(
            i, s, [&](int j) { return Rows::capped_exponent(p_.cap_long, s[j], reference[j / 2 % 2]); }, taken);
        return lowers;
      }
      if (Rows::all_take(p_.cap_wide, a.max, a.limit, [&](int h) { return least_bits<kCount>(s, h); })) {
        exponentiate<kCount>(
            i, s, [&](int j) { return Rows::capped_exponent(p_.cap_wide, s[j], reference[j / 2 % 2]); }, taken);
        return lowers;
      }
      rows.score(p_, start, s);
      if (edge) hide();  // the least product has a finite score
      c[0] = c[1] = 1;
    }
    // The slope last: the compiler would take what hangs on it alone before the group.
    const auto exponent = [&](int j) {
      const int h = j / 2 % 2;
      const float x = fmaf(s[j], c[h], -reference[h]);
      return kSlopedLate ? fmaf(rows.slope[Rows::kSloped ? h : 0], Rows::place_of(j), x) : x;
    };
    exponentiate<kCount>(i, s, exponent, taken, last, beside_last);
    return lowers;
  }

  static constexpr bool kSlopedLate = Rows::kSloped && Config::kLate;
  // Whether row h needs its maximum of the next tile, too: it has no reference yet, or its scores may grow from tile to
  // tile by more than weights can.
  __device__ __forceinline__ static bool waits(const Rows& rows, const Accumulators& a, int h) {
    return a.reference[h] == -ptx::infinity() || (kSlopedLate && rows.slope[Rows::kSloped ? h : 0] < 0.0f);
  }

  // Replaces what is hidden of a tile at an edge by -inf: whether it is one.
  template <int kCount = kKeysOfThread>
  __device__ __forceinline__ bool hide_edge(const Rows& rows, const WorkTile& work, const Line& line, int i,
                                            const Run& whole, float (&s)[Config::kKeys / 2],
                                            const Rows::View* view = nullptr) const {
    const unsigned hidden = Config::kCached ? smem_.mask(k_pipe_.stage) : 0;
    const bool flagged = Config::kCached && ptx::load_shared_u32(hidden) != 0;
    if (!Rows::kBits && !flagged && whole.has(i)) return false;
    const Tile tile = tile_at(work, line, i);
    rows.template hide<kCount>(p_, tile, view != nullptr ? *view : rows.view(p_, tile), flagged, hidden, s);
    return true;
  }

  // Has references follow maxima that are too far ahead: whether one of the warp's is. Of a first tile all are.
  template <bool kCodes, bool kFirst>
  __device__ __forceinline__ bool follow(float (&lowered)[2], Accumulators& a) const {
    const auto is_far = [&](int h) {
      return Rows::kCapped ? a.max[h] > a.limit[Rows::kCapped ? h : 0]
                           : a.max[h] * unit(h) - a.reference[h] > kMost<kCodes>;
    };
    if (!kFirst && !__any_sync(0xffffffffu, is_far(0) || is_far(1))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (kOwnMaxima) a.max[h] = max_of_row(a.max[h]);
      if (is_far(h)) {
        float level = level_of(a.max[h], h) - kLift<kCodes>;
        if (Config::kLateCaps) level = fmaxf(level, a.reference[h]);  // it may have risen without the maximum
        lowered[h] = ptx::exp2_approx(a.reference[h] - level);
        a.sum[h] *= lowered[h];
        a.reference[h] = level;
        if constexpr (Rows::kCapped)  // scores grow more slowly than products
          a.limit[h] = a.max[h] + (Config::kLateCaps ? kMost<kCodes> * ptx::reciprocal_approx(c_) : kMost<kCodes> / c_);
      }
    }
    return true;
  }

  // With softcap, once all maxima are known to be small, the short polynomial takes the tanh's place, and references
  // stay. It grows beyond its range, too, faster than the tanh, and so weights tell whether a product is beyond.
  __device__ __forceinline__ bool may_be_late(const Accumulators& a) const {
    return Rows::all_take(p_.cap_short, a.max, a.limit);
  }
  // Products of such a tile to weights in place. The last ones are not in the sums yet.
  template <class Last, class BesideLast>
  __device__ __forceinline__ void weigh_late_caps(int i, float (&s)[Config::kKeys / 2], Accumulators& a,
                                                  const Last& last, const BesideLast& beside_last) const {
    const float reference[2] = {reference_of(a.reference[0]), reference_of(a.reference[1])};
    exponentiate<kKeysOfThread, true>(
        i, s, [&](int j) { return Rows::capped_exponent(p_.cap_short, s[j], reference[j / 2 % 2]); },
        [&](int first, int end) { add_up(first, end, s, a); }, last, beside_last);
  }
  // Whether a product of the thread's rows may have been beyond the range, whose end has the score `edge`: the sum of a
  // tile's weights, of which none is negative, is no less than the largest.
  __device__ __forceinline__ static bool may_be_beyond(const float (&added)[2], float edge, const Accumulators& a) {
    bool beyond[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = ptx::exp2_approx(edge - reference_of(a.reference[h]));
      beyond[h] = !(added[h] <= largest) & !Rows::is_absent(a.limit, h);
    }
    return beyond[0] | beyond[1];
  }

  // The same with the polynomial of two terms, which is for products in its range alone: squares tell. Those of row h
  // may be up to limit[h], as bits, beyond which weights would leave their range, too; of rows that are not there
  // anything. Whether a row has begun with such products; where one has not the limit is negative.
  __device__ __forceinline__ void find_limits(const Accumulators& a, int (&limit)[2]) const {
    constexpr float kPowers = Config::kType == tile::kBFloat16 ? 64 : 15;  // kLargest
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float high = fminf(p_.cap_small.high, (a.reference[h] + kPowers) * ptx::reciprocal_approx(c_));
      const bool begun = fabsf(a.max[h]) <= high && high > 0.0f;
      limit[h] = Rows::is_absent(a.limit, h) ? 0x7fffffff : begun ? bits_of(high * high) : -1;
    }
  }
  template <class Last, class BesideLast>
  __device__ __forceinline__ bool weigh_small_caps(int i, float (&s)[Config::kKeys / 2], const int (&limit)[2],
                                                   Accumulators& a, const Last& last,
                                                   const BesideLast& beside_last) const {
    const float reference[2] = {a.reference[0], a.reference[1]};
    int top[2] = {0, 0};
    float before = 0.0f;
    exponentiate<kKeysOfThread, true>(
        i, s,
        [&](int j) {
          const int h = j / 2 % 2;
          const float square = s[j] * s[j];
          if (j % 2 == 0) before = square;
          else top[h] = max(max(top[h], bits_of(before)), bits_of(square));
          return Rows::capped_exponent(p_.cap_small, s[j], square, reference[h]);
        },
        [&](int first, int end) { add_up(first, end, s, a); }, last, beside_last);
    return top[0] > limit[0] || top[1] > limit[1];
  }

  // Weights first..end - 1.
  template <bool kPairs = false>
  __device__ __forceinline__ void take(int first, int end, const float (&s)[Config::kKeys / 2], Accumulators& a) {
    add_up<kPairs>(first, end, s, a);
    if (Config::kLate) raise_top(first, end, s, top_);
  }

  // Has references rise where weights are too large, by whole powers of two: nothing is rounded. A weight that is
  // infinite stays that, and the row is computed again (recompute.cuh).
  template <bool kCodes>
  __device__ __forceinline__ static void lower(const float (&s)[Config::kKeys / 2], float (&lowered)[2],
                                               Accumulators& a, unsigned (&weights)[Config::kWeights]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int top = 0;
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j)
        top = max(max(top, bits_of(s[4 * j + 2 * h])), bits_of(s[4 * j + 2 * h + 1]));
      top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
      if (top <= bits_of(kLargest)) continue;
      const int powers = min((top >> 23) - 127, 126);
      const float factor = __uint_as_float(static_cast<unsigned>(127 - powers) << 23);
      lowered[h] *= factor;
      a.sum[h] *= factor;
      a.reference[h] += static_cast<float>(powers);
#pragma unroll
      for (int i = h; i < Config::kKeys / 4; i += 2)
        weights[i] = pack_pair<kCodes>(s[2 * i] * factor, s[2 * i + 1] * factor);
    }
  }

  template <bool kCodes>
  __device__ __forceinline__ void scale_weights(float (&s)[Config::kKeys / 2]) const {
    if constexpr (kCodes && Config::kTokenScales) multiply_columns(smem_.scales(k_pipe_.stage, true), s);
  }
  // Weights kFirst..kEnd - 1 as an operand.
  template <bool kCodes, int kFirst = 0, int kEnd = Config::kKeys / 2>
  __device__ __forceinline__ static void pack(const float (&s)[Config::kKeys / 2],
                                              unsigned (&weights)[Config::kWeights]) {
#pragma unroll
    for (int i = kFirst / 2; i < kEnd / 2; ++i) {
      weights[i] = pack_pair<kCodes>(s[2 * i], s[2 * i + 1]);
      if constexpr (kCodes && Config::kWeightParts == 2) {  // what bf16 has left out
        weights[Config::kKeys / 4 + i] = pack_pair<kCodes>(s[2 * i] - __uint_as_float(weights[i] << 16),
                                                           s[2 * i + 1] - __uint_as_float(weights[i] & 0xffff0000u));
      }
    }
  }
  template <bool kCodes>
  __device__ __forceinline__ static unsigned pack_pair(float x, float y) {
    return Config::kValuesProduct<kCodes> == ptx::Type::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
  }

  __device__ __forceinline__ void release_keys() {
    if (Config::kCached) __syncwarp();  // all lanes have read what lies beside the keys
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.k_empty(k_pipe_.stage));
    k_pipe_.next<Config::kStages>();
  }

  const PrefillParams& p_;
  const Smem& smem_;
  const float c_;
  float factor_[2];           // of products with fp16 queries, c_ included where all are only multiplied
  bool takes_maxima_ = true;  // some row has no reference yet, or maxima are asked for
  int top_ = 0;               // the largest bits of a tile's weights
  PipelineState k_pipe_;
};

}  // namespace attune::prefill
