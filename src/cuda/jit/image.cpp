// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/image.h"

#include <strings.h>

#include <algorithm>
#include <chrono>

#include "core/status.h"
#include "cuda/driver.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/nvrtc.h"

namespace attune::cuda {
namespace {

Defines sorted(Defines defines) {
  std::sort(defines.begin(), defines.end());
  return defines;
}

std::vector<std::string> split_at_blanks(const std::string& text) {
  std::vector<std::string> words;
  size_t at = 0;
  while ((at = text.find_first_not_of(" \t", at)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(" \t", at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

}  // namespace

const char* origin_name(KernelOrigin origin) {
  switch (origin) {
    case KernelOrigin::kBundle:
      return "bundle";
    case KernelOrigin::kDiskCache:
      return "disk cache";
    case KernelOrigin::kCompiled:
      return "compiler";
  }
  return "?";
}

std::string module_name(const ModuleSpec& spec) {
  std::string name = spec.source;
  for (const auto& [macro, value] : sorted(spec.defines)) name += cat(" ", macro, "=", value);
  return name;
}

std::string short_module_name(const ModuleSpec& spec) {
  constexpr size_t kShown = 3;
  if (spec.defines.size() <= kShown + 1) return module_name(spec);
  const Defines all = sorted(spec.defines);
  return cat(module_name({spec.source, {all.begin(), all.begin() + kShown}, spec.target}), " and ", all.size() - kShown,
             " more macros");
}

std::vector<std::string> compiler_options(const ModuleSpec& spec) {
  std::vector<std::string> options = {cat("-arch=", spec.target.option()), "--std=c++20", "-default-device"};
  for (std::string& flag : split_at_blanks(environment("ATTUNE_NVRTC_FLAGS"))) options.push_back(std::move(flag));
  for (const auto& [macro, value] : sorted(spec.defines)) options.push_back(cat("-D", macro, "=", value));
  return options;
}

Digest module_key(const SourceUnit& unit, const std::vector<std::string>& options) {
  Sha256 hash;
  hash.update_field("attune kernel 1").update({reinterpret_cast<const char*>(unit.digest.data()), unit.digest.size()});
  for (const std::string& option : options) hash.update_field(option);
  return hash.finish();
}

Digest cache_key(const Digest& module, const std::string& compiler_version) {
  return Sha256()
      .update({reinterpret_cast<const char*>(module.data()), module.size()})
      .update_field(compiler_version)
      .finish();
}

bool jit_enabled() {
  const std::string value = environment("ATTUNE_JIT");
  if (value.empty() || strcasecmp(value.c_str(), "on") == 0) return true;
  if (strcasecmp(value.c_str(), "off") == 0) return false;
  log_message(ATTUNE_LOG_WARNING, cat("ATTUNE_JIT is '", value, "'; it may be on or off, and on is assumed"));
  return true;
}

ImageFinder::Options ImageFinder::default_options(int driver_version) {
  return {default_bundle_path(), default_cache_directory(), jit_enabled(), driver_version};
}

ImageFinder::ImageFinder(Options options) : options_(std::move(options)), cache_(options_.cache_directory) {}

const Bundle* ImageFinder::bundle() {
  std::call_once(bundle_once_, [&] {
    no_bundle_ = "there is no kernel bundle";
    if (options_.bundle_path.empty()) return;
    std::string why;
    bundle_ = Bundle::open(options_.bundle_path, &why);
    if (bundle_ != nullptr && bundle_->compiler_major() > options_.driver_major()) {
      why = cat("the kernel bundle ", options_.bundle_path, " was made with CUDA ", bundle_->compiler_major(), ".",
                bundle_->compiler_minor(), " and this driver supports CUDA ", version_text(options_.driver_version),
                ": it is not used");
      newer_bundle_ = bundle_->compiler_major();
      bundle_.reset();
    }
    if (!why.empty()) log_message(ATTUNE_LOG_WARNING, why);
    no_bundle_ = why.empty() ? cat(no_bundle_, " ", options_.bundle_path) : why;
  });
  return bundle_.get();
}

bool ImageFinder::bundles(const Target& target) {
  const Bundle* const b = bundle();
  if (b == nullptr) return false;
  // Each manifest has the self test's module.
  const ModuleSpec probe{"selftest/saxpy.cu", {{"A", "2"}}, target};
  std::string why;
  return !b->find(module_key(read_source(probe.source), compiler_options(probe)), &why).empty();
}

bool ImageFinder::can_compile() const {
  std::string why;
  return options_.may_compile && find_nvrtc(options_.driver_major(), &why) != nullptr;
}

std::string ImageFinder::why_not(bool without_bundle, const Nvrtc* nvrtc, const std::string& absent) {
  std::string why = bundle() == nullptr ? no_bundle_
                    : without_bundle ? cat("the driver does not load the kernel from the bundle ", options_.bundle_path)
                                     : cat("the kernel is not in the bundle ", options_.bundle_path);
  if (nvrtc == nullptr && options_.may_compile) why += cat("; ", absent, "; ", nvrtc_advice(options_.driver_major()));
  // The names of what the disk cache holds have the version of NVRTC: without it nothing is looked up.
  if (nvrtc != nullptr && !options_.cache_directory.empty())
    why += cat("; the kernel is not in the disk cache (", options_.cache_directory, ")");
  if (!options_.may_compile) {
    why += "; ATTUNE_JIT=off forbids compiling; set ATTUNE_JIT=on";
    if (nvrtc == nullptr) why += cat(", with NVRTC: ", nvrtc_advice(options_.driver_major()));
  }
  if (newer_bundle_ > 0) why += cat("; or install a driver of CUDA ", newer_bundle_, " or newer");
  return why;
}

Image ImageFinder::find(const ModuleSpec& wanted, bool without_bundle, bool without_cache) {
  ModuleSpec spec = wanted;
  const SourceUnit unit = read_source(spec.source);
  std::vector<std::string> options = compiler_options(spec);
  Digest key = module_key(unit, options);
  Image image;
  if (const Bundle* b = without_bundle ? nullptr : bundle()) {
    std::string why;
    image.bundled = b->find(key, &why);
    image.origin = KernelOrigin::kBundle;
    if (!image.bundled.empty()) return image;
    if (!why.empty()) log_message(ATTUNE_LOG_WARNING, why);
  }

  // The version of the compiler is part of the name of what it compiled.
  std::string why;
  const Nvrtc* nvrtc = find_nvrtc(options_.driver_major(), &why);
  if (nvrtc != nullptr && nvrtc->restrict(&spec.target)) {
    options = compiler_options(spec);
    key = module_key(unit, options);
  }
  if (nvrtc != nullptr) image.compiler = nvrtc->version();
  if (nvrtc != nullptr && !without_cache) {
    image.key = cache_key(key, nvrtc->version());
    if (std::optional<std::string> cached = cache_.load(image.key)) {
      image.owned = std::move(*cached);
      image.origin = KernelOrigin::kDiskCache;
      return image;
    }
  }
  if (nvrtc == nullptr || !options_.may_compile) {
    log_message(ATTUNE_LOG_INFO, cat("there is no code for ", module_name(spec)));
    fail(ATTUNE_DEVICE_ERROR, why_not(without_bundle, nvrtc, why), "; the kernel is ", short_module_name(spec));
  }

  const auto start = std::chrono::steady_clock::now();
  Compiled compiled = nvrtc->compile(unit, options);
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  log_message(ATTUNE_LOG_INFO, cat("compiled ", module_name(spec), " for ", spec.target.option(), " with NVRTC ",
                                   nvrtc->version(), " in ", static_cast<int64_t>(elapsed.count()), " ms"));
  if (!compiled.log.empty()) log_message(ATTUNE_LOG_WARNING, cat(module_name(spec), ": ", compiled.log));
  cache_.store(cache_key(key, nvrtc->version()), compiled.code);
  image.owned = std::move(compiled.code);
  image.origin = KernelOrigin::kCompiled;
  return image;
}

ImageFinder& the_image_finder(int driver_version) {
  // Never destroyed: kernels point into its bundle.
  static ImageFinder& finder = *new ImageFinder(ImageFinder::default_options(driver_version));
  return finder;
}

}  // namespace attune::cuda
