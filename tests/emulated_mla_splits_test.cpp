// SPDX-License-Identifier: Apache-2.0
// The MLA kernels in the emulator (emulated_mla.h): splits along the keys and their combine, and the m16 and swap-AB
// kernels.
#include <cmath>
#include <limits>
#include <vector>

#include "emulated_mla.h"

namespace attune::cuda {
namespace {

// fp16 partials are scaled by powers of two: numbers far smaller than fp16's are exact.
TEST_F(EmulatedMla, SplitsOfSmallValues) {
  for (const int powers : {-20, -60}) {
    cases::Problem problem(tests::make_case(R"({"name": "x", "dtype": "bf16", "kv": "paged", "shared_kv": true,
        "head_dim": [576, 512], "heads": [16, 1], "seqlens_kv": [900, 70], "cache": {"page_size": 64}})"));
    const attune_tensor& k = problem.host().cache.k;
    for (int64_t page = 0; page < k.shape[0]; ++page) {
      for (int64_t slot = 0; slot < k.shape[1]; ++slot) {
        for (int64_t d = 0; d < k.shape[3]; ++d) {
          void* const x = cases::element_at(k, {page, slot, 0, d});
          cases::encode(ATTUNE_BFLOAT16, std::ldexp(cases::decode(ATTUNE_BFLOAT16, x), powers), x);
        }
      }
    }
    EXPECT_EQ(run(problem), "") << powers;
  }
}

TEST_F(EmulatedMla, SplitsAlongTheKeysAndRunsAgain) {
  check(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "seqlens_kv": [900, 70], "max_logits": true,
        "cache": {"page_size": 64})",
        {R"("heads": [16, 1])", R"("heads": [128, 1])",
         // More splits than the grid has blocks.
         R"("heads": [16, 1], "seqlens_kv": [760, 60, 760, 60, 760, 60])",
         R"("heads": [48, 1], "seqlens_kv": [760, 60, 760, 60, 760, 60])"},
        2);
}

// One token's heads at a time, as many as the m16 kernel takes.
TEST_F(EmulatedMla, M16Kernel) {
  check(
      R"("kv": "paged", "head_dim": [576, 512], "max_logits": true)",
      {R"("heads": [16, 1], "seqlens_kv": [65, 0, 1, 130], "cache": {"format": "mla_656", "page_size": 64})",
       R"("heads": [16, 1], "seqlens_kv": [900, 70], "cache": {"format": "mla_656", "page_size": 16})",
       R"("heads": [1, 1], "seqlens_kv": [700], "cache": {"format": "mla_656", "page_size": 3}, "sinks": "mixed")",
       R"("heads": [11, 1], "seqlens_kv": [70, 129], "cache": {"format": "mla_656", "page_size": 64}, "out_dtype": "f32")",
       R"("heads": [16, 1], "seqlens_kv": [200, 70, 9], "cache": {"format": "mla_656"}, "finished": [0, 1, 0],
            "zero_finished": true, "window": [90, 0], "causal": true)",
       R"("heads": [14, 1], "seqlens_kv": [600, 900, 800, 64], "cache": {"format": "mla_656", "page_size": 64},
            "data": "spread")",
       R"("heads": [9, 1], "seqlens_kv": [70, 4], "cache": {"format": "mla_656", "page_size": 64}, "plant": "nan_v")"},
      2);
  check(
      R"("shared_kv": true, "max_logits": true)",
      {R"("kv": "paged", "head_dim": [576, 512], "heads": [16, 1], "seqlens_kv": [900, 0, 65], "cache": {"page_size": 64})",
       R"("kv": "paged", "head_dim": [512, 512], "heads": [22, 2], "seqlens_kv": [70, 129],
            "cache": {"page_size": 128, "layout": "hnd"}, "dtype": "f16")",
       R"("kv": "paged", "head_dim": [576, 512], "heads": [5, 1], "seqlens_kv": [200, 9], "cache": {"page_size": 3},
            "out_dtype": "f32", "sinks": "mixed", "plant": "nan_v")",
       R"("kv": "contiguous", "head_dim": [576, 512], "heads": [12, 1], "seqlens_kv": [100, 70, 0])",
       R"("kv": "slots", "head_dim": [576, 512], "heads": [8, 1], "seqlens_q": [2, 1],
            "sparse": {"topk": 70, "topk_length": "batch", "invalid": 0.5}, "extra": {"topk": 9, "page_size": 16})"},
      2);
  check(
      R"("kv": "slots", "head_dim": [576, 512], "seqlens_q": [2, 1, 3], "max_logits": true, "cache": {"format": "mla_656"})",
      {R"("heads": [16, 1], "sparse": {"topk": 300, "topk_length": "token", "invalid": 0.2},
            "extra": {"topk": 9, "page_size": 16})",
       R"("heads": [13, 1], "sparse": {"topk": 70, "invalid": 1})"},
      2);
}

