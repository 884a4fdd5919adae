// SPDX-License-Identifier: Apache-2.0
// The oracle's prologue and rope frequencies.
#include <numbers>

#include "reference_support.h"

namespace attune::reference_tests {
namespace {

using reference::Prepared;
using reference::qkv_prepare;
using reference::rope_frequencies;

constexpr double kPi = std::numbers::pi;

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-12) << i;
}

attune_qkv_prepare one_token(Store& store, const std::vector<float>& values) {
  attune_qkv_prepare op{};
  op.struct_size = sizeof(op);
  op.q = op.k = op.v = store.floats({1, 1, static_cast<int64_t>(values.size())}, values);
  return op;
}

// A table whose position p turns pair j by a quarter (p + j) times.
attune_tensor quarter_turns(Store& store, int64_t positions, int64_t width) {
  const float cosine[] = {1, 0, -1, 0}, sine[] = {0, 1, 0, -1};
  std::vector<float> values;
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t j = 0; j < width / 2; ++j) values.push_back(cosine[(p + j) % 4]);
    for (int64_t j = 0; j < width / 2; ++j) values.push_back(sine[(p + j) % 4]);
  }
  return store.floats({positions, width}, values);
}

TEST(ReferencePrologue, OrderOfTheSteps) {
  Store store;
  attune_qkv_prepare op = one_token(store, {0, 0});
  op.q = op.k = op.v = store.add({1, 1, 2}, std::vector<int8_t>{10, 20});
  op.seqused_kv = store.ints({3});
  attune_prologue& p = op.prologue;
  p.qkv_scale = store.floats({3}, {0.5f, 0.25f, 2});
  p.q_bias = store.floats({1, 2}, {1, 2});
  p.k_bias = store.floats({1, 2}, {3, 4});
  p.v_bias = store.floats({1, 2}, {5, 6});
  p.ia3_k = store.floats({2, 1, 2}, {9, 9, 2, 3});
  p.ia3_v = store.floats({2, 1, 2}, {9, 9, 4, 5});
  p.ia3_task = store.ints({1});
  p.rope_cos_sin = quarter_turns(store, 4, 2);  // position 3: (x, y) -> (y, -x)
  p.logn = store.floats({2}, {7, 10});
  const Prepared prepared = qkv_prepare(op);
  expect_near(prepared.q, {(10 + 2) * 10.0, -(5 + 1) * 10.0});
  expect_near(prepared.k, {(5 + 4) * 3, -(2.5 + 3) * 2});
  expect_near(prepared.v, {(20 + 5) * 4, (40 + 6) * 5});
  p.ia3_task = store.ints({2});  // no such task
  expect_near(qkv_prepare(op).v, {25, 46});
  p.ia3_task = {};
  expect_near(qkv_prepare(op).v, {25 * 9, 46 * 9});
}

TEST(ReferencePrologue, ScalesAreForEightBitsOnly) {
  Store store;
  attune_qkv_prepare op = one_token(store, {1, 2});
  op.prologue.qkv_scale = store.floats({3}, {2, 2, 2});
  op.k = store.add({1, 1, 2}, std::vector<uint8_t>{0x38, 0x40}, ATTUNE_FLOAT8_E4M3);
  const Prepared prepared = qkv_prepare(op);
  expect_near(prepared.q, {1, 2});
  expect_near(prepared.k, {2, 4});
  op.prologue.qkv_scale = {};
  expect_near(qkv_prepare(op).k, {1, 2});
}

