// SPDX-License-Identifier: Apache-2.0
// What the prefill kernel's host half decides and describes, without a GPU; more of it in cuda_prefill_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <tuple>

#include "cuda/prefill/config.h"
#include "cuda/prefill/prefill.h"
#include "dispatch/registry.h"
#include "support.h"

namespace attune::cuda {
namespace {

// An x-packed cache is taken with 16 or 8 bits, and what is not taken is named.
TEST(CudaPrefillConfig, TakesPackedCaches) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [40], "seqlens_kv": [60])");
  for (const auto& [cache, lacks] :
       {std::pair{R"("cache": {"dtype": "e4m3", "scales": "tensor", "page_size": 16})", ""},
        {R"("cache": {"dtype": "i8", "scales": "token", "page_size": 48})", ""},
        {R"("cache": {"page_size": 32})", ""},
        {R"("cache": {"dtype": "e4m3", "scales": "head", "x": 8})",
         "an x-packed cache whose x elements are not 16 bytes"},
        {R"("cache": {"dtype": "bf16", "x": 16})", "an x-packed cache whose x elements are not 16 bytes"},
        {R"("cache": {"dtype": "e5m2", "scales": "head", "page_size": 24})",
         "x-packed pages whose size is no multiple of 16"}}) {
    cases::Problem problem(tests::make_case(common.with(cache).set("cache.layout", "xpacked")));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill_kernel().coverage.difference(traits_of(p, problem.host())), "") << cache;
    EXPECT_EQ(prefill::refusal(p), lacks) << cache;
  }
}

