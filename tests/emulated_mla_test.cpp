// SPDX-License-Identifier: Apache-2.0
// The MLA kernels in the emulator (emulated_mla.h): caches, rows, lists, tables.
#include <limits>
#include <vector>

#include "emulated_mla.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 10, kMoreRandomCases = 200;

TEST_F(EmulatedMla, PagedDecode) {
  check(
      R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "seqlens_kv": [65, 0, 1, 200], "max_logits": true)",
      {R"("heads": [17, 1], "cache": {"page_size": 64})", R"("heads": [128, 1], "cache": {"page_size": 16})",
       R"("heads": [20, 1], "cache": {"page_size": 3})",
       R"("heads": [36, 2], "cache": {"page_size": 128, "layout": "hnd"})",
       R"("heads": [64, 1], "cache": {"page_size": 64}, "sinks": "mixed", "out_dtype": "f32")",
       R"("heads": [96, 1], "cache": {"page_size": 64})"});
}

// Head tiles that are no power of two, beside as many tokens as fit.
TEST_F(EmulatedMla, OddNumbersOfHeads) {
  check(R"("kv": "paged", "head_dim": [576, 512], "seqlens_kv": [65, 0, 130], "causal": true, "max_logits": true)",
        {R"("heads": [24, 1], "shared_kv": true, "queries": "fixed", "seqlens_q": 2, "cache": {"page_size": 64})",
         R"("heads": [40, 1], "shared_kv": true, "seqlens_q": [1, 3, 2], "cache": {"page_size": 3})",
         R"("heads": [96, 1], "cache": {"format": "mla_656", "page_size": 64})"},
        2);
  check(R"("queries": "fixed", "seqlens_kv": [130, 0], "causal": true, "max_logits": true)",
        {R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "heads": [7, 1], "seqlens_q": 4,
            "cache": {"page_size": 1024})",
         R"("kv": "paged", "shared_kv": true, "head_dim": [512, 512], "heads": [63, 1], "seqlens_q": 3,
            "cache": {"page_size": 16})",
         R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "heads": [36, 3], "seqlens_q": 16,
            "cache": {"page_size": 32}, "dtype": "f16")",
         R"("kv": "paged", "head_dim": [576, 512], "heads": [5, 1], "seqlens_q": 13, "cache": {"format": "mla_656"})",
         R"("kv": "paged", "head_dim": [512, 512], "heads": [15, 1], "seqlens_q": 7,
            "cache": {"format": "mla_584", "page_size": 1024})",
         R"("kv": "contiguous", "shared_kv": true, "head_dim": [576, 512], "heads": [20, 1], "seqlens_q": 11)"});
}

TEST_F(EmulatedMla, SeveralTokens) {
  check(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "heads": [16, 1], "cache": {"page_size": 64})",
        {R"("seqlens_q": [2, 7, 0], "seqlens_kv": [65, 130, 9], "causal": true)",
         R"("seqlens_q": [9, 1], "seqlens_kv": [200, 70], "causal": true, "window": [70, 0])",
         R"("seqlens_q": [4, 0], "seqlens_kv": [500, 9], "causal": true, "window": [368, 0])",
         R"("seqlens_q": [4, 3], "seqlens_kv": [128, 64], "causal": true, "max_logits": true)",
         // Windows that end within a tile, for the later tokens of a block alone.
         R"("seqlens_q": [9, 8], "seqlens_kv": [200, 199], "causal": true, "window": [68, 0])",
         R"("seqlens_q": [8, 4], "seqlens_kv": [203, 330], "causal": true, "window": [72, 0])",
         R"("seqlens_q": [2, 3], "seqlens_kv": [70, 0], "causal": true, "new_tokens": true)"});
}