TEST(ReferencePrologue, PairsOfRope) {
  Store store;
  attune_qkv_prepare op = one_token(store, {1, 2, 3, 4, 5, 6});
  op.seqused_kv = store.ints({1});
  op.prologue.rope_cos_sin = quarter_turns(store, 3, 4);  // pair 0 by 1 quarter, pair 1 by 2
  expect_near(qkv_prepare(op).q, {-3, -2, 1, -4, 5, 6});
  expect_near(qkv_prepare(op).v, {1, 2, 3, 4, 5, 6});
  op.prologue.rope_offset = 2;
  expect_near(qkv_prepare(op).k, {1, 2, -5, -4, 3, -6});
  op.prologue.rope_interleaved = 1;
  expect_near(qkv_prepare(op).q, {1, 2, -4, 3, -5, -6});
  op.prologue.rope_offset = 0;
  expect_near(qkv_prepare(op).q, {-2, 1, -3, -4, 5, 6});
  // Positions and tables outside: no rotation.
  op.seqused_kv = store.ints({3});
  expect_near(qkv_prepare(op).q, {1, 2, 3, 4, 5, 6});
  op.prologue.positions = store.ints({0});  // 0 is a position like any other: pair 1 turns by 1 quarter
  expect_near(qkv_prepare(op).q, {1, 2, -4, 3, 5, 6});
  op.prologue.positions = store.ints({-1});
  expect_near(qkv_prepare(op).q, {1, 2, 3, 4, 5, 6});
  op.prologue.positions = store.ints({1});
  op.prologue.rope_table_index = store.ints({1});
  expect_near(qkv_prepare(op).q, {1, 2, 3, 4, 5, 6});
  std::vector<float> tables(2 * 2 * 4, 0);
  tables[12] = 2, tables[13] = 3;  // cosines of position 1 in table 1
  op.prologue.rope_cos_sin = store.floats({2, 2, 4}, tables);
  expect_near(qkv_prepare(op).q, {2, 4, 9, 12, 5, 6});
}

TEST(ReferencePrologue, SectionsOfMrope) {
  Store store;
  // Position p multiplies by p: what comes out names the component of each pair.
  std::vector<float> values;
  for (int p = 0; p < 4; ++p) {
    for (int j = 0; j < 14; ++j) values.push_back(j < 7 ? static_cast<float>(p) : 0.0f);
  }
  attune_qkv_prepare op = one_token(store, std::vector<float>(14, 1));
  op.prologue.rope_cos_sin = store.floats({4, 14}, values);
  op.prologue.positions = store.add({1, 3}, std::vector<int32_t>{1, 2, 3});
  op.prologue.mrope_section[0] = 1, op.prologue.mrope_section[1] = 2, op.prologue.mrope_section[2] = 1;
  expect_near(qkv_prepare(op).q, {1, 2, 2, 3, 1, 2, 2, 1, 2, 2, 3, 1, 2, 2});
  op.prologue.mrope_interleaved = 1;  // j % 3 == 1 below 6, j % 3 == 2 below 3
  expect_near(qkv_prepare(op).q, {1, 2, 3, 1, 2, 1, 1, 1, 2, 3, 1, 2, 1, 1});
}

TEST(ReferencePrologue, Logn) {
  Store store;
  attune_qkv_prepare op = one_token(store, {1});
  op.prologue.logn = store.floats({3}, {2, 3, 4});
  for (const auto& [position, factor] : {std::pair{0, 2.0}, std::pair{2, 4.0}, std::pair{9, 4.0}}) {
    op.seqused_kv = store.ints({position});
    expect_near(qkv_prepare(op).q, {factor});
    expect_near(qkv_prepare(op).k, {1});
  }
}

TEST(ReferencePrologue, RowsOfSequences) {
  Store store;
  attune_qkv_prepare op{};
  op.k = store.filled({4, 1, 1}, 1);
  op.cu_seqlens_q = store.ints({0, 2, 3});
  op.seqused_kv = store.ints({1, 5});
  op.finished = store.add({2}, std::vector<uint8_t>{0, 1});
  op.cache.k = store.filled({2, 4, 1, 1}, 0);
  op.prologue.append = 1;
  const Prepared prepared = qkv_prepare(op);
  EXPECT_EQ(prepared.written, (std::vector<bool>{true, true, false, false}));
  EXPECT_TRUE(prepared.q.empty());
  expect_near(prepared.k, {1, 1, 0, 0});
  const std::vector<reference::CacheWrite> writes = reference::appended(op);
  ASSERT_EQ(writes.size(), 2u);
  EXPECT_EQ(writes[0].slot, 1);
  EXPECT_EQ(writes[1].slot, 2);
  EXPECT_TRUE(writes[0].v.empty());  // V is part of K
}

