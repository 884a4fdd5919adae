// SPDX-License-Identifier: Apache-2.0
// What attune check --stress draws of the backward, and what it sees of it.
#include <algorithm>
#include <map>
#include <utility>

#include "cases/backward_problem.h"
#include "cases/stress.h"
#include "support.h"

namespace attune::tests {
namespace {

using cases::BackwardProblem;
using cases::Case;

std::vector<Case> drawn(uint64_t count) {
  std::vector<Case> list;
  for (uint64_t index = 0; list.size() < count; ++index) {
    Case c = cases::serving_case(3, index, 64, 20000);
    if (c.backward.on) list.push_back(std::move(c));
  }
  return list;
}

TEST(StressBackward, DrawsTheWholeTable) {
  std::map<std::string, int> seen;
  for (const Case& c : drawn(1500)) {
    const auto count = [&](bool is, const std::string& what) { seen[what] += is ? 1 : 0; };
    for (const attune_dtype dtype : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16})
      count(c.dtype == dtype, cases::short_name(dtype));
    count(c.backward.dtype != ATTUNE_DTYPE_NONE && c.dtype != ATTUNE_FLOAT32, "gradients of fp32");
    count(c.num_heads_q > c.num_heads_kv, "groups");
    count(c.num_heads_q == c.num_heads_kv, "no groups");
    count(c.head_dim_qk > 128, "wide heads");
    count(c.head_dim_qk % 8 != 0, "odd heads");
    count(c.head_dim_qk != c.head_dim_v, "unlike heads");
    // What takes_turns() of kernels/backward/rows.cuh asks.
    const bool both_ends = c.causal || (c.window_left >= 0 && c.window_right >= 0);
    count(both_ends && c.num_heads_kv >= 8 && c.num_heads_q == c.num_heads_kv && c.dtype != ATTUNE_FLOAT32, "in turn");
    count(c.causal, "causal");
    count(!c.causal && c.window_left < 0 && c.window_right < 0, "full");
    count(c.window_left >= 0, "window_left");
    count(c.window_right >= 0, "window_right");
    count(c.mask_bits > 0, "mask_bits");
    count(!c.ranges.empty(), "ranges");
    count(c.softcap > 0, "softcap");
    count(c.alibi > 0, "alibi");
    count(c.bias > 0, "bias");
    count(c.new_token_bias, "new_token_bias");
    count(c.t5_buckets > 0, "t5");
    count(!c.sinks.empty(), "sinks");
    count(c.backward.dlse, "dlse");
    count(c.queries == cases::QueryShape::kFixed, "fixed");
    for (const auto& [mode, name] : {std::pair{cases::StrideMode::kDense, "dense"},
                                     {cases::StrideMode::kOdd, "odd"},
                                     {cases::StrideMode::kTransposed, "transposed"},
                                     {cases::StrideMode::kPacked, "packed"}})
      count(c.strides == mode, name);
    count(c.seqused, "seqused");
    count(c.batch_invariant, "batch_invariant");
    count(c.max_seqlens, "max_seqlens");
    count(!c.plant.empty() || !c.backward.plant.empty(), "plant");
    count(c.seqlens_q == c.seqlens_kv, "self");
    count(c.seqlens_q != c.seqlens_kv, "cross");
    count(c.batch() >= 100, "hundreds of sequences");
    count(c.max_seqlen_q() >= 1000, "thousands of queries");
    count(std::find(c.seqlens_q.begin(), c.seqlens_q.end(), 0) != c.seqlens_q.end(), "empty sequences");
    if (c.backward.outputs.size() == 1) count(true, "alone: " + c.backward.outputs.front());
    count(c.backward.outputs.size() == 2, "two outputs");
    count(c.backward.outputs.empty(), "all outputs");
  }
  EXPECT_EQ(seen.size(), 45u);  // six outputs alone
  for (const auto& [what, times] : seen) EXPECT_GE(times, what.starts_with("alone: d") ? 3 : 25) << what;
}

Case large() {
  return make_case(R"({"name": "large", "heads": [4, 2], "head_dim": [64, 40], "dtype": "bf16", "causal": true,
      "seqlens_q": [500, 1, 90], "seqlens_kv": [700, 30, 90], "sinks": "normal", "backward": {"dlse": true}})");
}

