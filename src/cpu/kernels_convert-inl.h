// SPDX-License-Identifier: Apache-2.0
// Rows of a cache dtype to fp32 or bf16, packing for the GEMMs, and the scan for values that are not finite.

#if defined(ATTUNE_CPU_KERNELS_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTUNE_CPU_KERNELS_CONVERT_INL_H_
#undef ATTUNE_CPU_KERNELS_CONVERT_INL_H_
#else
#define ATTUNE_CPU_KERNELS_CONVERT_INL_H_
#endif

#include <string.h>

#include "cpu/kernels_common-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attune::cpu::HWY_NAMESPACE {

// --- Decoders: kLanes source elements to fp32 lanes.

struct FromF32 {
  using Source = float;
  static HWY_INLINE VF decode(hn::Vec<DF> v) { return v; }
};

// An IEEE-like float of fewer bits, from the lower bits of each lane. Exponent 0 is read as exponent 1 with an implied
// one, which is then subtracted: exact, and without a denormal on the way.
template <int kBits, int kMantissa, int kBias, bool kHasInfinity>
HWY_INLINE VF decode_float(VU wide) {
  constexpr uint32_t kMagnitude = (1u << (kBits - 1)) - 1u;
  constexpr uint32_t kAllOnes = kMagnitude >> kMantissa << kMantissa;  // exponent of infinity and NaN
  const DU du;
  const VU magnitude = hn::And(wide, hn::Set(du, kMagnitude));
  const VU sign = hn::ShiftLeft<32 - kBits>(hn::Xor(wide, magnitude));
  const auto subnormal = hn::Lt(hn::BitCast(DI(), magnitude), hn::Set(DI(), 1 << kMantissa));
  const VU is_subnormal = hn::BitCast(du, hn::VecFromMask(DI(), subnormal));
  const VU bias = hn::Add(hn::Set(du, (127u - kBias) << 23), hn::And(is_subnormal, hn::Set(du, 1u << 23)));
  const VF normal = hn::BitCast(DF(), hn::Add(hn::ShiftLeft<23 - kMantissa>(magnitude), bias));
  const VF implied = hn::BitCast(DF(), hn::And(is_subnormal, hn::Set(du, (128u - kBias) << 23)));
  VU value = hn::BitCast(du, hn::Sub(normal, implied));
  if (kHasInfinity) {
    const auto special = hn::Gt(hn::BitCast(DI(), magnitude), hn::Set(DI(), static_cast<int32_t>(kAllOnes) - 1));
    value = hn::Or(value, hn::BitCast(du, hn::And(hn::VecFromMask(DI(), special), hn::Set(DI(), 0x7f800000))));
  } else {
    value = hn::IfThenElse(hn::Eq(magnitude, hn::Set(du, kMagnitude)), hn::Set(du, 0x7fc00000u), value);
  }
  return hn::BitCast(DF(), hn::Or(sign, value));
}

struct FromF16 {
  using Source = uint16_t;
  static HWY_INLINE VF decode(hn::Vec<DU16> bits) {
#if HWY_TARGET <= HWY_AVX2 || HWY_TARGET == HWY_NEON
    return hn::PromoteTo(DF(), hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
#else
    return decode_float<16, 10, 15, true>(hn::PromoteTo(DU(), bits));  // Highway's own emulation does not know infinity
#endif
  }
};
HWY_INLINE VF load(const f16_t* p) { return FromF16::decode(hn::LoadU(DU16(), &p->bits)); }
HWY_INLINE VF load(const f16_t* p, int n) { return FromF16::decode(load_first(DU16(), &p->bits, n)); }

struct FromBF16 {
  using Source = uint16_t;
  static HWY_INLINE VF decode(hn::Vec<DU16> bits) { return widen(bits); }
};

using DU8 = hn::Rebind<uint8_t, DF>;

struct FromE4M3 {
  using Source = uint8_t;
  static HWY_INLINE VF decode(hn::Vec<DU8> codes) { return decode_float<8, 3, 7, false>(hn::PromoteTo(DU(), codes)); }
};

struct FromE5M2 {
  using Source = uint8_t;
  static HWY_INLINE VF decode(hn::Vec<DU8> codes) { return decode_float<8, 2, 15, true>(hn::PromoteTo(DU(), codes)); }
};

struct FromInt8 {
  using Source = int8_t;
  static HWY_INLINE VF decode(hn::Vec<hn::Rebind<int8_t, DF>> codes) {
    return hn::ConvertTo(DF(), hn::PromoteTo(DI(), codes));
  }
};

template <class From>
HWY_INLINE void convert_row(const void* src, int64_t n, float* dst) {
  const hn::Rebind<typename From::Source, DF> d;
  const auto* source = static_cast<const typename From::Source*>(src);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(From::decode(hn::LoadU(d, source + i)), DF(), dst + i);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first(From::decode(load_first(d, source + i, rest)), DF(), dst + i, rest);
  }
}

