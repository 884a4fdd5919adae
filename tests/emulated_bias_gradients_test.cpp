// SPDX-License-Identifier: Apache-2.0
// dbias and dt5_bias (kernels/backward/dbias.cu, dt5_bias.cu) on the CPU (tests/emulator): beside the kernel by wgmma,
// whose problems they share, and beside those by mma.sync.
#include <limits>
#include <optional>

#include "emulated_backward.h"

namespace attune::cuda {
namespace {

using tests::EmulatedBackward;

class EmulatedBiasGradients : public EmulatedBackward {
 protected:
  static void expect_right(const cases::Row& row, std::initializer_list<const char*> variants) {
    for (const char* members : variants) EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
  }
  // The tables' bits.
  static std::vector<std::vector<std::byte>> tables_of(const cases::BackwardProblem& problem) {
    const auto& op = problem.host().op;
    std::vector<std::vector<std::byte>> bits;
    for (const attune_tensor& t : {op.dbias, op.dt5_bias}) {
      if (t.dtype != ATTUNE_DTYPE_NONE) bits.push_back(tests::gather(t));
    }
    return bits;
  }
};

// Several blocks of positions and of keys; sequences whose first positions differ; a table that all heads share.
TEST_F(EmulatedBiasGradients, OfUnlikeSequences) {
  const cases::Row row(R"("name": "tables", "heads": [4, 2], "head_dim": [24, 40], "seqlens_q": [150, 0, 1, 70],
                          "seqlens_kv": [300, 5, 70, 90], "backward": {"dlse": true}, "t5_buckets": 16)");
  for (const bool mma : {false, true}) {
    by_mma = mma;
    expect_right(row, {R"("bias": 2, "causal": true, "dtype": "bf16")",
                       R"("bias": 1, "t5_bidirectional": true, "dtype": "f16", "aux_dtype": "bf16")"});
  }
  expect_right(row.with(R"("dtype": "f32")"),
               {R"("bias": 2, "t5_bidirectional": true)", R"("bias": 1, "causal": true, "aux_dtype": "f16")",
                R"("bias": 2, "queries": "fixed", "seqlens_q": [70, 70], "seqlens_kv": [130, 90])"});
}

TEST_F(EmulatedBiasGradients, OfEveryHeadDim) {
  by_mma = true;
  const cases::Row row(R"("name": "dims", "heads": [2, 1], "causal": true, "bias": 1, "t5_buckets": 32,
                          "seqlens_q": [70, 3], "seqlens_kv": [90, 140],
                          "backward": {"outputs": ["dbias", "dt5_bias"]})");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    for (const auto& [qk, v] : {std::pair{1, 1}, {64, 64}, {99, 3}, {128, 128}, {33, 160}, {192, 128}, {256, 256}})
      EXPECT_EQ(check(tests::make_case(row.with(dtype).set("head_dim", {qk, v}))), "") << dtype << qk << ", " << v;
  }
}

// Rows of any strides; and a bias whose heads are one in memory, but have an entry each of dbias.
TEST_F(EmulatedBiasGradients, OfAnyStrides) {
  by_mma = true;
  const cases::Row row(R"("name": "strides", "heads": [2, 1], "head_dim": [24, 40], "causal": true, "bias": 2,
                          "t5_buckets": 16, "seqlens_q": [70, 3], "seqlens_kv": [70, 80], "backward": {})");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    expect_right(row.with(dtype), {R"("strides": "odd")", R"("strides": "transposed")"});
    cases::BackwardProblem problem(tests::make_case(row.with(dtype)));
    const attune_tensor& bias = problem.host().attention.bias;
    const auto head = bias.shape[1] * bias.stride[1] * int64_t{sizeof(float)};
    std::memcpy(static_cast<std::byte*>(bias.data) + head, bias.data, static_cast<size_t>(head));
    problem.arena().upload();
    const auto run = [&](cases::BackwardCall call) {
      call.attention.bias.stride[0] = 0;
      return run_emulated(call);
    };
    const cases::ExpectedGradients expected = evaluate(problem);
    EXPECT_EQ(run(problem.device()), "");
    EXPECT_EQ(compare(problem, expected, ATTUNE_DEVICE_CUDA).failure, "") << dtype;
  }
}