// NaN and infinite values that only some rows of an M block see do not spoil the other rows.
TEST_F(EmulatedMla, BadValuesStayWithThoseWhoSeeThem) {
  check(R"("head_dim": [576, 512], "heads": [16, 1], "causal": true, "plant": "nan_v", "shared_kv": true)",
        {R"("kv": "paged", "cache": {"page_size": 64}, "seqlens_q": [4, 3], "seqlens_kv": [70, 4])",
         R"("kv": "paged", "cache": {"page_size": 3}, "seqlens_q": [4], "seqlens_kv": [5], "out_dtype": "f32")",
         R"("kv": "contiguous", "seqlens_q": [20], "seqlens_kv": [30])"});
  check(
      R"("kv": "paged", "heads": [16, 1], "causal": true, "plant": "nan_v", "seqlens_q": [4, 3], "seqlens_kv": [70, 4])",
      {R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
       R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 16})"});
  // With splits, as fp16 and as fp32; some rows of an M block see the value, and some do not.
  check(
      R"("kv": "paged", "head_dim": [576, 512], "heads": [16, 1], "causal": true, "plant": "nan_v", "seqlens_q": [1, 4],
        "seqlens_kv": [70, 1500], "window": [747, 0], "max_logits": true)",
      {R"("shared_kv": true, "cache": {"page_size": 64})",
       R"("shared_kv": true, "cache": {"page_size": 64}, "out_dtype": "f32")",
       R"("cache": {"format": "mla_656", "page_size": 64})"});
}

// Rows of queries that do not exist do not spoil those that do.
TEST_F(EmulatedMla, BadQueriesStayTheirOwn) {
  const cases::Row common(R"("dtype": "bf16", "kv": "slots", "seqlens_q": [2, 1, 4], "shared_kv": true,
      "head_dim": [576, 512], "max_logits": true)");
  for (const char* more : {R"("heads": [20, 1], "sparse": {"topk": 70, "invalid": 0.5})",
                           R"("heads": [128, 1], "sparse": {"topk": 150, "topk_length": "token"})",
                           R"("heads": [16, 1], "sparse": {"topk": 70, "invalid": 0.5})"}) {
    cases::Problem problem(tests::make_case(common.with(more)));
    const attune_tensor& q = problem.host().q;
    for (int64_t d = 0; d < q.shape[2]; ++d)
      cases::encode(ATTUNE_BFLOAT16, std::numeric_limits<double>::quiet_NaN(), cases::element_at(q, {0, 0, d}));
    EXPECT_EQ(run(problem), "") << more;
  }
}

// An infinity in a key that is also a value: if it makes the score -inf, the key counts for nothing, whatever it holds.
TEST_F(EmulatedMla, KeysOfInfiniteScores) {
  check(R"("head_dim": [576, 512], "shared_kv": true, "causal": true, "plant": "inf_v", "max_logits": true)",
        {R"("heads": [16, 1], "kv": "paged", "cache": {"page_size": 64}, "seqlens_q": [4, 3], "seqlens_kv": [70, 4])",
         R"("heads": [64, 1], "kv": "paged", "cache": {"page_size": 3}, "seqlens_q": [2, 1], "seqlens_kv": [300, 9],
            "out_dtype": "f32")",
         R"("heads": [16, 1], "kv": "contiguous", "seqlens_q": [20], "seqlens_kv": [30], "dtype": "f16")"});
}

TEST_F(EmulatedMla, FinishedSequences) {
  check(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "heads": [16, 1], "seqlens_kv": [70, 90, 9],
        "cache": {"page_size": 64}, "finished": [0, 1, 0])",
        {R"("zero_finished": true)", R"("zero_finished": false)"});
  const std::string lists = R"("kv": "slots", "seqlens_q": [1, 2, 1], "finished": [0, 1, 0], "zero_finished": true,
      "sparse": {"topk": 200})";
  check(lists, {R"("shared_kv": true, "head_dim": [576, 512], "heads": [20, 1])",
                R"("head_dim": [576, 512], "heads": [16, 1], "cache": {"format": "mla_656"})",
                R"("head_dim": [576, 512], "heads": [128, 1], "cache": {"format": "mla_656"})",
                R"("head_dim": [512, 512], "heads": [20, 1], "cache": {"format": "mla_584"},
            "extra": {"topk": 9, "page_size": 16})"});
}

