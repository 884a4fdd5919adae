// SPDX-License-Identifier: Apache-2.0
// The oracle's keys: paged, contiguous, ring, beams, new tokens, indices. Values name the keys that are seen.
#include "reference_support.h"

namespace attune::reference_tests {
namespace {

using reference::attention;
using reference::CacheWrite;
using reference::RowResult;

constexpr int32_t kUnused = 0x7fffff00;  // a table entry that nobody may follow

// Queries of zeros over a cache of `pages` pages with one head; the value of slot i is 10^i, of unlisted slots NaN.
attune_attention over_cache(Store& store, int64_t queries, int64_t pages, int64_t page_size,
                            const std::vector<float>& values) {
  attune_attention a = empty_attention();
  a.q = store.filled({queries, 1, 1}, 0);
  std::vector<float> keys(values.size());
  for (size_t i = 0; i < values.size(); ++i) keys[i] = std::isnan(values[i]) ? kNaN : 1.0f;
  a.cache.k = store.floats({pages, page_size, 1, 1}, keys);
  a.cache.v = store.floats({pages, page_size, 1, 1}, values);
  return a;
}

TEST(ReferenceCacheKeys, Paged) {
  Store store;
  attune_attention a = over_cache(store, 3, 4, 2, {1, 10, 100, 1000, 10000, kNaN, 1e6, 1e7});
  a.cache.page_table = store.table(3, {3, 2, kUnused, /**/ 1, kUnused, kUnused, /**/ 0, -1, 1});
  a.seqused_kv = store.ints({3, 2, 5});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11010000, 1100, 111}));  // page -1 hides tokens 2 and 3
  EXPECT_EQ(attention(a)[2].num_visible, 3);
  a.window_left = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{10010000, 1100, 100}));
  a.window_left = -1;
  a.seqused_kv = store.ints({-4, 0, 1000});  // the last: six tokens fit the table
  EXPECT_EQ(seen(a), (std::vector<int64_t>{0, 0, 1111}));
  a.cache.page_table = store.table(3, {3, 2, kUnused, 1, kUnused, kUnused, 0, 4, 1});
  EXPECT_EQ(seen(a)[2], 1111);
}

TEST(ReferenceCacheKeys, SeveralQueriesOfASequence) {
  Store store;
  attune_attention a = over_cache(store, 4, 2, 3, {1, 10, 100, 1000, 10000, kNaN});
  a.cu_seqlens_q = store.ints({0, 1, 4});
  a.cache.page_table = store.table(2, {0, kUnused, 0, 1});
  a.seqused_kv = store.ints({2, 5});
  a.causal = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 111, 1111, 11111}));
}

TEST(ReferenceCacheKeys, Contiguous) {
  Store store;
  attune_attention a = over_cache(store, 2, 3, 2, {1, 10, 100, kNaN, 10000, 100000});
  a.seqused_kv = store.ints({2, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 100}));
  a.cache.batch_index = store.ints({2, 0});
  a.seqused_kv = store.ints({7, 1});  // two tokens fit
  EXPECT_EQ(seen(a), (std::vector<int64_t>{110000, 1}));
  a.cache.batch_index = store.ints({3, -1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{0, 0}));
}

TEST(ReferenceCacheKeys, SeparateTableOfV) {
  Store store;
  attune_attention a = over_cache(store, 1, 3, 1, {1, 10, 100});
  a.cache.page_table = store.table(1, {0, 1, 2});
  a.cache.v_page_table = store.table(1, {1, 1, 3});  // no page 3: the token is hidden
  a.seqused_kv = store.ints({3});
  EXPECT_EQ(seen(a), std::vector<int64_t>{20});
}

