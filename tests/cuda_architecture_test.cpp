// SPDX-License-Identifier: Apache-2.0
// What kernels are compiled for, and which of them a GPU gets.
#include "cuda/architecture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "cases/problem.h"
#include "core/status.h"
#include "cuda/jit/image.h"
#include "cuda/jit/nvrtc.h"
#include "dispatch/registry.h"
#include "support.h"

namespace attune::cuda {
namespace {

using testing::HasSubstr;

TEST(Architecture, FeaturesComeWithTheirCapability) {
  using namespace ptx;  // NOLINT: all features
  constexpr unsigned kFp8 = kFp8Conversion | kFp8Mma,
                     kHopper = kFp8 | kPairMaximum | kDependentLaunch | kClusters | kTma;
  EXPECT_EQ(own_target(80).features, 0u);
  EXPECT_EQ(own_target(86).features, 0u);
  EXPECT_EQ(own_target(89).features, kFp8);
  EXPECT_EQ(own_target(90).features, kHopper | kRegisterMoves | kWgmma);
  EXPECT_EQ(own_target(100).features, kHopper);
  EXPECT_EQ(own_target(120).features, kHopper);
  EXPECT_EQ(own_target(90).option(), Target().option());
  EXPECT_EQ(own_target(90).features, Target().features);
  EXPECT_EQ(own_target(88).option(), "sm_88") << "which is in no table";
  EXPECT_EQ(own_target(88).features, 0u);
}

TEST(Architecture, OtherArchitecturesAreCompiledToPtx) {
  std::string why;
  EXPECT_EQ(forced_target("sm_80", 90, &why).option(), "compute_80");
  EXPECT_EQ(forced_target("sm_80", 90, &why).features, 0u);
  EXPECT_EQ(forced_target("sm_90a", 90, &why).option(), "sm_90a");
  EXPECT_EQ(forced_target("sm_90", 100, &why).option(), "compute_90");
  EXPECT_EQ(why, "");
  forced_target("sm_90a", 100, &why);
  EXPECT_EQ(why,
            "ATTUNE_ARCH names sm_90a, whose code a GPU of compute capability 10.0 does not run; it may be "
            "sm_80, sm_86, sm_87, sm_89, sm_90 or sm_100");
  why.clear();
  forced_target("sm_120", 90, &why);
  EXPECT_EQ(why,
            "ATTUNE_ARCH names sm_120, whose code a GPU of compute capability 9.0 does not run; it may be sm_80, "
            "sm_86, sm_87, sm_89, sm_90 or sm_90a");
  why.clear();
  forced_target("Hopper", 90, &why);
  EXPECT_THAT(why, HasSubstr("ATTUNE_ARCH is 'Hopper'; it must be one of sm_80, "));
}

TEST(Architecture, NamesTheFeatureThatIsMissing) {
  EXPECT_EQ(missing_feature(kWarpgroups, own_target(90)), "");
  EXPECT_EQ(missing_feature(0, own_target(80)), "");
  EXPECT_EQ(missing_feature(kWarpgroups, own_target(86)), "wgmma: compute capability 9.0, this is 8.6");
  EXPECT_EQ(missing_feature(kWarpgroups, own_target(120)), "wgmma: compute capability 9.0, this is 12.0");
  EXPECT_EQ(missing_feature(ptx::kTma | ptx::kClusters, own_target(80)),
            "TMA: compute capability 9.0 or newer, this is 8.0");
  EXPECT_EQ(missing_feature(ptx::kFp8Mma, own_target(86)), "e4m3 mma: compute capability 8.9 or newer, this is 8.6");
}

TEST(Architecture, GpusGetKernelsThatRunThere) {
  const auto choose = [](const char* fields, int capability) -> std::string {
    cases::Problem problem(tests::make_case(fields));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    try {
      return choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA, kAttention, own_target(capability))
          .name;
    } catch (const Failure& e) {
      EXPECT_EQ(e.status(), ATTUNE_UNSUPPORTED);
      return e.what();
    }
  };
  constexpr const char* kStep = R"({"name": "x", "kv": "paged", "heads": [8, 2], "head_dim": [128, 128],
      "dtype": "bf16", "queries": "fixed", "seqlens_kv": [70]})";
  constexpr const char* kChunk = R"({"name": "x", "kv": "paged", "heads": [8, 2], "head_dim": [128, 128],
      "dtype": "bf16", "seqlens_q": [60], "seqlens_kv": [70]})";
  constexpr const char* kCodes = R"({"name": "x", "kv": "paged", "heads": [8, 2], "head_dim": [128, 128],
      "dtype": "bf16", "seqlens_q": [60], "seqlens_kv": [70], "cache": {"dtype": "i8", "scales": "token"}})";
  constexpr const char* kDense = R"({"name": "x", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16",
      "seqlens_q": [70]})";
  constexpr const char* kLong = R"({"name": "x", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16",
      "seqlens_q": [129]})";
  constexpr const char* kFloats = R"({"name": "x", "heads": [8, 2], "head_dim": [128, 128], "dtype": "f32",
      "seqlens_q": [70]})";
  constexpr const char* kOdd = R"({"name": "x", "heads": [8, 2], "head_dim": [100, 100], "dtype": "bf16",
      "seqlens_q": [70]})";
  constexpr const char* kAllCodes = R"({"name": "x", "heads": [8, 2], "head_dim": [128, 128], "dtype": "e4m3",
      "out_dtype": "bf16", "seqlens_q": [70]})";
  constexpr const char* kCappedCodes = R"({"name": "x", "heads": [8, 2], "head_dim": [72, 72], "dtype": "e4m3",
      "out_dtype": "bf16", "seqlens_q": [70], "softcap": 30})";
  constexpr const char* kBits = R"({"name": "x", "heads": [16, 1], "head_dim": [576, 512], "shared_kv": true,
      "kv": "paged", "dtype": "bf16", "queries": "fixed", "seqlens_kv": [70], "mask_bits": 1})";
  constexpr const char* kMla = R"({"name": "x", "heads": [16, 1], "head_dim": [576, 512], "shared_kv": true,
      "kv": "paged", "dtype": "bf16", "queries": "fixed", "seqlens_kv": [70]})";
  for (const int capability : {80, 86, 89, 100, 120}) {
    const std::string here = capability_text(capability);
    EXPECT_EQ(choose(kStep, capability), "cuda_decode") << here;
    EXPECT_EQ(choose(kChunk, capability), "cuda_prefill_mma") << here;
    EXPECT_EQ(choose(kCodes, capability), "cuda_prefill_mma") << here;
    EXPECT_EQ(choose(kDense, capability), "cuda_prefill_mma") << here;
    EXPECT_EQ(choose(kLong, capability), "cuda_prefill_mma") << here;
    EXPECT_EQ(choose(kFloats, capability), "cuda_prefill_fp32_mma") << here;
    EXPECT_EQ(choose(kOdd, capability), "cuda_prefill_fp32_mma") << here;
    EXPECT_EQ(choose(kAllCodes, capability), "cuda_prefill_fp8_mma") << here;
    EXPECT_EQ(
        choose(kBits, capability),
        "no kernel covers this; the nearest is cuda_mla, which needs wgmma: compute capability 9.0, this is " + here);
    EXPECT_EQ(choose(kMla, capability), "cuda_mla_mma") << here;
  }
  EXPECT_EQ(choose(kStep, 90), "cuda_decode");
  EXPECT_EQ(choose(kChunk, 90), "cuda_prefill");
  EXPECT_EQ(choose(kDense, 90), "cuda_prefill_mma");
  EXPECT_EQ(choose(kLong, 90), "cuda_prefill");
  EXPECT_EQ(choose(kFloats, 90), "cuda_prefill_fp32");
  EXPECT_EQ(choose(kAllCodes, 90), "cuda_prefill_fp8");
  EXPECT_EQ(choose(kCappedCodes, 90), "cuda_prefill_fp8_mma");
  EXPECT_EQ(choose(kMla, 90), "cuda_mla");
}