// Their queries and keys, which other cases poison, are finite, and keys of the work tiles before lie in shared memory.
TEST_F(EmulatedMla, FinishedSequencesOfNumbers) {
  const cases::Row common(R"("dtype": "bf16", "head_dim": [576, 512], "seqlens_kv": [500, 160, 90],
      "finished": [0, 1, 0], "zero_finished": true, "max_logits": true, "poison": false)");
  for (const char* rest :
       {R"("kv": "dense", "shared_kv": true, "heads": [16, 1], "seqlens_q": [90, 40, 5])",
        R"("kv": "paged", "shared_kv": true, "heads": [32, 1], "cache": {"page_size": 64})",
        R"("kv": "paged", "shared_kv": true, "heads": [32, 1], "cache": {"page_size": 3})",
        R"("kv": "paged", "shared_kv": true, "heads": [16, 1], "cache": {"page_size": 64})",
        R"("kv": "paged", "shared_kv": true, "heads": [16, 1], "seqlens_q": [9, 5, 2], "new_tokens": true,
           "causal": true, "cache": {"page_size": 64})",
        R"("kv": "paged", "heads": [16, 1], "cache": {"format": "mla_656"})",
        R"("kv": "paged", "heads": [32, 1], "cache": {"format": "mla_656"})",
        R"("kv": "paged", "heads": [64, 1], "cache": {"format": "mla_656"})"}) {
    const cases::Case spec = tests::make_case(common.with(rest));
    EXPECT_EQ(run(spec, 1, kBlocks, 2), "") << rest;
  }
}

TEST_F(EmulatedMla, Prologues) {
  const cases::Row common(R"("dtype": "bf16", "max_logits": true, "heads": [16, 1], "causal": true)");
  check(common.with(R"("kv": "paged", "new_tokens": true, "seqlens_q": [1, 3, 0, 20], "seqlens_kv": [130, 0, 5, 70],
        "prologue": {"append": true, "rope": {"style": "yarn", "dim": 64, "offset": 512, "interleaved": true}})"),
        {R"("head_dim": [576, 512], "shared_kv": true, "cache": {"page_size": 64})",
         R"("head_dim": [576, 512], "shared_kv": true, "cache": {"page_size": 3}, "dtype": "f16")",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 16}, "finished": [0, 1, 0, 0],
            "prologue": {"append": true, "rope": {"style": "linear", "dim": 64, "offset": 448}})"});
  check(common.with(R"("kv": "contiguous", "new_tokens": true, "seqlens_q": [2, 1], "seqlens_kv": [70, 9],
        "head_dim": [576, 512], "shared_kv": true)"),
        {R"("prologue": {"append": true})", R"("prologue": {"q_bias": true, "k_bias": true, "logn": 16})",
         R"("prologue": {"ia3_tasks": 2, "append": true, "rope": {"style": "linear", "dim": 64, "positions": 1}})"});
  check(R"("head_dim": [576, 512], "shared_kv": true, "heads": [16, 1])",
        {R"("kv": "dense", "queries": "fixed", "seqlens_q": [70, 70], "seqlens_kv": [70, 70], "causal": true,
            "prologue": {"rope": {"style": "linear", "dim": 64, "offset": 512}})",
         R"("kv": "slots", "seqlens_q": [2, 1], "sparse": {"topk": 70}, "prologue": {"q_bias": true})",
         R"("kv": "slots", "seqlens_q": [2, 1], "sparse": {"topk": 70},
            "prologue": {"rope": {"style": "linear", "dim": 64, "offset": 512, "positions": 1}})"});
}

// The key with nearly all of P has a value of about 2^-23 in some channel, so that keys whose P vanishes in fp16 are
// missed there.
TEST_F(EmulatedMla, WeightsThatVanishInFp16) {
  check(R"("dtype": "f16", "data": "spread", "shared_kv": true, "head_dim": [576, 512], "heads": [20, 1],
        "seqlens_q": [3], "seqlens_kv": [64], "kv": "paged", "cache": {"page_size": 3}, "causal": true)",
        {R"("name": "fp16 weights that vanish 3")", R"("name": "fp16 weights that vanish 40")"});
}

