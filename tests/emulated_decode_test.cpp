// SPDX-License-Identifier: Apache-2.0
// The decode kernels' own source on the CPU (tests/emulator): what they compute, against the oracle, with poisoned
// memory, without a GPU.
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <tuple>
#include <vector>

#include "emulated_decode.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 300;

// Every element of a tensor: value(index).
void fill(const attune_tensor& t, const std::function<double(const std::vector<int64_t>&)>& value) {
  std::vector<int64_t> at(static_cast<size_t>(t.rank), 0);
  while (true) {
    char* to = static_cast<char*>(t.data);
    const auto dtype = static_cast<attune_dtype>(t.dtype);
    for (size_t i = 0; i < at.size(); ++i) to += at[i] * t.stride[i] * cases::element_size(dtype);
    cases::encode(dtype, value(at), to);
    size_t axis = at.size();
    while (axis > 0 && ++at[axis - 1] == t.shape[axis - 1]) at[--axis] = 0;
    if (axis == 0) return;
  }
}

// Key 0 has the largest probability by far, the largest scale, and a value of zeros: what is left are the small
// probabilities of keys with small scales. By biases, as keys are zeros.
TEST_F(EmulatedDecode, SmallWeightsOfSmallScales) {
  const cases::Row common(R"("queries": "fixed", "kv": "contiguous", "heads": [4, 1], "head_dim": [64, 64],
      "seqlens_kv": [70], "bias": 1, "max_logits": true, "poison": false, "out_dtype": "f32",
      "cache": {"scales": "token"})");
  for (const char* q : {"bf16", "f16", "f32"}) {
    for (const char* cache : {"i8", "e4m3"}) {
      for (const double scale : {-9.0, -11.0}) {
        for (const double probability : {-13.2, -16.0}) {
          const cases::Case spec = tests::make_case(common.set("dtype", q).set("cache.dtype", cache));
          const auto edit = [&](const attune_attention& a) {
            fill(a.cache.k, [](const auto&) { return 0.0; });
            fill(a.cache.v, [](const auto& at) { return at[1] == 0 ? 0.0 : 100.0; });
            fill(a.cache.v_scale, [&](const auto& at) { return at[1] == 0 ? 1.0 : std::exp2(scale); });
            fill(a.bias, [&](const auto& at) { return at.back() == 0 ? 0.0 : probability * std::numbers::ln2; });
          };
          EXPECT_EQ(run(spec, false, 1, edit), "") << q << " " << cache << " " << scale << " " << probability;
        }
      }
    }
  }
}

// A mask of biases that are -inf, over values that are NaN.
TEST_F(EmulatedDecode, BiasesThatHide) {
  const cases::Row common(R"("queries": "fixed", "kv": "contiguous", "heads": [4, 1], "head_dim": [64, 64],
      "seqlens_kv": [170, 70], "bias": 1, "max_logits": true)");
  for (const char* more : {R"("dtype": "bf16")", R"("dtype": "f16")", R"("dtype": "f32")",
                           R"("dtype": "bf16", "cache": {"dtype": "e4m3", "scales": "token"})",
                           R"("dtype": "bf16", "new_tokens": true)"}) {
    const cases::Case spec = tests::make_case(common.with(more));
    const auto edit = [&](const attune_attention& a) {
      const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
      fill(a.bias, [&](const auto& at) { return at.back() % 5 == 3 ? -infinity : 0.1 * static_cast<double>(at[0]); });
      const auto plant = [&](const attune_tensor& v, const auto& key_of) {
        for (int64_t row = 0; row < v.shape[0]; ++row) {
          for (int64_t i = 0; i < v.shape[1]; ++i) {
            if (key_of(row, i) % 5 != 3) continue;
            for (int64_t d = 0; d < v.shape[3]; ++d)
              cases::encode(static_cast<attune_dtype>(v.dtype), nan, cases::element_at(v, {row, i, 0, d}));
          }
        }
      };
      plant(a.cache.v, [](int64_t, int64_t slot) { return slot; });
    };
    expect_right(spec, more, 1, edit);
  }
}

TEST_F(EmulatedDecode, Caches) {
  check(R"("heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "seqlens_kv": [300, 0, 1], "max_logits": true)",
        {R"("kv": "paged", "cache": {"page_size": 64})",
         R"("kv": "paged", "cache": {"page_size": 16, "layout": "hnd"})", R"("kv": "paged", "cache": {"page_size": 3})",
         R"("kv": "contiguous")", R"("kv": "paged", "cache": {"page_size": 64, "dtype": "i8", "scales": "token"})",
         R"("kv": "paged", "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
         R"("kv": "paged", "cache": {"page_size": 64, "dtype": "e5m2", "scales": "tensor"})"},
        2);
}

// As three bf16 numbers (bf16x3), so no bit of fp32 is lost. The lse of one key is its score.
TEST_F(EmulatedDecode, QueriesOfFp32) {
  check(R"("heads": [8, 2], "head_dim": [64, 64], "dtype": "f32", "kv": "paged", "seqlens_kv": [300, 1, 1, 1, 1, 1])",
        {R"("cache": {"dtype": "e5m2", "scales": "token"})", R"("cache": {"dtype": "e4m3", "scales": "tensor"})",
         R"("cache": {"dtype": "i8", "scales": "token"})"});
}

