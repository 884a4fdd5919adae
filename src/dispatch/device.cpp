// SPDX-License-Identifier: Apache-2.0
#include "dispatch/device.h"

#include <algorithm>
#include <cstring>

#include "core/status.h"
#include "cpu/cpu_info.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/jit/bundle.h"
#include "cuda/jit/image.h"
#include "cuda/jit/nvrtc.h"

namespace attune {
namespace {

template <size_t kCapacity>
void copy_text(char (&to)[kCapacity], const std::string& from) {
  const size_t n = std::min(kCapacity - 1, from.size());
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

// Where ATTUNE_ARCH names another architecture than the GPU's.
std::string planned_as(const cuda::DeviceInfo& gpu) {
  const bool own = gpu.target.name == cuda::own_target(10 * gpu.compute_major + gpu.compute_minor).name;
  return own ? "" : cat(", planned as ", gpu.target.name, " (ATTUNE_ARCH)");
}

std::string describe_bundle(const cuda::ImageFinder::Options& options) {
  const std::string& path = options.bundle_path;
  std::string why = "there is no file " + path;
  const auto bundle = path.empty() ? nullptr : cuda::Bundle::open(path, &why);
  if (bundle == nullptr) return path.empty() ? "none" : cat("none (", why, ")");
  return cat(path, ", ", bundle->size(), " module", plural_s(static_cast<int64_t>(bundle->size())), " by NVRTC ",
             bundle->compiler_major(), ".", bundle->compiler_minor(),
             bundle->compiler_major() > options.driver_major() ? ", not used: newer than the driver" : "");
}

}  // namespace

void check_device_argument(attune_device device) {
  require(device.type == ATTUNE_DEVICE_CPU || device.type == ATTUNE_DEVICE_CUDA, "device.type is ", device.type,
          "; it must be ATTUNE_DEVICE_CPU (0) or ATTUNE_DEVICE_CUDA (1)");
  require(device.type != ATTUNE_DEVICE_CPU || device.index == 0, "device.index is ", device.index,
          "; the CPU has only index 0");
}

void check_stream(attune_device device, const void* stream) {
  require(device.type == ATTUNE_DEVICE_CUDA || stream == nullptr,
          "stream is set, but the CPU has no streams; it must be null there");
}

void check_device(attune_device device) {
  check_device_argument(device);
  if (device.type == ATTUNE_DEVICE_CPU) return;
  try {
    cuda::require_device(device.index);
  } catch (const Failure& e) {
    fail(e.status(), "device ", device_name(device), " is not available: ", e.what());
  }
}

std::string device_name(attune_device device) {
  return device.type == ATTUNE_DEVICE_CUDA ? cat("cuda:", device.index) : std::string("cpu");
}

int32_t device_count() {
  const auto& gpus = cuda::devices();
  return 1 + static_cast<int32_t>(std::count_if(gpus.begin(), gpus.end(), [](const auto& d) { return d.usable(); }));
}

void describe_device(int32_t i, attune_device_info* info) {
  if (i == 0) {
    info->device = {ATTUNE_DEVICE_CPU, 0};
    copy_text(info->name, cpu::cpu_name());
    copy_text(info->isa, cpu::kernels().isa);
    info->num_units = cpu::num_threads();
    info->memory_bytes = cpu::memory_bytes();
    return;
  }
  for (const cuda::DeviceInfo& gpu : cuda::devices()) {
    if (!gpu.usable() || --i > 0) continue;
    info->device = {ATTUNE_DEVICE_CUDA, gpu.ordinal};
    copy_text(info->name, gpu.name);
    copy_text(info->isa, gpu.target.name);
    info->num_units = gpu.num_sms;
    info->memory_bytes = gpu.memory_bytes;
    return;
  }
}

std::string describe_cuda() {
  std::string why;
  const cuda::Driver* driver = cuda::driver(&why);
  std::string text = cat(
      "driver: ", driver != nullptr ? "CUDA " + cuda::version_text(driver->version) : cat("none (", why, ")"), "\n");
  for (const cuda::DeviceInfo& gpu : cuda::devices()) {
    text += cat("device ", gpu.ordinal, ": ",
                gpu.usable() ? cat(gpu.name, ", compute capability ", gpu.compute_major, ".", gpu.compute_minor, ", ",
                                   gpu.num_sms, " multiprocessors, ", gpu.l2_bytes >> 20, " MiB L2", planned_as(gpu))
                             : "not used: " + gpu.why_not,
                "\n");
  }
  const cuda::ImageFinder::Options options =
      cuda::ImageFinder::default_options(driver != nullptr ? driver->version : 1000 * cuda::kAnyMajor);
  const cuda::Nvrtc* nvrtc = cuda::find_nvrtc(options.driver_major(), &why);
  const std::string compiler = nvrtc != nullptr
                                   ? cat("NVRTC ", nvrtc->version(), ", ", nvrtc->path())
                                   : cat("none (", why, "; ", cuda::nvrtc_advice(options.driver_major()), ")");
  text += cat("bundle: ", describe_bundle(options), "\n");
  text += cat("disk cache: ", options.cache_directory.empty() ? "none" : options.cache_directory, "\n");
  text += cat("compiler: ", options.may_compile ? compiler : "off (ATTUNE_JIT); " + compiler, "\n");
  return text;
}

}  // namespace attune