TEST(ReferenceCacheKeys, RingKeepsTheLatest) {
  Store store;
  attune_attention a = over_cache(store, 1, 2, 3, {1, 10, 100, 1000, kNaN, kNaN});
  a.cache.ring_capacity = 4;
  a.cache.page_table = store.table(1, {0, 1});
  a.alibi_slopes = store.floats({1}, {0.5f});
  a.causal = 1;
  a.seqused_kv = store.ints({2});
  EXPECT_EQ(attention(a)[0].num_visible, 2);
  // After 6 tokens slots 0 to 3 hold tokens 4, 5, 2, 3. The query is token 5.
  a.seqused_kv = store.ints({6});
  const RowResult row = attention(a)[0];
  EXPECT_EQ(row.num_visible, 4);
  const double weights[] = {std::exp(-0.5), 1, std::exp(-1.5), std::exp(-1.0)};
  double sum = 0, out = 0;
  for (int slot = 0; slot < 4; ++slot) sum += weights[slot], out += weights[slot] * std::pow(10, slot);
  EXPECT_NEAR(row.out[0], out / sum, 1e-12);
  EXPECT_NEAR(row.lse, std::log(sum), 1e-15);
  a.window_left = 1;  // tokens 4 and 5, in slots 0 and 1
  a.alibi_slopes = {};
  EXPECT_EQ(seen(a), std::vector<int64_t>{11});
  a.seqused_kv = store.ints({7});  // tokens 5 and 6
  EXPECT_EQ(seen(a), std::vector<int64_t>{110});
  a.seqused_kv = store.ints({std::numeric_limits<int32_t>::max()});
  a.window_left = -1;
  EXPECT_EQ(seen(a), std::vector<int64_t>{1111});
}

TEST(ReferenceCacheKeys, Beams) {
  Store store;
  // Two requests of two beams; row r keeps its own two tokens in page r, 10^(2r) and 10^(2r + 1).
  attune_attention a = over_cache(store, 4, 4, 2, powers_of_ten(8));
  a.seqused_kv = store.ints({2, 2, 2, 1});
  a.beam_width = 2;
  a.cache_indirection = store.table(4, {0, 2, /**/ 1, 0, /**/ 0, 1, /**/ -1, kUnused});
  // Rows 0 and 3 name beams 2 and -1 of 2, which hides those tokens.
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 110, 10010000, 0}));
  // Below the prompt length all rows read beam 0.
  a.beam_prompt_length = store.ints({2, 1, 0, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 11, 10010000, 10000}));
  // In a ring the index is the slot: token 2 lies in slot 0. A wrapped ring ignores the prompt length.
  a.cache.ring_capacity = 2;
  a.seqused_kv = store.ints({3, 3, 2, 1});
  a.beam_prompt_length = store.ints({3, 0, 2, 0});
  a.cache_indirection = store.table(4, {1, 0, 1, 0, 1, 1, 0, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{110, 110, 110000, 10000}));
}

TEST(ReferenceCacheKeys, NewTokensFollowTheCache) {
  Store store;
  // Sequence 0: 2 cached and 2 new tokens; sequence 1: none cached and 1 new. Slots of the new ones hold NaN.
  attune_attention a = over_cache(store, 3, 2, 4, {1, 10, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN});
  a.cu_seqlens_q = store.ints({0, 2, 3});
  a.seqused_kv = store.ints({2, 0});
  a.k = store.filled({3, 1, 1}, 1);
  a.v = store.floats({3, 1, 1}, {100, 1000, 10000});
  a.causal = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{111, 1111, 10000}));
  a.window_left = 1;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{110, 1100, 10000}));
  a.window_left = -1;
  a.causal = 0;
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1111, 1111, 10000}));
  a.seqused_kv = store.ints({2, -1});
  a.new_token_bias = store.floats({2, 2}, {0, -std::numeric_limits<float>::infinity(), 0, 0});
  const std::vector<RowResult> rows = attention(a);
  EXPECT_NEAR(rows[0].out[0], 111 / 3.0, 1e-12);
  EXPECT_NEAR(rows[1].out[0], 1111 / 4.0, 1e-12);
}

