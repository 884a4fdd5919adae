// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime on a GPU, with the small kernels of kernels/selftest/.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <thread>

#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "cuda/tensor_map.h"
#include "cuda_fixture.h"
#include "failure.h"

namespace attune::cuda {
namespace {

using testing::HasSubstr;

class CudaDevice : public CudaFixture {};

struct SaxpyParams {
  const void* x;
  void* y;
  int64_t n;
};

KernelSpec saxpy_spec(int a) { return {"selftest/saxpy.cu", "saxpy", {{"A", std::to_string(a)}}, 0}; }

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(n);
  for (float& v : values) v = uniform(random);
  return values;
}

// Runs a * x + y on the device and compares. n is not a multiple of the block.
void check_saxpy(int a, int32_t device) {
  const size_t n = 100003;
  const CompiledKernel& kernel = get_kernel(saxpy_spec(a), device);
  const Stream stream(device);
  const std::vector<float> x = random_floats(n, 1), y = random_floats(n, 2);
  const DeviceMemory device_x = to_device(stream, x), device_y = to_device(stream, y);
  LaunchConfig config;
  config.grid[0] = 17;
  config.block[0] = 256;
  config.stream = stream.handle();
  launch_kernel(kernel, config, SaxpyParams{device_x.data(), device_y.data(), static_cast<int64_t>(n)});
  const std::vector<float> result = to_host<float>(stream, device_y);
  for (size_t i = 0; i < n; ++i) {
    const float expected = std::fma(static_cast<float>(a), x[i], y[i]);
    ASSERT_TRUE(std::abs(result[i] - expected) <= 1e-6f) << i;
  }
}

TEST_F(CudaDevice, DescribesTheGpu) {
  const DeviceInfo& info = require_device(kDevice);
  EXPECT_EQ(info.compute_major, 9);
  EXPECT_GT(info.num_sms, 0);
  EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
  EXPECT_GE(info.shared_bytes_per_block, 227 * 1024);
  EXPECT_THAT(failure_of([] { require_device(1000); }, ATTUNE_DEVICE_ERROR),
              HasSubstr("there is no CUDA device 1000; there "));
}

TEST_F(CudaDevice, RunsASpecialisedKernel) {
  primary_context(kDevice);
  const auto start = std::chrono::steady_clock::now();
  const CompiledKernel& kernel = get_kernel(saxpy_spec(2), kDevice);
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  std::printf("%s: from the %s in %.1f ms, %d registers\n", kernel.name.c_str(), origin_name(kernel.origin),
              elapsed.count(), kernel.num_regs);
  check_saxpy(2, kDevice);
  EXPECT_GT(kernel.num_regs, 0);
  EXPECT_EQ(kernel.local_bytes, 0);
  EXPECT_EQ(kernel.max_threads, 256);
  EXPECT_GT(kernel.blocks_per_sm(256, 0), 1);
  EXPECT_EQ(&kernel, &get_kernel(saxpy_spec(2), kDevice));
}

TEST_F(CudaDevice, KernelsAreKnownWhateverTheOrderOfTheirDefines) {
  const CompiledKernel& kernel = get_kernel({"selftest/saxpy.cu", "saxpy", {{"A", "2"}, {"UNUSED", "1"}}, 0}, kDevice);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(&kernel, &get_kernel({"selftest/saxpy.cu", "saxpy", {{"UNUSED", "1"}, {"A", "2"}}, 0}, kDevice));
  // Values that join to the same text, and names that change places, are other kernels.
  EXPECT_NE(&kernel, &get_kernel({"selftest/saxpy.cu", "saxpy", {{"A", "1"}, {"UNUSED", "2"}}, 0}, kDevice));
  EXPECT_NE(&kernel, &get_kernel({"selftest/saxpy.cu", "saxpy", {{"A", "21"}, {"UNUSED", ""}}, 0}, kDevice));
}

TEST_F(CudaDevice, EveryDeviceRunsTheSameModule) {
  for (const DeviceInfo& info : devices()) {
    if (info.usable()) check_saxpy(-3, info.ordinal);
  }
}

TEST_F(CudaDevice, NamesWhatDoesNotExist) {
  EXPECT_EQ(failure_of(
                [] {
                  get_kernel({"selftest/saxpy.cu", "sax", {{"A", "2"}}, 0}, kDevice);
                },
                ATTUNE_INTERNAL),
            "kernel source selftest/saxpy.cu has no entry sax");
  EXPECT_THAT(
      failure_of(
          [] {
            get_kernel({"selftest/cluster.cu", "cluster_sum", {}, 1 << 20}, kDevice);
          },
          ATTUNE_DEVICE_ERROR),
      HasSubstr("selftest/cluster.cu cluster_sum wants 1048576 bytes of dynamic shared memory; CUDA device 0 has "));
}

TEST_F(CudaDevice, LaunchErrorsNameTheKernelAndLeaveTheDeviceWorking) {
  const CompiledKernel& kernel = get_kernel(saxpy_spec(2), kDevice);
  LaunchConfig config;
  config.block[0] = 2048;
  const std::string message = failure_of([&] { launch_kernel(kernel, config, SaxpyParams{}); }, ATTUNE_DEVICE_ERROR);
  EXPECT_THAT(message, HasSubstr("launching selftest/saxpy.cu saxpy A=2 on CUDA device 0, grid 1x1x1, block 2048x1x1"));
  EXPECT_THAT(message, HasSubstr("CUDA_ERROR_INVALID_VALUE"));
  EXPECT_THAT(failure_of([] { DeviceMemory(kDevice, size_t{1} << 50); }, ATTUNE_OUT_OF_MEMORY),
              HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
  check_saxpy(2, kDevice);
}

TEST_F(CudaDevice, LeavesTheCallersContextAlone) {
  check_saxpy(2, kDevice);
  std::thread([] {
    const Driver& d = require_driver();
    Context current = nullptr;
    {
      const ScopedContext outer(kDevice);
      const ScopedContext inner(kDevice);
      EXPECT_EQ(d.cuCtxGetCurrent(&current), kSuccess);
      EXPECT_EQ(current, primary_context(kDevice));
    }
    EXPECT_EQ(d.cuCtxGetCurrent(&current), kSuccess);
    EXPECT_EQ(current, nullptr);
    check_saxpy(2, kDevice);
    EXPECT_EQ(d.cuCtxGetCurrent(&current), kSuccess);
    EXPECT_EQ(current, nullptr);
  }).join();
}

TEST_F(CudaDevice, ClustersShareMemory) {
  const KernelSpec spec = {"selftest/cluster.cu", "cluster_sum", {}, 200 * 1024};
  const CompiledKernel& kernel = get_kernel(spec, kDevice);
  const Stream stream(kDevice);
  const uint32_t blocks = 64;
  std::vector<uint32_t> in(blocks);
  std::iota(in.begin(), in.end(), 1000u);
  const DeviceMemory device_in = to_device(stream, in);
  for (const uint32_t cluster : {1u, 2u, 4u, 8u, 16u}) {
    EXPECT_GT(kernel.max_active_clusters(cluster, 128, spec.shared_bytes), 0) << cluster;
    const DeviceMemory device_out = to_device(stream, std::vector<uint32_t>(blocks / cluster, 0xdeadbeef));
    LaunchConfig config;
    config.grid[0] = blocks;
    config.block[0] = 128;
    config.cluster[0] = cluster;
    config.shared_bytes = static_cast<uint32_t>(spec.shared_bytes);
    config.stream = stream.handle();
    launch_kernel(kernel, config, device_in.data(), device_out.data(), config.shared_bytes / 4);
    const std::vector<uint32_t> out = to_host<uint32_t>(stream, device_out);
    for (uint32_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(out[i], std::accumulate(in.begin() + i * cluster, in.begin() + (i + 1) * cluster, 0u))
          << cluster << " " << i;
    }
  }
}

TEST_F(CudaDevice, TensorMapsCopyBoxesAndFillWithZeros) {
  constexpr int kRows = 8, kColumns = 32, kHeight = 100, kWidth = 60;
  const CompiledKernel& kernel = get_kernel({"selftest/tensor_map.cu",
                                             "tma_load",
                                             {{"ROWS", std::to_string(kRows)}, {"COLUMNS", std::to_string(kColumns)}},
                                             0},
                                            kDevice);
  const Stream stream(kDevice);
  const std::vector<float> matrix = random_floats(kHeight * kWidth, 3);
  const DeviceMemory device_matrix = to_device(stream, matrix);
  TensorMapDesc desc;
  desc.data = device_matrix.data();
  desc.type = TensorMapType::kFloat32;
  desc.rank = 2;
  desc.shape[0] = kWidth, desc.shape[1] = kHeight;
  desc.stride_bytes[1] = kWidth * sizeof(float);
  desc.box[0] = kColumns, desc.box[1] = kRows;
  const TensorMap map = make_tensor_map(desc, kDevice);
  // x in steps of 16 bytes: what the copy engine accepts.
  for (const auto& [x, y] : {std::pair(0, 0), std::pair(4, 17), std::pair(40, 96), std::pair(-4, -2)}) {
    const DeviceMemory device_out = to_device(stream, std::vector<float>(kRows * kColumns, NAN));
    LaunchConfig config;
    config.block[0] = 128;
    config.stream = stream.handle();
    launch_kernel(kernel, config, map, device_out.data(), x, y);
    const std::vector<float> out = to_host<float>(stream, device_out);
    for (int row = 0; row < kRows; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        const int r = y + row, c = x + column;
        const bool inside = r >= 0 && r < kHeight && c >= 0 && c < kWidth;
        ASSERT_EQ(out[static_cast<size_t>(row * kColumns + column)],
                  inside ? matrix[static_cast<size_t>(r * kWidth + c)] : 0.0f)
            << r << " " << c;
      }
    }
  }
}

// slow_write, then add_one, both with programmatic launch: the second is resident before the first has written.
class DependentPair {
 public:
  explicit DependentPair(const Stream& stream)
      : stream_(stream),
        write_(get_kernel({"selftest/dependent.cu", "slow_write", {}, 0}, kDevice)),
        add_(get_kernel({"selftest/dependent.cu", "add_one", {}, 0}, kDevice)),
        values_(to_device(stream, std::vector<uint32_t>(kCount, 0))),
        out_(to_device(stream, std::vector<uint32_t>(kCount, 0))) {}

