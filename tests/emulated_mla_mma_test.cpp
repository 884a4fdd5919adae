// SPDX-License-Identifier: Apache-2.0
// MLA by mma.sync, from its own source on the CPU (tests/emulator): as on GPUs without wgmma, against the oracle, with
// poisoned memory.
#include "batch_of.h"
#include "cuda/architecture.h"
#include "emulated_mla.h"
#include "mla/mma/shared_bytes.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 200;

class EmulatedMlaMma : public EmulatedMla {
 protected:
  static std::string run(cases::Problem& problem, const char* as = "sm_80", int layers = 1, int num_sms = kBlocks) {
    const Architecture& to = *find_architecture(as);
    const emulator::Capability capability(to.capability);
    return run_config(problem, layers, [&](const Problem& p) {
      mla::Config c = mla::choose_mma_config(p, num_sms, to.shared_a_block);
      EXPECT_GE(c.stages, kernels::mla_mma_fewest_stages(c.producer)) << as;
      EXPECT_LE(static_cast<int>(c.shared_bytes()), to.shared_a_block) << as;
      c.blocks = std::min(c.blocks, kBlocks);
      return c;
    });
  }
  static std::string run(const cases::Case& spec, const char* as = "sm_80", int layers = 1, int num_sms = kBlocks) {
    cases::Problem problem(spec);
    return run(problem, as, layers, num_sms);
  }
  // As on GPUs with the shared memory of an A100, and of those with less.
  static void check(const cases::Row& common, std::initializer_list<const char*> rest, int layers = 1) {
    for (const char* more : rest) {
      for (const char* as : {"sm_80", "sm_86"})
        EXPECT_EQ(run(tests::make_case(common.with(more)), as, layers), "") << as << " " << more;
    }
  }
  static void check(std::string_view common, std::initializer_list<const char*> rest, int layers = 1) {
    check(cases::Row(R"("dtype": "bf16")").with(common), rest, layers);
  }
  static mla::Config config_of(const cases::Row& row, const char* as, int num_sms = 132) {
    cases::Problem problem(tests::make_case(row));
    return mla::choose_mma_config(make_problem(problem.host(), Data::kRequired), num_sms,
                                  find_architecture(as)->shared_a_block);
  }
};

TEST_F(EmulatedMlaMma, PagedDecode) {
  check(
      R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "seqlens_kv": [65, 0, 1, 200], "max_logits": true)",
      {R"("heads": [16, 1], "cache": {"page_size": 64})", R"("heads": [128, 1], "cache": {"page_size": 16})",
       R"("heads": [20, 1], "cache": {"page_size": 3})",
       R"("heads": [36, 2], "cache": {"page_size": 128, "layout": "hnd"}, "dtype": "f16")",
       R"("heads": [64, 1], "cache": {"page_size": 64}, "sinks": "mixed", "out_dtype": "f32")"});
}

TEST_F(EmulatedMlaMma, SeveralTokens) {
  check(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "heads": [16, 1], "cache": {"page_size": 64})",
        {R"("seqlens_q": [2, 7, 0], "seqlens_kv": [65, 130, 9], "causal": true)",
         R"("seqlens_q": [4, 3], "seqlens_kv": [128, 64], "causal": true, "window": [70, 0], "max_logits": true)",
         R"("seqlens_q": [2, 3], "seqlens_kv": [70, 0], "causal": true, "new_tokens": true)"});
  check(R"("causal": true, "max_logits": true, "queries": "fixed", "seqlens_kv": [130, 0])",
        {R"("kv": "paged", "shared_kv": true, "head_dim": [512, 512], "heads": [63, 1], "seqlens_q": 3)",
         R"("kv": "paged", "head_dim": [576, 512], "heads": [5, 1], "seqlens_q": 13, "cache": {"format": "mla_656"})",
         R"("kv": "contiguous", "shared_kv": true, "head_dim": [576, 512], "heads": [20, 1], "seqlens_q": 5)"});
}

TEST_F(EmulatedMlaMma, SplitsAlongTheKeysAndRunsAgain) {
  check(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "seqlens_kv": [900, 70], "max_logits": true,
        "cache": {"page_size": 64})",
        {R"("heads": [16, 1])", R"("heads": [128, 1], "out_dtype": "f32")",
         R"("heads": [48, 1], "seqlens_kv": [760, 60, 760, 60, 760, 60])",
         R"("heads": [16, 1], "seqlens_kv": [760, 60, 760, 60, 760, 60])"},
        2);
  EXPECT_GT(splits_, 0);
}

