// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel.h"

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>

#include "core/parallel.h"
#include "core/status.h"
#include "cuda/device.h"
#include "cuda/jit/image.h"

namespace attune::cuda {
namespace {

// Code of one module, loaded once for all devices of an architecture.
struct LoadedModule {
  Library library = nullptr;
  KernelOrigin origin = KernelOrigin::kCompiled;
};
// The mutex is held while the module is found or compiled: threads that want the same one wait, others do not.
struct Module {
  std::mutex mutex;
  LoadedModule loaded;
};

std::string key_of(const KernelSpec& spec, int32_t device) {
  return cat(module_name({spec.source, spec.defines}), "\n", spec.entry, "\n", device);
}

// Kernels by their specs as callers write them, defines in the caller's order. Every plan comes here, so that a lookup
// neither sorts nor allocates.
class KnownKernels {
 public:
  const CompiledKernel* find(const KernelSpec& spec, int32_t device) const {
    const auto [begin, end] = kernels_.equal_range(hash(spec));
    for (auto it = begin; it != end; ++it) {
      const Known& k = it->second;
      if (k.device == device && k.spec.entry == spec.entry && k.spec.source == spec.source &&
          k.spec.defines == spec.defines) {
        return k.kernel;
      }
    }
    return nullptr;
  }
  void add(const KernelSpec& spec, int32_t device, const CompiledKernel* kernel) {
    if (find(spec, device) == nullptr) kernels_.emplace(hash(spec), Known{spec, device, kernel});
  }

 private:
  struct Known {
    KernelSpec spec;
    int32_t device;
    const CompiledKernel* kernel;
  };

  // Hashes entry and defines, in which kernels differ most.
  static size_t hash(const KernelSpec& spec) {
    size_t h = std::hash<std::string>()(spec.entry);
    for (const auto& [macro, value] : spec.defines)
      for (const char c : value) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;  // FNV-1a
    return h;
  }

  std::unordered_multimap<size_t, Known> kernels_;
};

class KernelCache {
 public:
  KernelCache() : finder_(the_image_finder(require_driver().version)) {}

  bool has(const KernelSpec& spec, int32_t device) const { return find(spec, device) != nullptr; }

  const CompiledKernel& get(const KernelSpec& spec, int32_t device) {
    if (const CompiledKernel* kernel = find(spec, device)) return checked(*kernel, spec);
    require_device(device);
    auto kernel = std::make_unique<CompiledKernel>(load_kernel(spec, device));
    std::unique_lock lock(kernels_mutex_);
    // If another thread came first, its entry stays: callers may hold references to it.
    const auto& entry = kernels_.try_emplace(key_of(spec, device), std::move(kernel)).first->second;
    known_.add(spec, device, entry.get());
    return checked(*entry, spec);
  }

 private:
  const CompiledKernel* find(const KernelSpec& spec, int32_t device) const {
    std::shared_lock lock(kernels_mutex_);
    return known_.find(spec, device);
  }

  static const CompiledKernel& checked(const CompiledKernel& kernel, const KernelSpec& spec) {
    if (spec.shared_bytes <= static_cast<size_t>(kernel.max_dynamic_shared_bytes)) return kernel;
    fail(ATTUNE_DEVICE_ERROR, kernel.name, " wants ", spec.shared_bytes,
         " bytes of dynamic shared memory; CUDA device ", kernel.device, " has ", kernel.max_dynamic_shared_bytes);
  }

  Module& slot(const ModuleSpec& spec) {
    std::lock_guard lock(modules_mutex_);
    std::unique_ptr<Module>& module = modules_[cat(spec.target.option(), " ", module_name(spec))];
    if (module == nullptr) module = std::make_unique<Module>();
    return *module;
  }

  CompiledKernel load_kernel(const KernelSpec& spec, int32_t device) {
    const ModuleSpec module_spec{spec.source, spec.defines, require_device(device).target};
    const LoadedModule loaded = load(module_spec);
    try {
      return make_kernel(spec, device, loaded);
    } catch (...) {
      // A function that the driver had no memory for stays broken in its library (CUDA_ERROR_FUNCTION_NOT_LOADED). The
      // next call loads the module again. The library stays loaded: kernels of other devices may be out of it.
      Module& module = slot(module_spec);
      std::lock_guard lock(module.mutex);
      if (module.loaded.library == loaded.library) module.loaded = {};
      throw;
    }
  }

