// SPDX-License-Identifier: Apache-2.0
// Conversions of 8-bit floats (common/fp8.cuh), by instructions and by arithmetic.
#include "common/fp8.cuh"
#include "common/operand.cuh"

// halves: fp16 of each code, [e4m3, e5m2][256], then of the code as each byte of four, in both orders of
// common/operand.cuh, [e4m3, e5m2][8][256]. bf16: of each code, int8 too, as each byte of four, [e4m3, e5m2,
// int8][4][256]. codes: of each number, [e4m3, e5m2][count].
extern "C" __global__ void fp8(unsigned short* halves, unsigned short* bf16, const float* numbers, unsigned count,
                               unsigned char* codes) {
  using namespace attune;
  const auto low = [](unsigned x) { return static_cast<unsigned short>(x & 0xffff); };
  const auto high = [](unsigned x) { return static_cast<unsigned short>(x >> 16); };
  for (unsigned code = threadIdx.x; code < 256; code += blockDim.x) {
    // The other byte holds another code, to show that bytes do not mix.
    const auto two = static_cast<unsigned short>(code | (code ^ 0xa5) << 8);
    halves[code] = low(common::e4m3_to_f16(two));
    halves[256 + code] = low(common::e5m2_to_f16(two));
    for (unsigned byte = 0; byte < 4; ++byte) {
      const unsigned four = (code ^ 0xa5) * 0x01010101u ^ (0xa5u << 8 * byte);
      unsigned x[2][4];
      common::quad_to_f16<common::kE4m3>(four, x[0][0], x[0][1]);
      common::crossed_quad_to_f16<common::kE4m3>(four, x[0][2], x[0][3]);
      common::quad_to_f16<common::kE5m2>(four, x[1][0], x[1][1]);
      common::crossed_quad_to_f16<common::kE5m2>(four, x[1][2], x[1][3]);
      for (unsigned type = 0; type < 2; ++type) {
        const unsigned straight = x[type][byte / 2], crossed = x[type][2 + byte % 2];
        unsigned short* const to = halves + 512 + type * 2048 + code;
        to[byte * 256] = byte % 2 == 0 ? low(straight) : high(straight);
        to[(4 + byte) * 256] = byte < 2 ? low(crossed) : high(crossed);
      }
      unsigned wide[3][2];
      common::quad_to_operands<common::kE4m3, common::kBFloat16>(four, wide[0][0], wide[0][1]);
      common::quad_to_operands<common::kE5m2, common::kBFloat16>(four, wide[1][0], wide[1][1]);
      common::quad_to_operands<common::kInt8, common::kBFloat16>(four, wide[2][0], wide[2][1]);
      for (unsigned type = 0; type < 3; ++type)
        bf16[(type * 4 + byte) * 256 + code] = byte % 2 == 0 ? low(wide[type][byte / 2]) : high(wide[type][byte / 2]);
    }
  }
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    codes[i] = static_cast<unsigned char>(common::pack_e4m3(numbers[i], 1.0f));
    codes[count + i] = static_cast<unsigned char>(common::pack_e5m2(1.0f, numbers[i]) >> 8);
  }
}