// P that grows from tile to tile by more than fp16 holds, and P that fp16 would lose.
TEST_F(EmulatedMlaMma, SpreadScores) {
  check(R"("shared_kv": true, "dtype": "f16", "data": "spread", "max_logits": true, "head_dim": [576, 512])",
        {R"("kv": "slots", "seqlens_q": [1, 2], "heads": [64, 1], "sparse": {"topk": 300})",
         R"("kv": "paged", "seqlens_q": [3], "seqlens_kv": [64], "heads": [20, 1], "causal": true)"});
}

// What rows do not see has no say; keys whose infinities make their scores -inf count for nothing.
TEST_F(EmulatedMlaMma, HiddenValuesThatAreNotFinite) {
  check(R"("kv": "paged", "heads": [16, 1], "causal": true, "plant": "nan_v", "head_dim": [576, 512])",
        {R"("shared_kv": true, "seqlens_q": [4, 3], "seqlens_kv": [70, 4])",
         R"("cache": {"format": "mla_656"}, "seqlens_q": [4, 3], "seqlens_kv": [70, 4])",
         // Split along the keys.
         R"("shared_kv": true, "seqlens_q": [1, 4], "seqlens_kv": [70, 400], "window": [195, 0], "max_logits": true)",
         R"("shared_kv": true, "seqlens_q": [1, 4], "seqlens_kv": [70, 400], "window": [195, 0], "out_dtype": "f32")"});
  check(R"("head_dim": [576, 512], "shared_kv": true, "causal": true, "plant": "inf_v", "max_logits": true)",
        {R"("heads": [16, 1], "kv": "paged", "seqlens_q": [4, 3], "seqlens_kv": [70, 4])",
         R"("heads": [64, 1], "kv": "paged", "cache": {"page_size": 3}, "seqlens_q": [2], "seqlens_kv": [300])"});
}

TEST_F(EmulatedMlaMma, PackedCaches) {
  check(R"("kv": "paged", "heads": [18, 1], "seqlens_kv": [65, 0, 1, 300])",
        {R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 16, "page_padding": true})",
         // Without poison no scale is large, which many rows of the others are.
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64}, "poison": false)",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64}, "poison": false,
            "heads": [16, 1])",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64}, "poison": false,
            "heads": [64, 1])",
         // Rows are looked up for eight tiles at a time.
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 16}, "heads": [16, 1],
            "seqlens_kv": [900, 290])",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 16}, "heads": [64, 1],
            "seqlens_kv": [900, 290])",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 48}, "seqlens_q": 2, "causal": true)"});
}

TEST_F(EmulatedMlaMma, RopeChannelsApart) {
  with_rope_channels_apart([](std::string_view common, auto rest) { check(common, rest, 2); });
}

TEST_F(EmulatedMlaMma, Prologues) {
  check(R"("max_logits": true, "heads": [16, 1], "causal": true, "kv": "paged", "new_tokens": true,
        "seqlens_q": [1, 3, 0, 20], "seqlens_kv": [130, 0, 5, 70],
        "prologue": {"append": true, "rope": {"style": "yarn", "dim": 64, "offset": 512, "interleaved": true}})",
        {R"("head_dim": [576, 512], "shared_kv": true, "cache": {"page_size": 64})",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 16}, "finished": [0, 1, 0, 0],
            "prologue": {"append": true, "rope": {"style": "linear", "dim": 64, "offset": 448}})"});
}

TEST_F(EmulatedMlaMma, SparseSlots) {
  check(R"("kv": "slots", "heads": [18, 1], "seqlens_q": [2, 1])",
        {R"("head_dim": [576, 512], "shared_kv": true, "sparse": {"topk": 70, "topk_length": "batch", "invalid": 0.5})",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_padding": true}, "sinks": "mixed",
            "sparse": {"topk": 300, "topk_length": "token"}, "extra": {"topk": 9, "page_size": 16})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584"}, "sparse": {"topk": 65},
            "extra": {"topk": 70, "topk_length": "batch"})",
         R"("head_dim": [576, 512], "shared_kv": true, "sparse": {"topk": 3, "invalid": 1})"},
        2);
}

