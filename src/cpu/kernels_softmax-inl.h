// SPDX-License-Identifier: Apache-2.0
// The online softmax over a tile of scores, and the score terms before it: softcap, scales, ALiBi.

#if defined(ATTUNE_CPU_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTUNE_CPU_KERNELS_SOFTMAX_INL_H_
#undef ATTUNE_CPU_KERNELS_SOFTMAX_INL_H_
#else
#define ATTUNE_CPU_KERNELS_SOFTMAX_INL_H_
#endif

#include <math.h>

#include "cpu/kernels_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {

constexpr float kMinusInf = -__builtin_huge_valf();

// 2^x for x < 128 to about 1 ulp; 0 or denormal below -126, NaN stays NaN, 2^0 is exactly 1. The polynomial is the
// minimax fit (Remez) of 2^f on [0, 1) with constant term 1, relative error 2^-23.5. AVX-512 splits x and scales by
// instruction (denormals included); elsewhere the power of two is put together from the lower bits of floor(x) + 127
// + 1.5 * 2^23 and multiplied in, so that a NaN survives whatever its bits are.
HWY_INLINE VF exp2(VF x) {
  const DF d;
#if HWY_TARGET <= HWY_AVX3
  const VF f{_mm512_reduce_ps(x.raw, 0x01)};  // x - floor(x)
#else
  const VF clamped = at_least(hn::Set(d, -127.0f), x);
  const VF whole = hn::Floor(clamped);
  const VF f = hn::Sub(clamped, whole);
#endif
  VF y = hn::MulAdd(f, hn::Set(d, 0.0018671301659196615f), hn::Set(d, 0.009017029777169228f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.05579991266131401f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.24016444385051727f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.6931512951850891f));
  y = hn::MulAdd(f, y, hn::Set(d, 1.0f));
#if HWY_TARGET <= HWY_AVX3
  return VF{_mm512_scalef_ps(y.raw, x.raw)};
#else
  const VU power = hn::ShiftLeft<23>(hn::BitCast(DU(), hn::Add(whole, hn::Set(d, 12582912.0f + 127.0f))));
  return hn::Mul(y, hn::BitCast(d, power));
#endif
}

HWY_INLINE void scale_row(float* x, int n, float factor) {
  const DF d;
  const VF f = hn::Set(d, factor);
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) hn::StoreU(hn::Mul(load(x + j), f), d, x + j);
  if (j < n) store_first(hn::Mul(load(x + j, n - j), f), d, x + j, n - j);
}

// Largest entry of the row, which ignores NaN.
HWY_INLINE float row_max(const float* s, int n) {
  const DF d;
  VF max0 = hn::Set(d, kMinusInf), max1 = max0;
  int j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    max0 = max_skipping_nan(load(s + j), max0);
    max1 = max_skipping_nan(load(s + j + kLanes), max1);
  }
  for (; j + kLanes <= n; j += kLanes) max0 = max_skipping_nan(load(s + j), max0);
  if (j < n) max1 = max_skipping_nan(load(s + j, n - j, kMinusInf), max1);
  return max_of_lanes(hn::Max(max0, max1));
}

HWY_INLINE void store_p(VF p, float* to) { hn::StoreU(p, DF(), to); }
HWY_INLINE void store_p(VF p, float* to, int n) { store_first(p, DF(), to, n); }
HWY_INLINE void store_p(VF p, bf16_t* to) { hn::StoreU(upper_half_bits(round_bf16(p)), DU16(), to); }
HWY_INLINE void store_p(VF p, bf16_t* to, int n) { store_first(upper_half_bits(round_bf16(p)), DU16(), to, n); }
HWY_INLINE VF rounded_as(VF p, const float* /*to*/) { return p; }
HWY_INLINE VF rounded_as(VF p, const bf16_t* /*to*/) { return hn::BitCast(DF(), round_bf16(p)); }