// Rows of q and of keys lie at multiples of 16 bytes; those of the output need not.
TEST_F(EmulatedMla, OutputsAnywhere) {
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "shared_kv": true, "head_dim": [576, 512],
      "seqlens_kv": [300, 65], "causal": true, "max_logits": true, "cache": {"page_size": 64})");
  for (const char* more : {R"("heads": [20, 1], "seqlens_q": [2, 3])", R"("heads": [16, 1], "seqlens_q": [1, 1])",
                           R"("heads": [16, 1], "seqlens_q": [2, 1], "out_dtype": "e4m3", "out_scale": true)"}) {
    cases::Problem problem(tests::make_case(common.with(more)));
    attune_tensor& out = problem.host().out;
    const auto dtype = static_cast<attune_dtype>(out.dtype);
    const auto size = static_cast<size_t>(cases::element_size(dtype));
    const std::vector<int64_t> shape = {out.shape[0], out.shape[1], out.shape[2]};
    out = problem.arena().add("out anywhere", dtype, shape, {{}, {0, 5, 3}, size});
    EXPECT_EQ(run(problem), "") << more;
    out = problem.arena().add("out beside 16 bytes", dtype, shape, {{}, {}, size});
    EXPECT_EQ(run(problem), "") << more;
  }
}

TEST_F(EmulatedMla, OtherSources) {
  check(R"("shared_kv": true, "heads": [12, 1])",
        {R"("kv": "dense", "head_dim": [576, 512], "seqlens_q": [9, 70], "seqlens_kv": [100, 70], "causal": true)",
         R"("kv": "contiguous", "head_dim": [512, 512], "seqlens_kv": [100, 70, 0])"});
}

TEST_F(EmulatedMla, PackedCaches) {
  check(R"("kv": "paged", "heads": [18, 1], "seqlens_kv": [65, 0, 1, 300])",
        {R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 16, "page_padding": true})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 48}, "seqlens_q": 2, "causal": true)"});
}

TEST_F(EmulatedMla, RopeChannelsApart) {
  with_rope_channels_apart([](std::string_view common, auto rest) { check(common, rest, 2); });
}

TEST_F(EmulatedMla, SparseSlots) {
  check(R"("kv": "slots", "heads": [18, 1], "seqlens_q": [2, 1])",
        {R"("head_dim": [576, 512], "shared_kv": true, "sparse": {"topk": 70, "topk_length": "batch", "invalid": 0.5})",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_padding": true}, "sinks": "mixed",
            "sparse": {"topk": 300, "topk_length": "token"}, "extra": {"topk": 9, "page_size": 16})",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584"}, "sparse": {"topk": 65},
            "extra": {"topk": 70, "topk_length": "batch"})",
         R"("head_dim": [576, 512], "shared_kv": true, "sparse": {"topk": 3, "invalid": 1})"});
}

// Lists of a batch whose sequences lie apart, in each way in which lists are read.
TEST_F(EmulatedMla, ListsOfSequencesApart) {
  check(R"("kv": "slots", "queries": "fixed", "seqlens_q": [3, 3], "strides": "transposed")",
        {R"("heads": [18, 1], "head_dim": [576, 512], "shared_kv": true, "sparse": {"topk": 70})",
         R"("heads": [18, 1], "head_dim": [512, 512], "cache": {"format": "mla_584"}, "sparse": {"topk": 65},
            "extra": {"topk": 70, "topk_length": "token"})",
         R"("heads": [16, 1], "head_dim": [576, 512], "cache": {"format": "mla_656"}, "sparse": {"topk": 70})",
         R"("heads": [128, 1], "head_dim": [576, 512], "cache": {"format": "mla_656"}, "sparse": {"topk": 70})",
         R"("heads": [128, 1], "head_dim": [576, 512], "shared_kv": true, "sparse": {"topk": 70})"},
        2);
}

// Two blocks of a cluster dequantize the rows of a tile together.
TEST_F(EmulatedMla, PairsSharePackedRows) {
  check(R"("kv": "slots", "seqlens_q": [2, 1, 4], "max_logits": true)",
        {R"("heads": [128, 1], "head_dim": [576, 512], "cache": {"format": "mla_656"}, "sinks": "mixed",
            "sparse": {"topk": 140, "topk_length": "token", "invalid": 0.2}, "extra": {"topk": 9, "page_size": 16})",
         R"("heads": [128, 1], "head_dim": [512, 512], "cache": {"format": "mla_584"}, "sparse": {"topk": 70})",
         R"("heads": [256, 1], "head_dim": [576, 512], "cache": {"format": "mla_656"}, "sparse": {"topk": 1})"},
        2);
  check(R"("kv": "paged", "heads": [128, 1], "seqlens_kv": [65, 0, 1, 130])",
        {R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
         R"("head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 16}, "seqlens_q": [3, 1, 1, 2],
            "causal": true, "new_tokens": true)",
         R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 48}, "seqlens_q": 2, "causal": true)"},
        2);
}