TEST(ReferencePrologue, AttentionAppliesItToNewTokensOnly) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.filled({1, 1, 1}, 1);
  a.cache.k = store.floats({1, 2, 1, 1}, {2, kNaN});
  a.cache.v = store.floats({1, 2, 1, 1}, {3, kNaN});
  a.seqused_kv = store.ints({1});
  a.k = store.filled({1, 1, 1}, 1);
  a.v = store.filled({1, 1, 1}, 10);
  a.prologue.q_bias = store.filled({1, 1}, 1);
  a.prologue.k_bias = store.filled({1, 1}, 3);
  a.prologue.v_bias = store.filled({1, 1}, 5);
  a.prologue.append = 1;
  const reference::RowResult row = reference::attention(a)[0];
  // Scores 2 * 2 and 2 * (1 + 3), values 3 and 10 + 5.
  EXPECT_NEAR(row.out[0], (3 + 15 * std::exp(4.0)) / (1 + std::exp(4.0)), 1e-12);
  const std::vector<reference::CacheWrite> writes = reference::appended(a);
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_EQ(writes[0].k, std::vector<double>{4});
  EXPECT_EQ(writes[0].v, std::vector<double>{15});
  // V as the first columns of the prepared K.
  a.cache.v = a.v = a.prologue.v_bias = {};
  a.head_dim_v = 1;
  EXPECT_NEAR(reference::attention(a)[0].out[0], (2 + 4 * std::exp(4.0)) / (1 + std::exp(4.0)), 1e-12);
}

TEST(ReferencePrologue, DenseKeysTurnByTheirOwnPosition) {
  Store store;
  // Rope makes scores depend on distances alone: with equal vectors everywhere, cos(angle * distance).
  attune_attention a = empty_attention();
  a.q = store.floats({2, 1, 2}, {1, 0, 1, 0});
  a.k = store.floats({4, 1, 2}, {1, 0, 1, 0, 1, 0, 1, 0});
  a.v = store.filled({4, 1, 1}, 1);
  std::vector<float> table;
  for (int p = 0; p < 4; ++p)
    table.push_back(std::cos(0.3f * static_cast<float>(p))), table.push_back(std::sin(0.3f * static_cast<float>(p)));
  a.prologue.rope_cos_sin = store.floats({4, 2}, table);
  const std::vector<reference::RowResult> rows = reference::attention(a);
  double sum = 0;
  for (int j = 0; j < 4; ++j) sum += std::exp(std::cos(0.3 * (j - 2)));
  EXPECT_NEAR(rows[0].lse, std::log(sum), 1e-6);
  EXPECT_NEAR(rows[0].max_logit, 1, 1e-6);
}

TEST(ReferencePrologue, PositionsServeTheKeysOfTheSameTokens) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.floats({2, 1, 2}, {1, 0, 1, 0});
  a.k = store.floats({2, 1, 2}, {2, 0, 2, 0});
  a.v = store.filled({2, 1, 1}, 1);
  a.prologue.rope_cos_sin = quarter_turns(store, 8, 2);
  a.prologue.positions = store.ints({2, 4});  // half a turn apart
  a.mask_bits = store.add({2, 1}, std::vector<uint8_t>{0b10, 0b10});
  for (const bool cached : {false, true}) {
    if (cached) {  // the same, as new tokens after none
      a.cache.k = store.filled({1, 4, 1, 2}, kNaN);
      a.cache.v = store.filled({1, 4, 1, 1}, kNaN);
      a.cu_seqlens_q = store.ints({0, 2});
      a.seqused_kv = store.ints({0});
      a.prologue.append = 1;
      expect_near(reference::appended(a)[0].k, {-2, 0});
    }
    const std::vector<reference::RowResult> rows = reference::attention(a);
    EXPECT_EQ(rows[0].max_logit, -2);
    EXPECT_EQ(rows[1].max_logit, 2);
  }
}

