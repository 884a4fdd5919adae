// SPDX-License-Identifier: Apache-2.0
// The emulator's search for races (tests/emulator/shadow.h): small kernels with a defect each, in which it must be
// found, and the kernels of the library, in which there must be none. No GPU.
#include <gmock/gmock.h>

#include <optional>

#include "emulated_attend.h"

namespace attune::cuda {
namespace {

using testing::HasSubstr;

class EmulatedRaces : public tests::Emulated {
 protected:
  template <class... Params>
  static auto find(const char* entry) {
    return reinterpret_cast<void (*)(Params...)>(emulator::find_kernel({"emulator/kernels/races.cu", entry, {}, 0}));
  }
  // What the launches are stopped by, in order, and by seed.
  static std::string words_of(const std::function<void()>& launch) {
    const emulator::Pinned pinned;  // of what follows from a defect, some orders show something else first
    std::string all;
    for (uint64_t seed = 0; seed <= 2; ++seed) {
      std::optional<emulator::Shuffled> shuffled;
      if (seed > 0) shuffled.emplace(seed);
      try {
        launch();
        all += "none\n";
      } catch (const std::exception& e) {
        all += e.what() + std::string("\n");
      }
    }
    return all;
  }
  // launch(broken): words[broken] must be said of it, whatever the order; nothing of 0.
  static void expect_found(const std::function<void(int)>& launch, const std::vector<const char*>& words) {
    for (int broken = 0; broken < static_cast<int>(words.size()); ++broken) {
      const std::string said = words_of([&] { launch(broken); });
      if (broken == 0) {
        EXPECT_EQ(said, "none\nnone\nnone\n");
      } else {
        EXPECT_THAT(said, Not(HasSubstr("none\n"))) << broken;
        EXPECT_THAT(said, HasSubstr(words[static_cast<size_t>(broken)])) << broken;
      }
    }
  }

  const emulator::Watched watched_;
};

TEST_F(EmulatedRaces, InARingOfStages) {
  const auto kernel = find<const uint8_t*, int, unsigned*, int>("pipeline");
  std::vector<uint8_t> from(512 * 6 + 16, 3);
  const uint8_t* const aligned = from.data() + 16 - reinterpret_cast<uintptr_t>(from.data()) % 16;
  std::vector<unsigned> sums(64);
  expect_found([&](int broken) { emulator::run(1, 96, [&] { kernel(aligned, 6, sums.data(), broken); }); },
               {"", "counts writes byte 1020", "which lane 0 of warp 0 writes, perhaps later", "reads, perhaps later",
                "reads byte", "reads byte", "reads, perhaps later", "reads, perhaps later", "too many arrive"});
}

TEST_F(EmulatedRaces, OfArrivalsTooMany) {
  const auto kernel = find<const uint8_t*, int, unsigned*, int>("pipeline");
  std::vector<uint8_t> from(512 + 16, 3);
  const uint8_t* const aligned = from.data() + 16 - reinterpret_cast<uintptr_t>(from.data()) % 16;
  std::vector<unsigned> sums(64);
  // Of one tile, so that nobody comes to what the arrival beyond the phase is taken for.
  EXPECT_THAT(words_of([&] { emulator::run(1, 96, [&] { kernel(aligned, 1, sums.data(), 9); }); }),
              AllOf(HasSubstr("in the middle of a barrier's phase"), Not(HasSubstr("none\n"))));
}

TEST_F(EmulatedRaces, OfThreadsOfABlock) {
  const auto kernel = find<unsigned*, int>("pass_on");
  std::vector<unsigned> out(128);
  expect_found([&](int broken) { emulator::run(1, 128, [&] { kernel(out.data(), broken); }); },
               {"", "writes, perhaps later", "reads, perhaps later", "writes, perhaps later",
                "which nobody has written", "writes, perhaps later"});
}

TEST_F(EmulatedRaces, OfCopiesThatAThreadIssues) {
  const auto kernel = find<const unsigned*, unsigned*, int>("copy_words");
  std::vector<unsigned> from(256), to(128);
  expect_found([&](int broken) { emulator::run(1, 128, [&] { kernel(from.data(), to.data(), broken); }); },
               {"", "which cp.async by lane", "perhaps later", "which cp.async by lane", "which lane"});
}

TEST_F(EmulatedRaces, OfProducts) {
  const auto kernel = find<float*, int>("multiply_ones");
  std::vector<float> out(128);
  expect_found([&](int broken) { emulator::run(1, 128, [&] { kernel(out.data(), broken); }); },
               {"", "fence.proxy.async", "a product of warp", "a product of warp", "registers in block 0"});
}

TEST_F(EmulatedRaces, OfBlocks) {
  const auto kernel = find<unsigned*, unsigned*, unsigned*, int>("add_parts");
  std::vector<unsigned> parts(32 * 6), sum(2);
  expect_found(
      [&](int broken) {
        unsigned counter = 0;
        emulator::run(6, 32, [&] { kernel(parts.data(), &counter, sum.data(), broken); });
      },
      {"", "of cluster", "of cluster", "of cluster"});
}

TEST_F(EmulatedRaces, InACluster) {
  const auto kernel = find<unsigned*, int>("meet_in_cluster");
  std::vector<unsigned> out(128);
  expect_found(
      [&](int broken) {
        emulator::run(
            4, 32, [&] { kernel(out.data(), broken); }, 2);
      },
      {"", "which nobody has written", "counts writes, perhaps later", "reads, perhaps later", "by its end"});
}

// --- The library's kernels, on few blocks, so that each has several work tiles.

class EmulatedRacesIn : public EmulatedRaces {
 protected:
  // source: of the kernel that attends.
  static void check(const std::string& source, const cases::Row& row, int num_sms = 2) {
    const cases::Case spec = tests::make_case(row);
    for (uint64_t seed = 0; seed <= 1; ++seed) {
      cases::Problem problem(spec);
      problem.arena().upload();
      const cases::Expected expected = cases::evaluate(problem);
      EXPECT_EQ(source_of(problem.device(), num_sms), source) << row.text();
      try {
        std::optional<emulator::Shuffled> shuffled;
        if (seed > 0) shuffled.emplace(seed);
        emulate_attention(problem.device(), num_sms);
      } catch (const std::exception& e) {
        ADD_FAILURE() << row.text() << ", seed " << seed << ": " << e.what();
      }
      EXPECT_EQ(cases::compare(problem, expected, ATTUNE_DEVICE_CUDA).failure, "") << row.text();
    }
  }

