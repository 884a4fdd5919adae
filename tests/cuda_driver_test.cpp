// SPDX-License-Identifier: Apache-2.0
// What the library says of drivers and GPUs, with a driver made of functions of this file: absent, old, without a GPU,
// with others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "core/status.h"
#include "cuda/device.h"
#include "cuda/tensor_map.h"
#include "failure.h"

namespace attune::cuda {
namespace {

struct FakeGpu {
  const char* name;
  int32_t major, minor;
};

struct FakeDriver {
  int32_t version = 12080;
  Result init = kSuccess;
  std::string missing;  // a function that it lacks
  std::vector<FakeGpu> gpus;
};
FakeDriver g_fake;
constexpr int32_t kSharedBytes = 200 * 1024;  // and all else that is asked for

Result get_version(int32_t* version) { return *version = g_fake.version, kSuccess; }
Result init(uint32_t) { return g_fake.init; }
Result error_name(Result r, const char** name) {
  return *name = r == kErrorNoDevice ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OF_TEST", kSuccess;
}
Result error_string(Result, const char** text) { return *text = "made up", kSuccess; }
Result device_count(int32_t* count) { return *count = static_cast<int32_t>(g_fake.gpus.size()), kSuccess; }
Result device_get(Ordinal* device, int32_t i) { return *device = i, kSuccess; }
Result device_memory(size_t* bytes, Ordinal) { return *bytes = size_t{141} << 30, kSuccess; }
Result device_name(char* name, int32_t capacity, Ordinal device) {
  const char* from = g_fake.gpus[static_cast<size_t>(device)].name;
  if (from == nullptr) return 999;
  std::strncpy(name, from, static_cast<size_t>(capacity));
  return kSuccess;
}
Result device_attribute(int32_t* value, DeviceAttribute attribute, Ordinal device) {
  const FakeGpu& gpu = g_fake.gpus[static_cast<size_t>(device)];
  *value = attribute == DeviceAttribute::kComputeCapabilityMajor   ? gpu.major
           : attribute == DeviceAttribute::kComputeCapabilityMinor ? gpu.minor
           : attribute == DeviceAttribute::kMultiprocessorCount    ? 132
                                                                   : kSharedBytes;
  return kSuccess;
}
Result not_of_this_test() { return 999; }

template <class F>
void* as_pointer(F* function) {
  return reinterpret_cast<void*>(function);
}

void* find_fake(const char* name, int version) {
  EXPECT_EQ(version, kMinDriverVersion);
  static const std::map<std::string, void*> functions = {{"cuDriverGetVersion", as_pointer(get_version)},
                                                         {"cuInit", as_pointer(init)},
                                                         {"cuGetErrorName", as_pointer(error_name)},
                                                         {"cuGetErrorString", as_pointer(error_string)},
                                                         {"cuDeviceGetCount", as_pointer(device_count)},
                                                         {"cuDeviceGet", as_pointer(device_get)},
                                                         {"cuDeviceGetName", as_pointer(device_name)},
                                                         {"cuDeviceTotalMem", as_pointer(device_memory)},
                                                         {"cuDeviceGetAttribute", as_pointer(device_attribute)}};
  if (name == g_fake.missing) return nullptr;
  const auto it = functions.find(name);
  return it != functions.end() ? it->second : as_pointer(not_of_this_test);
}

std::string why_not() {
  Driver table{};
  std::string why;
  return load_driver(find_fake, &table, &why) ? "" : why;
}

class CudaDriver : public testing::Test {
 protected:
  void SetUp() override { g_fake = {}; }
  // bundled: what the bundle has kernels of.
  static std::vector<DeviceInfo> list_gpus(const std::string& forced, const std::string& bundled = "",
                                           bool can_compile = true) {
    Driver table{};
    std::string why;
    EXPECT_TRUE(load_driver(find_fake, &table, &why)) << why;
    return list_devices(
        table, forced, {[&](const Target& target) { return target.option() == bundled; }, [&] { return can_compile; }});
  }
};

TEST_F(CudaDriver, LoadsEveryFunction) {
  Driver table{};
  std::string why;
  ASSERT_TRUE(load_driver(find_fake, &table, &why)) << why;
  EXPECT_EQ(table.version, 12080);
#define ATTUNE_TEST_PRESENT(name, parameters) EXPECT_NE(table.name, nullptr);
  ATTUNE_CUDA_DRIVER_FUNCTIONS(ATTUNE_TEST_PRESENT)
#undef ATTUNE_TEST_PRESENT
}

TEST_F(CudaDriver, NamesWhatIsWrongInOneSentence) {
  g_fake.version = 12020;
  // Age is the better reason, whatever else is missing.
  g_fake.missing = "cuFuncLoad";
  EXPECT_EQ(why_not(), "the NVIDIA driver is too old: it supports CUDA 12.2, and 12.4 (driver 550) or newer is needed");
  g_fake.version = 12040;
  EXPECT_EQ(why_not(), "the NVIDIA driver (CUDA 12.4) has no function cuFuncLoad");
  g_fake.missing = "";
  EXPECT_EQ(why_not(), "");
  g_fake.init = kErrorNoDevice;
  EXPECT_EQ(why_not(), "the NVIDIA driver finds no GPU (CUDA_ERROR_NO_DEVICE)");
  g_fake.init = 803;
  EXPECT_EQ(why_not(), "the NVIDIA driver does not start: CUDA_ERROR_OF_TEST (made up)");
}

TEST_F(CudaDriver, ListsGpusAndSaysWhichCannotBeUsed) {
  g_fake.gpus = {{"NVIDIA H200", 9, 0}, {"Tesla T4", 7, 5}, {nullptr, 9, 0}, {"NVIDIA A10", 8, 6}};
  const std::vector<DeviceInfo> list = list_gpus("");
  ASSERT_EQ(list.size(), 4u);
  EXPECT_TRUE(list[0].usable());
  EXPECT_EQ(list[0].name, "NVIDIA H200");
  EXPECT_EQ(list[0].num_sms, 132);
  EXPECT_EQ(list[0].memory_bytes, int64_t{141} << 30);
  EXPECT_EQ(list[0].target.option(), "sm_90a");
  EXPECT_EQ(list[1].why_not,
            "CUDA device 1 (Tesla T4) has compute capability 7.5; the kernels need 8.0 (Ampere) or newer");
  EXPECT_EQ(list[2].why_not, "CUDA device 2 cannot be read: CUDA_ERROR_OF_TEST (made up)");
  EXPECT_TRUE(list[3].usable());
  EXPECT_EQ(list[3].target.option(), "sm_86");
  EXPECT_EQ(list[3].shared_bytes_per_block, kSharedBytes) << "what its driver says";
}

// ATTUNE_ARCH.
TEST_F(CudaDriver, PlansForAnotherArchitecture) {
  g_fake.gpus = {{"NVIDIA H200", 9, 0}, {"NVIDIA A10", 8, 6}};
  std::vector<DeviceInfo> list = list_gpus("sm_86");
  EXPECT_EQ(list[0].target.option(), "compute_80") << "which has the same instructions";
  EXPECT_EQ(list[0].shared_bytes_per_block, 99 * 1024);
  EXPECT_EQ(list[0].shared_bytes_per_sm, 100 * 1024);
  EXPECT_EQ(list[1].target.option(), "sm_86") << "its own";
  list = list_gpus("sm_90");
  EXPECT_EQ(list[0].target.option(), "sm_90");
  EXPECT_EQ(list[0].shared_bytes_per_block, kSharedBytes) << "never more than the GPU has";
  EXPECT_FALSE(list[0].target.has(ptx::kWgmma));
  EXPECT_EQ(list[1].why_not,
            "CUDA device 1 (NVIDIA A10) is not used: ATTUNE_ARCH names sm_90, whose code a GPU of compute capability "
            "8.6 does not run; it may be sm_80 or sm_86");
  list = list_gpus("sm_75");
  EXPECT_EQ(list[0].why_not,
            "CUDA device 0 (NVIDIA H200) is not used: ATTUNE_ARCH is 'sm_75'; it must be one of sm_80, sm_86, sm_87, "
            "sm_89, sm_90, sm_90a, sm_100, sm_103, sm_110, sm_120, sm_121");
}

// What `--device auto` asks.
TEST_F(CudaDriver, TellsWhenAnArchitectureLeavesNoGpu) {
  const auto wrong = [](const std::string& forced) { return wrong_architecture(list_gpus(forced), forced); };
  const std::string unknown =
      "ATTUNE_ARCH is 'sm_75'; it must be one of sm_80, sm_86, sm_87, sm_89, sm_90, sm_90a, sm_100, sm_103, sm_110, "
      "sm_120, sm_121";
  EXPECT_EQ(wrong(""), "");
  EXPECT_EQ(wrong("sm_90"), "") << "there is no GPU";
  EXPECT_EQ(wrong("sm_75"), unknown);
  g_fake.gpus = {{"Tesla T4", 7, 5}};
  EXPECT_EQ(wrong("sm_75"), unknown);
  EXPECT_EQ(wrong("sm_80"), "") << "too old in any case";
  g_fake.gpus = {{"Tesla T4", 7, 5}, {"NVIDIA A10", 8, 6}};
  EXPECT_EQ(wrong(""), "");
  EXPECT_EQ(wrong("sm_86"), "");
  EXPECT_EQ(wrong("sm_89"),
            "CUDA device 1 (NVIDIA A10) is not used: ATTUNE_ARCH names sm_89, whose code a GPU of compute capability "
            "8.6 does not run; it may be sm_80 or sm_86");
  g_fake.gpus = {{"NVIDIA A10", 8, 6}, {"NVIDIA L4", 8, 9}};
  EXPECT_EQ(wrong("sm_89"), "") << "the other runs it";
}

// Without a compiler, GPUs whose own code the bundle does not hold run the PTX that it holds.
TEST_F(CudaDriver, PlansForTheBundledPtxWhereNothingElseIsThere) {
  g_fake.gpus = {{"NVIDIA H200", 9, 0}, {"NVIDIA A10", 8, 6}, {"NVIDIA A100", 8, 0}, {"NVIDIA B200", 10, 0}};
  std::vector<DeviceInfo> list = list_gpus("", "compute_80", false);
  for (const DeviceInfo& info : list) {
    EXPECT_TRUE(info.usable()) << info.why_not;
    EXPECT_EQ(info.target.option(), "compute_80") << info.name;
    EXPECT_EQ(info.target.features, 0u) << info.name;
    EXPECT_EQ(info.shared_bytes_per_block, std::min<int64_t>(kSharedBytes, 163 * 1024)) << info.name;
  }
  list = list_gpus("", "sm_90a", false);
  EXPECT_EQ(list[0].target.option(), "sm_90a");
  EXPECT_EQ(list[1].target.option(), "sm_86") << "its plans say that there is no compiler";
  list = list_gpus("sm_89", "compute_80", false);
  EXPECT_EQ(list[3].target.option(), "compute_89") << "asked for";
  list = list_gpus("", "compute_80", true);
  EXPECT_EQ(list[1].target.option(), "sm_86") << "the compiler makes its own";
}

TEST(CudaAbsent, OneSentenceAndNoCrash) {
  if (why_no_device().empty()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_EQ(why_no_device().find('\n'), std::string::npos);
  EXPECT_EQ(failure_of([] { require_device(0); }, ATTUNE_DEVICE_ERROR), why_no_device());
}

// A description that is right, for the tests to break.
TensorMapDesc good_map() {
  TensorMapDesc t;
  t.data = reinterpret_cast<void*>(uintptr_t{0x7f0000000100});
  t.type = TensorMapType::kBfloat16;
  t.rank = 3;
  t.shape[0] = 128, t.shape[1] = 8, t.shape[2] = 1000;
  t.stride_bytes[1] = 256, t.stride_bytes[2] = 2048;
  t.box[0] = 64, t.box[1] = 1, t.box[2] = 64;
  t.swizzle = TensorMapSwizzle::k128B;
  return t;
}

std::string map_fault(const TensorMapDesc& t) {
  return failure_of([&] { check_tensor_map(t); });
}

TEST(TensorMap, NamesTheBrokenRule) {
  EXPECT_EQ(map_fault(good_map()), "");
  auto broken = [](auto change) {
    TensorMapDesc t = good_map();
    change(t);
    return map_fault(t);
  };
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.rank = 6; }), "tensor map: rank is 6; it must be 1 to 5");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.data = nullptr; }), "tensor map: data is null");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.data = static_cast<char*>(t.data) + 8; }),
            "tensor map: data is not aligned to 16 bytes");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.shape[1] = 0; }), "tensor map: shape[1] is 0; it must be 1 to 2^32");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.stride_bytes[2] = 2056; }),
            "tensor map: stride_bytes[2] is 2056; it must be a multiple of 16 under 2^40");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.box[2] = 257; }), "tensor map: box[2] is 257; it must be 1 to 256");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.box[0] = 12; }),
            "tensor map: box[0] is 12, 24 bytes; it must be a multiple of 16 bytes");
  EXPECT_EQ(broken([](TensorMapDesc& t) { t.box[0] = 128; }),
            "tensor map: box[0] is 256 bytes, wider than the swizzle");
}

}  // namespace
}  // namespace attune::cuda