// dz, not dx: without the slope of a softcap. Every other term and mask beside it.
TEST_F(EmulatedBiasGradients, OfEveryVariant) {
  const cases::Row row(R"("name": "variants", "heads": [4, 2], "head_dim": [24, 40], "seqlens_q": [140, 0, 1, 20],
                          "seqlens_kv": [140, 5, 70, 12], "bias": 2, "t5_buckets": 16,
                          "backward": {"outputs": ["dbias", "dt5_bias"], "dlse": true})");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    by_mma = std::string_view(dtype).find("f32") != std::string_view::npos;
    expect_right(row.with(dtype),
                 {R"("softcap": 2.5, "causal": true)", R"("softcap": 0.4, "softmax_scale": -1.5, "sinks": "mixed")",
                  R"("sinks": "mixed", "backward": {}, "bias": 1)", R"("alibi": 2, "window": [50, 9])",
                  R"("alibi": 1, "alibi_sqrt": true, "mask_bits": 1)", R"("window": [9, 0], "new_token_bias": true)",
                  R"("mask_bits": 2, "causal": true, "bias": 1)",
                  R"("causal": true, "ranges": [[3, 100, 90, 120, 7, 7], [], [], [2, 30, 1, 9]])",
                  R"("seqused": true, "seqlens_kv": [130, 3, 40, 12], "causal": true)", R"("strides": "transposed")",
                  R"("mask_bits": 1, "bias": 1, "ranges": [[3, 100], [], [9, 69], []])"});
  }
}

// Each table alone, and beside each other gradient.
TEST_F(EmulatedBiasGradients, OfSomeGradients) {
  const cases::Row row(R"("name": "some", "heads": [2, 1], "head_dim": [16, 40], "dtype": "bf16", "causal": true,
                          "bias": 1, "t5_buckets": 8, "sinks": "normal", "seqlens_q": [70, 20],
                          "seqlens_kv": [130, 20])");
  for (const bool mma : {false, true}) {
    by_mma = mma;
    for (const std::vector<std::string>& outputs : {std::vector<std::string>{"dbias"},
                                                    {"dt5_bias"},
                                                    {"dq", "dbias"},
                                                    {"dv", "dt5_bias"},
                                                    {"dk", "dsinks", "dbias"},
                                                    {"dq", "dk", "dv", "dsinks"}}) {
      const cases::Row some = row.set("backward.outputs", outputs);
      EXPECT_EQ(check(tests::make_case(some)), "") << some.text();
    }
  }
}

// A NaN reaches the entries of its own pairs; a row without an lse and a score of -inf none at all.
TEST_F(EmulatedBiasGradients, BesideNan) {
  const cases::Row row(R"("name": "nan", "heads": [2, 1], "head_dim": [24, 40], "seqlens_q": [90, 20], "bias": 2,
                          "seqlens_kv": [130, 20], "t5_buckets": 16, "t5_bidirectional": true)");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "f16")"}) {
    by_mma = std::string_view(dtype).find("f32") != std::string_view::npos;
    for (const char* mask : {R"("causal": true)", R"("window": [20, 3])", R"("mask_bits": 1)"}) {
      expect_right(row.with(dtype).with(mask),
                   {R"("plant": "nan_k", "backward": {})", R"("plant": "nan_v", "backward": {})",
                    R"("plant": "inf_v", "backward": {})", R"("backward": {"plant": "nan_q"})",
                    R"("backward": {"plant": "inf_dout"})", R"("backward": {"plant": "no_lse", "dlse": true})",
                    R"("new_token_bias": true, "plant": "nan_v", "backward": {})"});
    }
  }
}