// More heads are several M blocks, if there are too few tokens to fill the device otherwise.
TEST_F(EmulatedMla, M16KernelOfManyHeads) {
  check_small(
      16, 1, R"("kv": "slots", "head_dim": [576, 512], "max_logits": true, "cache": {"format": "mla_656"})",
      {R"("heads": [24, 1], "seqlens_q": [1, 1], "sparse": {"topk": 450, "topk_length": "token", "invalid": 0.2},
            "sinks": "mixed", "extra": {"topk": 9, "page_size": 16})",
       R"("heads": [128, 1], "seqlens_q": [1], "sparse": {"topk": 250, "invalid": 0.1})",
       R"("heads": [17, 1], "seqlens_q": [1], "sparse": {"topk": 200, "topk_length": "batch"})"});
  check_small(
      16, 1, R"("kv": "paged", "head_dim": [576, 512], "max_logits": true)",
      {R"("cache": {"format": "mla_656", "page_size": 64}, "plant": "nan_v", "heads": [32, 1], "seqlens_q": [2, 0, 1],
            "seqlens_kv": [190, 3, 70], "causal": true, "new_tokens": true, "finished": [0, 0, 1])",
       R"("shared_kv": true, "cache": {"page_size": 3}, "heads": [64, 1], "seqlens_kv": [250, 0], "sinks": "mixed")"});
}

// Splits of the swap-AB kernel too, and splits of one tile in the M = 64 kernel: of tiles that a cluster shares, and of
// a block's own.
TEST_F(EmulatedMla, SwapAbAndShortSplitsOfManyHeads) {
  check_small(32, 2, R"("kv": "slots", "head_dim": [576, 512], "max_logits": true, "cache": {"format": "mla_656"})",
              {R"("heads": [66, 1], "batch": 14, "queries": "fixed", "seqlens_q": 1, "sparse": {"topk": 560,
            "topk_length": "token", "invalid": 0.2}, "sinks": "mixed")",
               R"("heads": [66, 1], "batch": 14, "queries": "fixed", "seqlens_q": 1, "sparse": {"topk": 500},
            "extra": {"topk": 9, "page_size": 16})"});
  check_small(
      64, 1, R"("max_logits": true, "max_seqlens": true)",
      {R"("kv": "slots", "head_dim": [576, 512], "heads": [128, 1], "seqlens_q": [1, 1], "cache": {"format": "mla_656"},
            "sparse": {"topk": 1100, "invalid": 0.2})",
       R"("kv": "slots", "head_dim": [512, 512], "heads": [128, 1], "seqlens_q": [1, 1], "cache": {"format": "mla_584"},
            "sparse": {"topk": 260, "topk_length": "token", "invalid": 0.2})",
       R"("kv": "paged", "head_dim": [576, 512], "shared_kv": true, "heads": [128, 1], "seqlens_kv": [500, 130, 1, 0],
            "cache": {"page_size": 64}, "sinks": "mixed")",
       R"("kv": "paged", "head_dim": [576, 512], "shared_kv": true, "heads": [64, 1], "queries": "fixed",
            "seqlens_q": 2, "seqlens_kv": [300, 130], "cache": {"page_size": 64}, "causal": true)"});
}

