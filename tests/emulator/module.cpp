// SPDX-License-Identifier: Apache-2.0
#include "emulator/module.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ATTUNE_NO_FIBERS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ATTUNE_NO_FIBERS 1
#endif
#endif

namespace attune::emulator {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void* compile(const cuda::KernelSpec& spec) {
  const std::filesystem::path root = ATTUNE_SOURCE_DIR;
  static int count = 0;  // dlopen knows modules by their names
  const std::filesystem::path module =
      std::filesystem::temp_directory_path() /
      ("attune_emulated_" + std::to_string(getpid()) + "_" + std::to_string(count++) + ".so");
  const std::string log = module.string() + ".log";
  std::string command =
      std::string(ATTUNE_CXX_COMPILER) +
      " -std=c++20 -O1 -fsanitize=alignment -fno-sanitize-recover=alignment -fPIC -shared -w -x c++ -include '" +
      (root / "tests/emulator/device.h").string() + "' -DATTUNE_EMULATED_SHARED=static";
  for (const char* folder : {"tests/emulator", "tests", "kernels"}) command += " -I'" + (root / folder).string() + "'";
  for (const auto& [name, value] : spec.defines) command += " -D" + name + "=" + value;
  command += " '" + (root / "kernels" / spec.source).string() + "' -o '" + module.string() + "' 2>'" + log + "'";
  const int status = std::system(command.c_str());
  const std::string words = read_file(log);
  std::filesystem::remove(log);
  if (status != 0) throw std::runtime_error(cuda::spec_name(spec) + ": " + words);
  void* handle = dlopen(module.c_str(), RTLD_NOW | RTLD_LOCAL);
  std::filesystem::remove(module);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  void* entry = dlsym(handle, spec.entry.c_str());
  if (entry == nullptr) throw std::runtime_error(dlerror());
  return entry;
}

}  // namespace

const char* why_not() {
#ifdef ATTUNE_NO_FIBERS
  return "sanitizers do not know the emulator's fibers";
#else
  return nullptr;
#endif
}

ptx::TensorMap tensor_map(const cuda::TensorMapDesc& desc) {
  cuda::check_tensor_map(desc);
  if (desc.rank < 4 || desc.swizzle == cuda::TensorMapSwizzle::k64B)
    throw std::runtime_error("the emulator's tensor maps have four or five axes and swizzle 128 bytes, 32 or none");
  ptx::TensorMap t{};
  t.element_size = static_cast<int>(cuda::element_size(desc.type));
  t.swizzle = desc.swizzle == cuda::TensorMapSwizzle::k128B  ? 0x70
              : desc.swizzle == cuda::TensorMapSwizzle::k32B ? 0x10
                                                             : 0;
  t.data = static_cast<const unsigned char*>(desc.data);
  t.shape[4] = t.box[4] = 1;
  for (int axis = 0; axis < desc.rank; ++axis) {
    t.shape[axis] = static_cast<int64_t>(desc.shape[axis]);
    t.stride_bytes[axis] = static_cast<int64_t>(desc.stride_bytes[axis]);
    t.box[axis] = static_cast<int>(desc.box[axis]);
  }
  return t;
}

void* find_kernel(const cuda::KernelSpec& spec) {
  static std::map<std::string, void*> found;
  void*& entry = found[cuda::spec_name(spec)];
  if (entry == nullptr) entry = compile(spec);
  return entry;
}

}  // namespace attune::emulator
