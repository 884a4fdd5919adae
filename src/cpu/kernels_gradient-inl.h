// SPDX-License-Identifier: Apache-2.0
// Recomputes P of a tile from its lse; the gradient of the scores.

#if defined(ATTUNE_CPU_KERNELS_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTUNE_CPU_KERNELS_GRADIENT_INL_H_
#undef ATTUNE_CPU_KERNELS_GRADIENT_INL_H_
#else
#define ATTUNE_CPU_KERNELS_GRADIENT_INL_H_
#endif

#include "cpu/kernels_common-inl.h"
#include "cpu/kernels_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {

template <bool kCapped>
HWY_INLINE void gradient_row(const GradientTile& t, int i) {
  const DF d;
  const VF none = hn::Set(d, kMinusInf), zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  const VF scale = hn::Set(d, t.scale2), lse = hn::Set(d, t.lse2[i]);
  // What lies between a large score and its rounded lse may be more than 2^ can hold: P of such a row is at most 1.
  const VF most = hn::Set(d, fabsf(t.lse2[i]) < kMostFused ? -kMinusInf : 0.0f);
  const VF share = hn::Set(d, t.share[i]), delta = hn::Set(d, t.delta[i]);
  const VF per_cap = hn::Set(d, kCapped ? 1.0f / t.cap : 0.0f);
  const int64_t row = static_cast<int64_t>(i) * t.ld;
  float* HWY_RESTRICT s = t.s + row;
  float* HWY_RESTRICT g = t.d + row;
  const int columns = (t.n + 15) / 16 * 16;  // a multiple of kLanes
  for (int j = 0; j < columns; j += kLanes) {
    const VF score = hn::LoadU(d, s + j);
    auto seen = hn::Not(hn::Eq(score, none));  // not Ne, which may be false for NaN: a NaN is visible
    if (j + kLanes > t.n) seen = hn::And(seen, hn::FirstN(d, static_cast<size_t>(HWY_MAX(t.n - j, 0))));
    const VF a = exp2(at_most(most, hn::MulSub(score, scale, lse)));
    VF gradient = hn::Mul(a, hn::MulSub(share, hn::LoadU(d, g + j), delta));
    if (kCapped) {
      const VF x = hn::Mul(hn::LoadU(d, t.capped + row + j), per_cap);
      gradient = hn::Mul(gradient, hn::NegMulAdd(x, x, one));
    }
    hn::StoreU(hn::IfThenElse(seen, hn::Mul(a, share), zero), d, s + j);
    hn::StoreU(hn::IfThenElse(seen, gradient, zero), d, g + j);
  }
}

void softmax_gradient(const GradientTile& t) {
  for (int i = 0; i < t.m; ++i) {
    if (t.lse2[i] == kMinusInf) {
      const int columns = (t.n + 15) / 16 * 16;
      for (float* x : {t.s, t.d}) {
        for (int j = 0; j < columns; ++j) x[static_cast<int64_t>(i) * t.ld + j] = 0.0f;
      }
    } else if (t.capped != nullptr) {
      gradient_row<true>(t, i);
    } else {
      gradient_row<false>(t, i);
    }
  }
}

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
