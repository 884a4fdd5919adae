// SPDX-License-Identifier: Apache-2.0
// Conversions of 8-bit floats as the kernels make them (kernels/selftest/fp8.cu): with and without instructions for
// them, in the emulator and on a GPU, against the library's own.
#include <cmath>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda_cases.h"
#include "emulated.h"

namespace attune::cuda {
namespace {

const KernelSpec kSpec = {"selftest/fp8.cu", "fp8", {}, 0};
constexpr unsigned kThreads = 128;

// Every code's number, those half way to the next code, their neighbours, and what is out of range.
std::vector<float> numbers() {
  std::vector<float> list = {0,
                             INFINITY,
                             std::nanf(""),
                             1e-30f,
                             1e30f,
                             464,
                             465,
                             480,
                             61440,
                             65536,
                             std::numeric_limits<float>::denorm_min(),
                             std::numeric_limits<float>::max()};
  for (float (*to_float)(uint8_t) : {e4m3_to_float, e5m2_to_float}) {
    for (uint8_t code = 0; code < 0x7f; ++code) {
      const float x = to_float(code), half = (x + to_float(static_cast<uint8_t>(code + 1))) / 2;
      for (const float at : {x, half})
        for (const float towards : {0.0f, at, INFINITY}) list.push_back(std::nextafterf(at, towards));
    }
  }
  const size_t positive = list.size();
  for (size_t i = 0; i < positive; ++i) list.push_back(-list[i]);
  return list;
}

struct Arrays {
  std::vector<float> in = numbers();
  std::vector<uint16_t> halves = std::vector<uint16_t>(512 + 2 * 8 * 256, 0xffff);
  std::vector<uint16_t> bf16 = std::vector<uint16_t>(3 * 4 * 256, 0xffff);
  std::vector<uint8_t> codes = std::vector<uint8_t>(2 * in.size());
};

void expect_number(float x, float want, unsigned code) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(x)) << code;
  } else {
    EXPECT_EQ(x, want) << code;
    EXPECT_EQ(std::signbit(x), std::signbit(want)) << code;
  }
}

void expect_half(uint16_t got, float want, unsigned code) { expect_number(half_to_float(got), want, code); }

void expect_results(const Arrays& x) {
  for (unsigned type = 0; type < 2; ++type) {
    for (unsigned code = 0; code < 256; ++code) {
      const float want = (type == 0 ? e4m3_to_float : e5m2_to_float)(static_cast<uint8_t>(code));
      expect_half(x.halves[type * 256 + code], want, code);
      for (unsigned way = 0; way < 8; ++way) expect_half(x.halves[512 + (type * 8 + way) * 256 + code], want, code);
    }
    for (size_t i = 0; i < x.in.size(); ++i) {
      // A NaN's sign is the instruction's own choice.
      const uint8_t want = (type == 0 ? float_to_e4m3 : float_to_e5m2)(x.in[i]), code = x.codes[type * x.in.size() + i];
      EXPECT_EQ(std::isnan(x.in[i]) ? code | 0x80 : code, std::isnan(x.in[i]) ? want | 0x80 : want)
          << (type == 0 ? "e4m3 of " : "e5m2 of ") << x.in[i];
    }
  }
}

void expect_bf16(const Arrays& x) {
  for (unsigned i = 0; i < x.bf16.size(); ++i) {
    const auto code = static_cast<uint8_t>(i % 256);
    const unsigned type = i / 1024;
    expect_number(bf16_to_float(x.bf16[i]),
                  type == 0   ? e4m3_to_float(code)
                  : type == 1 ? e5m2_to_float(code)
                              : static_cast<float>(static_cast<int8_t>(code)),
                  i);
  }
}

class EmulatedFp8 : public tests::Emulated {
 protected:
  static void check(int capability) {
    const emulator::Capability as(capability);
    Arrays x;
    using Convert = void (*)(uint16_t*, uint16_t*, const float*, unsigned, uint8_t*);
    const auto convert = reinterpret_cast<Convert>(emulator::find_kernel(kSpec));
    emulator::run(1, kThreads, [&] {
      convert(x.halves.data(), x.bf16.data(), x.in.data(), static_cast<unsigned>(x.in.size()), x.codes.data());
    });
    expect_results(x);
    expect_bf16(x);
  }
};

TEST_F(EmulatedFp8, ByArithmetic) { check(80); }
TEST_F(EmulatedFp8, ByInstructions) { check(90); }

class CudaFp8 : public CudaCases {};

TEST_F(CudaFp8, MatchesTheLibrary) {
  const Stream stream(kDevice);
  Arrays x;
  const DeviceMemory in(kDevice, x.in.size() * 4), halves(kDevice, x.halves.size() * 2),
      bf16(kDevice, x.bf16.size() * 2), codes(kDevice, x.codes.size());
  copy_to_device(stream, in.data(), x.in.data(), x.in.size() * 4);
  LaunchConfig config;
  config.block[0] = kThreads;
  config.stream = stream.handle();
  launch_kernel(get_kernel(kSpec, kDevice), config, halves.data(), bf16.data(), in.data(),
                static_cast<unsigned>(x.in.size()), codes.data());
  copy_to_host(stream, x.halves.data(), halves.data(), x.halves.size() * 2);
  copy_to_host(stream, x.bf16.data(), bf16.data(), x.bf16.size() * 2);
  copy_to_host(stream, x.codes.data(), codes.data(), x.codes.size());
  stream.synchronize();
  expect_results(x);
  expect_bf16(x);
}

}  // namespace
}  // namespace attune::cuda
