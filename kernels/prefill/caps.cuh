// SPDX-License-Identifier: Apache-2.0
// Softcap's weights: which polynomial takes the tanh's place, group by group of a tile's products.
#pragma once

#include "prefill/weights.cuh"

namespace attune::prefill {

class Caps {
 public:
  // The shortest polynomial that holds for all rows of the warp, by this thread's maxima of products. The widest one holds
  // where no product is beyond its range on either side, which shows group by group.
  __device__ __forceinline__ void choose(const PrefillParams& p, const Accumulators& a) {
    kind_ = kWide;
    if (Rows::all_take(p.cap_short, a.max, a.limit)) {
      kind_ = kShort;
    } else if (Rows::all_take(p.cap_long, a.max, a.limit)) {
      kind_ = kLong;
    }
  }

  // As exponentiate() (weights.cuh). Whether all products are in the range of the polynomial is found out beside the first
  // exponentials, which are taken of a copy. Otherwise the tile takes the tanh, and those after it a longer polynomial.
  // top: the largest bits of exponents that no range keeps small. hide(): has hidden ones of these products weigh nothing.
  template <int kCount, class Hide, class Take, class Last, class BesideLast>
  __device__ __forceinline__ void exponentiate(const PrefillParams& p, int tile, const float (&reference)[2],
                                               const Accumulators& a, float (&s)[Config::kKeys / 2], int& top,
                                               const Hide& hide, const Take& take, const Last& last,
                                               const BesideLast& beside_last) {
    static_assert(kCount % kGroup == 0);
    all_but_last<kCount>(p, tile, reference, a, s, top, hide, take);
    last();
#pragma unroll
    for (int j = kCount - kGroup; j < kCount; ++j) s[j] = ptx::exp2_approx(s[j]);
    if (kTakesBeside && kCount > kGroup) take(kCount - 2 * kGroup, kCount - kGroup);
    beside_last();
  }

 private:
  enum : int { kShort, kLong, kWide };
  static constexpr int kNone = static_cast<int>(0x80000000u);

  template <int kCount, class Hide, class Take>
  __device__ __forceinline__ void all_but_last(const PrefillParams& p, int tile, const float (&reference)[2],
                                               const Accumulators& a, float (&s)[Config::kKeys / 2], int& top,
                                               const Hide& hide, const Take& take) {
    int limit[2];
    find_limits(p, a, limit);
    if (kind_ == kShort) {
      if (attempt<kCount, false>(p.cap_short, tile, reference, limit, s, take)) return;
    } else if (kind_ == kLong) {
      if (attempt<kCount, false>(p.cap_long, tile, reference, limit, s, take)) return;
    } else {
      if (attempt<kCount, true>(p.cap_wide, tile, reference, limit, s, take)) return;
    }
    if (Config::kLate && kind_ != kWide) ++kind_;  // a maximum that is high enough for a polynomial is so for a longer one
#pragma unroll
    for (int j = 0; j < kCount; ++j) s[j] = Rows::score_of(p, s[j], {}, 0, 0.0f) - reference[j / 2 % 2];
    hide();
    if (Config::kLate) raise_top(0, kCount, s, top);
#pragma unroll
    for (int j = 0; j < kCount - kGroup; ++j) s[j] = ptx::exp2_approx(s[j]);
    if (kTakesBeside) take(0, kCount - 2 * kGroup);
  }

  // kBoth: the range has two ends.
  template <int kCount, bool kBoth, int kTerms, class Take>
  __device__ __forceinline__ static bool attempt(const kernels::CapPolynomial<kTerms>& cap, int tile,
                                                 const float (&reference)[2], const int (&limit)[2],
                                                 float (&s)[Config::kKeys / 2], const Take& take) {
    if (!holds<kCount, kBoth>(s, limit)) return false;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) s[j] = Rows::capped_exponent(cap, s[j], reference[j / 2 % 2]);
#pragma unroll
    for (int first = 0; first < kCount - kGroup; first += kGroup) {
      do {
#pragma unroll
      for (int j = first; j < first + kGroup; ++j) {
        s[j] = ptx::exp2_approx(s[j]);
        s[j + kGroup] = Rows::capped_exponent(cap, s[j + kGroup], reference[j / 2 % 2]);
      }
      if (kTakesBeside && first > 0) take(first - kGroup, first);
      } while (static_cast<int>(ptx::kept(tile)) < 0);
    }
    return true;
  }

  // The largest bits of a product of row h that the polynomial holds for and whose weight is not too large. Who is not
  // there has none.
  __device__ __forceinline__ void find_limits(const PrefillParams& p, const Accumulators& a, int (&limit)[2]) const {
    const float high = kind_ == kShort ? p.cap_short.high : kind_ == kLong ? p.cap_long.high : p.cap_wide.high;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = Config::kLate ? fminf(high, a.limit[h]) : high;
      limit[h] = Rows::is_absent(a.limit, h) ? 0x7fffffff : most > 0.0f ? bits_of(most) : kNone;
    }
  }

  // Whether all products are within the limits: where maxima come first that is known, but for what is below.
  template <int kCount, bool kBoth>
  __device__ __forceinline__ static bool holds(const float (&s)[Config::kKeys / 2], const int (&limit)[2]) {
    if (!Config::kLate && !kBoth) return true;
    bool beyond = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int top[kChains];
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float first = s[4 * i + 2 * h], second = s[4 * i + 2 * h + 1];
        int& x = top[i % kChains];
        if (i < kChains) x = kNone;
        x = max(max(x, bits_of(kBoth ? fabsf(first) : first)), bits_of(kBoth ? fabsf(second) : second));
      }
#pragma unroll
      for (int j = 1; j < kChains; ++j) top[0] = max(top[0], top[j]);
      beyond = beyond || top[0] > limit[h];
    }
    return !__any_sync(0xffffffffu, beyond);
  }

  int kind_ = kWide;
};

}  // namespace attune::prefill
