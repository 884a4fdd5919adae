// SPDX-License-Identifier: Apache-2.0
// Which NVRTC is taken: by its version, made of a library of the test's own, and from where.
#include <gmock/gmock.h>

#include <cstdlib>

#include "cuda/jit/nvrtc.h"
#include "environment_guard.h"
#include "jit_fixture.h"

namespace attune::cuda {
namespace {

using testing::ElementsAre;

class CudaNvrtcFound : public CudaJit {
 protected:
  // A library with NVRTC's functions, of which only the version works.
  std::string make_nvrtc(int major) {
    std::string text =
        cat("extern \"C\" int nvrtcVersion(int* major, int* minor) { *major = ", major, ", *minor = 1; return 0; }\n");
    for (const char* name :
         {"CreateProgram", "DestroyProgram", "CompileProgram", "GetCUBINSize", "GetCUBIN", "GetPTXSize", "GetPTX",
          "GetNumSupportedArchs", "GetSupportedArchs", "GetProgramLogSize", "GetProgramLog", "GetErrorString"})
      text += cat("extern \"C\" int nvrtc", name, "() { return 1; }\n");
    const std::string source = path(cat("nvrtc", major, ".cpp")), library = path(cat("libnvrtc.so.", major));
    write_file(source, text);
    EXPECT_EQ(std::system(cat(ATTUNE_CXX_COMPILER, " -shared -fPIC '", source, "' -o '", library, "'").c_str()), 0);
    return library;
  }

  // Sets a variable until the test ends.
  void set(const char* name, const std::string& value) { environment_.set(name, value); }

 private:
  tests::EnvironmentGuard environment_;
};

TEST_F(CudaNvrtcFound, From12On) {
  std::string why;
  const std::string old = make_nvrtc(11), first = make_nvrtc(12);
  EXPECT_EQ(Nvrtc::open(old, &why), nullptr);
  EXPECT_EQ(why, old + " is not NVRTC of CUDA 12 or later");
  const std::unique_ptr<Nvrtc> nvrtc = Nvrtc::open(first, &why);
  ASSERT_NE(nvrtc, nullptr) << why;
  EXPECT_EQ(nvrtc->version(), "12.1");
}

TEST_F(CudaNvrtcFound, WhereToolkitsAndPackagesPutIt) {
  const std::string cu13 = "site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                    cu12 = "site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
  const std::vector<std::string> files = {"home/lib64/libnvrtc.so.12",  "home/targets/any/lib/libnvrtc.so.13",
                                          "path/lib64/libnvrtc.so.13",  "env/lib/python3.11/" + cu13,
                                          "env/lib/python3.11/" + cu12, "env/lib/libnvrtc.so.13",
                                          "conda/lib/libnvrtc.so.12",   "user/.local/lib/python3.12/" + cu13};
  for (const std::string& file : files) write_file(path(file), "");
  write_file(path("home/lib64/libnvrtc.so.11"), "");
  set("ATTUNE_NVRTC", ""), set("CUDA_HOME", path("home")), set("CUDA_PATH", path("path"));
  set("VIRTUAL_ENV", path("env")), set("CONDA_PREFIX", path("conda")), set("HOME", path("user"));
  std::vector<std::string> found = nvrtc_candidates(), expected;
  ASSERT_GE(found.size(), 2u);
  EXPECT_EQ(found[0], "libnvrtc.so.13");
  EXPECT_EQ(found[1], "libnvrtc.so.12");
  std::erase_if(found, [&](const std::string& file) { return !file.starts_with(directory_.string()); });
  for (const std::string& file : files) expected.push_back(path(file));
  EXPECT_EQ(found, expected);
  set("ATTUNE_NVRTC", "this one");
  EXPECT_THAT(nvrtc_candidates(), ElementsAre("this one"));
}

}  // namespace
}  // namespace attune::cuda
