// SPDX-License-Identifier: Apache-2.0
// From a kernel's name to its machine code, without a GPU: sources, keys, the bundle, the disk cache, NVRTC (skipped
// where absent).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "cases/sanitizer.h"
#include "cuda/jit/environment.h"
#include "cuda/jit/files.h"
#include "cuda/jit/image.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/kernel.h"
#include "jit_fixture.h"

namespace attune::cuda {
namespace {

using testing::HasSubstr;

TEST(Sha256, KnownAnswers) {
  EXPECT_EQ(to_hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(to_hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(to_hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 million;
  for (int i = 0; i < 1000; ++i) million.update(std::string(1000, 'a'));
  EXPECT_EQ(to_hex(million.finish()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_F(CudaJit, SourcesComeWithTheirHeaders) {
  write_file(path("op/kernel.cu"),
             "#include \"tile/a.h\"\n  #  include\t\"ptx/b.h\" // twice\n#include <angle>\nint x;\n");
  write_file(path("tile/a.h"), "#include \"ptx/b.h\"\n");
  write_file(path("ptx/b.h"), "int b;");
  const SourceUnit unit = read_source("op/kernel.cu", directory_.string());
  ASSERT_EQ(unit.headers.size(), 2u);
  EXPECT_EQ(unit.headers[0].first, "ptx/b.h");
  EXPECT_EQ(unit.headers[1].first, "tile/a.h");
  EXPECT_EQ(unit.headers[0].second, "int b;");

  // A change two includes away changes the name of the code.
  const Digest before = unit.digest;
  EXPECT_EQ(read_source("op/kernel.cu", directory_.string()).digest, before);
  write_file(path("ptx/b.h"), "int c;");
  EXPECT_NE(read_source("op/kernel.cu", directory_.string()).digest, before);

  write_file(path("tile/a.h"), "#include \"ptx/c.h\"\n");
  EXPECT_THAT(failure_of([&] { read_source("op/kernel.cu", directory_.string()); }, ATTUNE_INTERNAL),
              HasSubstr("tile/a.h includes \"ptx/c.h\", which is not in"));
  EXPECT_EQ(failure_of([&] { read_source("op/none.cu", ""); }, ATTUNE_INTERNAL),
            "there is no kernel source op/none.cu in the library");
}

TEST_F(CudaJit, EmbeddedSourcesAreTheFiles) {
  size_t compared = 0;
  for (size_t i = 0; i < kNumEmbeddedKernels; ++i) {
    const EmbeddedFile& file = kEmbeddedKernels[i];
    EXPECT_GT(file.size, 0u) << file.path;
    // The runtime's own: others may be edited while this program runs.
    if (!std::string_view(file.path).starts_with("selftest/")) continue;
    EXPECT_EQ(std::string(file.text, file.size), read_file(cat(ATTUNE_SOURCE_DIR, "/kernels/", file.path)))
        << file.path;
    ++compared;
  }
  const std::filesystem::directory_iterator files(cat(ATTUNE_SOURCE_DIR, "/kernels/selftest"));
  EXPECT_EQ(compared, static_cast<size_t>(std::distance(begin(files), end(files))));
  EXPECT_GT(compared, 0u);
}

TEST_F(CudaJit, KeysHoldAllThatChangesTheCode) {
  const SourceUnit unit = read_source("selftest/saxpy.cu", "");
  const ModuleSpec one = {"selftest/saxpy.cu", {{"A", "2"}, {"B", "1"}}};
  const ModuleSpec reordered = {"selftest/saxpy.cu", {{"B", "1"}, {"A", "2"}}};
  const ModuleSpec other = {"selftest/saxpy.cu", {{"A", "2"}, {"B", "3"}}};
  const Digest key = module_key(unit, compiler_options(one));
  EXPECT_EQ(key, module_key(unit, compiler_options(reordered)));
  EXPECT_NE(key, module_key(unit, compiler_options(other)));
  EXPECT_NE(cache_key(key, "13.0"), cache_key(key, "13.1"));
  EXPECT_EQ(module_name(reordered), "selftest/saxpy.cu A=2 B=1");
  EXPECT_EQ(short_module_name(reordered), "selftest/saxpy.cu A=2 B=1");
  EXPECT_EQ(spec_name({"selftest/saxpy.cu", "saxpy", reordered.defines, 0}), "selftest/saxpy.cu saxpy A=2 B=1");
}

TEST_F(CudaJit, BundleFindsAndDetectsDamage) {
  std::vector<BundleEntry> entries;
  for (int i = 0; i < 100; ++i)
    entries.push_back({sha256(std::to_string(i)), std::string(static_cast<size_t>(i * 7 + 1), static_cast<char>(i))});
  const std::string file = path("kernels.bundle");
  ASSERT_EQ(write_bundle(file, 13, 0, entries), "");
  std::string why;
  const auto bundle = Bundle::open(file, &why);
  ASSERT_NE(bundle, nullptr) << why;
  EXPECT_EQ(bundle->compiler_major(), 13);
  EXPECT_EQ(bundle->size(), 100u);
  for (const BundleEntry& e : entries) EXPECT_EQ(bundle->find(e.key, &why), e.image);
  EXPECT_EQ(bundle->find(sha256("none"), &why), "");
  EXPECT_EQ(why, "");

  EXPECT_EQ(Bundle::open(path("absent"), &why), nullptr);
  EXPECT_EQ(why, "");
  const std::string whole = *read_file(file);
  // One flipped byte, wherever it is, never goes unnoticed.
  for (size_t at = 0; at < whole.size(); at += at < 300 ? 1 : 499) {
    std::string bytes = whole;
    bytes[at] ^= 0x10;
    write_file(file, bytes);
    why.clear();
    const auto damaged = Bundle::open(file, &why);
    if (at < 56 + 80 * entries.size()) {
      EXPECT_EQ(damaged, nullptr) << "byte " << at;
      EXPECT_NE(why, "") << "byte " << at;
    }
    for (const BundleEntry& e : entries) {
      const std::string_view image = damaged != nullptr ? damaged->find(e.key, &why) : "";
      EXPECT_TRUE(image == e.image || image.empty()) << "byte " << at;
    }
  }
  for (const size_t length : {size_t{0}, size_t{10}, size_t{56}, whole.size() / 2, whole.size() - 1}) {
    write_file(file, whole.substr(0, length));
    const auto cut = Bundle::open(file, &why);
    for (const BundleEntry& e : entries) {
      const std::string_view image = cut != nullptr ? cut->find(e.key, &why) : "";
      EXPECT_TRUE(image == e.image || image.empty()) << "length " << length;
    }
    EXPECT_NE(why, "");
  }
}

TEST_F(CudaJit, DiskCacheRebuildsWhatIsDamaged) {
  DiskCache cache(path("cache"));
  const Digest key = sha256("key");
  EXPECT_EQ(cache.load(key), std::nullopt);
  cache.store(key, "machine code");
  EXPECT_EQ(cache.load(key), "machine code");
  EXPECT_TRUE(log_.empty());
  EXPECT_TRUE(fs::is_empty(path("cache/tmp")));

  const std::string whole = *read_file(cache.path_of(key));
  for (size_t length = 0; length < whole.size(); length += 5) {
    write_file(cache.path_of(key), whole.substr(0, length));
    EXPECT_EQ(cache.load(key), std::nullopt) << length;
    EXPECT_FALSE(fs::exists(cache.path_of(key)));
  }
  std::string flipped = whole;
  flipped.back() ^= 1;
  write_file(cache.path_of(key), flipped);
  log_.clear();
  EXPECT_EQ(cache.load(key), std::nullopt);
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_THAT(log_[0], HasSubstr("is damaged; it is removed and compiled again"));
  cache.store(key, "machine code");
  EXPECT_EQ(cache.load(key), "machine code");
}

TEST_F(CudaJit, UnwritableCacheIsOneMessage) {
  // A file where the directory should be: refused even to root.
  write_file(path("file"), "");
  DiskCache cache(path("file/cache"));
  cache.store(sha256("1"), "code");
  cache.store(sha256("2"), "code");
  EXPECT_EQ(cache.load(sha256("1")), std::nullopt);
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_THAT(log_[0], HasSubstr("compiled kernels are not kept on disk: cannot create"));
  EXPECT_THAT(log_[0], HasSubstr("ATTUNE_CACHE_DIR"));
}

// A limit on the size of files stands in for a full disk: a write stops in the middle.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit = {bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    signal(SIGXFSZ, handler_);
  }

 private:
  sighandler_t handler_;
  rlimit old_;
};

TEST_F(CudaJit, FullDiskIsOneMessageAndLeavesNothing) {
  const FileSizeLimit limit(4096);
  DiskCache cache(path("cache"));
  cache.store(sha256("1"), std::string(100000, 'x'));
  cache.store(sha256("2"), std::string(100000, 'x'));
  EXPECT_EQ(cache.load(sha256("1")), std::nullopt);
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_THAT(log_[0], HasSubstr("cannot write"));
  EXPECT_TRUE(fs::is_empty(path("cache/tmp")));
}

TEST_F(CudaJit, ThreadsAndProcessesShareOneCache) {
  const std::string image(1 << 20, 'k');
  const Digest key = sha256("shared");
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      DiskCache cache(path("cache"));
      for (int round = 0; round < 5; ++round) {
        const std::optional<std::string> found = cache.load(key);
        if (found && *found != image) ++wrong;
        cache.store(key, image);
        if (cache.load(key) != image) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_TRUE(log_.empty()) << log_[0];
}

TEST_F(CudaJit, EnvironmentSaysWhetherToCompile) {
  const std::string before = environment("ATTUNE_JIT");
  const auto may_compile = [](const char* value) {
    setenv("ATTUNE_JIT", value, 1);
    return ImageFinder::default_options(99000).may_compile;
  };
  for (const char* on : {"", "on", "On"}) EXPECT_TRUE(may_compile(on)) << on;
  for (const char* off : {"off", "OFF"}) EXPECT_FALSE(may_compile(off)) << off;
  EXPECT_TRUE(log_.empty()) << log_[0];
  EXPECT_TRUE(may_compile("perhaps"));
  EXPECT_THAT(log_, testing::ElementsAre("ATTUNE_JIT is 'perhaps'; it may be on or off, and on is assumed"));
  setenv("ATTUNE_JIT", before.c_str(), 1);
}

class CudaCompile : public CudaJit {
 protected:
  void SetUp() override {
    CudaJit::SetUp();
    std::string why;
    nvrtc_ = find_nvrtc(99, &why);
    if (nvrtc_ == nullptr) GTEST_SKIP() << why;
  }
  ImageFinder::Options options(bool may_compile = true) {
    return {path("kernels.bundle"), path("cache"), may_compile, 99000};
  }

  const ModuleSpec spec_ = {"selftest/saxpy.cu", {{"A", "2"}}};
  const Nvrtc* nvrtc_ = nullptr;
};

TEST_F(CudaCompile, CompilesThenFindsOnDiskThenInTheBundle) {
  const Image compiled = ImageFinder(options()).find(spec_);
  EXPECT_EQ(compiled.origin, KernelOrigin::kCompiled);
  EXPECT_EQ(compiled.bytes().substr(0, 4),
            "\x7f"
            "ELF");
  const Image cached = ImageFinder(options(false)).find(spec_);
  EXPECT_EQ(cached.origin, KernelOrigin::kDiskCache);
  EXPECT_EQ(cached.bytes(), compiled.bytes());

  const SourceUnit unit = read_source(spec_.source, "");
  const BundleEntry entry = {module_key(unit, compiler_options(spec_)), std::string(compiled.bytes())};
  ASSERT_EQ(write_bundle(path("kernels.bundle"), nvrtc_->major(), nvrtc_->minor(), {entry}), "");
  ImageFinder finder(options(false));
  EXPECT_EQ(finder.find(spec_).origin, KernelOrigin::kBundle);
  EXPECT_EQ(finder.find(spec_).bytes(), compiled.bytes());
  EXPECT_EQ(finder.find(spec_, true).origin, KernelOrigin::kDiskCache);
  EXPECT_TRUE(log_.empty()) << log_[0];
}

TEST_F(CudaCompile, KnowsWhereKernelsComeFrom) {
  const Target portable = portable_target();
  EXPECT_TRUE(ImageFinder(options()).can_compile());
  EXPECT_FALSE(ImageFinder(options(false)).can_compile());
  EXPECT_FALSE(ImageFinder(options()).bundles(portable));
  ModuleSpec spec = spec_;
  spec.target = portable;
  const Image ptx = ImageFinder(options()).find(spec);
  EXPECT_THAT(std::string(ptx.bytes()), HasSubstr(".target sm_80"));
  const BundleEntry entry = {module_key(read_source(spec.source, ""), compiler_options(spec)),
                             std::string(ptx.bytes())};
  ASSERT_EQ(write_bundle(path("kernels.bundle"), nvrtc_->major(), nvrtc_->minor(), {entry}), "");
  ImageFinder finder(options(false));
  EXPECT_TRUE(finder.bundles(portable));
  EXPECT_FALSE(finder.bundles(own_target(86)));
  EXPECT_FALSE(finder.bundles(Target()));
  EXPECT_EQ(finder.find(spec).origin, KernelOrigin::kBundle);
}

TEST_F(CudaCompile, DamagedCacheEntryIsCompiledAgain) {
  ImageFinder finder(options());
  finder.find(spec_);
  const Digest key = cache_key(module_key(read_source(spec_.source), compiler_options(spec_)), nvrtc_->version());
  const std::string file = finder.disk_cache().path_of(key);
  std::string bytes = read_file(file).value();
  bytes[bytes.size() / 2] ^= 1;
  write_file(file, bytes);
  EXPECT_EQ(finder.find(spec_).origin, KernelOrigin::kCompiled);
  EXPECT_EQ(log_.size(), 1u);
  EXPECT_EQ(finder.find(spec_).origin, KernelOrigin::kDiskCache);
}

TEST_F(CudaCompile, JitOffNamesKernelAndDefines) {
  const std::string message = failure_of([&] { ImageFinder(options(false)).find(spec_); }, ATTUNE_DEVICE_ERROR);
  EXPECT_EQ(message,
            cat("there is no kernel bundle ", path("kernels.bundle"), "; the kernel is not in the disk cache (",
                path("cache"),
                "); ATTUNE_JIT=off forbids compiling; set ATTUNE_JIT=on; the kernel is selftest/saxpy.cu A=2"));
}

// Why comes first, then what helps, then which.
TEST_F(CudaJit, SaysWhyThereIsNoCode) {
  const std::string bundle = path("kernels.bundle");
  ASSERT_EQ(write_bundle(bundle, 13, 2, {}), "");
  const auto failure = [&](const std::string& file, int driver_version) {
    ImageFinder finder({file, "", false, driver_version});
    const ModuleSpec spec = {"selftest/saxpy.cu", {{"E", "5"}, {"A", "1"}, {"B", "2"}, {"C", "3"}, {"D", "4"}}};
    return failure_of([&] { finder.find(spec); }, ATTUNE_DEVICE_ERROR);
  };
  const std::string which = "; the kernel is selftest/saxpy.cu A=1 B=2 C=3 and 2 more macros";
  // No NVRTC is as old as these drivers.
  const std::string off = "; ATTUNE_JIT=off forbids compiling; set ATTUNE_JIT=on, with NVRTC: pip install ";
  EXPECT_EQ(
      failure(bundle, 11080),
      cat("the kernel bundle ", bundle, " was made with CUDA 13.2 and this driver supports CUDA 11.8: it is not used",
          off, "'nvidia-cuda-nvrtc==11.*', or set ATTUNE_NVRTC; or install a driver of CUDA 13 or newer", which));
  ASSERT_EQ(write_bundle(bundle, 11, 0, {}), "");
  EXPECT_EQ(failure(bundle, 11080), cat("the kernel is not in the bundle ", bundle, off,
                                        "'nvidia-cuda-nvrtc==11.*', or set ATTUNE_NVRTC", which));
  EXPECT_EQ(failure("", 11080),
            cat("there is no kernel bundle", off, "'nvidia-cuda-nvrtc==11.*', or set ATTUNE_NVRTC", which));
  write_file(bundle, "torn");
  EXPECT_EQ(failure(bundle, 11080), cat("the kernel bundle ", bundle, " is not readable or too short; it is not used",
                                        off, "'nvidia-cuda-nvrtc==11.*', or set ATTUNE_NVRTC", which));
}

TEST(CudaNvrtc, IsThatOfTheDriversMajorVersion) {
  EXPECT_EQ(nvrtc_advice(12), "pip install nvidia-cuda-nvrtc-cu12, or set ATTUNE_NVRTC");
  EXPECT_EQ(nvrtc_advice(13), "pip install 'nvidia-cuda-nvrtc==13.*', or set ATTUNE_NVRTC");
  EXPECT_EQ(nvrtc_advice(kAnyMajor), "pip install nvidia-cuda-nvrtc, or set ATTUNE_NVRTC");
}

TEST_F(CudaCompile, BundleOfANewerCudaIsNotUsed) {
  const BundleEntry entry = {module_key(read_source(spec_.source, ""), compiler_options(spec_)), "of the future"};
  ASSERT_EQ(write_bundle(path("kernels.bundle"), 100, 0, {entry}), "");
  EXPECT_EQ(ImageFinder(options()).find(spec_).origin, KernelOrigin::kCompiled);
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_THAT(log_[0], HasSubstr("was made with CUDA 100.0 and this driver supports CUDA 99.0: it is not used"));
}

TEST_F(CudaCompile, ErrorsOfTheSourceAreShown) {
  write_file(path("src/bad.cu"), "extern \"C\" __global__ void k() { return undeclared; }\n");
  const SourceUnit unit = read_source("bad.cu", path("src"));
  const std::string message = failure_of(
      [&] {
        nvrtc_->compile(unit, compiler_options({"bad.cu", {}}));
      },
      ATTUNE_INTERNAL);
  EXPECT_THAT(message, HasSubstr("bad.cu does not compile with NVRTC"));
  EXPECT_THAT(message, HasSubstr("\"undeclared\" is undefined"));
}

// Of those that the bundle does not hold. NVRTC itself is not under a sanitizer, so one is enough there.
TEST_F(CudaCompile, EveryKernelOfTheTestsCompiles) {
  const Defines defines = {{"A", "2"}, {"ROWS", "8"}, {"COLUMNS", "32"}, {"KEYS", "64"}, {"CHANNELS", "64"}};
  size_t compiled_count = 0;
  for (size_t i = 0; i < kNumEmbeddedKernels; ++i) {
    const std::string source = kEmbeddedKernels[i].path;
    const bool of_tests = source.starts_with("selftest/") || source.starts_with("check/");
    if (!of_tests || !source.ends_with(".cu")) continue;
    ++compiled_count;
    if (cases::kAddressSanitizer && compiled_count > 1) continue;
    const Compiled compiled = nvrtc_->compile(read_source(source), compiler_options({source, defines}));
    EXPECT_EQ(compiled.log, "") << source;
    EXPECT_GT(compiled.code.size(), 1000u) << source;
  }
  EXPECT_GE(compiled_count, 8u);
}

TEST(CudaNvrtc, AbsentOrTooNewIsOneSentence) {
  std::string why;
  EXPECT_EQ(Nvrtc::open("/nonexistent/libnvrtc.so.13", &why), nullptr);
  EXPECT_THAT(why, HasSubstr("/nonexistent/libnvrtc.so.13"));
  EXPECT_EQ(Nvrtc::open("libm.so.6", &why), nullptr);
  EXPECT_EQ(why, "libm.so.6 is not NVRTC of CUDA 12 or later");
  if (find_nvrtc(99, &why) == nullptr) return;
  EXPECT_EQ(find_nvrtc(11, &why), nullptr);
  EXPECT_THAT(why, HasSubstr("is newer than the driver, which supports CUDA 11"));
}

}  // namespace
}  // namespace attune::cuda