// An infinite key: scores of -inf or infinity, which the parts of fp32's products do not have.
TEST_F(EmulatedBiasGradients, OfInfiniteKeys) {
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    by_mma = true;
    const cases::Row row(R"("name": "inf", "heads": [1, 1], "head_dim": [8, 8], "seqlens_q": [40], "bias": 1,
                            "seqlens_kv": [40], "t5_buckets": 16, "t5_bidirectional": true,
                            "backward": {"outputs": ["dbias", "dt5_bias"]})");
    cases::BackwardProblem problem(tests::make_case(row.with(dtype)));
    const attune_attention& a = problem.host().attention;
    // Every query has -1 where key 7 has an infinity: its score is -inf, and the forward is as without the key.
    const auto type = static_cast<attune_dtype>(a.q.dtype);
    for (int64_t i = 0; i < 40; ++i) cases::encode(type, -1.0, cases::element_at(a.q, {i, 0, 3}));
    for (int64_t c = 0; c < 8; ++c) cases::encode(type, 0.0, cases::element_at(a.k, {7, 0, c}));
    cases::encode(type, std::numeric_limits<double>::infinity(), cases::element_at(a.k, {7, 0, 3}));
    problem.arena().upload();
    const cases::ExpectedGradients expected = evaluate(problem);
    EXPECT_EQ(expected.exact.dbias.value[7], 0.0);
    ASSERT_EQ(run_emulated(problem.device()), "");
    EXPECT_EQ(compare(problem, expected, ATTUNE_DEVICE_CUDA).failure, "") << dtype;
  }
}

// Tables have elements where nothing else has, and of sequences that are empty.
TEST_F(EmulatedBiasGradients, OfNothing) {
  const cases::Row row(R"("name": "nothing", "heads": [2, 1], "head_dim": [16, 16], "bias": 2, "t5_buckets": 8,
                          "backward": {})");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    by_mma = std::string_view(dtype).find("f32") != std::string_view::npos;
    expect_right(row.with(dtype), {R"("seqlens_q": [0], "seqlens_kv": [0])", R"("seqlens_q": [5], "seqlens_kv": [0])",
                                   R"("seqlens_q": [0, 0], "seqlens_kv": [5, 90])",
                                   R"("seqlens_q": [300], "seqlens_kv": [5], "causal": true)",
                                   R"("seqlens_q": [0, 7, 0, 1], "seqlens_kv": [3, 0, 0, 9])"});
  }
}

// More sequences than a block has threads, of which few have the positions of a block.
TEST_F(EmulatedBiasGradients, OfManySequences) {
  std::vector<int64_t> q, kv;
  for (int64_t b = 0; b < 300; ++b) q.push_back(b % 3), kv.push_back(b % 37 == 0 ? 150 : b % 5);
  const cases::Row row(R"("name": "many", "heads": [2, 1], "head_dim": [8, 8], "bias": 1, "t5_buckets": 8,
      "causal": true, "backward": {"outputs": ["dbias", "dt5_bias"]})");
  by_mma = true;
  expect_right(row.set("seqlens_q", q).set("seqlens_kv", kv), {R"("dtype": "f32")", R"("dtype": "bf16")"});
}

// Blocks of 32 positions, tiles of 16 keys, where shared memory is smaller.
TEST_F(EmulatedBiasGradients, OfOtherGpus) {
  by_mma = true;
  const cases::Row row(R"("name": "gpus", "heads": [2, 1], "dtype": "f32", "causal": true, "seqlens_q": [140, 3],
                          "seqlens_kv": [150, 20], "bias": 2, "t5_buckets": 64, "t5_bidirectional": true,
                          "backward": {"outputs": ["dbias", "dt5_bias"]})");
  const emulator::Capability capability(80);
  for (const int64_t kib : {164, 100}) {
    limits = {kib * 1024, (kib - 1) * 1024};
    expect_right(row, {R"("head_dim": [128, 128])", R"("head_dim": [192, 128])", R"("head_dim": [256, 256])"});
  }
}

// Whatever the order of blocks, warps and lanes.
TEST_F(EmulatedBiasGradients, HaveTheSameBits) {
  const cases::Row row(R"("name": "bits", "heads": [4, 2], "head_dim": [40, 24], "causal": true, "bias": 1,
                          "t5_buckets": 16, "backward": {"outputs": ["dbias", "dt5_bias"]},
                          "seqlens_q": [150, 31, 150, 5], "seqlens_kv": [150, 31, 150, 70])");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    by_mma = std::string_view(dtype).find("f32") != std::string_view::npos;
    cases::BackwardProblem problem(tests::make_case(row.with(dtype)));
    std::vector<std::vector<std::byte>> first;
    for (uint64_t seed = 0; seed < 3; ++seed) {
      std::optional<emulator::Shuffled> shuffled;
      if (seed > 0) shuffled.emplace(seed);
      ASSERT_EQ(run_emulated(problem.host(), nullptr, static_cast<int>(0x45 + seed)), "");
      const auto bits = tables_of(problem);
      if (seed == 0) first = bits;
      EXPECT_TRUE(bits == first && bits.size() == 2) << dtype << seed;
    }
  }
}