TEST(ReferenceCacheKeys, AppendedSlots) {
  Store store;
  attune_attention a = over_cache(store, 4, 3, 2, std::vector<float>(6, kNaN));
  a.cu_seqlens_q = store.ints({0, 3, 4});
  a.seqused_kv = store.ints({1, 4});
  a.cache.page_table = store.table(2, {2, 0, 1, 9});
  a.k = store.floats({4, 1, 1}, {1, 2, 3, 4});
  a.v = store.floats({4, 1, 1}, {5, 6, 7, 8});
  EXPECT_TRUE(reference::appended(a).empty());
  a.prologue.append = 1;
  // Positions 1, 2, 3 of sequence 0; position 4 of sequence 1 has no room.
  std::vector<CacheWrite> writes = reference::appended(a);
  ASSERT_EQ(writes.size(), 3u);
  const int64_t slots[] = {5, 0, 1};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(writes[i].slot, slots[i]);
    EXPECT_EQ(writes[i].v_slot, slots[i]);
    EXPECT_EQ(writes[i].k, std::vector<double>{static_cast<double>(i + 1)});
    EXPECT_EQ(writes[i].v, std::vector<double>{static_cast<double>(i + 5)});
  }
  // A ring of two: of three new tokens the last two stay, at positions 2 and 3.
  a.cache.ring_capacity = 2;
  writes = reference::appended(a);
  ASSERT_EQ(writes.size(), 3u);
  EXPECT_EQ(writes[0].slot, 4);
  EXPECT_EQ(writes[0].k, std::vector<double>{2});
  EXPECT_EQ(writes[1].slot, 5);
  EXPECT_EQ(writes[2].slot, 2);  // position 4 of sequence 1
  a.finished = store.add({2}, std::vector<uint8_t>{1, 0});
  EXPECT_EQ(reference::appended(a).size(), 1u);
  a.skip_decode = 1;
  EXPECT_TRUE(reference::appended(a).empty());
}

TEST(ReferenceSparse, ListedSlots) {
  Store store;
  attune_attention a = over_cache(store, 3, 3, 2, {1, 10, kNaN, 1000, 10000, 100000});
  a.indices = store.table(3, {0, 3, 4, -1, /**/ 5, 5, 6, 1, /**/ 1, 0, 2, kUnused});
  a.topk_length = store.ints({4, 9, 2});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11001, 200010, 11}));
  EXPECT_EQ(attention(a)[1].num_visible, 3);  // duplicates count twice
  a.topk_length = store.ints({0, -1, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{0, 0, 10}));
  // A second pool in the same softmax, with pages of its own.
  a.extra_cache.k = store.filled({4, 1, 1, 1}, 1);
  a.extra_cache.v = store.floats({4, 1, 1, 1}, {kNaN, 200, 300, 400});
  a.extra_indices = store.table(3, {1, 2, 3, 3, 4, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{500, 800, 210}));
  a.extra_topk_length = store.ints({1, 0, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{200, 0, 10}));
}

TEST(ReferenceSparse, LengthsOfSequencesOrRows) {
  Store store;
  attune_attention a = over_cache(store, 3, 1, 4, {1, 10, 100, 1000});
  a.cu_seqlens_q = store.ints({0, 2, 3});
  a.indices = store.table(3, {0, 1, 2, 1, 2, 3, 2, 3, 0});
  a.topk_length = store.ints({2, 1});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{11, 110, 100}));
  a.topk_length = store.ints({1, 2, 3});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 110, 1101}));
  a.q.rank = 4;  // [batch 3, seqlen_q 1, 1, 1] with [batch, seqlen_q, topk]
  a.q.shape[1] = a.q.shape[3] = 1, a.q.stride[3] = 1;
  a.cu_seqlens_q = {};
  a.indices = store.add({3, 1, 3}, std::vector<int32_t>{0, 1, 2, 1, 2, 3, 2, 3, 0});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{1, 110, 1101}));
}

TEST(ReferenceSparse, TokensOfDenseSequences) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.filled({2, 2, 1}, 0);
  a.cu_seqlens_q = store.ints({0, 1, 2});
  a.k = store.filled({5, 2, 1}, 0);
  a.v = store.floats({5, 2, 1}, {1, 2, 10, 20, 100, 200, 1000, 2000, 10000, 20000});
  a.cu_seqlens_kv = store.ints({0, 3, 5});
  a.indices = store.add({2, 2, 2}, std::vector<int32_t>{0, 2, 1, 3, /**/ 1, 1, 0, 2});
  EXPECT_EQ(seen(a), (std::vector<int64_t>{101, 20, 20000, 2000}));  // one list for each KV head
}

