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
  for (unsigned i = 0; i < 4; ++i) d |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
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
inline unsigned multiply_add_bf16x2(unsigned a, unsigned b, unsigned c) {
  // As above: those of kernels/common are exact.
  const auto one = [](unsigned x, unsigned y, unsigned z) {
    const auto number = [](unsigned bits) { return static_cast<double>(__uint_as_float(bits << 16)); };
    return emulator::to_bf16(static_cast<float>(number(x) * number(y) + number(z)));
  };
  return one(a, b, c) | static_cast<unsigned>(one(a >> 16, b >> 16, c >> 16)) << 16;
}
inline unsigned multiply_f16x2(unsigned a, unsigned b) { return multiply_add_f16x2(a, b, 0x80008000u); }

}  // namespace attune::ptx
