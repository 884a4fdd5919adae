// SPDX-License-Identifier: Apache-2.0
// CUDA devices: what they are, whether this library can use them, and their primary contexts.
#pragma once

#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "cuda/architecture.h"
#include "cuda/driver.h"

namespace attune::cuda {

struct DeviceInfo {
  int32_t ordinal = 0;  // as CUDA numbers them, CUDA_VISIBLE_DEVICES applied
  std::string name;     // "NVIDIA H200"
  int32_t compute_major = 0, compute_minor = 0;
  int32_t num_sms = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t shared_bytes_per_block = 0;  // the most that one block may ask for, static and dynamic
  int64_t shared_bytes_per_sm = 0;     // neither is more than the target has
  Target target;                       // what kernels are planned and compiled for
  std::string why_not;                 // "" if the kernels run here, else one sentence
  bool usable() const { return why_not.empty(); }
};

// All CUDA devices in order of their ordinals; empty where there is no working driver (driver() says why). Read once.
const std::vector<DeviceInfo>& devices();
// The entry of a device that can be used; Failure(ATTUNE_DEVICE_ERROR) that says why where it cannot.
const DeviceInfo& require_device(int32_t ordinal);
// One sentence on why no CUDA device can be used; "" if one can.
std::string why_no_device();
// One sentence on what is wrong with ATTUNE_ARCH: it is unknown, or leaves no GPU where there is one; else "".
std::string wrong_architecture();
// For it and its tests: with that value of ATTUNE_ARCH.
std::string wrong_architecture(const std::vector<DeviceInfo>& devices, const std::string& forced);

// The primary context of a usable device: created on first use, kept for the life of the process.
Context primary_context(int32_t ordinal);

// Makes the primary context of a device current for the scope. A comparison where it already is.
class ScopedContext {
 public:
  explicit ScopedContext(int32_t ordinal);
  ScopedContext(int32_t ordinal, std::nothrow_t) noexcept;  // for destructors: leaves things as they are where it fails
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver* driver_ = nullptr;  // null: nothing was pushed
};

// What the choice of a target needs to know of the places that kernels come from.
struct KernelSources {
  std::function<bool(const Target&)> bundles;  // whether the bundle has kernels of a target
  std::function<bool()> can_compile;           // asked last: it opens the compiler
};

// For devices() and its tests. forced: the architecture that ATTUNE_ARCH names, or "". A GPU whose own kernels can come
// from nowhere gets those of portable_target(), if the bundle has them.
std::vector<DeviceInfo> list_devices(const Driver& driver, const std::string& forced, const KernelSources& sources);

}  // namespace attune::cuda
