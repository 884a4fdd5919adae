// SPDX-License-Identifier: Apache-2.0
// The backward by mma.sync (kernels/backward/gradients_mma.cu) on the CPU (tests/emulator): fp32, and 16 bits on GPUs
// without wgmma.
#include <optional>

#include "cuda/architecture.h"
#include "emulated_backward.h"

namespace attune::cuda {
namespace {

using tests::EmulatedBackward;

class EmulatedBackwardMma : public EmulatedBackward {
 protected:
  void SetUp() override {
    EmulatedBackward::SetUp();
    by_mma = true;
  }
};

// Head dims that fill no line of channels; one pass for dk and dv, and two; blocks of 64 rows, and of 32.
TEST_F(EmulatedBackwardMma, OfEveryHeadDim) {
  const cases::Row row(R"("name": "dims", "heads": [2, 1], "dtype": "f32", "causal": true, "seqlens_q": [70, 3, 0],
                          "seqlens_kv": [90, 200, 5], "backward": {"dlse": true})");
  for (const auto& [qk, v] :
       {std::pair{64, 64}, {128, 128}, {8, 40}, {99, 3}, {72, 128}, {192, 128}, {256, 256}, {1, 1}, {33, 160}})
    EXPECT_EQ(check(tests::make_case(row.set("head_dim", {qk, v}))), "") << qk << ", " << v;
}

// Several blocks of each side, whose warps skip what their rows do not see.
TEST_F(EmulatedBackwardMma, OfWindows) {
  const cases::Row row(R"("name": "windows", "heads": [2, 1], "head_dim": [40, 32], "seqlens_q": [300, 90, 1],
                          "seqlens_kv": [300, 290, 70], "backward": {"dlse": true})");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "f16")"}) {
    for (const char* mask : {R"("causal": true)", R"("causal": true, "window": [100, 0])", R"("window": [40, 60])",
                             R"("seqused": true, "seqlens_kv": [270, 250, 18])"})
      EXPECT_EQ(check(tests::make_case(row.with(dtype).with(mask))), "") << dtype << mask;
  }
}