TEST(StressBackward, ASampleSaysWhatTheWholeSays) {
  const BackwardProblem problem(large(), cases::host_memory(), cases::Forward::kLibrary);
  const cases::ExpectedGradients whole = evaluate(problem), sample = evaluate_sample(problem, 20);
  ASSERT_FALSE(whole.sample);
  ASSERT_TRUE(sample.sample);
  int64_t rows = 0;
  const auto expect = [&](const reference::Gradient& all, const reference::Gradient& some,
                          const std::vector<bool>& known) {
    const size_t dim = all.value.size() / known.size();
    for (size_t row = 0; row < known.size(); ++row) {
      if (!known[row]) continue;
      ++rows;
      for (size_t at = row * dim; at < (row + 1) * dim; ++at) {
        ASSERT_EQ(some.value[at], all.value[at]) << at;
        ASSERT_EQ(some.parts[at], all.parts[at]) << at;
      }
    }
  };
  expect(whole.exact.dq, sample.exact.dq, sample.sample->q);
  expect(whole.exact.dk, sample.exact.dk, sample.sample->kv);
  expect(whole.exact.dv, sample.exact.dv, sample.sample->kv);
  EXPECT_GT(rows, 40);
  EXPECT_EQ(whole.exact.dsinks.value, sample.exact.dsinks.value);
}

// A row outside of the sample that is left as it was, and one byte of an input.
TEST(StressBackward, WhatIsNotWrittenIsSeen) {
  BackwardProblem problem(large(), cases::host_memory(), cases::Forward::kLibrary);
  const cases::ExpectedGradients sample = evaluate_sample(problem, 20);
  ASSERT_EQ(cases::run(problem.device(), cases::host_memory()), "");
  EXPECT_EQ(compare(problem, sample).failure, "");
  const cases::BackwardCall call = problem.device();
  for (const auto& [name, t, known] :
       {std::tuple{"dq", call.op.dq, &sample.sample->q}, {"dk", call.op.dk, &sample.sample->kv}}) {
    const auto at = std::find(known->begin(), known->end(), false) - known->begin();
    auto* element = static_cast<uint16_t*>(cases::element_at(t, {at / t.shape[1], at % t.shape[1], t.shape[2] - 1}));
    const uint16_t before = std::exchange(*element, uint16_t{0xffff});
    EXPECT_NE(compare(problem, sample).failure.find("was not written"), std::string::npos) << name;
    *element = before;
  }
  static_cast<std::byte*>(call.attention.k.data)[11] ^= std::byte{1};
  EXPECT_EQ(compare(problem, sample).failure.find("byte 11 of \"k\" was changed"), 0u);
}

// Fewer keys of some sequences: the others keep what they had, and what rows see of fewer keys is made anew.
TEST(StressBackward, FewerKeysAreAnotherProblemInTheSameBuffers) {
  Case spec = large();
  spec.seqused = spec.batch_invariant = true;
  BackwardProblem problem(spec, cases::host_memory(), cases::Forward::kLibrary);
  const attune_attention& a = problem.host().attention;
  const auto bytes_of = [&](const attune_tensor& t, int64_t row) {
    const auto* first = static_cast<const std::byte*>(cases::element_at(t, {row, 0}));
    const auto size = cases::element_size(static_cast<attune_dtype>(t.dtype)) * t.stride[0];
    return std::vector<std::byte>(first, first + size);
  };
  const auto of_first = [&] {
    std::vector<std::vector<std::byte>> all;
    for (const attune_tensor& t : {a.q, a.out, a.lse, problem.host().op.dout, problem.host().op.dlse})
      all.push_back(bytes_of(t, 40));
    return all;
  };
  const auto last_lse = [&] { return cases::decode(ATTUNE_FLOAT32, cases::element_at(a.lse, {590, 0})); };
  const auto before = of_first();
  const double lse = last_lse();
  ASSERT_TRUE(problem.use_fewer_keys([](int64_t b, int64_t keys) { return b == 2 ? 70 : keys; }));
  EXPECT_EQ(of_first(), before);
  EXPECT_NE(last_lse(), lse);
  EXPECT_TRUE(std::isinf(cases::decode(ATTUNE_FLOAT32, cases::element_at(a.lse, {501, 0}))));  // 90 queries of 70 keys
  EXPECT_TRUE(std::isnan(cases::decode(ATTUNE_BFLOAT16, cases::element_at(a.q, {501, 0, 0}))));
  EXPECT_EQ(run_and_check(problem).failure, "");
  // What a window hides would show.
  spec.window_left = 100;
  BackwardProblem windowed(spec, cases::host_memory(), cases::Forward::kLibrary);
  EXPECT_FALSE(windowed.use_fewer_keys([](int64_t, int64_t keys) { return keys; }));
}

}  // namespace
}  // namespace attune::tests
