// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "core/status.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/image.h"

namespace attune::cuda {
namespace {

constexpr int kMaxDevices = 64;

std::string read_device(const Driver& d, Ordinal device, DeviceInfo* info) {
  char name[256] = "";
  size_t memory = 0;
  Result result = d.cuDeviceGetName(name, sizeof(name), device);
  if (result == kSuccess) result = d.cuDeviceTotalMem(&memory, device);
  info->name = name;
  info->memory_bytes = static_cast<int64_t>(memory);
  auto read = [&](DeviceAttribute attribute) {
    int32_t value = 0;
    const Result r = d.cuDeviceGetAttribute(&value, attribute, device);
    if (result == kSuccess) result = r;
    return value;
  };
  info->compute_major = read(DeviceAttribute::kComputeCapabilityMajor);
  info->compute_minor = read(DeviceAttribute::kComputeCapabilityMinor);
  info->num_sms = read(DeviceAttribute::kMultiprocessorCount);
  info->l2_bytes = read(DeviceAttribute::kL2CacheSize);
  info->shared_bytes_per_block = read(DeviceAttribute::kMaxSharedMemoryPerBlockOptin);
  info->shared_bytes_per_sm = read(DeviceAttribute::kMaxSharedMemoryPerMultiprocessor);
  return result == kSuccess ? std::string() : cat("cannot be read: ", error_text(d, result));
}

// Makes plans those of that architecture: its target, and its limits where these are lower.
void set_target(const Target& target, const Architecture& like, DeviceInfo* info) {
  info->target = target;
  info->shared_bytes_per_block = std::min<int64_t>(info->shared_bytes_per_block, like.shared_a_block);
  info->shared_bytes_per_sm = std::min<int64_t>(info->shared_bytes_per_sm, like.shared_per_sm);
}

// Chooses what kernels are compiled for. "", or why there is nothing.
std::string choose_target(const std::string& forced, const KernelSources& sources, DeviceInfo* info) {
  const int capability = 10 * info->compute_major + info->compute_minor;
  const auto sentence = [info](const std::string& text) {
    return cat("CUDA device ", info->ordinal, " (", info->name, ") ", text);
  };
  if (const std::string old = too_old(capability); !old.empty()) return sentence(old);
  if (forced.empty()) {
    info->target = own_target(capability);
    const Target portable = portable_target();
    if (sources.bundles(portable) && !sources.bundles(info->target) && !sources.can_compile())
      set_target(portable, *find_architecture(portable.name), info);
    return "";
  }
  std::string why;
  const Target target = forced_target(forced, capability, &why);
  if (!why.empty()) return sentence(cat("is not used: ", why));
  set_target(target, *find_architecture(forced), info);
  return "";
}

struct PrimaryContexts {
  std::mutex mutex;
  std::atomic<Context> of_device[kMaxDevices] = {};
};
PrimaryContexts& primary_contexts() {
  static PrimaryContexts& once = *new PrimaryContexts;
  return once;
}

}  // namespace

std::vector<DeviceInfo> list_devices(const Driver& d, const std::string& forced, const KernelSources& sources) {
  int32_t count = 0;
  if (d.cuDeviceGetCount(&count) != kSuccess) return {};
  std::vector<DeviceInfo> list;
  for (int32_t i = 0; i < count && i < kMaxDevices; ++i) {
    DeviceInfo info;
    info.ordinal = i;
    Ordinal device = 0;
    const Result result = d.cuDeviceGet(&device, i);
    const std::string fault =
        result == kSuccess ? read_device(d, device, &info) : cat("cannot be opened: ", error_text(d, result));
    info.why_not = fault.empty() ? choose_target(forced, sources, &info) : cat("CUDA device ", i, " ", fault);
    list.push_back(std::move(info));
  }
  return list;
}

const std::vector<DeviceInfo>& devices() {
  static const std::vector<DeviceInfo>& once = *new std::vector<DeviceInfo>([] {
    const Driver* d = driver(nullptr);
    if (d == nullptr) return std::vector<DeviceInfo>();
    const auto finder = [d]() -> ImageFinder& { return the_image_finder(d->version); };
    return list_devices(
        *d, environment("ATTUNE_ARCH"),
        {[&](const Target& target) { return finder().bundles(target); }, [&] { return finder().can_compile(); }});
  }());
  return once;
}

const DeviceInfo& require_device(int32_t ordinal) {
  require_driver();
  const std::vector<DeviceInfo>& list = devices();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= list.size()) {
    fail(ATTUNE_DEVICE_ERROR, "there is no CUDA device ", ordinal, "; there ", list.size() == 1 ? "is " : "are ",
         list.size());
  }
  const DeviceInfo& info = list[static_cast<size_t>(ordinal)];
  if (!info.usable()) fail(ATTUNE_DEVICE_ERROR, info.why_not);
  return info;
}

std::string why_no_device() {
  std::string why;
  if (driver(&why) == nullptr) return why;
  for (const DeviceInfo& info : devices()) {
    if (info.usable()) return "";
    if (why.empty()) why = info.why_not;
  }
  return why.empty() ? "the NVIDIA driver finds no GPU" : why;
}

std::string wrong_architecture(const std::vector<DeviceInfo>& devices, const std::string& forced) {
  if (forced.empty()) return "";
  std::string fault = unknown_architecture(forced);
  if (!fault.empty()) return fault;
  for (const DeviceInfo& info : devices) {
    if (info.usable()) return "";
    const int capability = 10 * info.compute_major + info.compute_minor;
    std::string refused;
    forced_target(forced, capability, &refused);
    if (fault.empty() && !refused.empty() && too_old(capability).empty()) fault = info.why_not;
  }
  return fault;
}

std::string wrong_architecture() { return wrong_architecture(devices(), environment("ATTUNE_ARCH")); }

Context primary_context(int32_t ordinal) {
  PrimaryContexts& contexts = primary_contexts();
  if (ordinal >= 0 && ordinal < kMaxDevices) {
    if (const Context context = contexts.of_device[ordinal].load(std::memory_order_acquire)) return context;
  }
  require_device(ordinal);
  const Driver& d = require_driver();
  std::lock_guard lock(contexts.mutex);
  Context context = contexts.of_device[ordinal].load(std::memory_order_relaxed);
  if (context != nullptr) return context;
  Ordinal device = 0;
  check(d.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(d.cuDevicePrimaryCtxRetain(&context, device), cat("retaining the primary context of CUDA device ", ordinal));
  contexts.of_device[ordinal].store(context, std::memory_order_release);
  return context;
}

ScopedContext::ScopedContext(int32_t ordinal) {
  const Context wanted = primary_context(ordinal);
  const Driver& d = require_driver();
  Context current = nullptr;
  check(d.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == wanted) return;
  check(d.cuCtxPushCurrent(wanted), "cuCtxPushCurrent");
  driver_ = &d;
}

ScopedContext::ScopedContext(int32_t ordinal, std::nothrow_t) noexcept {
  const Context wanted = primary_contexts().of_device[ordinal].load(std::memory_order_acquire);
  const Driver* d = driver(nullptr);
  Context current = nullptr;
  if (d == nullptr || wanted == nullptr || d->cuCtxGetCurrent(&current) != kSuccess || current == wanted) return;
  if (d->cuCtxPushCurrent(wanted) == kSuccess) driver_ = d;
}

ScopedContext::~ScopedContext() {
  if (driver_ == nullptr) return;
  Context popped = nullptr;
  driver_->cuCtxPopCurrent(&popped);
}

}  // namespace attune::cuda