  void enqueue(uint32_t value) const {
    LaunchConfig config;
    config.grid[0] = 2;
    config.block[0] = 128;
    config.programmatic = true;
    config.stream = stream_.handle();
    launch_kernel(write_, config, values_.data(), value, 20000u);
    launch_kernel(add_, config, values_.data(), out_.data());
  }
  void expect(uint32_t value) const {
    EXPECT_EQ(to_host<uint32_t>(stream_, out_), std::vector<uint32_t>(kCount, value + 1));
  }

 private:
  static constexpr size_t kCount = 256;
  const Stream& stream_;
  const CompiledKernel& write_;
  const CompiledKernel& add_;
  DeviceMemory values_, out_;
};

TEST_F(CudaDevice, ProgrammaticLaunchesWaitForWhatTheyRead) {
  const Stream stream(kDevice);
  const DependentPair pair(stream);
  for (uint32_t value = 1; value <= 20; ++value) {
    pair.enqueue(value);
    pair.expect(value);
  }
}

TEST_F(CudaDevice, CapturesAndReplays) {
  const Stream stream(kDevice);
  const DependentPair pair(stream);
  const Graph graph(stream, [&] {
    pair.enqueue(41);
    pair.enqueue(42);
  });
  pair.expect(UINT32_MAX);  // nothing ran yet: all zero
  for (int i = 0; i < 5; ++i) graph.replay(stream);
  pair.expect(42);
}

TEST_F(CudaDevice, FirstLaunchMayBeInsideACapture) {
  const Stream stream(kDevice);
  const CompiledKernel& kernel = get_kernel(saxpy_spec(7), kDevice);
  const DeviceMemory x = to_device(stream, std::vector<float>{1, 2}), y = to_device(stream, std::vector<float>{10, 20});
  LaunchConfig config;
  config.block[0] = 32;
  config.stream = stream.handle();
  const Graph graph(stream, [&] { launch_kernel(kernel, config, SaxpyParams{x.data(), y.data(), 2}); });
  graph.replay(stream);
  EXPECT_EQ(to_host<float>(stream, y), (std::vector<float>{17, 34}));
}

TEST_F(CudaDevice, ThreadsGetOneKernel) {
  std::vector<const CompiledKernel*> found(16);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        found[i] = &get_kernel(saxpy_spec(100 + static_cast<int>(i) % 4), kDevice);
      } catch (const Failure& e) {
        ADD_FAILURE() << e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 4; i < found.size(); ++i) EXPECT_EQ(found[i], found[i % 4]);
  EXPECT_NE(found[0], found[1]);
}

