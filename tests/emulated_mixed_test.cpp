// SPDX-License-Identifier: Apache-2.0
// Calls with prompts and sequences of a few queries: both kernels' own source on the CPU (tests/emulator), together
// against the oracle, and each alone: it must leave the other's rows as they were. Poisoned memory, no GPU.
#include "cuda/attention/prologue.h"
#include "cuda/decode/config.h"
#include "cuda/mixed/mixed.h"
#include "cuda/prefill/config.h"
#include "dispatch/registry.h"
#include "emulated.h"
#include "emulated_decode_launch.h"
#include "emulated_prefill_launch.h"
#include "emulated_rows.h"
#include "failure.h"
#include "support.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 300;
constexpr int kFew = 3;  // multiprocessors, so that each block takes several work tiles and splits

enum Parts { kPrompts = 1, kDecodeQueries = 2, kBoth = 3 };

class EmulatedMixed : public tests::Emulated {
 protected:
  static void schedule_prompts(const Problem& p, const prefill::Config& c, std::byte* workspace) {
    emulate_schedule(c, prefill::to_params(p, c, workspace));
  }
  // alone: without the other kernel, which says that it has begun.
  static void attend_prompts(const Problem& p, const prefill::Config& c, std::byte* workspace, bool alone) {
    prefill::check_run(p, c);
    const kernels::WorkTileParams params = prefill::to_params(p, c, workspace);
    if (alone) ++params.list->decode_begun;
    emulate_attention(p, c, params);
    if (params.list->prefill_ended != params.list->decode_begun)
      throw std::runtime_error("the kernel of prompts has not counted the run that it ends with");
  }

  static void schedule_decode(const Problem& p, const decode::Config& c, std::byte* workspace) {
    emulate_decode_schedule(c, decode::to_params(p, c, workspace));
  }
  static void attend_decode(const Problem& p, const decode::Config& c, std::byte* workspace) {
    decode::check_run(p, c);
    emulate_decode(c, decode::to_params(p, c, workspace));
  }

  // Rows of the kernel that does not run must stay as they are.
  static void expect_only(const cases::Case& spec, int max_decode_q, Parts parts, cases::Expected& expected) {
    if (parts == kBoth) return;
    std::vector<bool> is_few;  // of each row
    for (const int64_t n : spec.seqlens_q) is_few.insert(is_few.end(), static_cast<size_t>(n), n <= max_decode_q);
    for (size_t i = 0; i < expected.rows.size(); ++i) {
      if (is_few.at(static_cast<size_t>(expected.rows[i].row)) != (parts == kDecodeQueries))
        expected.results[i].written = false;
    }
  }

  static std::string run(const cases::Case& spec, Parts parts = kBoth, int layers = 1) {
    cases::Problem problem(spec);
    problem.arena().upload();
    const attune_attention a = problem.device();
    const Problem given = make_problem(a, Data::kRequired);
    if (!mixed_kernel().coverage.difference(traits_of(given, a)).empty() || !mixed_kernel().refusal(given).empty())
      return tests::kNotCovered;
    cases::Expected expected = cases::evaluate(problem);
    const int max_decode_q = mixed::max_decode_queries(given);
    expect_only(spec, max_decode_q, parts, expected);
    const bool prepares = attention::has_prologue(given);
    decode::DeviceShape device;
    device.num_sms = kFew;
    const auto [prompts, steps] = mixed::choose_configs(given, device);
    const size_t decode_begin = prompts.workspace_bytes(), rows_begin = decode_begin + steps.workspace_bytes();
    cases::Workspace workspace(cases::host_memory(), rows_begin + attention::prologue_bytes(given));
    auto* const memory = static_cast<std::byte*>(workspace.buffer.device());
    const Problem p = prepares ? attention::after_prologue(given, memory + rows_begin) : given;
    try {
      if (prepares) launch_prepare(attention::to_prepare(given, memory + rows_begin), kFew);
      schedule_prompts(p, prompts, memory);
      schedule_decode(p, steps, memory + decode_begin);
      for (int i = 0; i < layers; ++i) {
        if ((parts & kDecodeQueries) != 0) attend_decode(p, steps, memory + decode_begin);
        if ((parts & kPrompts) != 0) attend_prompts(p, prompts, memory, parts == kPrompts);
      }
    } catch (const std::exception& e) {
      return e.what();
    }
    if (std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;
    return cases::compare(problem, expected, ATTUNE_DEVICE_CUDA).failure;
  }

  // Together, and each kernel alone.
  static void check(std::string_view common, std::initializer_list<const char*> rest, int layers = 1) {
    for (const char* more : rest) {
      const cases::Case spec = tests::make_case(cases::Row(common).with(more));
      EXPECT_EQ(run(spec, kBoth, layers), "") << more;
      EXPECT_EQ(run(spec, kPrompts), "") << more << ", prompts alone";
      EXPECT_EQ(run(spec, kDecodeQueries), "") << more << ", few queries alone";
    }
  }
};

// Four heads of a KV head: decode takes up to four queries. Both kinds, each alone, none, lengths at the limit and one
// above, sequences without queries or keys.
TEST_F(EmulatedMixed, Lengths) {
  check(R"("heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "cache": {"page_size": 16},
           "causal": true, "max_logits": true)",
        {R"("seqlens_q": [1, 70, 4, 5, 0, 1, 33], "seqlens_kv": [300, 170, 4, 140, 9, 1, 33])",
         R"("seqlens_q": [1, 2, 4, 3], "seqlens_kv": [300, 0, 77, 3])",
         R"("seqlens_q": [40, 5, 6], "seqlens_kv": [300, 0, 77])", R"("seqlens_q": [0, 0], "seqlens_kv": [30, 0])",
         R"("seqlens_q": [4, 5], "seqlens_kv": [0, 0])", R"("seqlens_q": [5, 0, 4, 0], "seqlens_kv": [80, 5, 80, 0])"},
        2);
}

