// SPDX-License-Identifier: Apache-2.0
// The kernels of the backward, their own sources, on the CPU (tests/emulator): every gradient against the oracle, with
// poisoned memory, without a GPU.
#include <array>
#include <optional>

#include "emulated_backward.h"

namespace attune::cuda {
namespace {

using backward::Config, backward::Maps;
using tests::EmulatedBackward;

TEST_F(EmulatedBackward, OfUnlikeSequences) {
  EXPECT_EQ(check(R"({"name": "causal", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "causal": true,
                      "seqlens_q": [150, 1, 0, 64, 7], "seqlens_kv": [150, 70, 12, 200, 0],
                      "backward": {"dlse": true}})"),
            "");
}

// Blocks of keys that are not the first of their tiles' windows.
TEST_F(EmulatedBackward, OfWindows) {
  for (const char* dims : {R"("head_dim": [32, 32])", R"("head_dim": [136, 32])", R"("head_dim": [200, 136])"}) {
    for (const char* mask : {R"("causal": true, "window": [100, 0])", R"("window": [40, 60])"}) {
      const cases::Row row(R"("name": "windows", "heads": [2, 1], "dtype": "f16", "seqlens_q": [420, 90],
                              "seqlens_kv": [420, 400], "backward": {"dlse": true})");
      EXPECT_EQ(check(tests::make_case(row.with(dims).with(mask))), "") << dims << mask;
    }
  }
}

// Blocks of a series that begin at different tiles: eight heads take turns. Also without dq, in passes of one gradient,
// and beside a NaN, whose work tiles are flagged in another order.
TEST_F(EmulatedBackward, InTurn) {
  const cases::Row row(R"("name": "turns", "heads": [8, 8], "head_dim": [16, 16], "dtype": "bf16", "causal": true,
                          "seqlens_q": [300, 20], "seqlens_kv": [300, 90], "backward": {})");
  for (const char* members : {"", R"("window": [100, 0])", R"("causal": false, "window": [60, 30])",
                              R"("seqlens_kv": [420, 90], "backward": {"plant": "nan_q"})", R"("plant": "nan_v")",
                              R"("backward": {"outputs": ["dk", "dv"]})", R"("backward": {"outputs": ["dq"]})",
                              R"("head_dim": [200, 136], "seqlens_q": [150, 2], "seqlens_kv": [150, 9])"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Series of blocks of keys that add to the same tiles, in turn (eight heads) and in the order of the keys, and series
// that windows cut.
TEST_F(EmulatedBackward, OfManyBlocksOfKeys) {
  const cases::Row row(R"("name": "series", "heads": [2, 1], "head_dim": [16, 16], "dtype": "bf16",
                          "seqlens_q": [200, 70], "seqlens_kv": [2180, 2100], "backward": {})");
  const cases::Row turns = row.with(R"("heads": [8, 8], "seqlens_q": [70, 70], "seqlens_kv": [2180, 150])");
  for (const char* mask :
       {R"("causal": true)", R"("causal": true, "window": [900, 0])", R"("window": [40, 60])", "",
        R"("causal": true, "ranges": [[100, 1500], [1900, 2100]])", R"("causal": true, "seqused": true)",
        R"("causal": true, "window": [20, 0], "ranges": [[0, 2147483647], []])"}) {
    EXPECT_EQ(check(tests::make_case(row.with(mask))), "") << mask;
    if (*mask == '\0') continue;  // without a mask none takes turns
    EXPECT_EQ(check(tests::make_case(turns.with(mask))), "") << mask << ", in turn";
  }
  EXPECT_EQ(check(tests::make_case(turns.with(R"("causal": true, "head_dim": [136, 40], "seqlens_q": [70, 9])"))), "");
  // Queries of a sequence without keys see none, whatever ranges hold them.
  EXPECT_EQ(check(tests::make_case(row.with(R"("causal": true, "ranges": [[-9, 5], []], "seqlens_kv": [0, 30])"))), "");
}

TEST_F(EmulatedBackward, OfEveryHeadDim) {
  const cases::Row row(R"("name": "dims", "heads": [2, 1], "dtype": "bf16", "causal": true, "seqlens_q": [70, 3],
                          "seqlens_kv": [90, 200], "backward": {})");
  const std::array<int64_t, 2> all[] = {{128, 128}, {8, 40},    {96, 64},  {72, 128}, {192, 128},
                                        {256, 256}, {136, 200}, {40, 160}, {240, 24}};
  for (const auto& [qk, v] : all) {
    EXPECT_EQ(check(tests::make_case(row.set("head_dim", {qk, v}))), "") << qk << ", " << v;
  }
}

// Sinks that leave the keys nearly nothing too, beside dlse; a partial dsinks of each block of queries; many sequences,
// of which a thread adds up one.
TEST_F(EmulatedBackward, OfSinks) {
  const cases::Row row(R"("name": "sinks", "heads": [6, 2], "dtype": "bf16", "causal": true, "sinks": "mixed",
                          "seqlens_q": [300, 0, 1, 129, 20], "seqlens_kv": [300, 5, 70, 140, 3])");
  for (const char* members :
       {R"("head_dim": [64, 64], "backward": {})", R"("head_dim": [64, 64], "backward": {"dlse": true})",
        R"("head_dim": [136, 40], "backward": {"dlse": true}, "dtype": "f16")",
        R"("head_dim": [24, 40], "backward": {"dlse": true, "outputs": ["dv", "dsinks"]}, "window": [70, 0])",
        R"("head_dim": [24, 40], "backward": {"outputs": ["dsinks"]}, "aux_dtype": "bf16")",
        R"("head_dim": [24, 40], "backward": {"outputs": ["dq"]}, "queries": "fixed", "seqlens_q": [150, 150],
           "seqlens_kv": [150, 70])"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < 300; ++b) lengths.push_back(b == 7 ? 200 : b % 3);
  const cases::Row many = row.with(R"("head_dim": [16, 16], "backward": {"outputs": ["dsinks"]})");
  EXPECT_EQ(check(tests::make_case(many.set("seqlens_q", lengths).set("seqlens_kv", lengths))), "");
}

// What a row that sees nothing, or has a NaN, gives to a sink; others of its head stay right.
TEST_F(EmulatedBackward, OfSinksBesideNan) {
  const cases::Row row(R"("name": "bad_sinks", "heads": [6, 1], "head_dim": [24, 40], "dtype": "bf16", "causal": true,
                          "sinks": "mixed", "seqlens_q": [70, 20], "seqlens_kv": [70, 12])");
  for (const char* members :
       {R"("backward": {"plant": "no_lse"})", R"("backward": {"dlse": true, "plant": "no_lse"})",
        R"("backward": {"plant": "inf_dout"})", R"("backward": {"dlse": true, "plant": "inf_dout"})",
        R"("backward": {"dlse": true, "plant": "nan_q"})", R"("backward": {"dlse": true}, "plant": "nan_v")",
        // The planted row's sink is an infinity.
        R"("heads": [10, 1], "seqlens_q": [9], "seqlens_kv": [9], "backward": {"plant": "inf_dout"})"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Slopes of nearly nothing, and scores that are small beside the cap.
TEST_F(EmulatedBackward, OfSoftcaps) {
  const cases::Row row(R"("name": "softcap", "heads": [4, 2], "dtype": "bf16", "causal": true,
                          "seqlens_q": [140, 0, 1, 20], "seqlens_kv": [140, 5, 70, 12])");
  for (const char* members :
       {R"("softcap": 2.5, "head_dim": [64, 64], "backward": {"dlse": true})",
        R"("softcap": 50, "head_dim": [128, 128], "backward": {})",
        R"("softcap": 0.4, "head_dim": [64, 24], "backward": {}, "window": [50, 0], "dtype": "f16")",
        R"("softcap": 3, "softmax_scale": -1.5, "head_dim": [136, 40], "backward": {}, "causal": false)",
        R"("softcap": 3, "head_dim": [16, 40], "backward": {"dlse": true}, "sinks": "mixed")",
        R"("softcap": 3, "head_dim": [16, 16], "backward": {}, "plant": "nan_v")",
        R"("softcap": 0.3, "head_dim": [16, 16], "backward": {"plant": "nan_q"}, "sinks": "normal")"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Distances in both directions, of every query head of a block's keys and of slopes of each sequence.
TEST_F(EmulatedBackward, OfAlibi) {
  const cases::Row row(R"("name": "alibi", "heads": [4, 2], "dtype": "bf16", "causal": true, "alibi": 1,
                          "seqlens_q": [140, 0, 1, 20], "seqlens_kv": [140, 5, 70, 12])");
  for (const char* members :
       {R"("head_dim": [64, 64], "backward": {"dlse": true})",
        R"("head_dim": [136, 40], "backward": {}, "alibi": 2, "causal": false)",
        R"("head_dim": [40, 24], "backward": {}, "alibi_negative": true, "window": [50, 9], "causal": false)",
        R"("head_dim": [16, 40], "backward": {"dlse": true}, "sinks": "mixed", "softcap": 3, "dtype": "f16")",
        R"("head_dim": [64, 64], "backward": {"dlse": true}, "alibi_sqrt": true, "causal": false)",
        R"("head_dim": [136, 40], "backward": {}, "alibi": 2, "alibi_sqrt": true, "alibi_negative": true)",
        R"("head_dim": [16, 16], "backward": {}, "plant": "nan_v", "alibi": 2)",
        R"("head_dim": [16, 16], "backward": {}, "plant": "nan_v", "alibi_sqrt": true, "softcap": 3)"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Of every head or of all, beside windows; what they do not cover passes; and a NaN that they hide.
TEST_F(EmulatedBackward, OfMasksByBits) {
  const cases::Row row(R"("name": "bits", "heads": [4, 2], "dtype": "bf16", "seqlens_q": [140, 0, 1, 90],
                          "seqlens_kv": [140, 5, 70, 200])");
  for (
      const char* members :
      {R"("head_dim": [64, 64], "mask_bits": 1, "backward": {"dlse": true})",
       R"("head_dim": [136, 40], "mask_bits": 2, "causal": true, "backward": {})",
       R"("head_dim": [200, 136], "mask_bits": 2, "window": [50, 9], "dtype": "f16", "backward": {})",
       R"("head_dim": [24, 40], "mask_bits": 2, "mask_start": 20, "mask_keys": 64, "queries": "fixed",
           "seqlens_q": [70, 70], "seqlens_kv": [130, 90], "backward": {})",
       R"("head_dim": [16, 40], "mask_bits": 2, "sinks": "mixed", "softcap": 3, "alibi": 1, "backward": {"dlse": true})",
       R"("head_dim": [16, 16], "mask_bits": 1, "plant": "nan_v", "backward": {})",
       R"("head_dim": [16, 16], "mask_bits": 2, "causal": true, "backward": {"plant": "nan_q"})"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Ranges that reach over blocks of keys and tiles, overlap, and end beyond the sequence; of queries before all keys,
// with keys and without; beside windows, where blocks between a range and a window have tiles that only later queries
// see.
TEST_F(EmulatedBackward, OfRanges) {
  const cases::Row row(R"("name": "ranges", "heads": [2, 1], "dtype": "bf16", "seqlens_q": [300, 90, 100],
                          "seqlens_kv": [300, 290, 20], "ranges": [[3, 200, 190, 250, 7, 7], [200, 280, 20, 400],
                          [-80, -30, -9, 5, 9, 2]])");
  for (const char* members :
       {R"("head_dim": [64, 64], "causal": true, "backward": {"dlse": true})",
        R"("head_dim": [64, 64], "window": [20, 0], "backward": {})",
        R"("head_dim": [136, 40], "window": [30, 3], "backward": {})",
        R"("head_dim": [200, 136], "window": [0, 0], "dtype": "f16", "backward": {})",
        R"("head_dim": [24, 24], "window": [9, 0], "seqused": true, "seqlens_kv": [270, 250, 18], "backward": {})",
        R"("head_dim": [24, 40], "causal": true, "mask_bits": 2, "sinks": "mixed", "backward": {"dlse": true})",
        R"("head_dim": [16, 16], "causal": true, "plant": "nan_v", "backward": {})",
        R"("head_dim": [16, 16], "window": [9, 0], "mask_bits": 1, "backward": {"plant": "nan_q"})"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

TEST_F(EmulatedBackward, ARunHasNoMoreMasksThanItsPlan) {
  const cases::Row row(R"("name": "plan", "heads": [1, 1], "head_dim": [16, 16], "dtype": "bf16", "causal": true,
                          "seqlens_q": [9], "seqlens_kv": [9], "backward": {})");
  const cases::Row ranges = row.with(R"("ranges": [[2, 8]])");
  const auto run_with = [&](const cases::Row& planned, const cases::Row& run) {
    cases::BackwardProblem of_plan(tests::make_case(planned)), problem(tests::make_case(run));
    cases::BackwardCall call = of_plan.host();
    const Config plan = backward::choose_config(make_backward(*call.linked(), call.attention, Data::kRequired));
    return cases::run_and_check(problem, [&](const cases::BackwardCall& c) { return run_emulated(c, &plan); }).failure;
  };
  EXPECT_EQ(run_with(ranges, row), "");
  EXPECT_EQ(run_with(row, ranges), "bidirectional_ranges.shape[1] is 1; the plan was made for 0");
}

// Of positions and heads, of all of them, of new tokens with -inf, which hides a NaN; and of T5's buckets.
TEST_F(EmulatedBackward, OfBiases) {
  const cases::Row row(R"("name": "biases", "heads": [4, 2], "dtype": "bf16", "seqlens_q": [100, 0, 1, 20],
                          "seqlens_kv": [140, 5, 70, 12], "backward": {"outputs": ["dq", "dk", "dv"]})");
  for (const char* members :
       {R"("head_dim": [64, 64], "bias": 2)",
        R"("head_dim": [136, 40], "bias": 1, "causal": true, "aux_dtype": "bf16")",
        R"("head_dim": [200, 136], "t5_buckets": 16, "t5_bidirectional": true, "dtype": "f16")",
        R"("head_dim": [24, 40], "new_token_bias": true, "t5_buckets": 32, "causal": true)",
        R"("head_dim": [16, 40], "bias": 2, "softcap": 3, "sinks": "mixed", "alibi": 1, "mask_bits": 1)",
        R"("head_dim": [16, 16], "new_token_bias": true, "causal": true, "plant": "nan_v")"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Rows of out may lie anywhere: no TMA copies them.
TEST_F(EmulatedBackward, OfOutsThatTakeNoVectors) {
  for (const char* sinks : {R"("sinks": "mixed")", R"("causal": true)"}) {
    const cases::Row row(
        R"("name": "out", "heads": [6, 2], "head_dim": [16, 40], "dtype": "bf16", "seqlens_q": [140, 3],
                            "seqlens_kv": [90, 70], "backward": {"dlse": true})");
    cases::BackwardProblem problem(tests::make_case(row.with(sinks)));
    std::vector<std::byte> moved = tests::gather(problem.host().attention.out);
    moved.insert(moved.begin(), 2, std::byte{});
    const auto run = [&](cases::BackwardCall call) {
      call.attention.out.data = moved.data() + 2;
      return run_emulated(call);
    };
    EXPECT_EQ(cases::run_and_check(problem, run).failure, "") << sinks;
  }
}

// Sequences are listed in any order; partial dsinks are added in one.
TEST_F(EmulatedBackward, DsinksHaveTheSameBits) {
  cases::BackwardProblem problem(
      tests::make_case(R"({"name": "bits", "heads": [3, 1], "head_dim": [16, 16], "dtype": "bf16", "causal": true,
          "sinks": "normal", "seqlens_q": [140, 150, 131, 5, 200, 139], "seqlens_kv": [140, 150, 131, 5, 200, 139],
          "backward": {"outputs": ["dsinks"]}})"));
  std::vector<std::byte> first;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    std::optional<emulator::Shuffled> shuffled;
    if (seed > 0) shuffled.emplace(seed);
    ASSERT_EQ(run_emulated(problem.host()), "");
    const std::vector<std::byte> bits = tests::gather(problem.host().op.dsinks);
    if (seed == 0) first = bits;
    EXPECT_TRUE(bits == first) << seed;
  }
}

// dlse beside sinks makes other kernels: a plan without it refuses it, one with it takes a run without.
TEST_F(EmulatedBackward, DlseBesideSinksIsAsInThePlan) {
  const cases::Row row(R"("name": "plan", "heads": [2, 1], "head_dim": [16, 16], "dtype": "bf16", "seqlens_q": [9],
                          "seqlens_kv": [9])");
  const auto run_with = [&](const char* planned, const char* members) {
    cases::BackwardProblem of_plan(tests::make_case(row.with(planned))), problem(tests::make_case(row.with(members)));
    cases::BackwardCall call = of_plan.host();
    const Config plan = backward::choose_config(make_backward(*call.linked(), call.attention, Data::kRequired));
    return cases::run_and_check(problem, [&](const cases::BackwardCall& c) { return run_emulated(c, &plan); }).failure;
  };
  const char *const sinks = R"("sinks": "normal", "backward": {})",
                    *const both = R"("sinks": "normal", "backward": {"dlse": true})";
  EXPECT_EQ(run_with(both, sinks), "");
  EXPECT_EQ(run_with(R"("backward": {})", R"("backward": {"dlse": true})"), "");
  EXPECT_EQ(run_with(sinks, both),
            "attention_backward differs from its plan: dlse is given, but was absent; beside sinks it changes the "
            "kernels");
}

TEST_F(EmulatedBackward, APlanTakesFewerSequencesOfMoreKeys) {
  const cases::Row row(R"("name": "plan", "heads": [1, 1], "head_dim": [16, 16], "dtype": "bf16", "queries": "fixed",
                          "seqlens_q": 9, "backward": {})");
  cases::BackwardProblem larger(tests::make_case(row.with(R"("batch": 8, "seqlens_kv": 128)")));
  cases::BackwardCall call = larger.host();
  const Config plan = backward::choose_config(make_backward(*call.linked(), call.attention, Data::kRequired));
  cases::BackwardProblem problem(tests::make_case(row.with(R"("batch": 7, "seqlens_kv": 146)")));
  EXPECT_EQ(cases::run_and_check(problem, [&](const cases::BackwardCall& c) { return run_emulated(c, &plan); }).failure,
            "");
}

// Sequences that overlap have more tiles than are listed. Whatever the workspace held, no block waits for ever.
TEST_F(EmulatedBackward, WrongOffsetsEnd) {
  cases::BackwardProblem problem(tests::make_case(
      R"({"name": "overlap", "heads": [1, 1], "head_dim": [16, 16], "dtype": "bf16", "seqlens_q": [512, 0, 0],
          "seqlens_kv": [130, 0, 130], "backward": {}})"));
  auto* const offsets = static_cast<int32_t*>(problem.host().attention.cu_seqlens_q.data);
  offsets[2] = 0;
  offsets[3] = 512;
  EXPECT_EQ(run_emulated(problem.host(), nullptr, 0xff), "");
}

// Rows of a neighbour that see nothing may hold anything, and lie in the tiles of the sequence before.
TEST_F(EmulatedBackward, ASequenceHasItsBitsBesideNan) {
  for (const char* dims : {R"("head_dim": [64, 64])", R"("head_dim": [192, 128])", R"("head_dim": [200, 136])"}) {
    const cases::Row row(R"("name": "beside", "heads": [2, 1], "dtype": "bf16", "causal": true, "backward": {},
                            "seqlens_q": [70, 30], "seqlens_kv": [70, 30], "seqused": true)");
    cases::BackwardProblem problem(tests::make_case(row.with(dims)));
    const auto gradients = [&] {
      EXPECT_EQ(run_emulated(problem.host()), "");
      std::vector<std::vector<std::byte>> bits;
      const cases::BackwardCall call = problem.host();
      for (const attune_tensor& t : {call.op.dq, call.op.dk, call.op.dv})
        bits.push_back(tests::gather(tests::rows_of(t, 0, 70)));
      return bits;
    };
    const auto alone = gradients();
    ASSERT_TRUE(problem.use_fewer_keys([](int64_t b, int64_t keys) { return b == 0 ? keys : 10; }));
    EXPECT_TRUE(alone == gradients()) << dims;
  }
}

// A block waits for those of its sequence that the list has before it. Of many sequences a thread has each, else a
// warp.
// In the order of the keys; with eight heads series after series, each from its last block to its first.
TEST_F(EmulatedBackward, TheListHasTheBlocksOfASequenceInTheirOrder) {
  constexpr int kSeriesInTurn = 16;  // backward/rows.cuh
  for (const int heads : {1, 8}) {
    for (const int batch : {3, 1100}) {
      std::vector<int64_t> lengths;
      const int64_t below = heads == 1 ? 700 : 250;
      for (int64_t b = 0; b < batch; ++b) lengths.push_back(batch == 3 ? 5000 - 2400 * b : b * 37 % below);
      const cases::Row row(R"("name": "list", "head_dim": [8, 8], "dtype": "bf16", "causal": true, "backward": {},
                              "poison": false)");
      cases::BackwardProblem problem(
          tests::make_case(row.set("heads", {heads, heads}).set("seqlens_q", lengths).set("seqlens_kv", lengths)),
          cases::host_memory(), cases::Forward::kLibrary);  // the list is of lengths alone
      cases::BackwardCall call = problem.host();
      const attune::BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kRequired);
      const Config c = backward::choose_config(p);
      cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
      const kernels::BackwardParams params = backward::to_params(p, c, workspace.buffer.device());
      launch(backward::launches(c)[0], params);
      const auto* const tiles = reinterpret_cast<const kernels::BackwardTile*>(params.kv_list + 1);
      const auto blocks_of = [&](size_t b) {
        return static_cast<int>((lengths[b] + kernels::kBackwardRows - 1) / kernels::kBackwardRows);
      };
      std::vector<int> seen(static_cast<size_t>(batch), 0);  // blocks
      for (int i = 0; i < params.kv_list->num_tiles; ++i) {
        const auto b = static_cast<size_t>(tiles[i].batch);
        const int lowest = seen[b] / kSeriesInTurn * kSeriesInTurn;
        const int highest = std::min(lowest + kSeriesInTurn, blocks_of(b)) - 1;
        const int block = heads == 1 ? seen[b] : highest - (seen[b] - lowest);
        ASSERT_EQ(tiles[i].begin, block * kernels::kBackwardRows) << "sequence " << b << " of " << batch;
        ++seen[b];
      }
      for (size_t b = 0; b < seen.size(); ++b) EXPECT_EQ(seen[b], blocks_of(b)) << "sequence " << b << " of " << batch;
      EXPECT_EQ(params.kv_list->next, 0u);
    }
  }
}

// Several tiles, heads and stages, in two orders of blocks, warps and lanes; blocks that wait for each other.
TEST_F(EmulatedBackward, HaveNoRaces) {
  const emulator::Watched watched;
  for (const char* dims : {R"("head_dim": [64, 64])", R"("head_dim": [144, 80], "softcap": 3, "sinks": "normal")",
                           R"("head_dim": [200, 136], "sinks": "normal")",
                           R"("head_dim": [24, 24], "mask_bits": 1, "ranges": [[3, 200], []])"}) {
    for (uint64_t seed = 0; seed <= 1; ++seed) {
      std::optional<emulator::Shuffled> shuffled;
      if (seed > 0) shuffled.emplace(seed);
      const cases::Row row(R"("name": "races", "heads": [4, 2], "dtype": "bf16", "causal": true,
                              "seqlens_q": [300, 3], "seqlens_kv": [300, 70], "backward": {"dlse": true})");
      EXPECT_EQ(check(tests::make_case(row.with(dims))), "") << dims;
    }
  }
}

// A side without rows may have no address, as empty tensors of torch; the driver makes no map of that.
TEST_F(EmulatedBackward, MapsOfNoRowsHaveAnAddress) {
  for (const bool no_queries : {true, false}) {
    cases::BackwardProblem problem(tests::make_case(
        cases::Row(R"("name": "x", "heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "backward": {})")
            .with(no_queries ? R"("seqlens_q": [0], "seqlens_kv": [5])" : R"("seqlens_q": [5], "seqlens_kv": [0])")));
    cases::BackwardCall call = problem.host();
    attune::BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kOptional);
    for (RowView* const v : {&p.forward.q, &p.dout, &p.forward.k, &p.forward.v}) {
      if ((v == &p.forward.q || v == &p.dout) == no_queries) v->data = nullptr;
    }
    const Maps m = backward::describe_maps(p, backward::choose_config(p), kernels::kGradients);
    for (const TensorMapDesc& map : {m.resident_qk, m.resident_vdo, m.qk, m.vdo})
      EXPECT_NO_THROW(check_tensor_map(map));
  }
}

// Sinks whose gradient is not wanted: their sums take no workspace.
TEST_F(EmulatedBackward, OfSinksWithoutTheirGradient) {
  cases::Case spec = tests::make_case(R"({"name": "backward", "heads": [8, 1], "head_dim": [64, 64], "dtype": "bf16",
      "kv": "dense", "queries": "fixed", "sinks": "mixed", "backward": {"outputs": ["dq"]}})");
  spec.seqlens_q.assign(100, 60);
  spec.seqlens_kv = spec.seqlens_q;
  EXPECT_EQ(check(spec), "");
}

// As attune check --stress draws them for a GPU, small; with the bounds of a GPU.
TEST_F(EmulatedBackward, OfServingBatches) {
  const char* const more = std::getenv("ATTUNE_EMULATE");
  int covered = 0;
  for (uint64_t index = 0; covered < (more != nullptr ? 200 : 12); ++index) {
    const cases::Case spec = cases::serving_case(6, index, 64, more != nullptr && index % 3 == 0 ? 500 : 150);
    if (!spec.backward.on || !is_covered(spec)) continue;
    ++covered;
    ASSERT_EQ(check(spec), "") << spec.name;
  }
}

// --stress plans a batch, then runs it: what a plan takes must not be refused by the address of an array.
TEST_F(EmulatedBackward, OfServingBatchesNoneIsRefusedByItsAddress) {
  int odd = 0;
  for (uint64_t index = 0; index < 3000; ++index) {
    const cases::Case spec = cases::serving_case(6, index, 64, 64);
    if (!spec.backward.on || spec.strides != cases::StrideMode::kOdd) continue;
    ++odd;
    if (!is_covered(spec)) continue;
    cases::BackwardProblem problem(spec);
    cases::BackwardCall call = problem.device();
    const attune::BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kRequired);
    EXPECT_NO_THROW(backward::check_run(p, backward::choose_config(p))) << spec.name;
  }
  EXPECT_GT(odd, 10);
}

// Of the table what is small: all of it takes minutes (ATTUNE_EMULATE=1).
TEST_F(EmulatedBackward, MatchesTheOracleOnTheTable) {
  check_table(cases::backward_cases(), 45, [](const cases::Case& spec) { return check(spec); });
}

}  // namespace
}  // namespace attune::cuda
