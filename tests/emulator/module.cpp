// SPDX-License-Identifier: Apache-2.0
#include "emulator/module.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
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

#include "core/status.h"
#include "cuda/jit/files.h"
#include "cuda/jit/image.h"
#include "cuda/jit/sha256.h"
#include "cuda/jit/sources.h"
#include "emulator/machine.h"

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

// ATTUNE_EMULATOR_LINES=1: a report of what is not aligned names the line.
bool names_the_line() { return setting("LINES") != nullptr; }

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

// What compiles a module with what options, but for the module's own.
struct Compiler {
  std::string command;
  bool is_clang;
};

// clang with -O0 takes a third of the time that gcc takes with -Og or -O0, but its kernels run for a third longer, or
// three times as long, which the gradients and the oracles do not make up for. Of a module that is watched the shadow
// knows what the tests' own compiler tells of loads and stores.
bool takes_quick_compiler(const cuda::KernelSpec& spec) {
  return ATTUNE_EMULATOR_CLANG != 0 && !is_watched() && !names_the_line() && !spec.source.starts_with("backward/") &&
         !spec.source.starts_with("check/");
}

Compiler compiler_of(const cuda::KernelSpec& spec) {
  const fs::path root = ATTUNE_SOURCE_DIR;
  const bool quick = takes_quick_compiler(spec);
#ifdef __clang__
  const bool is_clang = true;
#else
  const bool is_clang = quick;
#endif
  // Of one that is watched, the loads and stores. Else their alignment, by one instruction where it is wrong: code that
  // reports it took a quarter of the compiler's time.
  const char* const checks = is_watched()       ? "-Og -g1 -fsanitize=thread -DATTUNE_EMULATOR_RACES"
                             : names_the_line() ? "-Og -fsanitize=alignment -fno-sanitize-recover=alignment"
                             : quick            ? "-O0 -fsanitize=alignment -fsanitize-trap=alignment"
                                                : "-Og -fsanitize=alignment -fsanitize-undefined-trap-on-error";
  std::string command = std::string(quick ? ATTUNE_EMULATOR_CXX : ATTUNE_CXX_COMPILER) +
                        " -std=c++20 -nostdinc++ -fPIC -fvisibility=hidden -w " + checks +
                        " -DATTUNE_EMULATED_SHARED=static -D__CUDA_ARCH__=" + std::to_string(10 * capability());
  for (const std::string& folder : {(root / "tests/emulator").string(), (root / "tests").string(), kernel_folder()})
    command += " -I'" + folder + "'";
  return {command, is_clang};
}

// Compiles a module and links it, but for its name. What a module calls is in the program, but for the sanitizer's.
std::string module_command(const cuda::KernelSpec& spec) {
  std::string command = " -x c++";
  for (const auto& [name, value] : spec.defines) command += " -D" + name + "=" + value;
  return command + " '" + source_of(spec) + "' -x none -shared -nostartfiles -nodefaultlibs" +
         (is_watched()       ? ""
          : names_the_line() ? " -s -Wl,--no-as-needed -lubsan"
                             : " -s");
}

// Of what the emulator has in every module, and of the compiler.
std::string prelude_key(const std::string& compiler) {
  std::set<fs::path> paths = {"device.h", "prelude.h", "tensor_map.h", "thread.h"};
  const fs::path folder = fs::path(ATTUNE_SOURCE_DIR) / "tests/emulator";
  cuda::Sha256 hash;
  for (const fs::path& path : paths) hash.update_field(path.string()).update_field(read_file(folder / path));
  for (const fs::path& instructions : {folder / "ptx", fs::path(kernel_folder()) / "ptx"}) {
    paths.clear();
    for (const auto& file : fs::directory_iterator(instructions)) paths.insert(file.path());
    for (const fs::path& path : paths) hash.update_field(path.string()).update_field(read_file(path));
  }
  return cuda::to_hex(hash.update_field(compiler).update_field(__VERSION__ ATTUNE_EMULATOR_CXX_VERSION).finish())
      .substr(0, 32);
}

