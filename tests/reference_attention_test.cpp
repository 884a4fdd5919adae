// SPDX-License-Identifier: Apache-2.0
// The oracle's attention against what can be worked out by hand: masks, scores, sinks, finished rows.
#include "check/scores.h"
#include "reference_support.h"

namespace attune::reference_tests {
namespace {

using reference::attention;
using reference::RowResult;

// Dense, one sequence, one head: queries of zeros, values that name the keys.
attune_attention counting(Store& store, int64_t queries, int64_t keys) {
  attune_attention a = empty_attention();
  a.q = store.filled({queries, 1, 2}, 0);
  a.k = store.varied({keys, 1, 2}, 1);
  a.v = store.floats({keys, 1, 1}, powers_of_ten(keys));
  return a;
}

TEST(ReferenceAttention, UniformScoresAverageValues) {
  Store store;
  const attune_attention a = counting(store, 1, 4);
  const RowResult row = attention(a)[0];
  EXPECT_DOUBLE_EQ(row.out[0], 1111 / 4.0);
  EXPECT_DOUBLE_EQ(row.pv_abs[0], 1111 / 4.0);
  EXPECT_DOUBLE_EQ(row.lse, std::log(4.0));
  EXPECT_EQ(row.max_logit, 0);
  EXPECT_EQ(row.num_visible, 4);
}

TEST(ReferenceAttention, TwoKeysByHand) {
  Store store;
  attune_attention a = empty_attention();
  a.softmax_scale = 0;  // 1 / sqrt(4)
  a.q = store.floats({1, 1, 4}, {1, 2, 3, 4});
  a.k = store.floats({2, 1, 4}, {1, 0, 0, 0, 0, -1, 1, 0});
  a.v = store.floats({2, 1, 2}, {1, -1, 3, 5});
  const RowResult row = attention(a)[0];
  // Both products are 1, but the second is 3 - 2: its magnitude is 5.
  EXPECT_DOUBLE_EQ(row.max_logit, 0.5);
  EXPECT_DOUBLE_EQ(row.z_abs, 2.5);
  EXPECT_DOUBLE_EQ(row.lse, 0.5 + std::log(2.0));
  EXPECT_DOUBLE_EQ(row.out[0], 2);
  EXPECT_DOUBLE_EQ(row.out[1], 2);
  EXPECT_DOUBLE_EQ(row.pv_abs[1], 3);
}

TEST(ReferenceAttention, WhatAPrologueCancels) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.floats({1, 1, 2}, {3, 1});
  a.k = store.floats({1, 1, 2}, {2, -1});
  a.v = store.floats({1, 1, 1}, {5});
  a.prologue.q_bias = store.floats({1, 2}, {-2, 1});
  a.prologue.v_bias = store.floats({1, 1}, {-4});
  a.prologue.rope_cos_sin = store.floats({1, 2}, {1, 1});
  const RowResult row = attention(a)[0];
  // q is (1, 2), turned (-1, 3), of magnitudes (5, 2), turned (7, 7). k is turned (3, 1), of (3, 3).
  EXPECT_DOUBLE_EQ(row.max_logit, 0);
  EXPECT_DOUBLE_EQ(row.z_abs, 6);
  EXPECT_DOUBLE_EQ(row.z_lost, 6 * 3 + 4 * 1 + 3 * 2);
  EXPECT_DOUBLE_EQ(row.out[0], 1);
  EXPECT_DOUBLE_EQ(row.pv_lost[0], 8);
}

TEST(ReferenceAttention, OnesStayOnes) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.varied({3, 4, 8}, 1);
  a.k = store.varied({3, 2, 8}, 2);
  a.v = store.filled({3, 2, 5}, 1);
  for (const RowResult& row : attention(a)) {
    for (const double x : row.out) EXPECT_NEAR(x, 1, 1e-15);
  }
}