// 16 bits, exact in TF32; gradients of their type, and of fp32.
TEST_F(EmulatedBackwardMma, Of16Bits) {
  const cases::Row row(R"("name": "16_bits", "heads": [4, 2], "causal": true, "seqlens_q": [150, 1, 0, 70],
                          "seqlens_kv": [150, 70, 12, 150])");
  for (const char* members :
       {R"("dtype": "bf16", "head_dim": [64, 64], "backward": {"dlse": true})",
        R"("dtype": "f16", "head_dim": [128, 128], "backward": {"dtype": "f32"})",
        R"("dtype": "bf16", "head_dim": [99, 41], "backward": {})",
        R"("dtype": "bf16", "head_dim": [40, 24], "backward": {"plant": "nan_q"}, "softcap": 3)",
        R"("dtype": "f16", "head_dim": [40, 24], "plant": "nan_v", "backward": {})",
        R"("dtype": "bf16", "head_dim": [256, 256], "backward": {}, "causal": false, "softcap": 3)"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Every score term and mask, and combinations of them.
TEST_F(EmulatedBackwardMma, OfEveryVariant) {
  const cases::Row row(
      R"("name": "variants", "dtype": "f32", "heads": [4, 2], "head_dim": [24, 40], "seqlens_q": [140, 0, 1, 20],
                          "seqlens_kv": [140, 5, 70, 12], "backward": {"dlse": true})");
  const char* const tables = R"("backward": {"outputs": ["dq", "dk", "dv"]})";
  for (const char* members :
       {R"("sinks": "mixed", "causal": true)", R"("sinks": "mixed", "backward": {}, "aux_dtype": "bf16")",
        R"("softcap": 2.5, "causal": true)", R"("softcap": 0.4, "softmax_scale": -1.5, "sinks": "normal")",
        R"("alibi": 2, "dtype": "f16")", R"("alibi": 1, "alibi_sqrt": true, "alibi_negative": true, "window": [50, 9])",
        R"("mask_bits": 1, "causal": true)",
        R"("mask_bits": 2, "sinks": "mixed", "softcap": 3, "alibi": 1, "dtype": "bf16")",
        R"("mask_bits": 2, "mask_start": 20, "mask_keys": 64, "queries": "fixed", "seqlens_q": [70, 70],
             "seqlens_kv": [130, 90])",
        R"("causal": true, "ranges": [[3, 100, 90, 120, 7, 7], [], [], [2, 30, 1, 9]])",
        R"("window": [9, 0], "mask_bits": 1, "ranges": [[3, 100, 90, 120, 7, 7], [], [-80, -30, -9, 5], [2, 30]])"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
  for (const char* members : {R"("bias": 2)", R"("bias": 1, "causal": true, "aux_dtype": "bf16")",
                              R"("t5_buckets": 16, "t5_bidirectional": true, "dtype": "bf16")",
                              R"("new_token_bias": true, "t5_buckets": 32, "causal": true)",
                              R"("bias": 2, "softcap": 3, "sinks": "mixed", "alibi": 1, "mask_bits": 1)"})
    EXPECT_EQ(check(tests::make_case(row.with(tables).with(members))), "") << members;
}

// One gradient alone, and two, beside a NaN that only some rows see: their rows are computed again.
TEST_F(EmulatedBackwardMma, OfSomeGradientsBesideNan) {
  const cases::Row row(R"("name": "some", "heads": [2, 1], "dtype": "f32", "causal": true, "seqlens_q": [90, 20],
                          "seqlens_kv": [130, 20])");
  for (const char* dims : {R"("head_dim": [16, 40])", R"("head_dim": [192, 136])"}) {
    for (const cases::Row& some : tests::some_gradients(row.with(dims), {"", "nan_q", "inf_dout", "no_lse"}))
      EXPECT_EQ(check(tests::make_case(some)), "") << some.text();
    EXPECT_EQ(check(tests::make_case(row.with(dims).with(R"("plant": "nan_v", "backward": {})"))), "") << dims;
  }
}

// Rows that lie anywhere, and whose channels are apart.
TEST_F(EmulatedBackwardMma, OfAnyStrides) {
  const cases::Row row(R"("name": "strides", "heads": [2, 1], "head_dim": [40, 40], "causal": true,
                          "seqlens_q": [70, 3], "backward": {})");
  for (const char* dtype : {R"("dtype": "f32")", R"("dtype": "bf16")"}) {
    for (const char* strides : {"odd", "packed", "transposed"})
      EXPECT_EQ(check(tests::make_case(row.with(dtype).set("strides", strides))), "") << dtype << strides;
  }
}

// Smaller blocks and tiles, where shared memory is smaller: A100, RTX 30.
TEST_F(EmulatedBackwardMma, OfOtherGpus) {
  const cases::Row row(R"("name": "gpus", "heads": [2, 1], "dtype": "f32", "causal": true, "seqlens_q": [140, 3],
                          "seqlens_kv": [150, 20], "backward": {})");
  const emulator::Capability capability(80);
  for (const int64_t kib : {164, 100}) {
    limits = {kib * 1024, (kib - 1) * 1024};
    for (const char* dims : {R"("head_dim": [128, 128])", R"("head_dim": [192, 128])", R"("head_dim": [256, 256])"})
      EXPECT_EQ(check(tests::make_case(row.with(dims))), "") << kib << dims;
  }
}

// Every shape that a GPU of the table gets for any head dims fits it.
TEST_F(EmulatedBackwardMma, HasAShapeForEveryGpu) {
  for (const Architecture& gpu : kArchitectures) {
    for (int head_dim = 1; head_dim <= 256; ++head_dim) {
      backward::Config c;
      c.mma = backward::MmaInstruction::kMmaSync;
      c.limits = {gpu.shared_per_sm, gpu.shared_a_block};
      c.head_dim_qk = c.head_dim_v = head_dim;
      c.dtype = ATTUNE_FLOAT32, c.with_sinks = c.with_dlse = true;
      for (const int of : {kernels::kGradientDq, kernels::kGradientDk, kernels::kGradientDv, kernels::kGradientDbias,
                           kernels::kGradientDt5Bias}) {
        EXPECT_GE(c.mma_shape(of).blocks_per_sm, 1) << gpu.name << " " << head_dim;
        EXPECT_LE(c.mma_kernel(of).shared_bytes, static_cast<size_t>(gpu.shared_a_block)) << gpu.name << head_dim;
      }
    }
  }
}

// Whatever the order of blocks, warps and lanes, and whatever else is in the batch.
TEST_F(EmulatedBackwardMma, HaveTheSameBits) {
  const cases::Row row(R"("name": "bits", "heads": [4, 2], "head_dim": [40, 24], "dtype": "f32", "causal": true,
                          "sinks": "normal", "backward": {}, "seqlens_q": [150, 31, 5], "seqlens_kv": [150, 31, 70])");
  cases::BackwardProblem problem(tests::make_case(row));
  std::vector<std::vector<std::byte>> first;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    std::optional<emulator::Shuffled> shuffled;
    if (seed > 0) shuffled.emplace(seed);
    ASSERT_EQ(run_emulated(problem.host()), "");
    std::vector<std::vector<std::byte>> bits;
    const auto& op = problem.host().op;
    for (const attune_tensor& t : {op.dq, op.dk, op.dv, op.dsinks}) bits.push_back(tests::gather(t));
    if (seed == 0) first = bits;
    EXPECT_TRUE(bits == first) << seed;
  }
}

// Several tiles, heads and steps, in two orders of blocks, warps and lanes.
TEST_F(EmulatedBackwardMma, HaveNoRaces) {
  const emulator::Watched watched;
  for (const char* dims : {R"("head_dim": [16, 16], "dtype": "bf16", "sinks": "normal")",
                           R"("head_dim": [99, 72], "dtype": "f32", "mask_bits": 1)"}) {
    for (uint64_t seed = 0; seed <= 1; ++seed) {
      std::optional<emulator::Shuffled> shuffled;
      if (seed > 0) shuffled.emplace(seed);
      const cases::Row row(R"("name": "races", "heads": [4, 2], "causal": true, "seqlens_q": [100, 3],
                              "seqlens_kv": [100, 70], "backward": {"dlse": true})");
      EXPECT_EQ(check(tests::make_case(row.with(dims))), "") << dims;
    }
  }
}

// Of the table what is small: all of it takes minutes (ATTUNE_EMULATE=1).
TEST_F(EmulatedBackwardMma, MatchesTheOracleOnTheTable) {
  check_table(cases::backward_cases(), 60, [](const cases::Case& spec) { return check(spec); });
}

}  // namespace
}  // namespace attune::cuda