// Of all that a module is made from: the prelude, the command, the kernel's sources.
std::string module_key(const cuda::KernelSpec& spec, const std::string& prelude, const std::string& command) {
  const std::string source = is_of_tests(spec) ? read_file(source_of(spec))
                                               : cuda::to_hex(cuda::read_source(spec.source, kernel_folder()).digest);
  cuda::Sha256 hash;
  hash.update_field(command).update_field(prelude).update_field(source);
  return cuda::to_hex(hash.finish()).substr(0, 32);
}

// Makes a file by a command that ends before the file's name. Others may make the same at the same time.
void make_file(const fs::path& file, const std::string& command, const std::string& what) {
  fs::create_directories(file.parent_path());
  const std::string scratch = file.string() + "." + std::to_string(getpid()), log = scratch + ".log";
  const int status = std::system((command + " -o '" + scratch + "' 2>'" + log + "'").c_str());
  const std::string words = read_file(log);
  fs::remove(log);
  if (status != 0) throw std::runtime_error(what + ": " + words);
  fs::rename(scratch, file);
}

// Files of this beginning and another name are of older sources.
void remove_older(const fs::path& newest, const std::string& beginning) {
  for (const auto& file : fs::directory_iterator(newest.parent_path())) {
    const std::string other = file.path().filename().string();
    if (other.starts_with(beginning) && other.ends_with(newest.extension().string()) && file.path() != newest)
      fs::remove(file.path());
  }
}

std::string kind_of(const cuda::KernelSpec& spec) {
  const char* const mode = is_watched() ? "w" : names_the_line() ? "n" : takes_quick_compiler(spec) ? "q" : "";
  return cat(mode, capability(), "-");
}

// A header beside what the compiler has made of it. Where it cannot use that, it reads the header.
fs::path prelude_of(const fs::path& folder, const Compiler& compiler, const std::string& kind, const std::string& key) {
  const char* const extension = compiler.is_clang ? ".pch" : ".gch";
  const std::string name = "prelude" + kind, source = ATTUNE_SOURCE_DIR "/tests/emulator/prelude.h";
  const fs::path header = folder / (name + key + ".h"), made = header.string() + extension;
  if (fs::exists(made) && fs::exists(header)) return header;
  make_file(made, compiler.command + " -x c++-header '" + source + "'", "prelude.h");
  const fs::path scratch = header.string() + "." + std::to_string(getpid());
  std::ofstream(scratch) << "#include \"" << source << "\"\n";
  fs::rename(scratch, header);
  remove_older(made, name);
  return header;
}

// Every test is a process of its own, and many ask for the same modules: they stay beside the program.
fs::path module_of(const cuda::KernelSpec& spec) {
  const Compiler compiler = compiler_of(spec);
  const std::string command = module_command(spec), kind = kind_of(spec), prelude = prelude_key(compiler.command);
  const std::string name =
      cuda::to_hex(cuda::sha256(cuda::module_name({spec.source, spec.defines}))).substr(0, 16) + kind;
  const fs::path folder = fs::path(cuda::library_directory()) / "emulated",
                 module = folder / (name + module_key(spec, prelude, command) + ".so");
  if (fs::exists(module)) return module;
  const fs::path header = prelude_of(folder, compiler, kind, prelude);
  make_file(module, compiler.command + " -include '" + header.string() + "'" + command, cuda::spec_name(spec));
  remove_older(module, name);
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

// An instruction that says that something is wrong (compiler_of()): what it was, before the program ends as it would.
void say_what_ended(int signal, siginfo_t* info, void*) {
  Dl_info where{};
  if (dladdr(info->si_addr, &where) != 0 && where.dli_fname != nullptr) {
    std::fprintf(
        stderr,
        "an emulated kernel loads or stores what is not aligned, or does what C++ has no meaning for: %s + %#tx\n"
        "with ATTUNE_EMULATOR_LINES=1 this names the line\n",
        where.dli_fname, static_cast<const char*>(info->si_addr) - static_cast<const char*>(where.dli_fbase));
  }
  std::signal(signal, SIG_DFL);
  raise(signal);
}
void watch_for_traps() {
  struct sigaction action {};
  action.sa_sigaction = &say_what_ended;
  action.sa_flags = SA_SIGINFO;
  for (const int signal : {SIGILL, SIGTRAP}) sigaction(signal, &action, nullptr);
}

void* load(const cuda::KernelSpec& spec) {
  [[maybe_unused]] static const bool watching = (watch_for_traps(), true);
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