template <class From>
HWY_INLINE void convert_row(const void* src, int64_t n, bf16_t* dst) {
  const hn::Rebind<typename From::Source, DF> d;
  const auto* source = static_cast<const typename From::Source*>(src);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(upper_half_bits(round_bf16(From::decode(hn::LoadU(d, source + i)))), DU16(), dst + i);
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const auto bits = upper_half_bits(round_bf16(From::decode(load_first(d, source + i, rest))));
    store_first(bits, DU16(), dst + i, rest);
  }
}

template <typename T>
void convert(attune_dtype dtype, const void* src, int64_t n, T* dst) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      return convert_row<FromF32>(src, n, dst);
    case ATTUNE_FLOAT16:
      return convert_row<FromF16>(src, n, dst);
    case ATTUNE_BFLOAT16:
      if (sizeof(T) == sizeof(bf16_t)) {
        if (n > 0) memcpy(dst, src, static_cast<size_t>(n) * sizeof(bf16_t));
        return;
      }
      return convert_row<FromBF16>(src, n, dst);
    case ATTUNE_FLOAT8_E4M3:
      return convert_row<FromE4M3>(src, n, dst);
    case ATTUNE_FLOAT8_E5M2:
      return convert_row<FromE5M2>(src, n, dst);
    case ATTUNE_INT8:
      return convert_row<FromInt8>(src, n, dst);
    default:
      return;
  }
}

void to_f32(attune_dtype dtype, const void* src, int64_t n, float* dst) { convert(dtype, src, n, dst); }
void to_bf16(attune_dtype dtype, const void* src, int64_t n, bf16_t* dst) { convert(dtype, src, n, dst); }

// --- Packing

// Rows are packed in chunks of this many 32-bit columns, so that a short row of zeros can stand for a null row.
constexpr int kPackChunk = 256;
HWY_ALIGN inline const uint32_t kZeroRow[kPackChunk] = {};

#if HWY_TARGET <= HWY_AVX3
HWY_INLINE __m128i load_block(const uint32_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Columns c..c+3 of 16 rows: masked broadcast loads put rows r, r+4, r+8, r+12 in the four blocks without using a
// shuffle.
HWY_INLINE __m512i gather_blocks(const uint32_t* const* rows, int r, int c) {
  __m512i v = _mm512_castsi128_si512(load_block(rows[r] + c));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load_block(rows[r + 4] + c));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load_block(rows[r + 8] + c));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, load_block(rows[r + 12] + c));
}