// A run's table may be larger than its plan's, or smaller.
TEST_F(EmulatedBiasGradients, OfAnotherTableThanThePlans) {
  const cases::Row row(R"("name": "plan", "heads": [2, 1], "head_dim": [16, 16], "dtype": "bf16", "queries": "fixed",
                          "seqlens_q": 9, "bias": 2, "causal": true, "backward": {})");
  cases::BackwardProblem of_plan(tests::make_case(row.with(R"("batch": 8, "seqlens_kv": 140)")));
  cases::BackwardCall call = of_plan.host();
  const auto plan = backward::choose_config(make_backward(*call.linked(), call.attention, Data::kRequired));
  for (const char* lengths : {R"("batch": 3, "seqlens_kv": 300)", R"("batch": 8, "seqlens_kv": 20)"}) {
    cases::BackwardProblem problem(tests::make_case(row.with(lengths)));
    const auto run = [&](const cases::BackwardCall& c) { return run_emulated(c, &plan); };
    EXPECT_EQ(cases::run_and_check(problem, run).failure, "") << lengths;
  }
}

// Wherever a sequence stands in a batch whose others do not share its entries.
TEST_F(EmulatedBiasGradients, DoNotDependOnEmptyNeighbours) {
  by_mma = true;
  const auto tables = [](const std::vector<int64_t>& lengths) {
    const cases::Row row(R"("name": "invariant", "heads": [2, 1], "head_dim": [16, 16], "dtype": "f32", "bias": 2,
                             "causal": true, "t5_buckets": 16, "batch_invariant": true, "poison": false,
                             "backward": {"outputs": ["dbias", "dt5_bias"]})");
    cases::BackwardProblem problem(tests::make_case(row.set("seqlens_q", lengths).set("seqlens_kv", lengths)));
    EXPECT_EQ(run_emulated(problem.host()), "");
    return tables_of(problem);
  };
  EXPECT_TRUE(tables({150}) == tables({0, 0, 150, 0}));
}

// Sequences that overlap, or end before they begin: whatever comes of it, the run ends and nothing is written beside
// it.
TEST_F(EmulatedBiasGradients, WrongOffsetsEnd) {
  for (const bool mma : {false, true}) {
    by_mma = mma;
    cases::BackwardProblem problem(tests::make_case(
        R"({"name": "overlap", "heads": [1, 1], "head_dim": [16, 16], "dtype": "bf16", "seqlens_q": [200, 0, 0],
            "seqlens_kv": [130, 0, 130], "bias": 1, "t5_buckets": 8, "backward": {}})"));
    const attune_attention& a = problem.host().attention;
    auto* const of_q = static_cast<int32_t*>(a.cu_seqlens_q.data);
    auto* const of_kv = static_cast<int32_t*>(a.cu_seqlens_kv.data);
    of_q[2] = 0, of_q[3] = 200;
    of_kv[1] = 260, of_kv[2] = -5, of_kv[3] = 1 << 30;  // of more keys than the table has columns
    EXPECT_EQ(run_emulated(problem.host(), nullptr, 0xff), "");
    for (const auto& buffer : problem.arena().buffers()) EXPECT_EQ(buffer->check_guards(), "");
  }
}

TEST_F(EmulatedBiasGradients, HaveNoRaces) {
  const emulator::Watched watched;
  by_mma = true;
  for (const char* members : {R"("head_dim": [16, 16], "dtype": "bf16", "sinks": "normal", "bias": 1)",
                              R"("head_dim": [99, 72], "dtype": "f32", "mask_bits": 1, "bias": 2)"}) {
    for (uint64_t seed = 0; seed <= 1; ++seed) {
      std::optional<emulator::Shuffled> shuffled;
      if (seed > 0) shuffled.emplace(seed);
      const cases::Row row(R"("name": "races", "heads": [4, 2], "causal": true, "seqlens_q": [100, 3], "t5_buckets": 8,
                              "seqlens_kv": [150, 70], "backward": {"outputs": ["dbias", "dt5_bias"]})");
      EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
    }
  }
}

}  // namespace
}  // namespace attune::cuda