// Context in the cache and new tokens beside it.
TEST_F(EmulatedMixed, NewTokens) {
  check(R"("heads": [6, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "new_tokens": true, "causal": true,
           "seqlens_q": [1, 40, 5, 6, 0, 1], "seqlens_kv": [260, 131, 70, 9, 4, 0])",
        {R"("cache": {"page_size": 16})", R"("cache": {"page_size": 3}, "window": [40, 0])",
         R"("cache": {"page_size": 64, "layout": "hnd", "dtype": "e4m3", "scales": "head"})",
         R"("cache": {"page_size": 32, "layout": "xpacked"}, "sinks": "normal")"});
}

// Once for all sequences.
TEST_F(EmulatedMixed, Prologues) {
  const cases::Row common(R"("heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "new_tokens": true, "causal": true, "seqlens_q": [1, 40, 4, 9], "seqlens_kv": [70, 33, 0, 90])");
  for (const char* rest :
       {R"("prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 64}})",
        R"("prologue": {"append": true, "k_bias": true, "q_bias": true}, "finished": [1, 0, 0, 0],
            "cache": {"page_size": 16, "dtype": "e4m3", "scales": "token"})",
        R"("prologue": {"append": true, "rope": {"style": "linear", "dim": 128}}, "dtype": "f32")"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedMixed, Masks) {
  check(R"("heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "cache": {"page_size": 16},
           "seqlens_q": [1, 70, 4, 5, 0, 1, 33], "seqlens_kv": [300, 170, 4, 140, 9, 1, 33])",
        {R"("causal": true, "skip_decode": true)", R"("causal": true, "skip_decode": true, "zero_finished": true)",
         R"("finished": [1, 1, 0, 0, 0, 0, 0])", R"("finished": [0, 1, 1, 0, 1, 0, 0], "zero_finished": true)",
         R"("causal": true, "window": [20, 0])", R"("causal": true, "mask_bits": 2)",
         R"("ranges": [[5, 150], [0, 9, 20, 40], [], [], [], [], []])", R"("causal": true, "plant": "nan_v")",
         R"("causal": true, "alibi": 1, "out_dtype": "e4m3", "out_scale": true)",
         R"("causal": true, "batch_invariant": true, "out_dtype": "f32")"});
}

TEST_F(EmulatedMixed, Shapes) {
  check(R"("kv": "paged", "causal": true, "seqlens_q": [1, 50, 2, 9, 17], "seqlens_kv": [200, 90, 70, 33, 17])",
        {R"("heads": [3, 3], "head_dim": [128, 64], "dtype": "f16")",
         R"("heads": [16, 1], "head_dim": [64, 64], "dtype": "bf16")",
         R"("heads": [24, 1], "head_dim": [64, 64], "dtype": "bf16")",
         R"("heads": [4, 2], "head_dim": [192, 128], "dtype": "bf16")",
         R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f32")",
         R"("heads": [4, 1], "head_dim": [128, 64], "shared_kv": true, "dtype": "bf16")",
         R"("heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "contiguous", "strides": "transposed")"});
}

// Parts of both kernels' sequences; more than one run with one schedule.
// Caches whose rows the TMA does not take: prompts have them gathered.
TEST_F(EmulatedMixed, GatheredCaches) {
  check(R"("heads": [8, 2], "dtype": "bf16", "kv": "paged", "causal": true, "seqlens_q": [1, 70, 4, 5],
           "seqlens_kv": [300, 170, 4, 140])",
        {R"("head_dim": [64, 64], "cache": {"page_size": 24, "layout": "xpacked"})",
         R"("head_dim": [64, 64], "cache": {"page_size": 16, "row_padding": 4}, "new_tokens": true)"});
}