TEST_F(EmulatedMlaMma, SparsePrefill) {
  check(R"("shared_kv": true, "max_logits": true)",
        {R"("heads": [128, 1], "head_dim": [576, 512], "kv": "dense", "queries": "flat", "cu_seqlens_kv": false,
            "seqlens_q": [5], "seqlens_kv": [200], "sparse": {"topk": 130, "topk_length": "token"}, "sinks": "mixed")",
         R"("heads": [20, 1], "head_dim": [512, 512], "seqlens_q": [3, 0, 5], "seqlens_kv": [90, 40, 200],
            "sparse": {"topk": 75, "topk_length": "token"})",
         R"("heads": [6, 2], "head_dim": [512, 512], "queries": "flat", "cu_seqlens_kv": false, "seqlens_q": [7],
            "seqlens_kv": [200], "sparse": {"topk": 75, "topk_length": "token", "per_head": true})"});
}

TEST_F(EmulatedMlaMma, FinishedSequences) {
  check(R"("heads": [16, 1], "head_dim": [576, 512], "shared_kv": true, "finished": [0, 1, 0], "poison": false)",
        {R"("kv": "paged", "seqlens_kv": [70, 90, 9], "zero_finished": true)",
         R"("kv": "paged", "seqlens_kv": [70, 90, 9], "zero_finished": false)",
         R"("kv": "slots", "seqlens_q": [1, 2, 1], "zero_finished": true, "sparse": {"topk": 200})"});
}

// Every fifth case: each producer has some of them.
TEST_F(EmulatedMlaMma, TablesThatMakeNoSense) {
  const std::vector<tests::SpoiltCase> list = tests::spoilt_mla_cases();
  for (size_t i = 0; i < list.size(); i += 5) {
    cases::Problem problem(list[i].spec);
    list[i].spoil(problem);
    EXPECT_EQ(run(problem, i % 2 == 0 ? "sm_80" : "sm_86"), "") << list[i].spec.name;
  }
}

// Rows of the output need not lie at multiples of 16 bytes.
TEST_F(EmulatedMlaMma, OutputsAnywhere) {
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "shared_kv": true, "head_dim": [576, 512],
      "seqlens_kv": [300, 65], "causal": true, "max_logits": true)");
  for (const char* more :
       {R"("heads": [20, 1], "seqlens_q": [2, 3])", R"("heads": [16, 1], "out_dtype": "e4m3", "out_scale": true)"}) {
    cases::Problem problem(tests::make_case(common.with(more)));
    attune_tensor& out = problem.host().out;
    const auto dtype = static_cast<attune_dtype>(out.dtype);
    const auto size = static_cast<size_t>(cases::element_size(dtype));
    out = problem.arena().add("out anywhere", dtype, {out.shape[0], out.shape[1], out.shape[2]}, {{}, {0, 5, 3}, size});
    EXPECT_EQ(run(problem), "") << more;
  }
}

// Rows, keys, stages and warps follow from the rows that see the same keys and from the shared memory.
TEST_F(EmulatedMlaMma, Tiles) {
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "seqlens_kv": [900, 70], "head_dim": [576, 512])");
  const auto tile = [&](const char* more, const char* as) {
    const mla::Config c = config_of(common.with(more), as);
    return cat(c.rows, "x", c.keys, "x", c.stages);
  };
  EXPECT_EQ(tile(R"("heads": [16, 1], "shared_kv": true)", "sm_80"), "16x32x4");
  EXPECT_EQ(tile(R"("heads": [16, 1], "shared_kv": true)", "sm_86"), "16x32x2");
  EXPECT_EQ(tile(R"("heads": [16, 1], "queries": "fixed", "seqlens_q": 2, "shared_kv": true)", "sm_80"), "32x32x3");
  EXPECT_EQ(tile(R"("heads": [128, 1], "shared_kv": true)", "sm_80"), "64x32x2");
  EXPECT_EQ(tile(R"("heads": [128, 1], "shared_kv": true)", "sm_89"), "32x16x3");
  EXPECT_EQ(tile(R"("heads": [128, 1], "shared_kv": true)", "sm_100"), "64x32x4");
  EXPECT_EQ(tile(R"("heads": [128, 1], "cache": {"format": "mla_656"})", "sm_80"), "64x32x1");
  EXPECT_EQ(tile(R"("heads": [16, 1], "cache": {"format": "mla_656"})", "sm_120"), "16x16x4");
  EXPECT_EQ(tile(R"("heads": [16, 1], "cache": {"format": "mla_656"})", "sm_80"), "16x32x3");
  const auto threads = [&](const char* more, const char* as) { return config_of(common.with(more), as).threads(); };
  EXPECT_EQ(threads(R"("heads": [16, 1], "shared_kv": true)", "sm_80"), 384u);
  EXPECT_EQ(threads(R"("heads": [16, 1], "cache": {"format": "mla_656"})", "sm_80"), 512u);
  EXPECT_EQ(threads(R"("heads": [16, 1], "cache": {"format": "mla_656"})", "sm_120"), 384u);
  EXPECT_EQ(threads(R"("heads": [32, 1], "cache": {"format": "mla_656"})", "sm_80"), 384u);
  EXPECT_EQ(threads(R"("heads": [64, 1], "cache": {"format": "mla_656"})", "sm_80"), 256u);
}