 private:
  static std::string source_of(const attune_attention& a, int num_sms) {
    const Problem p = make_problem(a, Data::kRequired);
    const std::string name = choose_kernel(p, traits_of(p, a), ATTUNE_DEVICE_CUDA).name;
    decode::DeviceShape device;
    device.num_sms = num_sms;
    return name == "cuda_mixed"    ? "both"
           : name == "cuda_decode" ? decode::choose_config(p, device).main_kernel().source
           : name == "cuda_mla"    ? mla::choose_config(p, num_sms).main_kernel().source
                                   : prefill::choose_config(p, num_sms).main_kernel().source;
  }
};

TEST_F(EmulatedRacesIn, Prompts) {
  const cases::Row common(R"("max_seqlens": true, "causal": true, "head_dim": [64, 64], "dtype": "bf16")");
  check("prefill/prefill.cu", common.with(R"("heads": [4, 2], "kv": "dense", "seqlens_q": [130, 3, 70],
                                          "seqlens_kv": [300, 90, 70])"));
  check("prefill/prefill.cu", common.with(R"("heads": [4, 1], "kv": "paged", "new_tokens": true, "softcap": 30,
                                          "cache": {"page_size": 16}, "seqlens_q": [40, 9], "seqlens_kv": [300, 70])"));
  // Cut along the keys, with three work tiles a block and more.
  check("prefill/prefill.cu", common.with(R"("heads": [4, 1], "kv": "paged", "cache": {"page_size": 16},
      "seqlens_q": [20, 9, 20, 5, 7, 9], "seqlens_kv": [2100, 70, 130, 90, 64, 30])"));
}
TEST_F(EmulatedRacesIn, PromptsInPairs) {
  const cases::Row common(
      R"("max_seqlens": true, "causal": true, "head_dim": [128, 128], "dtype": "bf16", "heads": [4, 1],
      "seqlens_q": [130, 3, 70], "seqlens_kv": [300, 90, 70])");
  const cases::Problem problem(tests::make_case(common.with(R"("kv": "dense")")));
  ASSERT_EQ(prefill::choose_config(make_problem(problem.host(), Data::kRequired), 2).cluster, 2);
  check("prefill/prefill.cu", common.with(R"("kv": "paged", "new_tokens": true, "cache": {"page_size": 16})"), 4);
  check("prefill/prefill.cu", common.with(R"("kv": "paged", "cache": {"page_size": 64}, "seqlens_kv": [2100, 90, 70])"),
        6);
  check("prefill/prefill.cu", common.with(R"("kv": "dense")"));
}
TEST_F(EmulatedRacesIn, PromptsByThreeConsumerGroups) {
  const cases::Row common(
      R"("max_seqlens": true, "causal": true, "head_dim": [64, 64], "dtype": "bf16", "heads": [8, 1],
      "seqlens_q": [110, 3, 70], "seqlens_kv": [300, 90, 70])");
  const cases::Problem problem(tests::make_case(common.with(R"("kv": "dense")")));
  ASSERT_EQ(prefill::choose_config(make_problem(problem.host(), Data::kRequired), 2).rows, 192);
  check("prefill/prefill.cu", common.with(R"("kv": "paged", "new_tokens": true, "cache": {"page_size": 16})"), 4);
  check("prefill/prefill.cu", common.with(R"("kv": "dense")"));
}
TEST_F(EmulatedRacesIn, PromptsOverOtherCaches) {
  const cases::Row common(
      R"("max_seqlens": true, "causal": true, "head_dim": [64, 64], "dtype": "bf16", "heads": [4, 1],
      "kv": "paged", "seqlens_q": [40, 9], "seqlens_kv": [300, 70])");
  check("prefill/prefill.cu",
        common.with(R"("cache": {"page_size": 64, "dtype": "e4m3", "scales": "head"}, "new_tokens": true)"));
  check("prefill/prefill.cu", common.with(R"("cache": {"page_size": 64, "dtype": "i8", "scales": "token"})"));
  check("prefill/prefill.cu", common.with(R"("cache": {"page_size": 32, "layout": "xpacked"})"));
  check("prefill/prefill.cu",
        common.with(R"("cache": {"page_size": 32, "layout": "xpacked", "dtype": "e4m3", "scales": "tensor"})"));
  check("prefill/prefill.cu", common.with(R"("cache": {"page_size": 24, "layout": "xpacked"})"));
}
TEST_F(EmulatedRacesIn, PromptsOfOtherTypes) {
  check("prefill/prefill_fp8.cu",
        cases::Row(R"("max_seqlens": true, "causal": true, "heads": [4, 2], "head_dim": [64, 64], "dtype": "e4m3",
      "kv": "dense", "prologue": {"qkv_scale": true}, "seqlens_q": [130, 70], "seqlens_kv": [200, 70])"));
  check("prefill/prefill_fp32.cu",
        cases::Row(R"("max_seqlens": true, "causal": true, "heads": [2, 2], "head_dim": [64, 64], "dtype": "f32",
      "kv": "dense", "seqlens_q": [70, 40], "seqlens_kv": [130, 70])"));
}
TEST_F(EmulatedRacesIn, Steps) {
  const cases::Row common(
      R"("max_seqlens": true, "causal": true, "head_dim": [64, 64], "kv": "paged", "queries": "fixed")");
  check("decode/decode.cu", common.with(R"("heads": [8, 2], "dtype": "bf16", "seqlens_kv": [700, 3, 130])"));
  check("decode/decode.cu", common.with(R"("heads": [8, 2], "dtype": "bf16", "seqlens_kv": [700, 3, 130],
      "new_tokens": true, "prologue": {"append": true, "rope": {"style": "linear", "dim": 64}},
      "cache": {"dtype": "e4m3", "scales": "head"})"));
  check("decode/decode.cu", common.with(R"("heads": [4, 2], "dtype": "bf16", "seqlens_kv": [70, 3],
      "strides": "odd", "new_tokens": true, "prologue": {"append": true})"));
  check("decode/decode_cluster.cu", common.with(R"("heads": [8, 2], "dtype": "bf16", "seqlens_kv": [700, 300])"), 132);
  check("decode/decode_cluster.cu", common.with(R"("heads": [24, 1], "dtype": "bf16", "seqlens_kv": [200, 33],
      "new_tokens": true)"),
        132);
}
TEST_F(EmulatedRacesIn, LatentCaches) {
  const cases::Row common(
      R"("max_seqlens": true, "causal": true, "head_dim": [576, 512], "dtype": "bf16", "kv": "paged")");
  check("mla/mla.cu", common.with(R"("heads": [16, 1], "cache": {"page_size": 64}, "shared_kv": true,
                                  "seqlens_q": [1, 9, 1], "seqlens_kv": [400, 70, 130])"));
  check("mla/mla.cu", common.with(R"("heads": [128, 1], "cache": {"page_size": 64}, "shared_kv": true,
                                  "seqlens_q": [1, 2], "seqlens_kv": [300, 70])"));
  check("mla/mla.cu", common.with(R"("heads": [64, 1], "cache": {"format": "mla_656"}, "seqlens_q": [1, 1],
                                  "seqlens_kv": [300, 70])"));
}
TEST_F(EmulatedRacesIn, LatentCachesOfM16AndSwapAb) {
  const cases::Row common(
      R"("max_seqlens": true, "causal": true, "head_dim": [576, 512], "dtype": "bf16", "kv": "paged",
                                "queries": "fixed")");
  check("mla/swap_ab.cu",
        common.with(R"("heads": [16, 1], "cache": {"format": "mla_656"}, "seqlens_kv": [300, 70, 130])"));
  check("mla/m16.cu", common.with(R"("heads": [16, 1], "cache": {"page_size": 64}, "shared_kv": true,
                                  "seqlens_kv": [300, 700])"),
        132);
}
TEST_F(EmulatedRacesIn, SparseLatentCaches) {
  check("mla/mla.cu", cases::Row(R"("dtype": "bf16", "head_dim": [576, 512], "kv": "slots", "seqlens_q": [2, 1],
      "sparse": {"topk": 100, "topk_length": "token", "slots": 256}, "heads": [64, 1], "shared_kv": true)"));
}
TEST_F(EmulatedRacesIn, BothKinds) {
  check("both", cases::Row(R"("causal": true, "heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged",
           "seqlens_q": [120, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
           "seqlens_kv": [120, 90, 9, 33, 70, 64, 5, 200, 1, 44, 80, 9, 5, 21, 8, 77])"));
}

}  // namespace
}  // namespace attune::cuda