TEST_F(CudaDevice, WarmsSideBySideAndReportsFailure) {
  warm({saxpy_spec(200), saxpy_spec(201), saxpy_spec(202)}, kDevice);
  EXPECT_THAT(failure_of(
                  [] {
                    warm({saxpy_spec(203), {"selftest/none.cu", "k", {}, 0}}, kDevice);
                  },
                  ATTUNE_INTERNAL),
              HasSubstr("there is no kernel source selftest/none.cu"));
}

// A call without a plan warms what it needs every time: no thread may be started for that.
TEST_F(CudaDevice, WarmingWhatIsThereCostsMicroseconds) {
  using Clock = std::chrono::steady_clock;
  const std::vector<KernelSpec> specs = {saxpy_spec(200), saxpy_spec(201), saxpy_spec(202), saxpy_spec(203)};
  warm(specs, kDevice);
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < 100; ++i) warm(specs, kDevice);
    best = std::min(best, std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 100);
  }
  EXPECT_LT(best, 20);
}

TEST_F(CudaDevice, LaunchesCostMicroseconds) {
  using Clock = std::chrono::steady_clock;
  const Stream stream(kDevice);
  const CompiledKernel& kernel = get_kernel(saxpy_spec(2), kDevice);
  LaunchConfig config;
  config.block[0] = 256;
  config.stream = stream.handle();
  auto per_call = [&](int count, auto&& body) {
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) body();
    const std::chrono::duration<double, std::micro> elapsed = Clock::now() - start;
    stream.synchronize();
    return elapsed.count() / count;
  };
  per_call(500, [&] { launch_kernel(kernel, config, SaxpyParams{nullptr, nullptr, 0}); });
  const double with_context = [&] {
    const ScopedContext context(kDevice);
    return per_call(500, [&] { launch_kernel(kernel, config, SaxpyParams{nullptr, nullptr, 0}); });
  }();
  const double without_context = per_call(500, [&] {
    launch_kernel(kernel, config, SaxpyParams{nullptr, nullptr, 0});
  });
  const double lookup = per_call(500, [&] { get_kernel(saxpy_spec(2), kDevice); });
  config.cluster[0] = 1;
  config.programmatic = true;
  const double programmatic = per_call(500, [&] { launch_kernel(kernel, config, SaxpyParams{nullptr, nullptr, 0}); });
  Timer timer(kDevice);
  timer.start(stream);
  launch_kernel(kernel, config, SaxpyParams{nullptr, nullptr, 0});
  timer.stop(stream);
  std::printf(
      "a launch: %.2f us, context switched %.2f us, programmatic %.2f us; a lookup: %.2f us; an empty kernel: %.2f "
      "us\n",
      with_context, without_context, programmatic, lookup, timer.milliseconds() * 1e3);
  // Loose: other work may share the machine.
  EXPECT_LT(with_context, 50);
}

}  // namespace
}  // namespace attune::cuda