// Warps share Q, key tiles, P and row stats; blocks take several work tiles, and rows are recomputed.
TEST_F(EmulatedMlaMma, HasNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(7);
  check(R"("head_dim": [576, 512], "causal": true, "max_logits": true)",
        {R"("kv": "paged", "shared_kv": true, "heads": [24, 1], "seqlens_kv": [400, 65, 90])",
         R"("kv": "paged", "shared_kv": true, "heads": [16, 1], "seqlens_q": [4, 3], "seqlens_kv": [70, 4],
            "plant": "nan_v")",
         R"("kv": "paged", "heads": [16, 1], "seqlens_q": [2, 1], "seqlens_kv": [100, 40], "new_tokens": true,
            "cache": {"format": "mla_656"})",
         R"("kv": "paged", "heads": [16, 1], "seqlens_kv": [300, 65, 90], "cache": {"format": "mla_656"})",
         // With 64 rows those that multiply copy and decode as well.
         R"("kv": "paged", "shared_kv": true, "heads": [64, 1], "seqlens_kv": [300, 65, 90])",
         R"("kv": "paged", "heads": [64, 1], "seqlens_kv": [300, 65, 90], "cache": {"format": "mla_656"})"},
        2);
}

// Other architectures have conversions of 8-bit floats, and programmatic launches.
TEST_F(EmulatedMlaMma, NewerArchitectures) {
  for (const char* as : {"sm_89", "sm_90", "sm_100", "sm_120"}) {
    for (const char* more :
         {R"("kv": "paged", "heads": [48, 1], "cache": {"format": "mla_656"}, "seqlens_kv": [300, 65])",
          R"("kv": "paged", "heads": [16, 1], "cache": {"format": "mla_656"}, "seqlens_kv": [300, 65],
             "poison": false)",
          R"("kv": "slots", "shared_kv": true, "heads": [16, 1], "seqlens_q": [2, 1], "sparse": {"topk": 150})"}) {
      const cases::Row row = cases::Row(R"("dtype": "bf16", "head_dim": [576, 512])").with(more);
      EXPECT_EQ(run(tests::make_case(row), as, 2), "") << as << " " << more;
    }
  }
}

TEST_F(EmulatedMlaMma, BitsOfItsOwnInAnyBatch) {
  for (const char* as : {"sm_80", "sm_86"}) {
    const Architecture& to = *find_architecture(as);
    const emulator::Capability capability(to.capability);
    const auto attend = [&](const attune_attention& a) {
      const Problem p = make_problem(a, Data::kRequired);
      const mla::Config c = mla::choose_mma_config(p, 3, to.shared_a_block);
      cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
      const kernels::WorkTileParams params = mla::to_params(p, c, workspace.buffer.device());
      emulate_schedule(c, params);
      emulate_mla(p, c, params);
    };
    for (const cases::Case& spec : cases::parse_cases(R"({"area": "batch", "cases": [
        {"name": "mma", "dtype": "bf16", "head_dim": [576, 512], "kv": "paged", "seqlens_q": [1, 3, 1],
         "seqlens_kv": [400, 60, 3], "causal": true, "batch_invariant": true, "max_seqlens": true, "lse": true,
         "sweep": {"with": [{"name": "latent", "heads": [16, 1], "shared_kv": true, "window": [90, 0]},
                            {"name": "packed", "heads": [12, 1], "cache": {"format": "mla_656"}}]}}]})"))
      EXPECT_EQ(tests::find_other_bits(spec, cases::host_memory(), attend, 2), "") << as << " " << spec.name;
  }
}

TEST_F(EmulatedMlaMma, MatchesTheOracleOnTheTable) {
  std::vector<cases::Case> list = cases::all_cases();
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) list.push_back(cases::random_mla_case(seed));
  check_table(list, 20,
              [n = 0](const cases::Case& spec) mutable { return run(spec, n++ % 2 == 0 ? "sm_80" : "sm_86"); });
}

}  // namespace
}  // namespace attune::cuda