TEST(ReferenceAttention, HeadsShareKvHeads) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.filled({1, 4, 1}, 0);
  a.k = store.filled({1, 2, 1}, 0);
  a.v = store.floats({1, 2, 1}, {7, 9});
  const std::vector<RowResult> rows = attention(a);
  EXPECT_EQ(rows[0].out[0], 7);
  EXPECT_EQ(rows[1].out[0], 7);
  EXPECT_EQ(rows[2].out[0], 9);
  EXPECT_EQ(rows[3].out[0], 9);
}

TEST(ReferenceAttention, CausalIsBottomRight) {
  Store store;
  attune_attention a = counting(store, 2, 4);
  a.causal = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{111, 1111}));
  attune_attention wide = counting(store, 4, 2);  // the first two queries stand before any key
  wide.causal = 1;
  EXPECT_EQ(seen(wide), (std::vector<int64_t>{0, 0, 1, 11}));
  const RowResult nothing = attention(wide)[0];
  EXPECT_TRUE(nothing.written);
  EXPECT_EQ(nothing.out[0], 0);
  EXPECT_EQ(nothing.lse, -kInf);
  EXPECT_EQ(nothing.max_logit, -kInf);
}

TEST(ReferenceAttention, Windows) {
  Store store;
  attune_attention a = counting(store, 4, 4);
  a.window_left = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1111, 1111, 1110, 1100}));
  a.window_right = 0;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 11, 110, 1100}));
  a.window_left = -1;
  a.window_right = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 111, 1111, 1111}));
  a.causal = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 11, 111, 1111}));
  a.causal = 0;
  a.window_left = a.window_right = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1111, 1111, 1111, 1111}));
}

TEST(ReferenceAttention, MaskBits) {
  Store store;
  attune_attention a = counting(store, 2, 4);
  a.mask_bits = store.add({2, 1}, std::vector<uint8_t>{0b0101, 0b0010});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{101, 10}));
  a.mask_start = store.ints({2});  // keys 0 and 1 are not covered
  EXPECT_EQ(seen(a), (std::vector<int64_t>{111, 1011}));
  a.causal = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{111, 1011}));
  a.mask_start = store.ints({-2});  // bits 2 and 3 are keys 0 and 1
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 0}));
  // One mask for each head.
  a.causal = 0;
  a.mask_start = {};
  a.q = store.filled({1, 2, 2}, 0);
  a.mask_bits = store.add({1, 2, 1}, std::vector<uint8_t>{0b1000, 0b0001});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1000, 1}));
}

TEST(ReferenceAttention, RangesOverrideCausalityAndWindows) {
  Store store;
  attune_attention a = counting(store, 5, 5);
  a.causal = 1;
  a.bidirectional_ranges = store.add({1, 2, 2}, std::vector<int32_t>{1, 3, /* no range: */ 4, 4});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 1111, 1111, 1111, 11111}));
  a.window_left = 0;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 1110, 1110, 1110, 10000}));
  a.mask_bits = store.add({5, 1}, std::vector<uint8_t>(5, 0b00100));
  EXPECT_EQ(seen(a), (std::vector<int64_t>{0, 100, 100, 100, 0}));
}

// z of one key is the largest logit of a row that sees only it.
double logit_of(Store& store, attune_attention a, int64_t row, int64_t head, int64_t key) {
  a.mask_bits = store.add({a.q.shape[0], 1},
                          std::vector<uint8_t>(static_cast<size_t>(a.q.shape[0]), static_cast<uint8_t>(1 << key)));
  return attention(a, {{row, head}})[0].max_logit;
}

