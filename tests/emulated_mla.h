// SPDX-License-Identifier: Apache-2.0
// The MLA kernels' own source on the CPU (tests/emulator): what they compute, against the oracle, with poisoned memory,
// without a GPU.
#pragma once

#include <algorithm>

#include "cuda/attention/prologue.h"
#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "emulated.h"
#include "emulated_mla_launch.h"
#include "emulated_rows.h"
#include "support.h"

namespace attune::cuda {

class EmulatedMla : public tests::Emulated {
 protected:
  static constexpr int kBlocks = 4;  // of the grid, so that each takes several work tiles

  // A grid of most_blocks may be smaller than the device's, so that blocks take several work tiles each.
  static std::string run(const cases::Case& spec, int layers = 1, int num_sms = kBlocks, int most_blocks = kBlocks) {
    cases::Problem problem(spec);
    return run(problem, layers, num_sms, most_blocks);
  }
  static std::string run(cases::Problem& problem, int layers = 1, int num_sms = kBlocks, int most_blocks = kBlocks) {
    return run_config(problem, layers, [num_sms, most_blocks](const Problem& p) {
      mla::Config c = mla::choose_config(p, num_sms);
      c.blocks = std::min(c.blocks, most_blocks);
      return c;
    });
  }
  // choose: the configuration of a problem that MLA's kernels cover.
  template <class Choose>
  static std::string run_config(cases::Problem& problem, int layers, const Choose& choose) {
    problem.arena().upload();
    const attune_attention a = problem.device();
    const Problem given = make_problem(a, Data::kRequired);
    if (!mla_kernel().coverage.difference(traits_of(given, a)).empty() || !mla::refusal(given).empty())
      return tests::kNotCovered;
    const cases::Expected expected = cases::evaluate(problem);
    const mla::Config c = choose(given);
    cases::Workspace workspace(cases::host_memory(), c.workspace_bytes() + attention::prologue_bytes(given));
    std::byte* const rows = static_cast<std::byte*>(workspace.buffer.device()) + c.workspace_bytes();
    const bool prepares = attention::has_prologue(given);
    const Problem p = prepares ? attention::after_prologue(given, rows) : given;
    mla::check_run(p, c);
    const kernels::WorkTileParams params = mla::to_params(p, c, workspace.buffer.device());
    try {
      emulate_schedule(c, params);
      balanced_ = std::any_of(params.work_tiles, params.work_tiles + params.list->num_work_tiles,
                              [](const kernels::WorkTile& t) { return t.next_work > 0; });
      splits_ = params.list->num_split_tiles;
      for (int i = 0; i < layers; ++i) {
        if (prepares) launch_prepare(attention::to_prepare(given, rows), kBlocks);
        emulate_mla(p, c, params);
      }
    } catch (const std::exception& e) {
      return e.what();
    }
    if (const std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;
    if (params.list->next_tile != 0) return "the counter of work tiles is not 0 for the next layer";
    return cases::compare(problem, expected).failure;
  }
  // Of the last case: whether its schedule is balanced, and the M blocks that are split.
  static inline bool balanced_ = false;
  static inline int splits_ = 0;

  // Cases that have `common` and, one after the other, what is in `rest`.
  static void check(std::string_view common, std::initializer_list<const char*> rest, int layers = 1) {
    check(cases::Row(R"("dtype": "bf16")").with(common), rest, layers);
  }
  static void check(const cases::Row& common, std::initializer_list<const char*> rest, int layers = 1) {
    for (const char* more : rest) EXPECT_EQ(run(tests::make_case(common.with(more)), layers), "") << more;
  }
  // Cases whose queries have their rope channels apart, by each form of the kernels. check(common, rest).
  template <class Check>
  static void with_rope_channels_apart(const Check& check) {
    using Rest = std::initializer_list<const char*>;
    const auto check_each = [&](std::string_view common, Rest rest) { check(common, rest); };
    check_each(
        R"("head_dim": [576, 512], "q_rope": 64, "causal": true, "max_logits": true)",
        {R"("kv": "paged", "heads": [16, 1], "shared_kv": true, "seqlens_q": [1, 1, 1], "seqlens_kv": [65, 0, 200])",
         R"("kv": "paged", "heads": [12, 1], "shared_kv": true, "seqlens_q": [3, 2], "seqlens_kv": [70, 4],
              "new_tokens": true, "strides": "transposed")",
         R"("kv": "paged", "heads": [64, 1], "shared_kv": true, "queries": "fixed", "seqlens_q": 3, "seqlens_kv": [70, 9],
              "strides": "transposed", "plant": "nan_k")",
         R"("kv": "paged", "heads": [128, 1], "shared_kv": true, "cache": {"page_size": 3}, "seqlens_q": [2, 1],
              "seqlens_kv": [65, 130])",
         R"("kv": "dense", "heads": [20, 1], "shared_kv": true, "seqlens_q": [9, 70], "seqlens_kv": [100, 70],
              "dtype": "f16")",
         R"("kv": "paged", "heads": [32, 1], "cache": {"format": "mla_656"}, "seqlens_q": [2, 1], "seqlens_kv": [65, 130],
              "new_tokens": true, "strides": "transposed")",
         R"("kv": "paged", "heads": [64, 1], "cache": {"format": "mla_656"}, "seqlens_q": [4, 3], "seqlens_kv": [70, 4],
              "plant": "nan_k")"});
    check_each(
        R"("kv": "slots", "head_dim": [576, 512], "q_rope": 64, "seqlens_q": [2, 1, 4], "max_logits": true)",
        {R"("heads": [16, 1], "shared_kv": true, "sparse": {"topk": 70}, "strides": "transposed")",
         R"("heads": [128, 1], "shared_kv": true, "sparse": {"topk": 200, "topk_length": "token"})",
         R"("heads": [128, 1], "cache": {"format": "mla_656"}, "sparse": {"topk": 140}, "queries": "fixed", "seqlens_q": 3,
              "strides": "transposed")"});
  }
  // Cases that the swap-AB kernel takes.
  static void check_swap_ab(std::string_view common, std::initializer_list<const char*> rest) {
    for (const char* more : rest) {
      const cases::Case spec = tests::make_case(cases::Row(R"("dtype": "bf16")").with(common).with(more));
      cases::Problem problem(spec);
      EXPECT_TRUE(mla::choose_config(make_problem(problem.host(), Data::kRequired), kBlocks).swap_ab) << more;
      EXPECT_EQ(run(spec, 2), "") << more;
    }
  }
  // Cases of an H200's small batches, which get M blocks of so many rows, and splits of so many tiles at least.
  static void check_small(int rows, int fewest_tiles, std::string_view common,
                          std::initializer_list<const char*> rest) {
    for (const char* more : rest) {
      const cases::Case spec = tests::make_case(cases::Row(R"("dtype": "bf16")").with(common).with(more));
      cases::Problem problem(spec);
      const mla::Config c = mla::choose_config(make_problem(problem.host(), Data::kRequired), 132);
      EXPECT_EQ(c.rows, rows) << more;
      EXPECT_EQ(c.fewest_tiles, fewest_tiles) << more;
      EXPECT_EQ(run(spec, 2, 132), "") << more;
    }
  }
};

}  // namespace attune::cuda