TEST(ReferenceSparse, MlaRowsServeAsKeysAndValues) {
  Store store;
  std::vector<uint8_t> bytes(2 * 656, 0);
  for (int d = 0; d < 512; ++d) bytes[static_cast<size_t>(656 + d)] = 0x38;  // token 1: ones
  for (int group = 0; group < 4; ++group) {
    const float scale = 0.5f;
    std::memcpy(&bytes[static_cast<size_t>(656 + 512 + 4 * group)], &scale, 4);
  }
  attune_attention a = empty_attention();
  a.q = store.filled({1, 2, 576}, 1.0f / 256);
  a.cache.format = ATTUNE_KV_MLA_656;
  a.cache.layout = ATTUNE_KV_BYTES;
  a.cache.k = store.add({1, 2, 656}, bytes);
  a.indices = store.table(1, {1, 0, -1});
  for (const RowResult& row : attention(a)) {
    // Scores 1 (512 * 0.5 / 256) and 0.
    ASSERT_EQ(row.out.size(), 512u);
    EXPECT_NEAR(row.out[511], 0.5 * std::exp(1.0) / (1 + std::exp(1.0)), 1e-15);
    EXPECT_NEAR(row.lse, std::log(1 + std::exp(1.0)), 1e-15);
    EXPECT_EQ(row.max_logit, 1);
  }
}

TEST(ReferenceMerge, PartsMakeTheWhole) {
  Store store;
  attune_attention a = empty_attention();
  a.q = store.varied({2, 2, 4}, 1);
  a.k = store.varied({7, 1, 4}, 2);
  a.v = store.varied({7, 1, 3}, 3);
  a.cu_seqlens_kv = store.ints({0, 7});
  a.cu_seqlens_q = store.ints({0, 2});
  const std::vector<RowResult> whole = attention(a);
  std::vector<float> out, lse;
  for (const auto& [first, last] : {std::pair{0, 3}, std::pair{3, 7}}) {
    a.cu_seqlens_kv = store.ints({first, last});
    for (const RowResult& row : attention(a)) {
      out.insert(out.end(), row.out.begin(), row.out.end());
      lse.push_back(static_cast<float>(row.lse));
    }
  }
  // A third partial output, of no keys.
  out.insert(out.end(), 12, kNaN);
  lse.insert(lse.end(), 4, -std::numeric_limits<float>::infinity());
  attune_merge m{};
  m.partial_out = store.floats({3, 2, 2, 3}, out);
  m.partial_lse = store.floats({3, 2, 2}, lse);
  reference::Merged merged = reference::merge(m);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(merged.lse[i], whole[i].lse, 1e-6);
    for (size_t d = 0; d < 3; ++d) {
      EXPECT_NEAR(merged.out[3 * i + d], whole[i].out[d], 1e-6);
      EXPECT_GE(merged.abs[3 * i + d], std::fabs(merged.out[3 * i + d]));
    }
  }
  m.sinks = store.floats({2}, {1, -2});
  const reference::Merged with_sinks = reference::merge(m);
  EXPECT_EQ(with_sinks.lse, merged.lse);
  for (size_t i = 0; i < 12; ++i) {
    const double lse_i = merged.lse[i / 3], sink = i / 3 % 2 == 0 ? 1 : -2;
    EXPECT_NEAR(with_sinks.out[i], merged.out[i] * std::exp(lse_i) / (std::exp(lse_i) + std::exp(sink)), 1e-15);
  }
  // Nothing at all.
  m.partial_lse = store.filled({3, 2, 2}, -std::numeric_limits<float>::infinity());
  merged = reference::merge(m);
  EXPECT_EQ(merged.lse[3], -kInf);
  EXPECT_EQ(merged.out[11], 0);
}

}  // namespace
}  // namespace attune::reference_tests