TEST(ReferenceScores, AdditiveTerms) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.filled({2, 2, 1}, 3);  // 2 queries at positions 2 and 3, 2 heads
  a.k = store.filled({4, 1, 1}, 4);
  a.v = store.filled({4, 1, 1}, 1);
  EXPECT_DOUBLE_EQ(logit_of(store, a, 0, 0, 0), 12);
  a.softmax_scale = -0.5;
  EXPECT_DOUBLE_EQ(logit_of(store, a, 0, 0, 0), -6);
  a.softcap = 5;
  const double capped = -5 * std::tanh(6.0 / 5.0);
  EXPECT_DOUBLE_EQ(logit_of(store, a, 0, 0, 0), capped);

  attune_attention alibi = a;
  alibi.alibi_slopes = store.floats({2}, {0.25f, -2});
  EXPECT_DOUBLE_EQ(logit_of(store, alibi, 0, 0, 0), capped - 0.5);  // 2 back
  EXPECT_DOUBLE_EQ(logit_of(store, alibi, 1, 1, 1), capped + 4);
  EXPECT_DOUBLE_EQ(logit_of(store, alibi, 0, 0, 3), capped + 0.25);  // 1 ahead
  alibi.alibi_sqrt = 1;
  EXPECT_DOUBLE_EQ(logit_of(store, alibi, 1, 0, 1), capped - 0.25 * std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(logit_of(store, alibi, 0, 0, 3), capped);
  alibi.alibi_sqrt = 0;
  alibi.alibi_slopes = store.floats({1, 2}, {1, 2});
  EXPECT_DOUBLE_EQ(logit_of(store, alibi, 0, 1, 1), capped - 2);

  attune_attention table = a;
  std::vector<float> values(2 * 4 * 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  table.bias = store.floats({2, 4, 4}, values);
  EXPECT_DOUBLE_EQ(logit_of(store, table, 0, 1, 3), capped + (1 * 4 + 2) * 4 + 3);
  table.bias = store.floats({1, 4, 8}, values);
  EXPECT_DOUBLE_EQ(logit_of(store, table, 1, 1, 0), capped + 3 * 8);

  attune_attention early = table;  // more queries than keys: the first stands at -1, which no table covers
  early.k = early.v = store.filled({1, 1, 1}, 4);
  early.bias = store.floats({2, 4, 4}, values);
  EXPECT_DOUBLE_EQ(logit_of(store, early, 0, 1, 0), capped);
  EXPECT_DOUBLE_EQ(logit_of(store, early, 1, 1, 0), capped + 16);

  attune_attention tree = a;
  tree.new_token_bias = store.floats({2, 2}, {1, 2, 3, 4});
  EXPECT_DOUBLE_EQ(logit_of(store, tree, 0, 0, 1), capped);
  EXPECT_DOUBLE_EQ(logit_of(store, tree, 0, 0, 3), capped + 2);
  EXPECT_DOUBLE_EQ(logit_of(store, tree, 1, 0, 2), capped + 3);

  attune_attention t5 = a;
  std::vector<float> buckets(2 * 32);
  for (size_t i = 0; i < buckets.size(); ++i) buckets[i] = static_cast<float>(i);
  t5.t5_bias = store.floats({2, 32}, buckets);
  t5.t5_max_distance = 128;
  EXPECT_DOUBLE_EQ(logit_of(store, t5, 1, 1, 0), capped + 32 + 3);
  EXPECT_DOUBLE_EQ(logit_of(store, t5, 0, 0, 3), capped);  // later: distance 0
  t5.t5_bidirectional = 1;
  EXPECT_DOUBLE_EQ(logit_of(store, t5, 0, 0, 3), capped + 17);
}

TEST(ReferenceScores, T5Buckets) {
  using oracle::t5_bucket;
  // Encoder, 32 buckets, 128: first distance of each bucket from 8 on, from the published formula.
  const int64_t first[] = {8, 12, 16, 23, 32, 46, 64, 91};
  for (int64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(t5_bucket(-first[i], 32, 128, true), 8 + i);
    EXPECT_EQ(t5_bucket(-(first[i] - 1), 32, 128, true), 7 + i);
    EXPECT_EQ(t5_bucket(first[i], 32, 128, true), 24 + i);
  }
  EXPECT_EQ(t5_bucket(0, 32, 128, true), 0);
  EXPECT_EQ(t5_bucket(1, 32, 128, true), 17);
  EXPECT_EQ(t5_bucket(-1000000, 32, 128, true), 15);
  // Decoder.
  EXPECT_EQ(t5_bucket(5, 32, 128, false), 0);
  EXPECT_EQ(t5_bucket(-15, 32, 128, false), 15);
  EXPECT_EQ(t5_bucket(-16, 32, 128, false), 16);
  EXPECT_EQ(t5_bucket(-18, 32, 128, false), 16);
  EXPECT_EQ(t5_bucket(-19, 32, 128, false), 17);
  EXPECT_EQ(t5_bucket(-21, 32, 128, false), 18);
  EXPECT_EQ(t5_bucket(-113, 32, 128, false), 31);
  EXPECT_EQ(t5_bucket(-112, 32, 128, false), 30);
}

TEST(ReferenceScores, Sinks) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.varied({1, 6, 4}, 1);
  a.k = store.varied({5, 1, 4}, 2);
  a.v = store.varied({5, 1, 3}, 3);
  const std::vector<RowResult> plain = attention(a);
  const float sinks[] = {-std::numeric_limits<float>::infinity(), -50, 0.5f, 3, 900,
                         std::numeric_limits<float>::infinity()};
  a.sinks = store.floats({6}, {sinks, sinks + 6});
  const std::vector<RowResult> rows = attention(a);
  for (size_t h = 0; h < 6; ++h) {
    const double total = std::exp(plain[h].lse);
    const double left =
        std::isinf(sinks[h]) ? (sinks[h] < 0 ? 1.0 : 0.0) : total / (total + std::exp(static_cast<double>(sinks[h])));
    EXPECT_EQ(rows[h].lse, plain[h].lse);
    EXPECT_EQ(rows[h].max_logit, plain[h].max_logit);
    for (size_t d = 0; d < 3; ++d) {
      EXPECT_NEAR(rows[h].out[d], plain[h].out[d] * left, 1e-15);
      EXPECT_NEAR(rows[h].pv_abs[d], plain[h].pv_abs[d] * left, 1e-15);
    }
  }
  a.seqused_kv = store.ints({0});  // a row that sees nothing is 0 whatever the sink
  for (const RowResult& row : attention(a)) EXPECT_EQ(row.out, (std::vector<double>{0, 0, 0}));
}

