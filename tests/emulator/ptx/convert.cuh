// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/convert.cuh on the CPU.
#pragma once

namespace attune::ptx {

inline unsigned pack_bf16(float lo, float hi) {
  return emulator::to_bf16(lo) | static_cast<unsigned>(emulator::to_bf16(hi)) << 16;
}
inline unsigned pack_f16(float lo, float hi) {
  return emulator::to_half(lo) | static_cast<unsigned>(emulator::to_half(hi)) << 16;
}
inline float bf16_to_float(unsigned short x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
inline unsigned round_to_tf32(float x) { return isnan(x) ? 0x7fffffffu : __float_as_uint(x) + 0x1000u & 0xffffe000u; }
inline float f16_to_float(unsigned short x) { return emulator::from_half(x); }
inline unsigned e4m3_to_f16(unsigned short x) {
  return pack_f16(emulator::from_e4m3(static_cast<uint8_t>(x)), emulator::from_e4m3(static_cast<uint8_t>(x >> 8)));
}
inline uint2 four_e4m3_to_f16(unsigned x) {
  return {e4m3_to_f16(static_cast<unsigned short>(x)), e4m3_to_f16(static_cast<unsigned short>(x >> 16))};
}
inline unsigned e5m2_to_f16(unsigned short x) {
  return pack_f16(emulator::from_e5m2(static_cast<uint8_t>(x)), emulator::from_e5m2(static_cast<uint8_t>(x >> 8)));
}
inline unsigned short pack_e4m3(float lo, float hi) {
  return static_cast<unsigned short>(emulator::to_e4m3(lo) | emulator::to_e4m3(hi) << 8);
}
inline unsigned pack_four_e4m3(float a, float b, float c, float d) {
  return pack_e4m3(a, b) | static_cast<unsigned>(pack_e4m3(c, d)) << 16;
}
inline unsigned short pack_e5m2(float lo, float hi) {
  return static_cast<unsigned short>(emulator::to_e5m2(lo) | emulator::to_e5m2(hi) << 8);
}
inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  unsigned d = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i, byte = static_cast<unsigned>(bytes >> (pick & 7) * 8 & 0xff);
    d |= ((pick & 8) == 0 ? byte : byte >> 7 != 0 ? 0xffu : 0) << 8 * i;
  }
  return d;
}
inline unsigned subtract_f16x2(unsigned a, unsigned b) {
  const auto half = [](unsigned x) { return emulator::from_half(static_cast<uint16_t>(x)); };
  return pack_f16(half(a) - half(b), half(a >> 16) - half(b >> 16));
}
inline unsigned multiply_add_f16x2(unsigned a, unsigned b, unsigned c) {
  // The product is exact. A sum is rounded to fp32 first; those of kernels/common/fp8.cuh are exact.
  const auto half = [](unsigned x) { return static_cast<double>(emulator::from_half(static_cast<uint16_t>(x))); };
  const auto one = [&](unsigned x, unsigned y, unsigned z) { return emulator::to_half(half(x) * half(y) + half(z)); };
  return one(a, b, c) | static_cast<unsigned>(one(a >> 16, b >> 16, c >> 16)) << 16;
}
// Sums are rounded to fp32 first.
inline unsigned multiply_add_bf16x2(unsigned a, unsigned b, unsigned c) {
  const auto half = [](unsigned x) { return static_cast<double>(__uint_as_float(x << 16)); };
  const auto one = [&](unsigned x, unsigned y, unsigned z) {
    return static_cast<unsigned>(emulator::to_bf16(static_cast<float>(half(x) * half(y) + half(z))));
  };
  return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
inline unsigned multiply_f16x2(unsigned a, unsigned b) { return multiply_add_f16x2(a, b, 0x80008000u); }

}  // namespace attune::ptx