TEST_F(EmulatedDecode, HeadDimsAndGroups) {
  check(R"("kv": "paged", "seqlens_kv": [200, 33])", {R"("heads": [3, 3], "head_dim": [64, 64], "dtype": "f16")",
                                                      R"("heads": [16, 1], "head_dim": [128, 128], "dtype": "bf16")",
                                                      R"("heads": [14, 2], "head_dim": [96, 80], "dtype": "bf16")",
                                                      R"("heads": [4, 2], "head_dim": [256, 256], "dtype": "f16")",
                                                      R"("heads": [4, 2], "head_dim": [72, 40], "dtype": "bf16")",
                                                      R"("heads": [24, 1], "head_dim": [128, 64], "dtype": "bf16")",
                                                      R"("heads": [24, 1], "head_dim": [256, 256], "dtype": "bf16")",
                                                      R"("heads": [4, 1], "head_dim": [64, 64], "dtype": "f32")"});
}

// Where four channels are no vector of 8 bytes.
TEST_F(EmulatedDecode, OutputsAtAnyAddress) {
  check(R"("kv": "paged", "heads": [8, 2], "head_dim": [64, 64], "dtype": "bf16", "seqlens_kv": [200, 33])",
        {R"("strides": "odd")", R"("strides": "spread")", R"("strides": "spread", "dtype": "f16")",
         R"("strides": "spread", "out_dtype": "f32")", R"("strides": "spread", "out_dtype": "e4m3")"});
}

TEST_F(EmulatedDecode, RowsThatSeeDifferentKeys) {
  check(R"("kv": "paged", "heads": [6, 2], "head_dim": [128, 128], "dtype": "bf16", "seqlens_kv": [200, 70])",
        {R"("seqlens_q": [4, 4], "causal": true)",
         R"("seqlens_q": [4, 4], "causal": true, "window": [40, 0], "plant": "nan_v")", R"("window": [33, 0])",
         R"("window": [0, 0])", R"("alibi": 1, "softcap": 20)", R"("softcap": 1e7, "max_logits": true)",
         R"("softcap": 1e7, "max_logits": true, "dtype": "f32")", R"("sinks": "mixed", "out_dtype": "e4m3")",
         R"("finished": [0, 1], "zero_finished": true)", R"("finished": [1, 0], "zero_finished": false)"});
}

TEST_F(EmulatedDecode, RaggedQueries) {
  EXPECT_EQ(run(tests::make_case(R"({"name": "x", "kv": "paged", "heads": [6, 2], "head_dim": [128, 128],
      "dtype": "bf16", "seqlens_kv": [200, 70, 9], "seqlens_q": [9, 0, 1], "causal": true, "new_tokens": true,
      "prologue": {"append": true, "rope": {"style": "linear", "dim": 64}}})"),
                false),
            "");
}

TEST_F(EmulatedDecode, NewTokens) {
  const cases::Row common(R"("new_tokens": true, "causal": true, "max_logits": true, "head_dim": [128, 128],
      "dtype": "bf16", "kv": "paged", "seqlens_kv": [300, 0, 64])");
  for (const char* queries :
       {R"("heads": [8, 2])", R"("heads": [8, 2], "seqlens_q": [3, 3, 3])", R"("heads": [16, 1])"}) {
    check(common.with(queries),
          {R"("prologue": {"append": true})",
           R"("prologue": {"append": true, "q_bias": true, "k_bias": true, "v_bias": true,
               "rope": {"style": "linear", "dim": 128}}, "cache": {"page_size": 64})",
           R"("prologue": {"append": true, "k_bias": true, "rope": {"style": "linear", "dim": 64, "interleaved": true},
               "logn": 16}, "cache": {"page_size": 16, "ring_capacity": 128})",
           R"("prologue": {"append": true, "ia3_tasks": 2, "rope": {"style": "linear", "dim": 128, "positions": 1}},
               "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
           R"("prologue": {"rope": {"style": "mrope", "dim": 128, "positions": 3, "mrope_section": [12, 16, 8]}},
               "cache": {"page_size": 16})",
           R"("prologue": {"append": true, "v_bias": true},
               "cache": {"page_size": 8, "dtype": "i8", "scales": "token", "ring_capacity": 24})"});
  }
}

// Blocks of a cluster, for 32 output tiles on 132 multiprocessors: two on each where there are tiles enough.
TEST(DecodeConfig, BlocksOfManyKeysHaveAMultiprocessorToThemselves) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [8, 8], "head_dim": [32, 32], "dtype": "bf16",
      "kv": "contiguous", "queries": "fixed", "seqlens_kv": [1, 1, 1, 1]})"));
  Problem p = make_problem(problem.host(), Data::kRequired);
  for (const auto& [keys, warps, blocks_per_sm] : {std::tuple{1024, 4, 2}, {4095, 4, 2}, {4096, 8, 1}, {16384, 8, 1}}) {
    p.max_seqlen_kv = keys;
    const decode::Config c = decode::choose_config(p, {});
    EXPECT_EQ(c.cluster, 4) << keys;
    EXPECT_EQ(c.blocks, 32 * 4) << keys;
    EXPECT_EQ(c.warps, warps) << keys;
    EXPECT_EQ(c.blocks_per_sm, blocks_per_sm) << keys;
  }
}

TEST_F(EmulatedDecode, MatchesTheOracleOnTheTable) {
  check_table(all_cases(kRandomCases), 100, [](const cases::Case& spec) {
    const std::string alone = run(spec, false), clusters = run(spec, true);
    return clusters == tests::kNotCovered || clusters == alone ? alone : alone + " in clusters: " + clusters;
  });
}

}  // namespace
}  // namespace attune::cuda