TEST(ReferenceScores, LargeScoresDoNotOverflow) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.filled({1, 1, 1}, 1);
  a.k = store.floats({2, 1, 1}, {10000, 10001});
  a.v = store.floats({2, 1, 1}, {0, 1});
  const RowResult row = attention(a)[0];
  EXPECT_NEAR(row.out[0], 1 / (1 + std::exp(-1.0)), 1e-15);
  EXPECT_NEAR(row.lse, 10001 + std::log1p(std::exp(-1.0)), 1e-11);
}

TEST(ReferenceScores, NanStaysInItsRowAndHead) {
  Store store;
  attune_attention a = empty_attention();
  a.causal = 1;
  a.q = store.varied({2, 2, 1}, 1);
  a.k = store.floats({2, 2, 1}, {1, 1, kNaN, 1});  // key 1 of KV head 0
  a.v = store.filled({2, 2, 1}, 1);
  const std::vector<RowResult> rows = attention(a);
  EXPECT_EQ(rows[0].out[0], 1);
  EXPECT_TRUE(std::isnan(rows[2].out[0]));
  EXPECT_TRUE(std::isnan(rows[2].lse));
  EXPECT_TRUE(std::isnan(rows[2].max_logit));
  EXPECT_NEAR(rows[3].out[0], 1, 1e-15);
  // Beside it +inf is the maximum, whichever comes first.
  a.q = store.filled({2, 2, 1}, 1);
  for (const float first : {kNaN, static_cast<float>(kInf)}) {
    a.k = store.floats({2, 2, 1}, {first, 1, std::isnan(first) ? static_cast<float>(kInf) : kNaN, 1});
    const RowResult row = attention(a)[2];
    EXPECT_EQ(row.max_logit, kInf);
    EXPECT_TRUE(std::isnan(row.lse));
    EXPECT_TRUE(std::isnan(row.out[0]));
  }
  // A score of -inf has P = 0, whatever the value.
  attune_attention b = counting(store, 1, 2);
  b.v = store.floats({2, 1, 1}, {kNaN, 5});
  b.new_token_bias = store.floats({1, 1}, {0});
  b.bias = store.floats({1, 2, 2}, {0, 0, -std::numeric_limits<float>::infinity(), 0});
  EXPECT_EQ(attention(b)[0].out[0], 5);
  b.v = store.floats({2, 1, 1}, {1, std::numeric_limits<float>::infinity()});
  EXPECT_EQ(attention(b)[0].out[0], kInf);
}