TEST_F(EmulatedMixed, SplitsAlongTheKeysAndRunsAgain) {
  check(R"("heads": [8, 1], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "cache": {"page_size": 64},
           "causal": true)",
        {R"("seqlens_q": [1, 3, 1], "seqlens_kv": [2900, 2000, 300])"}, 2);
}

// Decode's blocks beside the prompts': in proportion to its work, which the device finds, or all.
TEST_F(EmulatedMixed, LeavesBlocksToThePrompts) {
  struct Split {
    const char* lengths;
    int least, most;
  };
  const cases::Row common(R"("heads": [4, 1], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true)");
  for (const Split& x : {Split{R"("seqlens_q": [1, 1, 2, 1], "seqlens_kv": [900, 800, 900, 700])", 12, 12},
                         {R"("seqlens_q": [1, 5, 2, 1], "seqlens_kv": [900, 5, 900, 700])", 12, 12},
                         {R"("seqlens_q": [1, 320, 1, 1], "seqlens_kv": [300, 900, 300, 300])", 2, 6},
                         {R"("seqlens_q": [1, 900, 0, 900], "seqlens_kv": [30, 900, 900, 900])", 1, 1}}) {
    cases::Problem problem(tests::make_case(common.with(x.lengths)));
    const Problem p = make_problem(problem.device(), Data::kRequired);
    decode::DeviceShape device;
    device.num_sms = 12;
    const auto [prompts, steps] = mixed::choose_configs(p, device);
    const size_t decode_begin = prompts.workspace_bytes();
    cases::Workspace workspace(cases::host_memory(), decode_begin + steps.workspace_bytes());
    auto* const memory = static_cast<std::byte*>(workspace.buffer.device());
    problem.arena().upload();
    schedule_prompts(p, prompts, memory);
    schedule_decode(p, steps, memory + decode_begin);
    const auto* ranges = reinterpret_cast<const kernels::StreamKRange*>(memory + decode_begin);
    int live = 0;
    for (int i = 0; i < steps.blocks; ++i) live += ranges[i].live;
    EXPECT_GE(live, x.least) << x.lengths;
    EXPECT_LE(live, x.most) << x.lengths;
    EXPECT_LE(live, ranges[0].blocks) << x.lengths;
  }
}

TEST_F(EmulatedMixed, MatchesTheOracleOnTheTable) {
  check_table(all_cases(kRandomCases), 100, [](const cases::Case& spec) { return run(spec); });
}