// Groups of channels that differ by more than fp16 can hold: of partials, and of packed rows' scales.
TEST_F(EmulatedMla, SplitsOfChannelsFarApart) {
  constexpr double kLower = 0x1p-90;
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "head_dim": [576, 512], "seqlens_kv": [400],
      "max_logits": true)");
  for (const char* more : {R"("heads": [16, 1], "cache": {"page_size": 64}, "shared_kv": true)",
                           R"("heads": [128, 1], "cache": {"page_size": 64}, "shared_kv": true)",
                           R"("heads": [20, 1], "cache": {"page_size": 3}, "shared_kv": true)",
                           R"("heads": [16, 1], "cache": {"format": "mla_656", "page_size": 64})",
                           R"("heads": [32, 1], "cache": {"format": "mla_656", "page_size": 64})",
                           R"("heads": [128, 1], "cache": {"format": "mla_656", "page_size": 64})"}) {
    cases::Problem problem(tests::make_case(common.with(more)));
    const attune_kv_cache& cache = problem.host().cache;
    const bool packed = cache.k.dtype != ATTUNE_BFLOAT16;
    for (int64_t page = 0; page < cache.k.shape[0]; ++page) {
      for (int64_t row = 0; row < cache.k.shape[1]; ++row) {
        const auto lower = [&](attune_dtype dtype, void* at) {
          cases::encode(dtype, cases::decode(dtype, at) * kLower, at);
        };
        if (packed) {
          auto* const scales = static_cast<std::byte*>(cases::element_at(cache.k, {page, row, 512}));
          lower(ATTUNE_FLOAT32, scales + 4), lower(ATTUNE_FLOAT32, scales + 8);
          continue;
        }
        for (int64_t d = 0; d < 512; ++d) {
          if (d / 64 % 3 == 1) lower(ATTUNE_BFLOAT16, cases::element_at(cache.k, {page, row, 0, d}));
        }
      }
    }
    EXPECT_EQ(run(problem), "") << more;
  }
}

// An infinity in a key that makes its scores -inf, and so its P 0, makes one channel NaN: the other channels are what
// they are without that key. The oracle's bounds of such a row are infinite.
TEST_F(EmulatedMla, SplitsBesideInfinities) {
  const cases::Row common(R"("dtype": "bf16", "kv": "slots", "head_dim": [576, 512], "shared_kv": true,
      "seqlens_q": [1], "sparse": {"topk": 600, "invalid": 0})");
  for (const int64_t heads : {16, 64}) {
    cases::Problem problem(tests::make_case(common.set("heads", {heads, 1})));
    const attune_attention& a = problem.host();
    const double slot = cases::decode(ATTUNE_INT32, cases::element_at(a.indices, {0, 5}));
    const auto replace = [&](double x, double by) {
      for (int64_t i = 0; i < a.indices.shape[1]; ++i) {
        void* const entry = cases::element_at(a.indices, {0, i});
        if (cases::decode(ATTUNE_INT32, entry) == x) cases::encode(ATTUNE_INT32, by, entry);
      }
    };
    for (int64_t head = 0; head < a.q.shape[1]; ++head)
      cases::encode(ATTUNE_BFLOAT16, -1, cases::element_at(a.q, {0, head, 127}));
    replace(slot, -1);
    ASSERT_EQ(run(problem), "") << heads;
    const auto out = [&](int64_t head, int64_t d) {
      return cases::decode(ATTUNE_BFLOAT16, cases::element_at(problem.device().out, {0, head, d}));
    };
    std::vector<double> expected;
    for (int64_t head = 0; head < a.q.shape[1]; ++head) {
      for (int64_t d = 0; d < 512; ++d) expected.push_back(out(head, d));
    }
    replace(-1, slot);
    const auto row = static_cast<int64_t>(slot), page_size = a.cache.k.shape[1];
    cases::encode(ATTUNE_BFLOAT16, std::numeric_limits<double>::infinity(),
                  cases::element_at(a.cache.k, {row / page_size, row % page_size, 0, 127}));
    run(problem);
    for (int64_t head = 0; head < a.q.shape[1]; ++head) {
      EXPECT_FALSE(std::isfinite(out(head, 127)));
      for (int64_t d = 0; d < 512; ++d) {
        const double x = expected[static_cast<size_t>(head * 512 + d)];
        if (d == 127) continue;
        ASSERT_NEAR(out(head, d), x, std::fabs(x) * 0x1p-7 + 1e-6) << heads << ", " << head << ", " << d;
      }
    }
  }
}