// out[c][i] = rows[i][c] for 16 rows and columns c..c+3.
HWY_INLINE void transpose_16x4(const uint32_t* const* rows, int c, uint32_t* out, int ld) {
  const __m512i v0 = gather_blocks(rows, 0, c), v1 = gather_blocks(rows, 1, c);
  const __m512i v2 = gather_blocks(rows, 2, c), v3 = gather_blocks(rows, 3, c);
  const __m512i a = _mm512_unpacklo_epi32(v0, v1), b = _mm512_unpacklo_epi32(v2, v3);
  const __m512i e = _mm512_unpackhi_epi32(v0, v1), f = _mm512_unpackhi_epi32(v2, v3);
  _mm512_storeu_si512(out + static_cast<int64_t>(c) * ld, _mm512_unpacklo_epi64(a, b));
  _mm512_storeu_si512(out + static_cast<int64_t>(c + 1) * ld, _mm512_unpackhi_epi64(a, b));
  _mm512_storeu_si512(out + static_cast<int64_t>(c + 2) * ld, _mm512_unpacklo_epi64(e, f));
  _mm512_storeu_si512(out + static_cast<int64_t>(c + 3) * ld, _mm512_unpackhi_epi64(e, f));
}
#elif HWY_TARGET == HWY_SCALAR
HWY_INLINE void transpose_16x4(const uint32_t* const* rows, int c, uint32_t* out, int ld) {
  for (int i = 0; i < 16; ++i) {
    uint32_t four[4];
    memcpy(four, rows[i] + c, sizeof(four));
    for (int t = 0; t < 4; ++t) out[static_cast<int64_t>(c + t) * ld + i] = four[t];
  }
}
#else
HWY_INLINE void transpose_16x4(const uint32_t* const* rows, int c, uint32_t* out, int ld) {
  const hn::FixedTag<uint32_t, 4> d;
  const hn::Repartition<uint64_t, decltype(d)> d64;
  for (int i = 0; i < 16; i += 4) {
    const auto v0 = hn::LoadU(d, rows[i] + c), v1 = hn::LoadU(d, rows[i + 1] + c);
    const auto v2 = hn::LoadU(d, rows[i + 2] + c), v3 = hn::LoadU(d, rows[i + 3] + c);
    const auto a = hn::BitCast(d64, hn::InterleaveLower(d, v0, v1)),
               b = hn::BitCast(d64, hn::InterleaveLower(d, v2, v3));
    const auto e = hn::BitCast(d64, hn::InterleaveUpper(d, v0, v1)),
               f = hn::BitCast(d64, hn::InterleaveUpper(d, v2, v3));
    uint32_t* to = out + static_cast<int64_t>(c) * ld + i;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, a, b)), d, to);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, a, b)), d, to + ld);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, e, f)), d, to + 2 * static_cast<int64_t>(ld));
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, e, f)), d, to + 3 * static_cast<int64_t>(ld));
  }
}
#endif

// out[c][i] = rows[i][c], zeros for null rows and for i = n.. up to the next multiple of 16. Rows may be unaligned.
HWY_INLINE void transpose(const void* const* rows, int n, int columns, uint32_t* out, int ld) {
  for (int i0 = 0; i0 < n; i0 += 16) {
    for (int c0 = 0; c0 < columns; c0 += kPackChunk) {
      const int count = HWY_MIN(kPackChunk, columns - c0);
      const uint32_t* group[16];
      for (int i = 0; i < 16; ++i) {
        const void* row = i0 + i < n ? rows[i0 + i] : nullptr;
        group[i] = row != nullptr ? static_cast<const uint32_t*>(row) + c0 : kZeroRow;
      }
      uint32_t* to = out + static_cast<int64_t>(c0) * ld + i0;
      int c = 0;
      for (; c + 4 <= count; c += 4) transpose_16x4(group, c, to, ld);
      for (; c < count; ++c) {
        for (int i = 0; i < 16; ++i) memcpy(to + static_cast<int64_t>(c) * ld + i, group[i] + c, sizeof(uint32_t));
      }
    }
  }
}

void pack_k_f32(const float* const* rows, int n, int d, float* out, int ld) {
  transpose(reinterpret_cast<const void* const*>(rows), n, d, reinterpret_cast<uint32_t*>(out), ld);
}