// p = exp2(s * scale - max), times v_scale where there is one. Returns the sum of p before v_scale.
template <typename P>
HWY_INLINE float exp2_row(const float* s, int n, float scale, float max, const float* v_scale, P* p) {
  const DF d;
  const VF factor = hn::Set(d, scale), offset = hn::Set(d, max);
  VF sum = hn::Zero(d);
  int j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    VF e = exp2(hn::MulSub(load(s + j), factor, offset));
    sum = hn::Add(sum, rounded_as(e, p));
    if (v_scale != nullptr) e = hn::Mul(e, load(v_scale + j));
    store_p(e, p + j);
  }
  if (j < n) {
    VF e = exp2(hn::MulSub(load(s + j, n - j, kMinusInf), factor, offset));
    sum = hn::Add(sum, rounded_as(e, p));
    if (v_scale != nullptr) e = hn::Mul(e, load(v_scale + j, n - j));
    store_p(e, p + j, n - j);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Scales the scores where the scale is not positive, or they are large: -inf must still mean "not seen", and no other.
HWY_INLINE void apply_scale(float* s, int n, float scale) {
  for (int j = 0; j < n; ++j) s[j] = scaled_score(s[j], scale);
}

// Rows whose maxima are found before their exponentials: one row's chain of operations is long, eight rows overlap.
constexpr int kSoftmaxRows = 8;

template <typename P>
HWY_INLINE void softmax_rows(const SoftmaxTile& t) {
  float scale = t.scale2;
  if (!(scale > 0.0f)) {
    for (int i = 0; i < t.m; ++i) apply_scale(t.s + static_cast<int64_t>(i) * t.lds, t.n, scale);
    scale = 1.0f;
  }
  for (int begin = 0; begin < t.m; begin += kSoftmaxRows) {
    const int end = HWY_MIN(begin + kSoftmaxRows, t.m);
    float tile_max[kSoftmaxRows];
    for (int i = begin; i < end; ++i)
      tile_max[i - begin] = scaled_score(row_max(t.s + static_cast<int64_t>(i) * t.lds, t.n), scale);
    for (int i = begin; i < end; ++i) {
      P* p = static_cast<P*>(t.p) + static_cast<int64_t>(i) * t.ldp;
      const float old_max = t.row_max[i];
      const float max = tile_max[i - begin] > old_max ? tile_max[i - begin] : old_max;
      if (max > old_max) {
        const float rescale = hn::GetLane(exp2(hn::Set(DF(), old_max - max)));
        t.row_max[i] = max;
        t.row_sum[i] *= rescale;
        scale_row(t.o + static_cast<int64_t>(i) * t.ldo, t.dv, rescale);
      }
      // A row that has seen no key has only -inf (or NaN) scores. With 0 in place of the max they give 0 (or NaN).
      const float offset = max == kMinusInf ? 0.0f : max;
      float* const row = t.s + static_cast<int64_t>(i) * t.lds;
      const bool fused = fabsf(offset) < kMostFused;
      if (!fused) apply_scale(row, t.n, scale);
      t.row_sum[i] += exp2_row(row, t.n, fused ? scale : 1.0f, offset, t.v_scale, p);
      if (sizeof(P) == sizeof(bf16_t) && t.n % 2 != 0) p[t.n] = 0;
    }
  }
}

void softmax(const SoftmaxTile& t) {
  if (t.p_type == TileType::kBF16) {
    softmax_rows<bf16_t>(t);
  } else {
    softmax_rows<float>(t);
  }
}

// tanh to about 2 ulp: the minimax fit of an odd polynomial below 0.625, 1 - 2 / (e^2x + 1) above.
HWY_INLINE VF tanh(VF x) {
  const DF d;
  const VF magnitude = hn::Abs(x);
  const VF square = hn::Mul(x, x);
  VF y = hn::MulAdd(square, hn::Set(d, -0.005704986862838268f), hn::Set(d, 0.0206390880048275f));
  y = hn::MulAdd(square, y, hn::Set(d, -0.05373971536755562f));
  y = hn::MulAdd(square, y, hn::Set(d, 0.13331441581249237f));
  y = hn::MulAdd(square, y, hn::Set(d, -0.3333328068256378f));
  const VF small = hn::MulAdd(hn::Mul(x, square), y, x);
  // 2 / ln 2; tanh rounds to 1 well before 10, and the clamp keeps exp2 in range.
  const VF clamped = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 10.0f)), hn::Set(d, 10.0f), magnitude);
  const VF e = exp2(hn::Mul(clamped, hn::Set(d, 2.885390081777927f)));
  const VF large = hn::Sub(hn::Set(d, 1.0f), hn::Div(hn::Set(d, 2.0f), hn::Add(e, hn::Set(d, 1.0f))));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), small, hn::CopySign(large, x));
}