TEST(ReferenceSequences, RaggedAndFixedAgree) {
  Store store;
  attune_attention a = empty_attention();
  a.causal = 1;
  a.q = store.varied({6, 2, 4}, 1);
  a.k = store.varied({8, 2, 4}, 2);
  a.v = store.varied({8, 2, 3}, 3);
  a.cu_seqlens_q = store.ints({0, 3, 6});
  a.cu_seqlens_kv = store.ints({0, 4, 8});
  const auto fixed = [](attune_tensor t) {
    t.rank = 4;
    for (int i = 3; i > 1; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
    t.shape[1] = t.shape[0] / 2, t.stride[1] = t.stride[0];
    t.shape[0] = 2, t.stride[0] = t.shape[1] * t.stride[1];
    return t;
  };
  attune_attention b = empty_attention();
  b.causal = 1;
  b.q = fixed(a.q);
  b.k = fixed(a.k);
  b.v = fixed(a.v);
  EXPECT_EQ(reference::num_rows(b), 6);
  expect_same_rows(attention(a), attention(b));
  // One after the other.
  attune_attention second = a;
  second.cu_seqlens_q = store.ints({3, 6});
  second.cu_seqlens_kv = store.ints({4, 8});
  const std::vector<RowResult> rows = attention(second), both = attention(a);
  for (size_t i = 0; i < 6; ++i) EXPECT_FALSE(rows[i].written);  // no sequence owns rows 0 to 2
  expect_same_rows({rows.begin() + 6, rows.end()}, {both.begin() + 6, both.end()});
}

TEST(ReferenceSequences, TablesOutOfRangeAreClamped) {
  Store store;
  attune_attention a = counting(store, 4, 4);
  a.cu_seqlens_q = store.ints({-3, 2, 1, 99});  // [0, 2), [2, 2), [2, 4)
  a.cu_seqlens_kv = a.cu_seqlens_q;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 11, 1100, 1100}));
  a.cu_seqlens_kv = {};  // as cu_seqlens_q
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 11, 1100, 1100}));
  a.seqused_kv = store.ints({-1, 5, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{0, 0, 100, 100}));
  a.causal = 1;  // positions count from the keys in use
  EXPECT_EQ(seen(a), (std::vector<int64_t>{0, 0, 0, 100}));
}

TEST(ReferenceSequences, FinishedAndSkipped) {
  Store store;
  attune_attention a = counting(store, 4, 4);
  a.q = store.floats({4, 1, 2}, {kNaN, kNaN, 0, 0, 0, 0, kNaN, kNaN});
  a.cu_seqlens_q = store.ints({0, 1, 3, 4});
  a.cu_seqlens_kv = store.ints({0, 1, 3, 4});
  a.finished = store.add({3}, std::vector<uint8_t>{0, 0, 2});
  a.skip_decode = 1;
  std::vector<RowResult> rows = attention(a);
  EXPECT_FALSE(rows[0].written);
  EXPECT_TRUE(rows[1].written);
  EXPECT_EQ(seen_digits(rows[2]), 110);
  EXPECT_FALSE(rows[3].written);
  a.zero_finished = 1;
  rows = attention(a);
  for (const size_t i : {0, 3}) {
    EXPECT_TRUE(rows[i].written);
    EXPECT_EQ(rows[i].out, std::vector<double>{0});
    EXPECT_EQ(rows[i].lse, -kInf);
  }
}

}  // namespace
}  // namespace attune::reference_tests