void pack_k_bf16(const bf16_t* const* rows, int n, int d, bf16_t* out, int ld) {
  transpose(reinterpret_cast<const void* const*>(rows), n, d / 2, reinterpret_cast<uint32_t*>(out), ld);
  if (d % 2 != 0) {
    bf16_t* last = out + static_cast<int64_t>(d / 2) * ld * 2;
    for (int i = 0; i < (n + 15) / 16 * 16; ++i) {
      last[2 * i] = i < n && rows[i] != nullptr ? rows[i][d - 1] : bf16_t{0};
      last[2 * i + 1] = 0;
    }
  }
}

HWY_INLINE VU interleave_rows(hn::Vec<DU16> even, hn::Vec<DU16> odd) {
  return hn::Or(hn::PromoteTo(DU(), even), hn::ShiftLeft<16>(hn::PromoteTo(DU(), odd)));
}

void pack_v_bf16(const bf16_t* const* rows, int n, int dv, bf16_t* out, int ld) {
  const DU16 d;
  const auto zero = hn::Zero(d);
  for (int i = 0; i < n; i += 2) {
    const bf16_t* even = rows[i];
    const bf16_t* odd = i + 1 < n ? rows[i + 1] : nullptr;
    uint32_t* to = reinterpret_cast<uint32_t*>(out) + static_cast<int64_t>(i / 2) * ld;
    int c = 0;
    for (; c + kLanes <= dv; c += kLanes) {
      const auto lo = even != nullptr ? hn::LoadU(d, even + c) : zero;
      const auto hi = odd != nullptr ? hn::LoadU(d, odd + c) : zero;
      hn::StoreU(interleave_rows(lo, hi), DU(), to + c);
    }
    for (; c < (dv + 15) / 16 * 16; c += kLanes) {
      const int rest = HWY_MAX(0, HWY_MIN(kLanes, dv - c));
      const auto lo = even != nullptr && rest > 0 ? load_first(d, even + c, rest) : zero;
      const auto hi = odd != nullptr && rest > 0 ? load_first(d, odd + c, rest) : zero;
      hn::StoreU(interleave_rows(lo, hi), DU(), to + c);
    }
  }
}

// --- Values that are not finite

// Keeps the largest magnitude as an integer. NaN and infinity have all exponent bits set, so they are the largest.
bool any_nonfinite_f32(const float* x, int64_t n) {
  const DI di;
  const auto magnitude = hn::Set(di, 0x7fffffff);
  auto largest0 = hn::Zero(di), largest1 = largest0;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    largest0 = hn::Max(largest0, hn::And(hn::BitCast(di, load(x + i)), magnitude));
    largest1 = hn::Max(largest1, hn::And(hn::BitCast(di, load(x + i + kLanes)), magnitude));
  }
  for (; i < n; i += kLanes) {
    const VF v = n - i >= kLanes ? load(x + i) : load(x + i, static_cast<int>(n - i));
    largest0 = hn::Max(largest0, hn::And(hn::BitCast(di, v), magnitude));
  }
  return !hn::AllFalse(di, hn::Gt(hn::Max(largest0, largest1), hn::Set(di, 0x7f7fffff)));
}

bool any_nonfinite_bf16(const bf16_t* x, int64_t n) {
  const hn::ScalableTag<int16_t> di;
  const hn::ScalableTag<uint16_t> du;
  const int lanes = static_cast<int>(hn::MaxLanes(di));
  const auto magnitude = hn::Set(du, static_cast<uint16_t>(0x7fff));
  auto largest = hn::Zero(di);
  for (int64_t i = 0; i < n; i += lanes) {
    const auto v = n - i >= lanes ? hn::LoadU(du, x + i) : load_first(du, x + i, static_cast<int>(n - i));
    largest = hn::Max(largest, hn::BitCast(di, hn::And(v, magnitude)));
  }
  return !hn::AllFalse(di, hn::Gt(largest, hn::Set(di, static_cast<int16_t>(0x7f7f))));
}

}  // namespace attune::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
