// SPDX-License-Identifier: Apache-2.0
// Loads, stores and conversions shared by the per-target kernels. Included once for each Highway target.

#if defined(ATTUNE_CPU_KERNELS_COMMON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTUNE_CPU_KERNELS_COMMON_INL_H_
#undef ATTUNE_CPU_KERNELS_COMMON_INL_H_
#else
#define ATTUNE_CPU_KERNELS_COMMON_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu/kernels.h"

// Register tiles are arrays. Compilers keep them in registers only if every loop over them is unrolled.
#undef ATTUNE_UNROLL
#if defined(__clang__)
#define ATTUNE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ATTUNE_UNROLL _Pragma("GCC unroll 16")
#endif

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::ScalableTag<int32_t>;
using DU = hn::ScalableTag<uint32_t>;
using DU16 = hn::Rebind<uint16_t, DF>;  // as many lanes as DF
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
// AVX-512 and NEON have 32 vector registers, the others 16.
constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON;

HWY_INLINE VF widen(hn::Vec<DU16> bits) { return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits))); }

HWY_INLINE VF load(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE VF load(const bf16_t* p) { return widen(hn::LoadU(DU16(), p)); }

// The first n < kLanes elements; nothing behind them is touched. The other lanes hold `fill`.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_first(D d, const T* p, int n, T fill = T{0}) {
#if HWY_TARGET <= HWY_AVX3
  const auto mask = hn::FirstN(d, static_cast<size_t>(n));
  return hn::IfThenElse(mask, hn::MaskedLoad(mask, d, p), hn::Set(d, fill));
#else
  HWY_ALIGN T lanes[hn::MaxLanes(D())];
  for (int i = 0; i < static_cast<int>(hn::MaxLanes(d)); ++i) lanes[i] = i < n ? p[i] : fill;
  return hn::Load(d, lanes);
#endif
}

HWY_INLINE VF load(const float* p, int n, float fill = 0.0f) { return load_first(DF(), p, n, fill); }
HWY_INLINE VF load(const bf16_t* p, int n) { return widen(load_first(DU16(), p, n)); }

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void store_first(hn::Vec<D> v, D d, T* p, int n) {
#if HWY_TARGET <= HWY_AVX3
  hn::BlendedStore(v, hn::FirstN(d, static_cast<size_t>(n)), d, p);
#else
  HWY_ALIGN T lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
#endif
}

// Bits of v rounded to the nearest even bfloat16, in the upper half of each lane. NaN stays a quiet NaN.
HWY_INLINE VU round_bf16(VF v) {
  const DU du;
  const VU bits = hn::BitCast(du, v);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const VU rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const VU quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  return hn::And(hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded), hn::Set(du, 0xffff0000u));
}

// The upper halves of the lanes.
HWY_INLINE hn::Vec<DU16> upper_half_bits(VU v) { return hn::TruncateTo(DU16(), hn::ShiftRight<16>(v)); }

// max(low, x), but x where x is NaN.
HWY_INLINE VF at_least(VF low, VF x) {
#if HWY_TARGET <= HWY_SSSE3
  return hn::Max(low, x);  // MAXPS returns its second operand when one is NaN
#else
  return hn::IfThenElse(hn::Lt(x, low), low, x);
#endif
}

// The same for a largest value.
HWY_INLINE VF at_most(VF high, VF x) {
#if HWY_TARGET <= HWY_SSSE3
  return hn::Min(high, x);
#else
  return hn::IfThenElse(hn::Gt(x, high), high, x);
#endif
}

// max(a, b), which ignores a NaN in `a`; b is never NaN.
HWY_INLINE VF max_skipping_nan(VF a, VF b) {
#if HWY_TARGET <= HWY_SSSE3
  return hn::Max(a, b);  // MAXPS returns its second operand when one is NaN
#else
  return hn::IfThenElse(hn::Gt(a, b), a, b);
#endif
}

// The largest lane; v has no NaN. MaxOfLanes() of EMU128 begins at the lowest finite number, which is above -inf.
HWY_INLINE float max_of_lanes(VF v) {
#if HWY_TARGET == HWY_EMU128
  float max = v.raw[0];
  for (int i = 1; i < kLanes; ++i) max = v.raw[i] > max ? v.raw[i] : max;
  return max;
#else
  return hn::GetLane(hn::MaxOfLanes(DF(), v));
#endif
}

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