// So attune check --stress runs them as sm_80, and on Hopper those of mma.sync that are chosen there.
TEST(Architecture, BatchesOfServersReachAllKernels) {
  std::map<std::string, int> taken, with_prologue, on_hopper;
  int several_short_prompts = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    const cases::Case spec = cases::serving_case(i % 8, i, 200, 3000);
    if (std::string_view(cases::operation_name(spec)) != kAttention) continue;
    cases::Problem problem(spec);
    const Problem p = make_problem(problem.host(), Data::kRequired);
    try {
      const std::string name =
          choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA, kAttention, own_target(80)).name;
      ++taken[name];
      if (p.prologue.append) ++with_prologue[name];
      const std::string there =
          choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA, kAttention, own_target(90)).name;
      ++on_hopper[there];
      if (there == "cuda_prefill_mma" && p.batch > 2 && p.total_q > 128) ++several_short_prompts;
    } catch (const Failure& e) {
      EXPECT_EQ(e.status(), ATTUNE_UNSUPPORTED);
    }
  }
  for (const char* name : {"cuda_decode", "cuda_prefill_mma", "cuda_prefill_fp32_mma", "cuda_prefill_fp8_mma"})
    EXPECT_GT(taken[name], 10) << name;
  for (const char* name : {"cuda_prefill", "cuda_prefill_mma"}) EXPECT_GT(on_hopper[name], 0) << name;
  EXPECT_GT(several_short_prompts, 5);
  for (const char* name : {"cuda_prefill_mma", "cuda_prefill_fp32_mma"}) EXPECT_GT(with_prologue[name], 0) << name;
}

