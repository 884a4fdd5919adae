// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/status.h"

namespace attune::cuda {
namespace {

using GetProcAddress = Result (*)(const char* symbol, void** function, int32_t version, uint64_t flags,
                                  int32_t* status);

constexpr char kNoGpu[] = "the NVIDIA driver finds no GPU";
constexpr uint64_t kLegacyStream = 1;  // a NULL stream is the legacy default stream

GetProcAddress g_get_proc_address = nullptr;

void* find_in_libcuda(const char* name, int version) {
  void* function = nullptr;
  int32_t status = 0;
  if (g_get_proc_address(name, &function, version, kLegacyStream, &status) != kSuccess || status != 0) return nullptr;
  return function;
}

struct Opened {
  Driver table{};
  bool works = false, is_there = false;
  std::string why;
};

Opened open() {
  Opened opened;
  const char* path = std::getenv("ATTUNE_LIBCUDA");
  if (path == nullptr || *path == '\0') path = "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    opened.why = cat("no NVIDIA driver: ", error != nullptr ? error : "libcuda.so.1 cannot be opened");
    return opened;
  }
  opened.is_there = true;
  // This name came with CUDA 12.0.
  g_get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (g_get_proc_address == nullptr) {
    opened.why = cat("the NVIDIA driver is too old: it is older than CUDA 12.0, and ", version_text(kMinDriverVersion),
                     " (driver 550) or newer is needed");
    return opened;
  }
  opened.works = load_driver(find_in_libcuda, &opened.table, &opened.why);
  return opened;
}

const Opened& opened() {
  // Never closed and never destroyed: the driver may be used until the last thread ends.
  static const Opened& once = *new Opened(open());
  return once;
}

}  // namespace

std::string version_text(int version) { return cat(version / 1000, ".", version % 1000 / 10); }

bool load_driver(FindFunction find, Driver* table, std::string* why) {
  // The version first: an old driver lacks functions, and its age is the better reason.
  table->cuDriverGetVersion =
      reinterpret_cast<decltype(table->cuDriverGetVersion)>(find("cuDriverGetVersion", kMinDriverVersion));
  int32_t version = 0;
  if (table->cuDriverGetVersion == nullptr || table->cuDriverGetVersion(&version) != kSuccess) {
    *why = "the NVIDIA driver does not tell its version";
    return false;
  }
  table->version = version;
  if (version < kMinDriverVersion) {
    *why = cat("the NVIDIA driver is too old: it supports CUDA ", version_text(version), ", and ",
               version_text(kMinDriverVersion), " (driver 550) or newer is needed");
    return false;
  }
#define ATTUNE_CUDA_FIND(name, parameters)                                                     \
  table->name = reinterpret_cast<decltype(table->name)>(find(#name, kMinDriverVersion));       \
  if (table->name == nullptr) {                                                                \
    *why = cat("the NVIDIA driver (CUDA ", version_text(version), ") has no function " #name); \
    return false;                                                                              \
  }
  ATTUNE_CUDA_DRIVER_FUNCTIONS(ATTUNE_CUDA_FIND)
#undef ATTUNE_CUDA_FIND
  if (const Result result = table->cuInit(0); result != kSuccess) {
    *why = result == kErrorNoDevice ? cat(kNoGpu, " (CUDA_ERROR_NO_DEVICE)")
                                    : cat("the NVIDIA driver does not start: ", error_text(*table, result));
    return false;
  }
  return true;
}

const Driver* driver(std::string* why) {
  const Opened& o = opened();
  if (why != nullptr) *why = o.why;
  return o.works ? &o.table : nullptr;
}

const Driver& require_driver() {
  const Opened& o = opened();
  if (!o.works) fail(ATTUNE_DEVICE_ERROR, o.why);
  return o.table;
}

bool driver_fails() {
  const Opened& o = opened();
  return o.is_there && !o.works && !o.why.starts_with(kNoGpu);
}

std::string error_text(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != kSuccess || name == nullptr) return cat("CUDA error ", result);
  if (driver.cuGetErrorString(result, &text) != kSuccess || text == nullptr) return name;
  return cat(name, " (", text, ")");
}

void check(Result result, const char* what) {
  if (result == kSuccess) [[likely]]
    return;
  const Opened& o = opened();
  fail(result == kErrorOutOfMemory ? ATTUNE_OUT_OF_MEMORY : ATTUNE_DEVICE_ERROR, what, ": ",
       o.works ? error_text(o.table, result) : cat("CUDA error ", result));
}

void check(Result result, const std::string& what) { check(result, what.c_str()); }

}  // namespace attune::cuda
