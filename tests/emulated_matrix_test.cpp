// SPDX-License-Identifier: Apache-2.0
// What a warp does with matrices (kernels/selftest/matrix.cu): on the CPU, where the emulator does what ptx/ says, and
// on a GPU, where the instructions do; both against plain loops and the library's own conversions.
#include <cmath>
#include <vector>

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda_cases.h"
#include "emulated.h"

namespace attune::cuda {
namespace {

const KernelSpec kSpec = {"selftest/matrix.cu", "matrix", {}, 1816};
constexpr unsigned kThreads = 256;

// Small integers, whose sums are exact.
struct Arrays {
  std::vector<uint16_t> a = filled(256, 7), b = filled(128, 5);
  std::vector<float> c = std::vector<float>(128, NAN);
  std::vector<uint16_t> copy = std::vector<uint16_t>(256, 0xffff), transposed = std::vector<uint16_t>(64, 0xffff),
                        tail = std::vector<uint16_t>(8, 0xffff);
  std::vector<uint32_t> codes = std::vector<uint32_t>(512, 0xffffffff);

  static std::vector<uint16_t> filled(size_t count, size_t step) {
    std::vector<uint16_t> v(count);
    for (size_t i = 0; i < count; ++i) v[i] = float_to_bf16(static_cast<float>(i * step % 17) - 8);
    return v;
  }
};

void expect_codes(const uint32_t* got, float (*to_float)(uint8_t)) {
  for (unsigned code = 0; code < 256; ++code) {
    const float want = to_float(static_cast<uint8_t>(code)), half = half_to_float(static_cast<uint16_t>(got[code]));
    const unsigned again = got[code] >> 16;
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(half)) << code;
      EXPECT_TRUE(std::isnan(to_float(static_cast<uint8_t>(again)))) << code;
    } else {
      EXPECT_EQ(half, want) << code;
      EXPECT_EQ(std::signbit(half), std::signbit(want)) << code;
      if (std::isinf(want)) continue;  // those saturate
      EXPECT_EQ(again, code);
    }
  }
}

void expect_results(const Arrays& x) {
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      float sum = 0;
      for (size_t k = 0; k < 16; ++k) sum += bf16_to_float(x.a[row * 16 + k]) * bf16_to_float(x.b[k * 8 + column]);
      EXPECT_EQ(x.c[row * 8 + column], sum) << row << " " << column;
    }
  }
  EXPECT_EQ(x.copy, x.a);
  for (size_t row = 0; row < 8; ++row) {
    for (size_t column = 0; column < 8; ++column)
      EXPECT_EQ(x.transposed[row * 8 + column], x.a[column * 16 + row]) << row << " " << column;
  }
  EXPECT_EQ(x.tail, (std::vector<uint16_t>{x.a[0], x.a[1], x.a[2], 0, 0, 0, 0, 0}));
  expect_codes(x.codes.data(), e4m3_to_float);
  expect_codes(x.codes.data() + 256, e5m2_to_float);
}

class EmulatedMatrix : public tests::Emulated {};

TEST_F(EmulatedMatrix, MatchesPlainLoops) {
  Arrays x;
  using Matrix = void (*)(const uint16_t*, const uint16_t*, float*, uint16_t*, uint16_t*, uint16_t*, uint32_t*);
  const auto matrix = reinterpret_cast<Matrix>(emulator::find_kernel(kSpec));
  emulator::run(1, kThreads, [&] {
    matrix(x.a.data(), x.b.data(), x.c.data(), x.copy.data(), x.transposed.data(), x.tail.data(), x.codes.data());
  });
  expect_results(x);
}

class CudaMatrix : public CudaCases {};

TEST_F(CudaMatrix, MatchesPlainLoops) {
  const Stream stream(kDevice);
  Arrays x;
  const auto to_device = [&](const auto& v) {
    DeviceMemory memory(kDevice, v.size() * sizeof(v[0]));
    copy_to_device(stream, memory.data(), v.data(), v.size() * sizeof(v[0]));
    return memory;
  };
  const auto to_host = [&](auto& v, const DeviceMemory& memory) {
    copy_to_host(stream, v.data(), memory.data(), v.size() * sizeof(v[0]));
  };
  const DeviceMemory a = to_device(x.a), b = to_device(x.b), c = to_device(x.c), copy = to_device(x.copy),
                     transposed = to_device(x.transposed), tail = to_device(x.tail), codes = to_device(x.codes);
  LaunchConfig config;
  config.block[0] = kThreads;
  config.shared_bytes = static_cast<uint32_t>(kSpec.shared_bytes);
  config.stream = stream.handle();
  launch_kernel(get_kernel(kSpec, kDevice), config, a.data(), b.data(), c.data(), copy.data(), transposed.data(),
                tail.data(), codes.data());
  to_host(x.c, c);
  to_host(x.copy, copy);
  to_host(x.transposed, transposed);
  to_host(x.tail, tail);
  to_host(x.codes, codes);
  stream.synchronize();
  expect_results(x);
}

}  // namespace
}  // namespace attune::cuda