// combine.cu computes the scales of 32 splits at a time. Splits have two tiles at least, and there are no more than
// blocks. 17 to 32 heads over packed rows of 656 bytes.
TEST_F(EmulatedMla, SwapAbKernel) {
  check_swap_ab(
      R"("kv": "paged", "head_dim": [576, 512], "max_logits": true)",
      {R"("heads": [32, 1], "seqlens_kv": [65, 0, 1, 130], "cache": {"format": "mla_656", "page_size": 64})",
       R"("heads": [32, 1], "seqlens_kv": [900, 70], "cache": {"format": "mla_656", "page_size": 16})",
       R"("heads": [17, 1], "seqlens_kv": [700], "cache": {"format": "mla_656", "page_size": 3}, "sinks": "mixed")",
       R"("heads": [28, 1], "seqlens_kv": [300, 129], "queries": "fixed", "batch_invariant": true,
            "cache": {"format": "mla_656", "page_size": 48})",
       R"("heads": [25, 1], "seqlens_kv": [70, 129], "cache": {"format": "mla_656", "page_size": 64}, "out_dtype": "f32")",
       R"("heads": [32, 1], "seqlens_kv": [200, 70, 9], "cache": {"format": "mla_656"}, "finished": [0, 1, 0],
            "zero_finished": true, "window": [90, 0], "causal": true)",
       R"("heads": [30, 1], "seqlens_kv": [600, 900, 800, 64], "cache": {"format": "mla_656", "page_size": 64},
            "data": "spread")",
       R"("heads": [19, 1], "seqlens_kv": [70, 4], "cache": {"format": "mla_656", "page_size": 64}, "plant": "nan_v")"});
  check_swap_ab(
      R"("kv": "slots", "head_dim": [576, 512], "seqlens_q": [2, 1, 3], "max_logits": true, "cache": {"format": "mla_656"})",
      {R"("heads": [32, 1], "sparse": {"topk": 300, "topk_length": "token", "invalid": 0.2},
            "extra": {"topk": 9, "page_size": 16})",
       R"("heads": [21, 1], "sparse": {"topk": 70, "invalid": 1})"});
  check_swap_ab(
      R"("kv": "paged", "head_dim": [576, 512], "heads": [32, 1], "causal": true, "new_tokens": true, "max_logits": true,
         "cache": {"format": "mla_656", "page_size": 64})",
      {R"("seqlens_q": [1, 1, 1, 1], "seqlens_kv": [130, 0, 64, 900])",
       R"("seqlens_q": [2, 0, 1], "seqlens_kv": [70, 3, 200], "out_dtype": "f32")",
       R"("seqlens_q": [1, 1], "seqlens_kv": [130, 5],
            "prologue": {"append": true, "rope": {"style": "yarn", "dim": 64, "offset": 512, "interleaved": true}})"});
}

// Scales of packed rows that differ by more than fp16 P could hold. Some channels are 0 except in one kind of keys, so
// that these are seen however small their scales are. Queries are 0 except in the rope channels, so that no key has all
// of P.
TEST_F(EmulatedMla, ScalesFarApart) {
  struct Kinds {
    const char* name;
    int (*kind)(int64_t key);  // 0 or 1
    int powers[4];             // of two, of each group, by which scales of kind 1 are multiplied
  };
  const std::vector<Kinds> list = {
      {"alike", [](int64_t) { return 0; }, {}},
      {"hardly within a tile", [](int64_t key) { return static_cast<int>(key % 2); }, {-2, -7, 5, 6}},
      {"within a tile", [](int64_t key) { return static_cast<int>(key % 2); }, {-6, -20, -30, 20}},
      {"a key", [](int64_t key) { return key == 100 ? 1 : 0; }, {30, -30, 0, 9}},
      // Tiles are processed from the last one on.
      {"tiles that grow", [](int64_t key) { return key < 128 ? 1 : 0; }, {5, 20, 30, 40}},
      {"tiles that shrink", [](int64_t key) { return key < 128 ? 1 : 0; }, {-5, -20, -30, -40}},
  };
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "head_dim": [576, 512], "seqlens_kv": [300],
      "data": "spread", "max_logits": true, "batch_invariant": true,
      "cache": {"format": "mla_656", "page_size": 512})");
  for (size_t i = 0; i < 2 * list.size(); ++i) {
    const Kinds& kinds = list.at(i / 2);
    const int64_t heads = i % 2 == 0 ? 32 : 16;
    cases::Problem problem(tests::make_case(common.set("heads", {heads, 1})));
    const attune_tensor &q = problem.host().q, &k = problem.host().cache.k;
    for (int64_t head = 0; head < q.shape[1]; ++head) {
      for (int64_t d = 0; d < 512; ++d) cases::encode(ATTUNE_BFLOAT16, 0, cases::element_at(q, {0, head, d}));
    }
    for (int64_t page = 0; page < k.shape[0]; ++page) {
      for (int64_t row = 0; row < k.shape[1]; ++row) {
        const int kind = kinds.kind(row);
        for (int64_t d = 0; d < 512; ++d) {
          if (d % 8 == 3 + kind) *static_cast<std::byte*>(cases::element_at(k, {page, row, d})) = std::byte{0};
        }
        auto* const scales = static_cast<std::byte*>(cases::element_at(k, {page, row, 512}));
        for (int group = 0; group < 4; ++group) {
          void* const scale = scales + 4 * group;
          const double usual = std::ldexp(1 + static_cast<double>((5 * row + 3 * group) % 16) / 16, -7);
          cases::encode(ATTUNE_FLOAT32, kind == 0 ? usual : std::ldexp(usual, kinds.powers[group]), scale);
        }
      }
    }
    EXPECT_EQ(run(problem), "") << kinds.name << ", " << heads;
  }
}