// Rows are located for two tiles at a time: odd and even numbers of tiles, one tile, and lists with invalid entries.
TEST_F(EmulatedMla, GatheredRowsOfSeveralTiles) {
  check(R"("kv": "slots", "seqlens_q": [2, 1, 4], "max_logits": true, "shared_kv": true)",
        {R"("heads": [128, 1], "head_dim": [576, 512], "sinks": "mixed",
            "sparse": {"topk": 200, "topk_length": "token", "invalid": 0.2}, "extra": {"topk": 9, "page_size": 16})",
         R"("heads": [128, 1], "head_dim": [512, 512], "sparse": {"topk": 70})",
         R"("heads": [256, 1], "head_dim": [576, 512], "sparse": {"topk": 1})"},
        2);
  // P that grows from tile to tile by more than fp16 holds; sparse rows are not recomputed.
  check(R"("kv": "slots", "seqlens_q": [1, 2], "shared_kv": true, "dtype": "f16", "data": "spread", "max_logits": true,
        "head_dim": [576, 512])",
        {R"("heads": [64, 1], "sparse": {"topk": 300})", R"("heads": [20, 1], "sparse": {"topk": 200, "invalid": 0.2})",
         R"("heads": [8, 1], "sparse": {"topk": 300})"});
  check(R"("kv": "paged", "heads": [128, 1], "seqlens_kv": [65, 0, 1, 330], "shared_kv": true)",
        {R"("head_dim": [576, 512], "cache": {"page_size": 4})",
         R"("head_dim": [576, 512], "cache": {"page_size": 3}, "seqlens_q": [3, 1, 1, 2], "causal": true,
            "new_tokens": true)"},
        2);
}

TEST_F(EmulatedMla, SparsePrefill) {
  check(R"("heads": [128, 1], "head_dim": [576, 512], "shared_kv": true, "kv": "dense", "queries": "flat",
        "cu_seqlens_kv": false, "seqlens_q": [5], "seqlens_kv": [200], "max_logits": true)",
        {R"("sparse": {"topk": 130, "topk_length": "token"}, "sinks": "mixed")", R"("sparse": {"topk": 7})"});
  // By offsets, several of one length, several KV heads with lists of their own.
  check(R"("head_dim": [512, 512], "shared_kv": true, "max_logits": true)",
        {R"("heads": [20, 1], "seqlens_q": [3, 0, 5], "seqlens_kv": [90, 40, 200],
            "sparse": {"topk": 75, "topk_length": "token"})",
         R"("heads": [20, 1], "queries": "fixed", "seqlens_q": 3, "seqlens_kv": [90, 200], "dtype": "f16",
            "sparse": {"topk": 75, "topk_length": "batch"}, "strides": "transposed")",
         R"("heads": [6, 2], "queries": "flat", "cu_seqlens_kv": false, "seqlens_q": [7], "seqlens_kv": [200],
            "sparse": {"topk": 75, "topk_length": "token", "per_head": true})"});
}

// Every third case: each producer has some of them, and each table.
TEST_F(EmulatedMla, TablesThatMakeNoSense) {
  const std::vector<tests::SpoiltCase> list = tests::spoilt_mla_cases();
  for (size_t i = 0; i < list.size(); i += 3) {
    cases::Problem problem(list[i].spec);
    list[i].spoil(problem);
    EXPECT_EQ(run(problem), "") << list[i].spec.name;
  }
}

TEST_F(EmulatedMla, RandomCases) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    const cases::Case spec = cases::random_mla_case(seed);
    EXPECT_EQ(run(spec), "") << spec.name;
  }
}

TEST_F(EmulatedMla, MatchesTheOracleOnTheTable) {
  std::vector<cases::Case> list = cases::all_cases();
  for (uint64_t seed = 0; seed < kMoreRandomCases; ++seed) list.push_back(cases::random_mla_case(seed));
  check_table(list, 20, [](const cases::Case& spec) { return run(spec); });
}

}  // namespace
}  // namespace attune::cuda
