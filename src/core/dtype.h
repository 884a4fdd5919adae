// SPDX-License-Identifier: Apache-2.0
// Element types: sizes, names and scalar conversions with one rounding. Bulk conversions are in the backends.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attune/attune.h"

namespace attune {

int64_t dtype_size(int32_t dtype);  // 0 for NONE and unknown values
const char* dtype_name(int32_t dtype);
inline bool is_float(int32_t d) { return d == ATTUNE_FLOAT32 || d == ATTUNE_FLOAT16 || d == ATTUNE_BFLOAT16; }
inline bool is_float8(int32_t d) { return d == ATTUNE_FLOAT8_E4M3 || d == ATTUNE_FLOAT8_E5M2; }
inline bool is_8bit(int32_t d) { return is_float8(d) || d == ATTUNE_INT8; }

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; NaN stays a quiet NaN.
inline uint16_t float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

float half_to_float(uint16_t h);
uint16_t float_to_half(float x);
float e4m3_to_float(uint8_t x);
float e5m2_to_float(uint8_t x);
uint8_t float_to_e4m3(float x);  // saturates at +-448, NaN stays NaN
uint8_t float_to_e5m2(float x);  // saturates at +-57344, NaN stays NaN
int8_t float_to_int8(float x);   // rounds to nearest even, clamps to -127..127, NaN gives 0

float load_as_float(int32_t dtype, const void* element);
void store_from_float(int32_t dtype, float x, void* element);

}  // namespace attune
