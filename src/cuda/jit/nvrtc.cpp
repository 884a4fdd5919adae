// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/nvrtc.h"

#include <dlfcn.h>
#include <glob.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "core/status.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/files.h"

namespace attune::cuda {

using Program = struct ProgramOpaque*;

struct Nvrtc::Api {
  int (*version)(int*, int*);
  int (*create)(Program*, const char* text, const char* name, int num_headers, const char* const* headers,
                const char* const* names);
  int (*destroy)(Program*);
  int (*compile)(Program, int num_options, const char* const* options);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, size_t*);
  int (*ptx)(Program, char*);
  int (*num_supported_archs)(int*);
  int (*supported_archs)(int*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  const char* (*error_string)(int);
};

namespace {

constexpr int kMinMajor = 12;
constexpr int kCompilationError = 6;  // NVRTC_ERROR_COMPILATION

template <class F>
bool find_symbol(void* library, const char* name, F** function) {
  *function = reinterpret_cast<F*>(dlsym(library, name));
  return *function != nullptr;
}

void add_matches(const std::string& pattern, std::vector<std::string>* list) {
  glob_t found;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) list->push_back(found.gl_pathv[i]);
  }
  globfree(&found);
}

// The layouts of PyPI's packages: CUDA 13 and later, and 12.
void add_site_packages(const std::string& directory, std::vector<std::string>* list) {
  add_matches(directory + "/nvidia/cu13/lib/libnvrtc.so.1[2-9]", list);
  add_matches(directory + "/nvidia/cuda_nvrtc/lib/libnvrtc.so.1[2-9]", list);
}

}  // namespace

std::unique_ptr<Nvrtc> Nvrtc::open(const std::string& path, std::string* why) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    *why = error != nullptr ? error : path + " cannot be opened";
    return nullptr;
  }
  auto api = std::make_shared<Api>();
  const bool complete =
      find_symbol(library, "nvrtcVersion", &api->version) && find_symbol(library, "nvrtcCreateProgram", &api->create) &&
      find_symbol(library, "nvrtcDestroyProgram", &api->destroy) &&
      find_symbol(library, "nvrtcCompileProgram", &api->compile) &&
      find_symbol(library, "nvrtcGetCUBINSize", &api->cubin_size) &&
      find_symbol(library, "nvrtcGetCUBIN", &api->cubin) && find_symbol(library, "nvrtcGetPTXSize", &api->ptx_size) &&
      find_symbol(library, "nvrtcGetPTX", &api->ptx) &&
      find_symbol(library, "nvrtcGetNumSupportedArchs", &api->num_supported_archs) &&
      find_symbol(library, "nvrtcGetSupportedArchs", &api->supported_archs) &&
      find_symbol(library, "nvrtcGetProgramLogSize", &api->log_size) &&
      find_symbol(library, "nvrtcGetProgramLog", &api->log) &&
      find_symbol(library, "nvrtcGetErrorString", &api->error_string);
  std::unique_ptr<Nvrtc> nvrtc(new Nvrtc);
  if (!complete || api->version(&nvrtc->major_, &nvrtc->minor_) != 0 || nvrtc->major_ < kMinMajor) {
    *why = cat(path, " is not NVRTC of CUDA ", kMinMajor, " or later");
    return nullptr;
  }
  int count = 0;
  if (api->num_supported_archs(&count) == 0 && count > 0) {
    nvrtc->capabilities_.resize(static_cast<size_t>(count));
    if (api->supported_archs(nvrtc->capabilities_.data()) != 0) nvrtc->capabilities_.clear();
  }
  std::sort(nvrtc->capabilities_.begin(), nvrtc->capabilities_.end());
  nvrtc->api_ = std::move(api);
  nvrtc->path_ = path;
  return nvrtc;
}

std::string Nvrtc::version() const { return cat(major_, ".", minor_); }

bool Nvrtc::restrict(Target* target) const {
  const auto behind = std::upper_bound(capabilities_.begin(), capabilities_.end(), target->capability);
  if (behind == capabilities_.begin() || *(behind - 1) == target->capability) return false;
  const int capability = *(behind - 1);
  *target = {cat("sm_", capability), capability, ptx::features_of(capability, false), true};
  return true;
}

