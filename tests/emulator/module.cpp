// SPDX-License-Identifier: Apache-2.0
#include "emulator/module.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/jit/files.h"
#include "cuda/jit/image.h"
#include "cuda/jit/sha256.h"
#include "cuda/jit/sources.h"
#include "emulator/emulator.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ATTUNE_NO_FIBERS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ATTUNE_NO_FIBERS 1
#endif
#endif

namespace attune::emulator {
namespace {

namespace fs = std::filesystem;

int g_capability = 90;

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Of sources, as the library finds them.
std::string kernel_folder() {
  const char* folder = std::getenv("ATTUNE_KERNEL_DIR");
  return folder != nullptr && *folder != '\0' ? folder : ATTUNE_SOURCE_DIR "/kernels";
}

// Kernels of the emulator's own tests lie beside it.
bool is_of_tests(const cuda::KernelSpec& spec) { return spec.source.starts_with("emulator/"); }
std::string source_of(const cuda::KernelSpec& spec) {
  return (is_of_tests(spec) ? ATTUNE_SOURCE_DIR "/tests" : kernel_folder()) + "/" + spec.source;
}

// Compiles a module's object, up to its name. ccache, where the build has it, knows the object in every checkout.
std::string compile_command(const cuda::KernelSpec& spec) {
  const fs::path root = ATTUNE_SOURCE_DIR;
  // Of one that is watched, the loads and stores.
  const char* const checks = is_watched() ? "-g1 -fsanitize=thread -DATTUNE_EMULATOR_RACES"
                                          : "-fsanitize=alignment -fno-sanitize-recover=alignment";
  std::string command = std::string(ATTUNE_CXX_LAUNCHER " " ATTUNE_CXX_COMPILER) +
                        " -std=c++20 -Og -nostdinc++ -fPIC -fvisibility=hidden -w " + checks + " -x c++ -include '" +
                        (root / "tests/emulator/device.h").string() +
                        "' -DATTUNE_EMULATED_SHARED=static -D__CUDA_ARCH__=" + std::to_string(10 * capability());
  for (const std::string& folder : {(root / "tests/emulator").string(), (root / "tests").string(), kernel_folder()})
    command += " -I'" + folder + "'";
  for (const auto& [name, value] : spec.defines) command += " -D" + name + "=" + value;
  return command + " -c '" + source_of(spec) + "' -o ";
}

// Links it, up to the module's name. What a module calls is in the program, but for the sanitizer's.
std::string link_command() {
  return std::string(ATTUNE_CXX_COMPILER) + " -shared -nostartfiles -nodefaultlibs " +
         (is_watched() ? "" : "-s -Wl,--no-as-needed -lubsan ") + "-o ";
}

// Of all that a module is made from: the command, the compiler, the kernel's sources and what they include of the
// emulator.
std::string module_key(const cuda::KernelSpec& spec, const std::string& command) {
  static const std::string emulator = [] {
    const fs::path folder = fs::path(ATTUNE_SOURCE_DIR) / "tests/emulator";
    std::set<fs::path> paths = {folder / "device.h", folder / "tensor_map.h", folder / "thread.h"};
    for (const auto& file : fs::directory_iterator(folder / "ptx")) paths.insert(file.path());
    cuda::Sha256 hash;
    for (const fs::path& path : paths) hash.update_field(path.string()).update_field(read_file(path));
    return cuda::to_hex(hash.update_field(__VERSION__).finish());
  }();
  const std::string source = is_of_tests(spec) ? read_file(source_of(spec))
                                               : cuda::to_hex(cuda::read_source(spec.source, kernel_folder()).digest);
  cuda::Sha256 hash;
  hash.update_field(command).update_field(emulator).update_field(source);
  return cuda::to_hex(hash.finish()).substr(0, 32);
}

// Every test is a process of its own, and many ask for the same modules: they stay beside the program.
fs::path module_of(const cuda::KernelSpec& spec) {
  const std::string compile = compile_command(spec), link = link_command();
  // A module of this name and another key is of older sources.
  const std::string name = cuda::to_hex(cuda::sha256(cuda::module_name({spec.source, spec.defines}))).substr(0, 16) +
                           (is_watched() ? "w" : "") + std::to_string(capability()) + "-";
  const fs::path folder = fs::path(cuda::library_directory()) / "emulated",
                 module = folder / (name + module_key(spec, compile + link) + ".so");
  if (fs::exists(module)) return module;
  fs::create_directories(folder);
  const std::string scratch = module.string() + "." + std::to_string(getpid()), object = scratch + ".o",
                    log = scratch + ".log";
  const std::string commands = compile + "'" + object + "' && " + link + "'" + scratch + "' '" + object + "'";
  const int status = std::system(("{ " + commands + "; } 2>'" + log + "'").c_str());
  const std::string words = read_file(log);
  fs::remove(log);
  fs::remove(object);
  if (status != 0) throw std::runtime_error(cuda::spec_name(spec) + ": " + words);
  for (const auto& file : fs::directory_iterator(folder)) {
    const std::string other = file.path().filename().string();
    if (other.starts_with(name) && other.ends_with(".so") && file.path() != module) fs::remove(file.path());
  }
  fs::rename(scratch, module);
  return module;
}

// A module's variables that begin as zeros: it has no others than shared ones.
void find_static_shared(void* handle) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0) throw std::runtime_error(dlerror());
  const auto* base = reinterpret_cast<const unsigned char*>(map->l_addr);
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(base);
  const auto* segments = reinterpret_cast<const ElfW(Phdr)*>(base + header->e_phoff);
  for (const ElfW(Phdr) & s : std::span(segments, header->e_phnum)) {
    if (s.p_type == PT_LOAD && s.p_memsz > s.p_filesz)
      add_static_shared(const_cast<unsigned char*>(base) + s.p_vaddr + s.p_filesz, s.p_memsz - s.p_filesz);
  }
}

void* load(const cuda::KernelSpec& spec) {
  void* handle = dlopen(module_of(spec).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  find_static_shared(handle);
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
  if (desc.rank == 0) return {};  // nothing is copied by it
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

Capability::Capability(int capability) : before_(std::exchange(g_capability, capability)) {}
Capability::~Capability() { g_capability = before_; }
int capability() { return g_capability; }

void* find_kernel(const cuda::KernelSpec& spec) {
  static std::map<std::string, void*> found;
  void*& entry = found[cuda::spec_name(spec) + (is_watched() ? " watched " : " ") + std::to_string(capability())];
  if (entry == nullptr) entry = load(spec);
  return entry;
}

}  // namespace attune::emulator