  LoadedModule load(const ModuleSpec& spec) {
    Module& module = slot(spec);
    std::lock_guard lock(module.mutex);
    if (module.loaded.library != nullptr) return module.loaded;
    const Driver& d = require_driver();
    // Code from the bundle or the disk that the driver refuses is as good as none: go on to the next source.
    bool without_bundle = false, without_cache = false;
    while (true) {
      const Image image = finder_.find(spec, without_bundle, without_cache);
      Library library = nullptr;
      const Result result =
          d.cuLibraryLoadData(&library, image.bytes().data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      if (result == kSuccess) {
        return module.loaded = {library, image.origin};
      }
      if (image.origin == KernelOrigin::kCompiled && result == kErrorUnsupportedPtxVersion) {
        fail(ATTUNE_DEVICE_ERROR, "the NVIDIA driver is too old for PTX of NVRTC ", image.compiler,
             ": it supports CUDA ", version_text(d.version), ", and ", image.compiler, " is needed for ",
             spec.target.option(), "; or set ATTUNE_NVRTC to one of CUDA ", version_text(d.version));
      }
      if (image.origin == KernelOrigin::kCompiled) check(result, cat("loading ", module_name(spec)));
      log_message(ATTUNE_LOG_WARNING, cat("the driver does not load ", module_name(spec), " from the ",
                                          origin_name(image.origin), ": ", error_text(d, result)));
      if (image.origin == KernelOrigin::kBundle) without_bundle = true;
      if (image.origin == KernelOrigin::kDiskCache) {
        without_cache = true;
        finder_.disk_cache().remove(image.key);
      }
    }
  }

  static CompiledKernel make_kernel(const KernelSpec& spec, int32_t device, const LoadedModule& module) {
    const Driver& d = require_driver();
    CompiledKernel k;
    k.name = spec_name(spec);
    k.device = device;
    k.origin = module.origin;
    const Result found = d.cuLibraryGetKernel(&k.kernel, module.library, spec.entry.c_str());
    if (found == kErrorNotFound) fail(ATTUNE_INTERNAL, "kernel source ", spec.source, " has no entry ", spec.entry);
    check(found, cat("finding ", k.name));

    // Loads now and not lazily, as the first launch may be inside a stream capture.
    const ScopedContext context(device);
    check(d.cuKernelGetFunction(&k.function, k.kernel), cat("loading ", k.name));
    check(d.cuFuncLoad(k.function), cat("loading ", k.name));
    auto attribute = [&](FunctionAttribute a) {
      int32_t value = 0;
      check(d.cuFuncGetAttribute(&value, a, k.function), cat("reading the attributes of ", k.name));
      return value;
    };
    k.num_regs = attribute(FunctionAttribute::kNumRegs);
    k.static_shared_bytes = attribute(FunctionAttribute::kSharedSizeBytes);
    k.local_bytes = attribute(FunctionAttribute::kLocalSizeBytes);
    k.max_threads = attribute(FunctionAttribute::kMaxThreadsPerBlock);

    // These raise the limits of the kernel; a launch still takes only what it asks for.
    const DeviceInfo& info = require_device(device);
    k.max_dynamic_shared_bytes = static_cast<int32_t>(info.shared_bytes_per_block) - k.static_shared_bytes;
    Ordinal handle = 0;
    check(d.cuDeviceGet(&handle, device), "cuDeviceGet");
    check(d.cuKernelSetAttribute(FunctionAttribute::kMaxDynamicSharedSizeBytes, k.max_dynamic_shared_bytes, k.kernel,
                                 handle),
          cat("allowing ", k.max_dynamic_shared_bytes, " bytes of shared memory to ", k.name));
    k.dependent_launch = info.target.has(ptx::kDependentLaunch);
    if (info.target.has(ptx::kClusters)) {
      check(d.cuKernelSetAttribute(FunctionAttribute::kNonPortableClusterSizeAllowed, 1, k.kernel, handle),
            cat("allowing large clusters to ", k.name));
    }
    return k;
  }

  ImageFinder& finder_;
  mutable std::shared_mutex kernels_mutex_;
  std::map<std::string, std::unique_ptr<CompiledKernel>> kernels_;
  KnownKernels known_;
  std::mutex modules_mutex_;
  std::map<std::string, std::unique_ptr<Module>> modules_;
};

KernelCache& the_cache() {
  // Never destroyed: plans hold references, and may outlive static destruction.
  static KernelCache& cache = *new KernelCache;
  return cache;
}

}  // namespace

std::string spec_name(const KernelSpec& spec) {
  std::string name = module_name({spec.source, spec.defines});
  return name.insert(spec.source.size(), " " + spec.entry);
}

const CompiledKernel& get_kernel(const KernelSpec& spec, int32_t device) { return the_cache().get(spec, device); }

void warm(const std::vector<KernelSpec>& all, int32_t device) {
  require_device(device);
  // Operations without plans come here on every call: starting threads would cost more than the launch.
  std::vector<KernelSpec> specs;
  for (const KernelSpec& spec : all)
    if (!the_cache().has(spec, device)) specs.push_back(spec);
  if (specs.empty()) return;
  run_in_parallel(specs.size(), [&](size_t i) { get_kernel(specs[i], device); });
}

int32_t CompiledKernel::blocks_per_sm(int32_t threads, size_t dynamic_shared_bytes) const {
  const ScopedContext context(device);
  int32_t blocks = 0;
  check(require_driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, dynamic_shared_bytes),
        cat("the occupancy of ", name));
  return blocks;
}

int32_t CompiledKernel::max_active_clusters(uint32_t cluster_x, int32_t threads, size_t dynamic_shared_bytes) const {
  // Cached: every plan asks, and the driver takes longer to answer than to launch.
  static std::shared_mutex mutex;
  static auto& known = *new std::map<std::tuple<const CompiledKernel*, uint32_t, int32_t, size_t>, int32_t>;
  const auto question = std::make_tuple(this, cluster_x, threads, dynamic_shared_bytes);
  {
    std::shared_lock lock(mutex);
    if (const auto it = known.find(question); it != known.end()) return it->second;
  }
  const ScopedContext context(device);
  LaunchAttribute attribute = {};
  attribute.id = LaunchAttributeId::kClusterDimension;
  attribute.value.cluster[0] = cluster_x;
  attribute.value.cluster[1] = attribute.value.cluster[2] = 1;
  const DriverLaunchConfig config = {{cluster_x, 1, 1},
                                     {static_cast<uint32_t>(threads), 1, 1},
                                     static_cast<uint32_t>(dynamic_shared_bytes),
                                     nullptr,
                                     &attribute,
                                     1};
  int32_t clusters = 0;
  check(require_driver().cuOccupancyMaxActiveClusters(&clusters, function, &config), cat("the occupancy of ", name));
  std::unique_lock lock(mutex);
  known[question] = clusters;
  return clusters;
}

}  // namespace attune::cuda