attune_rope rope(int32_t style, int64_t dim, double theta) {
  attune_rope r{};
  r.struct_size = sizeof(r);
  r.style = style;
  r.dim = dim;
  r.theta = theta;
  r.scale = r.mscale = r.extrapolation_factor = r.beta_slow = r.low_freq_factor = 1;
  r.beta_fast = 32;
  r.high_freq_factor = 4;
  return r;
}

TEST(ReferenceRope, Linear) {
  attune_rope r = rope(ATTUNE_ROPE_LINEAR, 4, 10000);
  r.scale = 2;
  expect_near(rope_frequencies(r), {0.5, 0.005});
  r.style = ATTUNE_ROPE_GLM2;
  expect_near(rope_frequencies(r), {0.5, 0.005});
  r.style = ATTUNE_ROPE_MROPE;
  expect_near(rope_frequencies(r), {0.5, 0.005});
  r.style = ATTUNE_ROPE_NONE;
  expect_near(rope_frequencies(r), {0, 0});
}

TEST(ReferenceRope, DynamicNtk) {
  attune_rope r = rope(ATTUNE_ROPE_DYNAMIC_NTK, 8, 10000);
  r.max_position = 100;
  r.seqlen = 100;
  expect_near(rope_frequencies(r), {1, 0.1, 0.01, 0.001});
  r.seqlen = 300;
  r.scale = 2;  // theta times (2 * 3 - 1)^(8/6)
  const double theta = 10000 * std::pow(5, 8.0 / 6);
  expect_near(rope_frequencies(r), {1, std::pow(theta, -0.25), std::pow(theta, -0.5), std::pow(theta, -0.75)});
}

TEST(ReferenceRope, QwenDynamicNtk) {
  attune_rope r = rope(ATTUNE_ROPE_QWEN_DYNAMIC_NTK, 4, 10000);
  r.max_position = 1000;
  for (const auto& [length, alpha] :
       {std::pair{1000, 1}, {1001, 3}, {2000, 3}, {2001, 7}, {4000, 7}, {4001, 15}, {8000, 15}}) {
    r.seqlen = length;
    EXPECT_NEAR(rope_frequencies(r)[1], 1 / (100.0 * alpha), 1e-15) << length;  // theta grows by alpha^2, f as its root
  }
}

TEST(ReferenceRope, Yarn) {
  // DeepSeek: the ramp goes from pair 10 to pair 23.
  attune_rope r = rope(ATTUNE_ROPE_YARN, 64, 10000);
  r.max_position = 4096;
  r.scale = 40;
  const std::vector<double> f = rope_frequencies(r);
  for (size_t j = 0; j < 32; ++j) {
    const double original = std::pow(10000, -static_cast<double>(j) / 32);
    const double ramp = j <= 10 ? 0 : j >= 23 ? 1 : (static_cast<double>(j) - 10) / 13;
    EXPECT_NEAR(f[j] / original, 1 - ramp + ramp / 40, 1e-12) << j;
  }
  r.extrapolation_factor = 0;
  EXPECT_NEAR(rope_frequencies(r)[0], 1 / 40.0, 1e-15);
}

TEST(ReferenceRope, Llama3) {
  attune_rope r = rope(ATTUNE_ROPE_LLAMA3, 128, 500000);
  r.max_position = 8192;
  r.scale = 8;
  const std::vector<double> f = rope_frequencies(r);
  for (size_t j = 0; j < 64; ++j) {
    const double original = std::pow(500000, -static_cast<double>(j) / 64);
    // Turns within the original context: at least 4 are kept, less than 1 are stretched.
    const double turns = 8192 * original / (2 * kPi);
    const double kept = std::clamp((turns - 1) / 3, 0.0, 1.0);
    EXPECT_NEAR(f[j] / original, kept + (1 - kept) / 8, 1e-12) << j;
  }
  EXPECT_EQ(f[28], std::pow(500000, -28.0 / 64));
  EXPECT_LT(f[29], std::pow(500000, -29.0 / 64));
  EXPECT_NEAR(f[35], std::pow(500000, -35.0 / 64) / 8, 1e-18);
}

}  // namespace
}  // namespace attune::reference_tests