// Only where both kinds may be there, as far as the host knows.
TEST(MixedChoice, GoesByWhatTheHostKnows) {
  // One sequence of so many queries and 15 of one.
  const cases::Row common(R"("dtype": "bf16", "head_dim": [64, 64])");
  const auto beside_ones = [&](int64_t longest) {
    std::vector<int64_t> queries(16, 1);
    queries[0] = longest;
    return common.set("kv", "paged").set("seqlens_q", queries).set("seqlens_kv", std::vector<int64_t>(16, 90));
  };
  const cases::Row mix = beside_ones(90);
  struct Choice {
    cases::Row what;
    int64_t longest;  // as the caller says; 0: nothing
    const char* kernel;
  };
  for (const Choice& x :
       {Choice{mix.with(R"("heads": [8, 2])"), 0, "cuda_mixed"},
        {mix.with(R"("heads": [8, 2])"), 90, "cuda_mixed"},
        {mix.with(R"("heads": [8, 2], "new_tokens": true)"), 90, "cuda_mixed"},
        {mix.with(R"("heads": [8, 2], "new_tokens": true, "prologue": {"append": true})"), 0, "cuda_mixed"},
        {mix.with(R"("heads": [8, 2], "dtype": "f32")"), 90, "cuda_mixed"},
        // Prompts enough to fill the device for long.
        {beside_ones(5000).with(R"("heads": [8, 2], "head_dim": [16, 16])"), 0, "cuda_prefill"},
        // The longest is not far above the mean.
        {mix.with(R"("heads": [8, 2])"), 20, "cuda_prefill"},
        // Nobody has more than decode takes.
        {mix.with(R"("heads": [8, 2])"), 4, "cuda_decode"},
        {beside_ones(1).with(R"("heads": [8, 2])"), 0, "cuda_decode"},
        // So few rows that decode has all of them anyway, and a few more.
        {beside_ones(5).with(R"("heads": [8, 2])"), 5, "cuda_decode"},
        {beside_ones(9).with(R"("heads": [8, 2])"), 9, "cuda_mixed"},
        // What serves a sequence may be asked not to follow from the others, beside what the caller says of all.
        {mix.with(R"("heads": [8, 2], "batch_invariant": true)"), 90, "cuda_prefill"},
        {beside_ones(1).with(R"("heads": [8, 2], "batch_invariant": true)"), 0, "cuda_prefill"},
        {beside_ones(1).with(R"("heads": [8, 2], "batch_invariant": true)"), 1, "cuda_decode"},
        // A query alone fills a quarter of a prompt's block.
        {mix.with(R"("heads": [32, 1])"), 0, "cuda_prefill"},
        // What only one of them covers, or the kernel of fp32 prompts, where a block could be full.
        {mix.with(R"("heads": [8, 2], "cache": {"dtype": "bf16"}, "dtype": "f16")"), 0, "cuda_prefill_fp32"},
        {mix.with(R"("heads": [8, 2], "cache": {"dtype": "bf16"}, "dtype": "f16")"), 4, "cuda_decode"},
        {mix.with(R"("heads": [8, 2], "new_tokens": true, "skip_decode": true,
                              "prologue": {"append": true})"),
         0, "cuda_decode"},
        {mix.with(R"("heads": [8, 2], "causal": true, "kv": "dense")"), 0, "cuda_prefill_mma"},
        {mix.with(R"("heads": [8, 2], "kv": "dense", "batch_invariant": true)"), 0, "cuda_prefill"},
        {common.with(R"("kv": "paged", "heads": [8, 2], "seqlens_q": [90], "seqlens_kv": [90])"), 0, "cuda_prefill"},
        {common.with(R"("kv": "paged", "queries": "fixed", "heads": [8, 2], "seqlens_q": [90, 90],
                              "seqlens_kv": [90, 90])"),
         0, "cuda_prefill"}}) {
    cases::Problem problem(tests::make_case(x.what));
    problem.host().max_seqlen_q = x.longest;
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_STREQ(choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA).name, x.kernel)
        << x.what.text() << ", longest " << x.longest;
  }
}

// Between the two launches nobody would.
// What either of the two kernels would not take, as it stands after the prologue, and the prologue.
TEST(MixedChoice, NamesWhatARunMayNotBring) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16",
      "kv": "paged", "new_tokens": true, "seqlens_q": [90, 1, 1, 1, 1, 1], "seqlens_kv": [90, 90, 90, 90, 90, 90],
      "cache": {"page_size": 16}, "prologue": {"append": true}})"));
  const mixed::Configs configs = mixed::choose_configs(make_problem(problem.host(), Data::kRequired), {});
  const auto check = [&](const std::function<void(attune_attention&)>& change) -> std::string {
    attune_attention a = problem.host();
    change(a);
    const Problem p = make_problem(a, Data::kRequired);
    alignas(256) static std::byte rows[1 << 20];
    return failure_of([&] { mixed::check_run(p, attention::after_prologue(p, rows), configs); });
  };
  EXPECT_EQ(check([](attune_attention&) {}), "");
  EXPECT_EQ(check([](attune_attention& a) { a.cache.k.shape[1] = a.cache.v.shape[1] = 8; }),
            "cache.page_size is 8; the plan was made for pages of multiples of 16 tokens");
  EXPECT_EQ(check([](attune_attention& a) { a.softmax_scale = -1; }),
            "softmax_scale is -1.000000; the plan was made for one that is positive");
  EXPECT_EQ(check([](attune_attention& a) { a.skip_decode = 1; }),
            "attention differs from its plan: kernel cuda_mixed does not take a prologue with skip_decode");
}

TEST(MixedChoice, CopiesNoRows) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16",
      "kv": "paged", "new_tokens": true, "seqlens_q": [90, 1, 1, 1, 1, 1], "seqlens_kv": [90, 90, 90, 90, 90, 90]})"));
  Problem p = make_problem(problem.host(), Data::kRequired);
  EXPECT_EQ(mixed_kernel().refusal(p), "");
  p.k.data += 2;
  EXPECT_EQ(prefill::refusal(p), "");
  EXPECT_EQ(mixed_kernel().refusal(p), "rows of k that do not lie at multiples of 16 bytes");
}

}  // namespace
}  // namespace attune::cuda