Compiled Nvrtc::compile(const SourceUnit& unit, const std::vector<std::string>& options) const {
  std::vector<const char*> texts, names, flags;
  for (const auto& [name, text] : unit.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());

  const Api& api = *api_;
  Program program = nullptr;
  auto check_nvrtc = [&](int result, const char* what) {
    if (result != 0) fail(ATTUNE_INTERNAL, what, " for ", unit.path, ": ", api.error_string(result));
  };
  check_nvrtc(api.create(&program, unit.text.c_str(), unit.path.c_str(), static_cast<int>(names.size()), texts.data(),
                         names.data()),
              "nvrtcCreateProgram");
  struct Destroy {
    const Api& api;
    Program* program;
    ~Destroy() { api.destroy(program); }
  } destroy{api, &program};

  const int result = api.compile(program, static_cast<int>(flags.size()), flags.data());
  Compiled compiled;
  size_t size = 0;
  if (api.log_size(program, &size) == 0 && size > 1) {
    compiled.log.resize(size);
    if (api.log(program, compiled.log.data()) != 0) compiled.log.clear();
    while (!compiled.log.empty() && (compiled.log.back() == '\0' || compiled.log.back() == '\n'))
      compiled.log.pop_back();
  }
  if (result == kCompilationError)
    fail(ATTUNE_INTERNAL, unit.path, " does not compile with NVRTC ", version(), ":\n", compiled.log);
  check_nvrtc(result, "nvrtcCompileProgram");
  const bool as_ptx = std::any_of(options.begin(), options.end(),
                                  [](const std::string& option) { return option.starts_with("-arch=compute_"); });
  check_nvrtc((as_ptx ? api.ptx_size : api.cubin_size)(program, &size), "the size of the code");
  compiled.code.resize(size);
  check_nvrtc((as_ptx ? api.ptx : api.cubin)(program, compiled.code.data()), "the code");
  return compiled;
}

std::vector<std::string> nvrtc_candidates() {
  if (const std::string forced = environment("ATTUNE_NVRTC"); !forced.empty()) return {forced};
  // By name first: what the process has loaded already (PyTorch, say) is taken, then the loader's path.
  std::vector<std::string> list = {"libnvrtc.so.13", "libnvrtc.so.12"};
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string home = environment(name);
    if (home.empty()) continue;
    add_matches(home + "/lib64/libnvrtc.so.1[2-9]", &list);
    add_matches(home + "/targets/*/lib/libnvrtc.so.1[2-9]", &list);
  }
  // In a wheel this library stands in site-packages/attune, or in attune/lib.
  if (const std::string here = library_directory(); !here.empty()) {
    add_site_packages(here + "/..", &list);
    add_site_packages(here + "/../..", &list);
  }
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string prefix = environment(name);
    if (prefix.empty()) continue;
    add_site_packages(prefix + "/lib/python3*/site-packages", &list);
    add_matches(prefix + "/lib/libnvrtc.so.1[2-9]", &list);
  }
  if (const std::string home = environment("HOME"); !home.empty())
    add_site_packages(home + "/.local/lib/python3*/site-packages", &list);
  add_site_packages("/usr/local/lib/python3*/*-packages", &list);
  add_site_packages("/usr/lib/python3*/*-packages", &list);
  add_matches("/usr/local/cuda/lib64/libnvrtc.so.1[2-9]", &list);
  add_matches("/usr/local/cuda-1[2-9]*/lib64/libnvrtc.so.1[2-9]", &list);
  return list;
}

const Nvrtc* find_nvrtc(int max_major, std::string* why) {
  struct Found {
    std::unique_ptr<Nvrtc> nvrtc;
    std::string why;
  };
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, Found>& found = *new std::map<int, Found>;
  std::lock_guard lock(mutex);
  const auto [it, is_new] = found.try_emplace(max_major);
  Found& result = it->second;
  if (is_new) {
    std::string newer;
    for (const std::string& path : nvrtc_candidates()) {
      std::string fault;
      result.nvrtc = Nvrtc::open(path, &fault);
      if (result.nvrtc != nullptr && result.nvrtc->major() > max_major) {
        newer = cat("NVRTC ", result.nvrtc->version(), " (", path, ") is newer than the driver, which supports CUDA ",
                    max_major);
        result.nvrtc.reset();
      }
      if (result.nvrtc != nullptr) break;
      if (result.why.empty()) result.why = fault;
    }
    if (result.nvrtc != nullptr) {
      result.why.clear();
    } else {
      result.why = !newer.empty() ? newer : cat("NVRTC was not found (", result.why, ")");
    }
  }
  if (why != nullptr) *why = result.why;
  return result.nvrtc.get();
}

std::string nvrtc_advice(int max_major) {
  // PyPI's names: CUDA 12 has a package of its own, and the other is of the newest.
  const std::string package = max_major == 12          ? "nvidia-cuda-nvrtc-cu12"
                              : max_major >= kAnyMajor ? "nvidia-cuda-nvrtc"
                                                       : cat("'nvidia-cuda-nvrtc==", max_major, ".*'");
  return cat("pip install ", package, ", or set ATTUNE_NVRTC");
}

}  // namespace attune::cuda