// Blocks of rows are listed by their number only where nothing that they depend on lies on the device, and none is cut.
TEST(CudaPrefillConfig, KnowsSequencesThatAreAlike) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense",
      "cu_seqlens_kv": false, "queries": "fixed")");
  for (const auto& [rest, blocks] : {
           std::pair{R"("seqlens_q": 150, "seqlens_kv": [150, 150, 150], "causal": true)", 2},
           {R"("seqlens_q": 150, "seqlens_kv": [150, 150, 150])", 2},
           {R"("seqlens_q": 70, "seqlens_kv": [400, 400], "causal": true)", 2},
           {R"("seqlens_q": 70, "seqlens_kv": [1024, 1024], "causal": true)", 2},  // eight tiles stay whole
           {R"("seqlens_q": 70, "seqlens_kv": [1025, 1025], "causal": true)",
            0},  // of nine tiles, too few for 132 multiprocessors
           {R"("seqlens_q": 70, "seqlens_kv": [1025, 1025], "causal": true, "batch_invariant": true)", 2},
           {R"("seqlens_q": 70, "seqlens_kv": [60, 60], "causal": true)", 0},
           {R"("seqlens_q": 150, "seqlens_kv": [150, 150], "window": [70, 0])", 0},
           {R"("seqlens_q": 150, "seqlens_kv": [150, 150], "window": [-1, 70])", 0},
           {R"("seqlens_q": 150, "seqlens_kv": [150, 150], "finished": [0, 1])", 0},
           {R"("seqlens_q": 150, "seqlens_kv": [150, 150], "ranges": [[5, 50], []], "causal": true)", 0},
           {R"("seqlens_q": 1, "seqlens_kv": [150, 150], "causal": true)", 1},
           {R"("seqlens_q": 1, "seqlens_kv": [150, 150], "causal": true, "skip_decode": true)", 0},
           {R"("seqlens_q": 150, "seqlens_kv": [150, 120], "seqused": true)", 0},
           {R"("seqlens_q": [150, 150], "seqlens_kv": [150, 150], "queries": "ragged", "causal": true)", 0},
       }) {
    cases::Problem problem(tests::make_case(common.with(rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill::to_params(p, prefill::choose_config(p, 132), nullptr).blocks_each, blocks) << rest;
    // Beside a kernel that has the short ones.
    EXPECT_EQ(prefill::to_params(p, prefill::choose_config(p, 132, 1), nullptr).blocks_each, 0) << rest;
  }
  // As many that none need be cut.
  cases::Problem problem(tests::make_case(cases::Row(R"("heads": [4, 2], "head_dim": [128, 128],
      "dtype": "bf16", "kv": "dense", "cu_seqlens_kv": false, "queries": "fixed", "causal": true, "seqlens_q": 1280,
      "seqlens_kv": [1280, 1280, 1280, 1280, 1280, 1280, 1280])")));
  const Problem p = make_problem(problem.host(), Data::kRequired);
  EXPECT_EQ(prefill::to_params(p, prefill::choose_config(p, 132), nullptr).blocks_each, 10);
}

// Two blocks copy the keys of prompts together, each for half of the query heads of a KV head.
TEST(CudaPrefillConfig, CopiesKeysInPairs) {
  const cases::Row common(R"("heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [100, 40], "seqlens_kv": [400, 300], "cache": {"page_size": 16})");
  const auto config = [&](const char* rest, int num_sms = 132, int max_decode_q = 0) {
    const cases::Problem problem(tests::make_case(common.with(rest)));
    return prefill::choose_config(make_problem(problem.host(), Data::kRequired), num_sms, max_decode_q);
  };
  for (const char* rest :
       {"", R"("new_tokens": true)", R"("kv": "dense")", R"("kv": "dense", "softcap": 20)", R"("dtype": "f16")",
        R"("head_dim": [96, 72])", R"("head_dim": [192, 128])", R"("heads": [14, 1])", R"("window": [70, 0])",
        R"("seqlens_q": [127, 1])", R"("heads": [4, 2], "seqlens_q": [255, 1])", R"("head_dim": [128, 64])",
        R"("head_dim": [64, 64], "seqlens_q": [191, 1])"}) {
    const prefill::Config c = config(rest);
    EXPECT_EQ(c.cluster, 2) << rest;
    EXPECT_EQ(c.blocks % 2, 0) << rest;
  }
  for (const char* rest :
       {R"("heads": [8, 8])", R"("heads": [6, 2])", R"("kv": "dense", "head_dim": [64, 64])",
        R"("kv": "dense", "head_dim": [128, 64])", R"("head_dim": [256, 256])", R"("softcap": 20)",
        R"("batch_invariant": true)", R"("seqlens_q": [126, 1])", R"("heads": [4, 2], "seqlens_q": [254, 1])",
        R"("dtype": "f32")", R"("kv": "dense", "dtype": "e4m3")",
        R"("cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
        R"("cache": {"page_size": 16, "layout": "xpacked"})"}) {
    EXPECT_EQ(config(rest).cluster, 1) << rest;
  }
  EXPECT_EQ(config("", 131).cluster, 1) << "an odd number of multiprocessors";
  EXPECT_EQ(config("", 132, 1).cluster, 1) << "beside a kernel that has the short ones";
  EXPECT_EQ(config("").heads_of_tile, 2);
  EXPECT_EQ(config("").tokens_of_tile, 64);
}

constexpr int kSms = 6;

// Where no half of the heads of a KV head is left for another block, pairs have neighbouring tokens: of long prompts,
// and where they fill the grid several times, whatever the lengths of keys.
TEST(CudaPrefillConfig, CopiesKeysInPairsOfNeighbouringTokens) {
  const cases::Row common(R"("heads": [1, 1], "head_dim": [192, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "cache": {"page_size": 16}, "seqlens_q": [4096], "seqlens_kv": [4096])");
  const auto config = [&](const char* rest, int num_sms = kSms) {
    const cases::Problem problem(tests::make_case(common.with(rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    const prefill::Config c = prefill::choose_config(p, num_sms);
    const kernels::WorkTileParams k = prefill::to_params(p, c, nullptr);
    EXPECT_EQ(k.no_splits, c.row_pairs || p.batch_invariant ? 1 : 0);
    EXPECT_EQ(k.tokens_of_tile, c.tokens_of_tile * (c.row_pairs ? 2 : 1));
    EXPECT_EQ(c.cluster, c.row_pairs ? 2 : 1);
    return c;
  };
  for (const char* rest : {"", R"("heads": [3, 1])", R"("heads": [3, 3], "window": [4096, 0])",
                           R"("causal": false, "seqlens_q": [4096, 4096], "seqlens_kv": [4096, 4096])",
                           R"("kv": "dense", "causal": false)"}) {
    const prefill::Config c = config(rest);
    EXPECT_TRUE(c.row_pairs) << rest;
    EXPECT_FALSE(c.splits) << rest;
    EXPECT_EQ(c.blocks, kSms) << rest;
  }
  for (const char* rest :
       {R"("heads": [3, 1], "seqlens_q": [2048, 2048], "seqlens_kv": [2048, 2048])", R"("batch_invariant": true)",
        R"("kv": "dense", "head_dim": [64, 64])", R"("head_dim": [256, 256])",
        R"("head_dim": [64, 64], "seqlens_q": [8192], "seqlens_kv": [8192])", R"("window": [4000, 0])",
        R"("kv": "dense")", R"("t5_buckets": 16, "t5_max_distance": 60)",
        R"("heads": [3, 1], "causal": false, "window": [-1, 4], "seqlens_q": [2048, 2048], "seqlens_kv": [2048, 2048])",
        // The last pair of a prompt would be nearly empty: 1,280 rows instead of 1,152.
        R"("causal": false, "kv": "dense", "seqlens_q": [1025, 1025, 1025], "seqlens_kv": [1025, 1025, 1025])",
        // One row block would take longer than all others together, and a pair does not split it.
        R"("seqlens_q": [8191, 1], "seqlens_kv": [8191, 32768])"}) {
    EXPECT_FALSE(config(rest).row_pairs) << rest;
  }
  EXPECT_FALSE(config("", kSms - 1).row_pairs) << "an odd number of multiprocessors";
  EXPECT_FALSE(config("", 10).row_pairs) << "fewer than four rounds";
}

// Stress has batches for such pairs.
TEST(CudaPrefillConfig, PairsOfNeighbouringTokensAreStressed) {
  int pairs = 0, all = 0;
  for (uint64_t index = 0; index < 1500 && all < 2; ++index) {
    const cases::Case spec = cases::serving_case(1, index, 64, 20000);
    if (spec.num_heads_q < 16 || spec.num_heads_q > 3 * spec.num_heads_kv || spec.head_dim_v > 128) continue;
    const cases::Problem problem(spec);
    const Problem p = make_problem(problem.host(), Data::kRequired);
    ++all, pairs += prefill::choose_config(p, 132).row_pairs ? 1 : 0;
  }
  EXPECT_EQ(all, 2);
  EXPECT_GE(pairs, 1);
}

// An axis of one element has no stride, which the driver would not take.
TEST(CudaPrefillConfig, GivesAxesOfOneElementAStride) {
  const cases::Row common(R"("heads": [1, 1], "head_dim": [64, 64], "dtype": "bf16", "seqlens_q": [40],
      "seqlens_kv": [40], "causal": true)");
  for (const char* rest : {R"("kv": "dense", "queries": "fixed", "cu_seqlens_kv": false)", R"("kv": "paged")"}) {
    cases::Problem problem(tests::make_case(common.with(rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    const prefill::Maps m = prefill::describe_maps(p, prefill::choose_config(p, 132));
    for (const TensorMapDesc& map : {m.q, m.k, m.v, m.dense_k, m.dense_v}) {
      for (int axis = 1; axis < map.rank; ++axis) EXPECT_GE(map.stride_bytes[axis], 16u) << rest << ", axis " << axis;
    }
  }
}

// A run encodes the maps that its kernel copies by, and no others.
TEST(CudaPrefillConfig, DescribesMapsThatAreUsed) {
  struct {
    const char* rest;
    bool cache, dense;
  } const kCalls[] = {
      {R"("kv": "dense")", false, true},
      {R"("kv": "paged")", true, false},
      {R"("kv": "paged", "new_tokens": true)", true, true},
      {R"("kv": "paged", "cache": {"layout": "xpacked", "page_size": 24})", false, false},  // gathered by cp.async
  };
  for (const auto& x : kCalls) {
    cases::Problem problem(tests::make_case(cases::Row(R"("heads": [4, 2], "head_dim": [64, 64],
        "dtype": "bf16", "seqlens_q": [40], "seqlens_kv": [40], "causal": true)")
                                                .with(x.rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    const prefill::Maps m = prefill::describe_maps(p, prefill::choose_config(p, 132));
    EXPECT_EQ(m.q.rank, 4) << x.rest;
    for (const TensorMapDesc* map : {&m.k, &m.v}) EXPECT_EQ(map->rank != 0, x.cache) << x.rest;
    for (const TensorMapDesc* map : {&m.dense_k, &m.dense_v}) EXPECT_EQ(map->rank != 0, x.dense) << x.rest;
  }
}

// Rows of a block lie within 2^31 elements where they are found by offsets of 32 bits.
TEST(CudaPrefillConfig, FindsPlainRowsBy32Bits) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16",
      "kv": "dense", "seqlens_q": [40], "seqlens_kv": [40], "lse": false})"));
  Problem p = make_problem(problem.host(), Data::kRequired);
  const prefill::Config c = prefill::choose_config(p, 132);
  EXPECT_EQ(prefill::to_params(p, c, nullptr).plain_out, 1);
  p.out.row_stride = (int64_t{1} << 31) / c.tokens_of_tile - 1024;
  EXPECT_EQ(prefill::to_params(p, c, nullptr).plain_out, 1);
  p.out.row_stride += 1024;
  EXPECT_EQ(prefill::to_params(p, c, nullptr).plain_out, 0);
  p.out.row_stride = 256, p.out.head_stride = int64_t{1} << 31;
  EXPECT_EQ(prefill::to_params(p, c, nullptr).plain_out, 0);
}

// Codes of V come in rows as wide as their page allows, and at their places either way.
TEST(CudaPrefillConfig, DescribesPackedCodes) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [48, 80], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [40], "seqlens_kv": [60], "cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head"})");
  for (const auto& [page_size, row, rows] :
       {std::tuple{16, 256u, 6u}, {64, 256u, 24u}, {256, 128u, 96u}, {544, 32u, 96u}, {48, 16u, 96u}}) {
    cases::Problem problem(tests::make_case(common.set("cache.page_size", page_size)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    const prefill::Maps m = prefill::describe_maps(p, prefill::choose_config(p, 132));
    EXPECT_NO_THROW(check_tensor_map(m.k));
    EXPECT_NO_THROW(check_tensor_map(m.v));
    EXPECT_EQ(m.k.box[0], 128u);  // 8 tokens of 16 channels
    EXPECT_EQ(m.k.box[1], 3u);
    EXPECT_EQ(m.v.box[0], row) << page_size;
    EXPECT_EQ(m.v.box[1], rows) << page_size;  // zeros beyond 80 channels
    EXPECT_EQ(m.v.type, TensorMapType::kUint8);
  }
}

// Scores in base 2 by a polynomial, as the kernel sums it.
template <int kTerms>
double capped(const kernels::CapPolynomial<kTerms>& k, float product) {
  const float square = product * product;
  float factor = k.terms[kTerms - 1];
  for (int i = kTerms - 2; i >= 0; --i) factor = std::fma(factor, square, k.terms[i]);
  return static_cast<double>(product) * static_cast<double>(factor);
}

// As exact as the page says where they are taken; and what lies below their range is as small as it says.
TEST(CudaPrefillConfig, CapsScoresByPolynomials) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense", "seqlens_q": [5],
      "seqlens_kv": [5])");
  for (const double softcap : {1e-3, 2.0, 5.0, 20.0, 30.0, 50.0, 100.0, 101.0, 1e5}) {
    for (const double scale : {1e-6, 1.0 / 64, 1.0 / 16, 0.088, 7.0}) {
      cases::Problem problem(tests::make_case(common.set("softcap", softcap).set("softmax_scale", scale)));
      const Problem p = make_problem(problem.host(), Data::kRequired);
      const kernels::WorkTileParams params = prefill::to_params(p, prefill::choose_config(p, 132), nullptr);
      const double level = softcap * std::numbers::log2e;
      const auto exact = [&](double product) { return level * std::tanh(product * scale / softcap); };
      const auto check = [&](const auto& k, double range, double gap) {
        // Nobody takes one that would change scores by more than 8.1e-5.
        if (softcap > 100 ||
            !std::ranges::all_of(k.terms, [](float x) { return std::isfinite(x) && std::abs(x) >= 1e-40f; })) {
          EXPECT_EQ(k.high, -std::numeric_limits<float>::infinity());  // not even rows of negative products take it
          return;
        }
        EXPECT_NEAR(k.high * scale / softcap, range, 1e-5) << softcap << " " << scale;
        for (int i = -1000; i <= 1000; ++i) {
          const float product = k.high * static_cast<float>(i) / 1000;
          EXPECT_LE(std::abs(capped(k, product) - exact(product)), 8.1e-7 * level) << product;
        }
        for (double x = 1; x < 100; x *= 1.01) {
          const auto product = static_cast<float>(-k.high * x);
          EXPECT_LE(capped(k, product), exact(product) + 8.1e-7 * level) << product;
        }
        EXPECT_EQ(std::isfinite(k.low), gap < 2 * level * std::tanh(range));
        if (std::isfinite(k.low)) {
          EXPECT_GE(exact(k.low) - exact(-k.high), gap - 1e-6 * level);
        }
      };
      check(params.cap_short, 0.375, 16.5);
      check(params.cap_long, 0.85, 24);
      check(params.cap_wide, 1.33, 26);
      const auto& small = params.cap_small;
      EXPECT_EQ(small.low, -small.high);
      // Where the kernel may take it, and caps are not so large that the terms are next to nothing.
      EXPECT_EQ(small.high > 0, softcap >= 2 && std::abs(small.terms[1]) >= 1e-40f) << softcap << " " << scale;
      for (int i = -1000; i <= 1000; ++i) {
        const float product = small.high * static_cast<float>(i) / 1000;
        EXPECT_LE(std::abs(capped(small, product) - exact(product)),
                  8.1e-5 * std::numbers::log2e + 2e-7 * std::abs(exact(product)))
            << product;
      }
      if (softcap == 30 && scale > 1e-3) {
        EXPECT_GT(small.high * scale, 6.0);
      }
      EXPECT_EQ(prefill::choose_config(p, 132).low_cap, softcap < 25);
      if (std::isfinite(params.cap_short.low)) {
        EXPECT_GE(params.cap_short.low, params.cap_long.low);  // whoever leaves the short one may take the long one
      }
      if (softcap == 50 && scale == 1.0 / 16) {
        EXPECT_GT(params.cap_wide.high, 0);  // Gemma 2's
      }
    }
  }
}

}  // namespace
}  // namespace attune::cuda