// One key has values of zero and a scale of 2^60. The scales of all others are 2^-110: none of their values is lost.
TEST_F(EmulatedMla, ZerosOfLargeScales) {
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "head_dim": [576, 512], "seqlens_kv": [300],
      "out_dtype": "f32", "cache": {"format": "mla_656", "page_size": 512})");
  for (const int64_t heads : {32, 16}) {
    cases::Problem problem(tests::make_case(common.set("heads", {heads, 1})));
    const attune_tensor& k = problem.host().cache.k;
    for (int64_t page = 0; page < k.shape[0]; ++page) {
      for (int64_t row = 0; row < k.shape[1]; ++row) {
        const bool zero = row == 100;
        if (zero) memset(cases::element_at(k, {page, row, 0}), 0, 512);
        auto* const scales = static_cast<std::byte*>(cases::element_at(k, {page, row, 512}));
        for (int group = 0; group < 4; ++group)
          cases::encode(ATTUNE_FLOAT32, zero ? 0x1p60 : 0x1p-110, scales + 4 * group);
      }
    }
    EXPECT_EQ(run(problem), "") << heads;
  }
}

// combine.cu computes the scales of 32 splits at a time.
TEST_F(EmulatedMla, ManySplits) {
  constexpr int kMany = 36;
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "head_dim": [576, 512], "max_logits": true,
      "seqlens_kv": [4500], "heads": [5, 1])");
  for (const char* more : {R"("cache": {"format": "mla_656", "page_size": 64}, "sinks": "mixed")",
                           R"("cache": {"page_size": 64}, "shared_kv": true, "out_dtype": "f32")"}) {
    const cases::Case spec = tests::make_case(common.with(more));
    EXPECT_EQ(run(spec, 1, kMany, kMany), "") << more;
  }
}

TEST_F(EmulatedMla, M16KernelWithNewTokens) {
  check(
      R"("kv": "paged", "head_dim": [576, 512], "heads": [16, 1], "causal": true, "new_tokens": true, "max_logits": true)",
      {R"("seqlens_q": [1, 1, 1, 1], "seqlens_kv": [130, 0, 64, 900], "cache": {"format": "mla_656", "page_size": 64})",
       R"("seqlens_q": [1, 1, 1], "seqlens_kv": [130, 0, 64], "shared_kv": true, "cache": {"page_size": 16})",
       R"("seqlens_q": [2, 0, 1], "seqlens_kv": [70, 3, 200], "cache": {"format": "mla_656", "page_size": 64})",
       R"("seqlens_q": [1, 1], "seqlens_kv": [130, 5], "cache": {"format": "mla_656", "page_size": 64},
            "prologue": {"append": true, "rope": {"style": "yarn", "dim": 64, "offset": 512, "interleaved": true}})"},
      2);
}

}  // namespace
}  // namespace attune::cuda
