// SPDX-License-Identifier: Apache-2.0
// wgmma on operands that the TMA wrote, in the layouts that attention uses (kernels/selftest/wgmma*.cu): on the CPU,
// where the emulator does what ptx/ says, and on a GPU, where the instructions do; both against plain loops.
#include <array>
#include <cmath>
#include <random>

#include "core/dtype.h"
#include "cuda/launch.h"
#include "cuda_cases.h"
#include "emulator/emulator.h"
#include "emulator/module.h"
#include "emulator/tensor_map.h"

namespace attune::cuda {
namespace {

constexpr int kRows = 64, kHeadDim = 64;

struct Matrix {
  int rows, columns;
  std::vector<uint16_t> bits;  // bf16, row-major
  float at(int row, int column) const { return bf16_to_float(bits[static_cast<size_t>(row * columns + column)]); }
};

Matrix random_matrix(int rows, int columns, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  Matrix m{rows, columns, std::vector<uint16_t>(static_cast<size_t>(rows * columns))};
  for (uint16_t& x : m.bits) x = float_to_bf16(normal(engine));
  return m;
}

TensorMapDesc describe(const Matrix& m, void* data) {
  TensorMapDesc t;
  t.data = data;
  t.type = TensorMapType::kBfloat16;
  t.rank = 4;
  t.shape[0] = static_cast<uint64_t>(m.columns), t.shape[1] = 1, t.shape[2] = static_cast<uint64_t>(m.rows),
  t.shape[3] = 1;
  t.stride_bytes[1] = 16, t.stride_bytes[2] = static_cast<uint64_t>(m.columns) * 2, t.stride_bytes[3] = 16;
  t.box[0] = 64, t.box[1] = 1, t.box[2] = static_cast<uint32_t>(m.rows), t.box[3] = 1;
  t.swizzle = TensorMapSwizzle::k128B;
  return t;
}

// S and O, and how far they may be from the exact ones: fp32 sums in another order, and P that rounds differently.
void expect_products(const Matrix& q, const Matrix& k, const Matrix& v, const std::vector<float>& s,
                     const std::vector<float>& o) {
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> weights;
    for (int key = 0; key < k.rows; ++key) {
      double sum = 0;
      for (int d = 0; d < kHeadDim; ++d) sum += static_cast<double>(q.at(row, d)) * k.at(key, d);
      const float got = s[static_cast<size_t>(row * k.rows + key)];
      ASSERT_NEAR(got, sum, 1e-4) << "s[" << row << ", " << key << "]";
      weights.push_back(bf16_to_float(float_to_bf16(got)));
    }
    for (int d = 0; d < v.columns; ++d) {
      double sum = 0;
      for (int key = 0; key < k.rows; ++key) sum += weights[static_cast<size_t>(key)] * v.at(key, d);
      ASSERT_NEAR(o[static_cast<size_t>(row * v.columns + d)], sum, 1e-3) << "o[" << row << ", " << d << "]";
    }
  }
}

// What an x-packed page has of k: [channels / 8][keys][8].
std::vector<uint16_t> pack_keys(const Matrix& k) {
  std::vector<uint16_t> packed;
  for (int piece = 0; piece < k.columns / 8; ++piece) {
    for (int key = 0; key < k.rows; ++key) {
      for (int d = 0; d < 8; ++d) packed.push_back(k.bits[static_cast<size_t>(key * k.columns + piece * 8 + d)]);
    }
  }
  return packed;
}
// Pages of 16 tokens: [keys / 16][channels][16].
std::vector<uint16_t> pack_values(const Matrix& v) {
  std::vector<uint16_t> packed;
  for (int page = 0; page < v.rows / 16; ++page) {
    for (int d = 0; d < v.columns; ++d) {
      for (int key = 0; key < 16; ++key)
        packed.push_back(v.bits[static_cast<size_t>((page * 16 + key) * v.columns + d)]);
    }
  }
  return packed;
}

TensorMapDesc describe_packed(void* data, std::array<int, 3> box, std::array<int, 2> strides,
                              TensorMapSwizzle swizzle) {
  TensorMapDesc t;
  t.data = data;
  t.type = TensorMapType::kBfloat16;
  t.rank = 5;
  for (size_t i = 0; i < 5; ++i) {
    t.box[i] = i < 3 ? static_cast<uint32_t>(box[i]) : 1;
    t.shape[i] = t.box[i];
    t.stride_bytes[i] = i == 1 || i == 2 ? static_cast<uint64_t>(strides[i - 1]) : 16;
  }
  t.swizzle = swizzle;
  return t;
}
// Groups of eight tokens one after the other, each with all its channels.
TensorMapDesc describe_packed_keys(const Matrix& k, void* data) {
  return describe_packed(data, {64, k.columns / 8, k.rows / 8}, {k.rows * 16, 128}, TensorMapSwizzle::kNone);
}
TensorMapDesc describe_packed_values(const Matrix& v, void* data) {
  return describe_packed(data, {16, v.columns, v.rows / 16}, {32, v.columns * 32}, TensorMapSwizzle::k32B);
}

struct Shape {
  int keys, channels;
  bool packed = false;  // K and V lie as in x-packed pages
};
// The last ones end in the middle of an atom of 64 channels.
constexpr Shape kShapes[] = {{64, 64},        {128, 128},      {128, 192},      {160, 160},       {32, 256},
                             {128, 96},       {64, 32},        {64, 64, true},  {128, 128, true}, {128, 96, true},
                             {32, 256, true}, {64, 224, true}, {96, 160, true}, {64, 192, true},  {160, 32, true}};

std::string name_of(const Shape& shape) {
  return std::to_string(shape.keys) + " x " + std::to_string(shape.channels) + (shape.packed ? ", x-packed" : "");
}

// An input as it lies in memory, and as the TMA sees it there.
struct Input {
  std::vector<uint16_t> bits;
  TensorMapDesc map;  // of no data yet
  TensorMapDesc at(void* data) const {
    TensorMapDesc m = map;
    m.data = data;
    return m;
  }
};
struct Inputs {
  Matrix q, k, v;
  Input of_q, of_k, of_v;
  explicit Inputs(const Shape& shape)
      : q(random_matrix(kRows, kHeadDim, 1)),
        k(random_matrix(shape.keys, kHeadDim, 2)),
        v(random_matrix(shape.keys, shape.channels, 3)) {
    const bool packed = shape.packed;
    of_q = {q.bits, describe(q, nullptr)};
    of_k = packed ? Input{pack_keys(k), describe_packed_keys(k, nullptr)} : Input{k.bits, describe(k, nullptr)};
    of_v = packed ? Input{pack_values(v), describe_packed_values(v, nullptr)} : Input{v.bits, describe(v, nullptr)};
  }
};

KernelSpec spec_of(const Shape& shape) {
  const int blocks = (shape.channels + 63) / 64;
  if (shape.packed) {
    return {"selftest/wgmma_packed.cu",
            "multiply_packed",
            {{"KEYS", std::to_string(shape.keys)}, {"CHANNELS", std::to_string(shape.channels)}},
            static_cast<size_t>((kRows + shape.keys) * 128 + shape.channels * shape.keys * 2 + 8)};
  }
  return {"selftest/wgmma.cu",
          "multiply",
          {{"KEYS", std::to_string(shape.keys)}, {"CHANNELS", std::to_string(shape.channels)}},
          static_cast<size_t>((kRows + shape.keys + blocks * shape.keys) * 128 + 8)};
}

TEST(EmulatedProducts, MatchPlainLoops) {
  if (emulator::why_not() != nullptr) GTEST_SKIP() << emulator::why_not();
  for (const Shape& shape : {kShapes[0], kShapes[5], kShapes[7], kShapes[9]}) {
    SCOPED_TRACE(name_of(shape));
    Inputs in(shape);
    std::vector<float> s(static_cast<size_t>(kRows * shape.keys), NAN),
        o(static_cast<size_t>(kRows * shape.channels), NAN);
    using Multiply = void (*)(ptx::TensorMap, ptx::TensorMap, ptx::TensorMap, float*, float*);
    const auto multiply = reinterpret_cast<Multiply>(emulator::find_kernel(spec_of(shape)));
    emulator::run(1, 128, [&] {
      multiply(emulator::tensor_map(in.of_q.at(in.of_q.bits.data())),
               emulator::tensor_map(in.of_k.at(in.of_k.bits.data())),
               emulator::tensor_map(in.of_v.at(in.of_v.bits.data())), s.data(), o.data());
    });
    expect_products(in.q, in.k, in.v, s, o);
  }
}

class CudaProducts : public CudaCases {};

TEST_F(CudaProducts, MatchPlainLoops) {
  const Stream stream(kDevice);
  const auto to_device = [&](const void* data, size_t bytes) {
    DeviceMemory memory(kDevice, bytes);
    copy_to_device(stream, memory.data(), data, bytes);
    return memory;
  };
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(name_of(shape));
    const Inputs in(shape);
    std::vector<float> s(static_cast<size_t>(kRows * shape.keys), NAN),
        o(static_cast<size_t>(kRows * shape.channels), NAN);
    const DeviceMemory device_q = to_device(in.of_q.bits.data(), in.of_q.bits.size() * 2),
                       device_k = to_device(in.of_k.bits.data(), in.of_k.bits.size() * 2),
                       device_v = to_device(in.of_v.bits.data(), in.of_v.bits.size() * 2),
                       device_s = to_device(s.data(), s.size() * 4), device_o = to_device(o.data(), o.size() * 4);
    const KernelSpec spec = spec_of(shape);
    LaunchConfig config;
    config.block[0] = 128;
    config.shared_bytes = static_cast<uint32_t>(spec.shared_bytes);
    config.stream = stream.handle();
    launch_kernel(get_kernel(spec, kDevice), config, make_tensor_map(in.of_q.at(device_q.data()), kDevice),
                  make_tensor_map(in.of_k.at(device_k.data()), kDevice),
                  make_tensor_map(in.of_v.at(device_v.data()), kDevice), device_s.data(), device_o.data());
    copy_to_host(stream, s.data(), device_s.data(), s.size() * 4);
    copy_to_host(stream, o.data(), device_o.data(), o.size() * 4);
    stream.synchronize();
    expect_products(in.q, in.k, in.v, s, o);
  }
}

}  // namespace
}  // namespace attune::cuda