// No such GPU is there.
TEST(Architecture, TheCApiAnswersByCapability) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "kv": "paged", "heads": [8, 2], "head_dim": [128, 128],
      "dtype": "bf16", "seqlens_q": [60], "seqlens_kv": [70]})"));
  attune_attention a = problem.host();
  for (const Architecture& each : kArchitectures) EXPECT_ATTUNE_OK(attune_supported_by_capability(&a, each.capability));
  EXPECT_EQ(attune_supported_by_capability(&a, 75), ATTUNE_UNSUPPORTED);
  EXPECT_STREQ(attune_last_error(), "a GPU that has compute capability 7.5; the kernels need 8.0 (Ampere) or newer");

  cases::Problem bits(tests::make_case(R"({"name": "x", "heads": [16, 1], "head_dim": [576, 512], "shared_kv": true,
      "kv": "paged", "dtype": "bf16", "queries": "fixed", "seqlens_kv": [70], "mask_bits": 1})"));
  EXPECT_ATTUNE_OK(attune_supported_by_capability(&bits.host(), 90));
  EXPECT_EQ(attune_supported_by_capability(&bits.host(), 86), ATTUNE_UNSUPPORTED);
  EXPECT_THAT(attune_last_error(), HasSubstr("cuda_mla, which needs wgmma: compute capability 9.0, this is 8.6"));

  for (const int32_t capability : {-5, 1000, 1 << 30}) {
    EXPECT_EQ(attune_supported_by_capability(&a, capability), ATTUNE_INVALID_ARGUMENT) << capability;
    EXPECT_EQ(attune_last_error(),
              cat("capability is ", capability, "; it must be 0 to 999: 10 * major + minor of a compute capability"));
  }

  a.softcap = -1;
  EXPECT_EQ(attune_supported_by_capability(&a, 90), ATTUNE_INVALID_ARGUMENT);
}

// What the compiler does not know becomes PTX of the newest architecture that it does.
TEST(Architecture, CompilersThatAreOlderThanTheGpu) {
  std::string why;
  const Nvrtc* nvrtc = find_nvrtc(99, &why);
  if (nvrtc == nullptr) GTEST_SKIP() << why;
  for (const Architecture& a : kArchitectures) {
    if (a.capability > 90) continue;
    Target target = target_of(a);
    EXPECT_FALSE(nvrtc->restrict(&target)) << a.name;
    EXPECT_EQ(target.option(), a.name);
  }
  Target future = own_target(990);
  EXPECT_TRUE(nvrtc->restrict(&future));
  EXPECT_TRUE(future.as_ptx);
  EXPECT_GE(future.capability, 90);
  EXPECT_LT(future.capability, 990);
  EXPECT_FALSE(nvrtc->restrict(&future)) << future.name;
  const ModuleSpec spec{"selftest/saxpy.cu", {{"A", "2"}}, future};
  const Compiled compiled = nvrtc->compile(read_source(spec.source, ""), compiler_options(spec));
  EXPECT_THAT(compiled.code, HasSubstr(cat(".target ", future.name)));
  EXPECT_EQ(compiled.code.back(), '\0');
}

}  // namespace
}  // namespace attune::cuda