HWY_INLINE VF capped(VF s, VF scale, VF cap) { return hn::Mul(cap, tanh(hn::Mul(s, scale))); }

void softcap(int m, int n, float* s, int lds, float scale, float cap) {
  const DF d;
  const VF factor = hn::Set(d, scale / cap), limit = hn::Set(d, cap);
  for (int i = 0; i < m; ++i) {
    float* row = s + static_cast<int64_t>(i) * lds;
    int j = 0;
    for (; j + kLanes <= n; j += kLanes) hn::StoreU(capped(load(row + j), factor, limit), d, row + j);
    if (j < n) store_first(capped(load(row + j, n - j), factor, limit), d, row + j, n - j);
  }
}

void scale_columns(int m, int n, float* s, int lds, float scalar, const float* factor) {
  const DF d;
  if (factor == nullptr) {
    for (int i = 0; i < m; ++i) scale_row(s + static_cast<int64_t>(i) * lds, n, scalar);
    return;
  }
  const auto by = hn::Set(d, scalar);
  for (int i = 0; i < m; ++i) {
    float* row = s + static_cast<int64_t>(i) * lds;
    int j = 0;
    for (; j + kLanes <= n; j += kLanes) hn::StoreU(hn::Mul(load(row + j), hn::Mul(load(factor + j), by)), d, row + j);
    if (j < n) store_first(hn::Mul(load(row + j, n - j), hn::Mul(load(factor + j, n - j), by)), d, row + j, n - j);
  }
}

void relu_sum(int m, int n, const float* s, int lds, const float* w, float* out, bool accumulate) {
  constexpr int kVecs = 4;
  const DF d;
  const VF zero = hn::Zero(d);
  const int columns = (n + 15) / 16 * 16;
  int j = 0;
  for (; j + kVecs * kLanes <= columns; j += kVecs * kLanes) {
    VF sum[kVecs];
    ATTUNE_UNROLL
    for (int v = 0; v < kVecs; ++v) sum[v] = accumulate ? load(out + j + v * kLanes) : zero;
    for (int i = 0; i < m; ++i) {
      const float* row = s + static_cast<int64_t>(i) * lds + j;
      const VF weight = hn::Set(d, w[i]);
      ATTUNE_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[v] = hn::MulAdd(weight, at_least(zero, load(row + v * kLanes)), sum[v]);
    }
    ATTUNE_UNROLL
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[v], d, out + j + v * kLanes);
  }
  for (; j < columns; j += kLanes) {
    VF sum = accumulate ? load(out + j) : zero;
    for (int i = 0; i < m; ++i) {
      sum = hn::MulAdd(hn::Set(d, w[i]), at_least(zero, load(s + static_cast<int64_t>(i) * lds + j)), sum);
    }
    hn::StoreU(sum, d, out + j);
  }
}

void add_alibi(int m, int n, float* s, int lds, const float* slope, const float* position, float first) {
  const DF d;
  for (int i = 0; i < m; ++i) {
    float* row = s + static_cast<int64_t>(i) * lds;
    const VF factor = hn::Set(d, slope[i]);
    const VF start = hn::Iota(d, first - position[i]);  // exact: both are integers below 2^24
    int j = 0;
    for (; j + kLanes <= n; j += kLanes) {
      const VF distance = hn::Add(start, hn::Set(d, static_cast<float>(j)));
      hn::StoreU(hn::MulAdd(factor, distance, load(row + j)), d, row + j);
    }
    if (j < n) {
      const VF distance = hn::Add(start, hn::Set(d, static_cast<float>(j)));
      store_first(hn::MulAdd(factor, distance, load(row + j, n - j)), d, row + j, n - j);
    }
  }
}

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
