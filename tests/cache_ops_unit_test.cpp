// SPDX-License-Identifier: Apache-2.0
// Rules of the cache operations: which slots are written or read, what is masked, what is refused.
#include "cpu/append.h"

#include <cstring>

#include "unit_cache.h"

namespace attune::unit {
namespace {

struct Op {
  attune_cache_op op;
  std::vector<float> k, v;
  std::vector<int32_t> used, cu;
  std::vector<int64_t> slots;
  std::vector<uint8_t> finished;

  Op(attune_cache_op_kind kind, const SlotCache& cache, std::vector<float> dense_k) : k(std::move(dense_k)), v(k) {
    EXPECT_EQ(attune_cache_op_init(&op, sizeof(op)), ATTUNE_OK);
    for (float& x : v) x *= 10;
    const auto n = static_cast<int64_t>(k.size());
    op.kind = kind;
    op.cache = cache.c;
    op.k = dense(k, {n, 1, 1});
    op.v = dense(v, {n, 1, 1});
  }
  void sequences(std::vector<int32_t> seqused, std::vector<int32_t> offsets) {
    used = std::move(seqused), cu = std::move(offsets);
    op.seqused_kv = dense(used, {static_cast<int64_t>(used.size())});
    if (!cu.empty()) op.cu_seqlens = dense(cu, {static_cast<int64_t>(cu.size())});
  }
  void at_slots(std::vector<int64_t> s) {
    slots = std::move(s);
    op.slots = dense(slots, {static_cast<int64_t>(slots.size())});
  }
  void finish(std::vector<uint8_t> f) {
    finished = std::move(f);
    op.finished = dense(finished, ATTUNE_UINT8, {static_cast<int64_t>(finished.size())});
  }
  attune_status run() { return attune_cache_op_run(&op, kCpuDevice, nullptr); }
};

void expect_v_is_ten_times_k(const SlotCache& c) {
  for (size_t i = 0; i < c.k.size(); ++i) EXPECT_EQ(c.v[i], c.k[i] == kOld ? kOld : 10 * c.k[i]) << "slot " << i;
}

TEST(CacheOpUnit, AppendGoesThroughThePageTable) {
  SlotCache c(5, 2);
  c.paged({4, 1, 0x7fffff00, 2, 3, 0x7fffff00}, 2);
  Op op(ATTUNE_CACHE_APPEND, c, numbers(5));
  op.sequences({1, 0}, {0, 3, 5});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  EXPECT_EQ(c.k, (std::vector<float>{o, o, 2, 3, 4, 5, o, o, o, 1}));
  expect_v_is_ten_times_k(c);
}

TEST(CacheOpUnit, AppendSkipsBadPagesFinishedRowsAndWhatDoesNotFit) {
  SlotCache c(4, 2);
  c.paged({0, -1, 1, 2, 3, 9}, 3);
  Op op(ATTUNE_CACHE_APPEND, c, numbers(9));
  op.sequences({1, 0, 1}, {0, 3, 5, 9});
  op.finish({0, 1, 0});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  // Sequence 0: position 1, then a page of -1. Sequence 1 is finished. Sequence 2: position 1, then page 9, then past
  // the table.
  EXPECT_EQ(c.k, (std::vector<float>{o, 1, o, o, o, o, o, 6}));
  expect_v_is_ten_times_k(c);
}

TEST(CacheOpUnit, AppendToContiguousRowsByIndex) {
  SlotCache c(3, 4);
  std::vector<int32_t> rows = {2, 7};
  c.c.batch_index = dense(rows, {2});
  Op op(ATTUNE_CACHE_APPEND, c, numbers(2));
  op.sequences({3, 0}, {});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  std::vector<float> expected(12, kOld);
  expected[11] = 1;
  EXPECT_EQ(c.k, expected);
}

TEST(CacheOpUnit, AppendToRingKeepsTheLastTokens) {
  for (const int32_t used : {0, 3, 8, 1000000001}) {
    SlotCache c(1, 4);
    c.c.ring_capacity = 3;
    Op op(ATTUNE_CACHE_APPEND, c, numbers(5));
    op.sequences({used}, {0, 5});
    ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
    std::vector<float> expected(4, kOld);
    for (int64_t i = 2; i < 5; ++i) expected[static_cast<size_t>((used + i) % 3)] = static_cast<float>(i + 1);
    EXPECT_EQ(c.k, expected) << used;
  }
}

// Many new tokens want the one slot: the last has it, however the threads are timed.
TEST(CacheOpUnit, ThreadsDoNotRaceForARingSlot) {
  constexpr int64_t kTokens = 2000, kDim = 512;
  ASSERT_EQ(attune_set_num_threads(8), ATTUNE_OK);
  std::vector<float> cache(kDim), k(kTokens * kDim);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i / kDim);
  std::vector<int32_t> used = {0};
  attune_cache_op op;
  ASSERT_EQ(attune_cache_op_init(&op, sizeof(op)), ATTUNE_OK);
  op.cache.k = dense(cache, {1, 1, 1, kDim});
  op.cache.ring_capacity = 1;
  op.k = dense(k, {kTokens, 1, kDim});
  op.seqused_kv = dense(used, {1});
  for (int run = 0; run < 10; ++run) {
    ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
    EXPECT_EQ(cache, std::vector<float>(kDim, kTokens - 1));
  }
  ASSERT_EQ(attune_set_num_threads(0), ATTUNE_OK);
}

TEST(CacheOpUnit, AppendBySlot) {
  SlotCache c(2, 3);
  Op op(ATTUNE_CACHE_APPEND, c, numbers(5));
  op.at_slots({5, -1, 0, 6, INT64_MIN});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  EXPECT_EQ(c.k, (std::vector<float>{3, o, o, o, o, 1}));
  expect_v_is_ten_times_k(c);
}

TEST(CacheOpUnit, OffsetsThatMakeNoSenseStayInTheTensor) {
  SlotCache c(4, 2);
  Op op(ATTUNE_CACHE_APPEND, c, numbers(4));
  op.sequences({0, 0, -5}, {-3, 2, 1, 1000});  // rows 0..1, none, 2..3
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  EXPECT_EQ(c.k, (std::vector<float>{1, 2, o, o, 3, 4, o, o}));
}

TEST(CacheOpUnit, GatherReadsSequencesAndHidesBadPages) {
  SlotCache c(4, 2);
  c.k = numbers(8), c.v = numbers(8);
  for (float& x : c.v) x *= 10;
  c.c.k.data = c.k.data(), c.c.v.data = c.v.data();
  c.paged({3, 0, -4, 1, 0x7fffff00, 0x7fffff00}, 2);
  Op op(ATTUNE_CACHE_GATHER, c, std::vector<float>(10, kOld));
  op.sequences({5, 2}, {0, 6, 10});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  EXPECT_EQ(op.k, (std::vector<float>{7, 8, 1, 2, 0, o, 3, 4, o, o}));
  EXPECT_EQ(op.v, (std::vector<float>{70, 80, 10, 20, 0, 10 * o, 30, 40, 10 * o, 10 * o}));
}

TEST(CacheOpUnit, GatherClampsLengthsAndKnowsTheRing) {
  SlotCache c(2, 3);
  c.k = numbers(6), c.v = c.k;
  c.c.k.data = c.k.data(), c.c.v.data = c.v.data();
  Op op(ATTUNE_CACHE_GATHER, c, std::vector<float>(8, kOld));
  op.sequences({100, -1}, {0, 5, 8});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  EXPECT_EQ(op.k, (std::vector<float>{1, 2, 3, o, o, o, o, o}));
  // Five tokens went into a ring of three: 0 and 1 are gone.
  op.op.cache.ring_capacity = 3;
  op.sequences({5, 0}, {0, 5, 8});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  EXPECT_EQ(op.k, (std::vector<float>{0, 0, 3, 1, 2, o, o, o}));
}

TEST(CacheOpUnit, GatherBySlotGivesZerosForBadOnes) {
  SlotCache c(2, 3);
  c.k = numbers(6), c.v = c.k;
  c.c.k.data = c.k.data(), c.c.v.data = c.v.data();
  Op op(ATTUNE_CACHE_GATHER, c, std::vector<float>(4, kOld));
  op.at_slots({5, -1, 6, 0});
  ASSERT_EQ(op.run(), ATTUNE_OK) << attune_last_error();
  EXPECT_EQ(op.k, (std::vector<float>{6, 0, 0, 1}));
}

// Packed MLA pools, there and back, with scales of powers of two.
TEST(CacheOpUnit, QuantizeAndDequantizeAWholePool) {
  for (const attune_kv_format format : {ATTUNE_KV_MLA_656, ATTUNE_KV_MLA_584}) {
    const int64_t dim = format == ATTUNE_KV_MLA_656 ? 576 : 512, page = 2, pages = 2;
    int64_t bytes = 0;
    ASSERT_EQ(attune_kv_page_bytes(format, page, &bytes), ATTUNE_OK);
    std::vector<uint8_t> pool(static_cast<size_t>(bytes * pages), 0xff);
    std::vector<float> in = normal(static_cast<size_t>(4 * dim), 31), out(in.size(), kNan);
    attune_cache_op op;
    ASSERT_EQ(attune_cache_op_init(&op, sizeof(op)), ATTUNE_OK);
    op.cache.format = format;
    op.cache.layout = ATTUNE_KV_BYTES;
    op.cache.page_size = page;
    op.cache.k = format == ATTUNE_KV_MLA_656 ? dense(pool, ATTUNE_UINT8, {pages, page, 656})
                                             : dense(pool, ATTUNE_UINT8, {pages, bytes});
    op.kind = ATTUNE_CACHE_QUANTIZE;
    op.k = dense(in, {4, 1, dim});
    op.power_of_two_scales = 1;
    ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
    op.kind = ATTUNE_CACHE_DEQUANTIZE;
    op.k = dense(out, {4, 1, dim});
    ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
    for (size_t i = 0; i < in.size(); ++i) EXPECT_CLOSE(out[i], in[i], std::fabs(in[i]) / 16 + 1e-4);
    // What was read back is exact: writing it again changes no byte.
    const std::vector<uint8_t> before = pool;
    op.kind = ATTUNE_CACHE_QUANTIZE;
    ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
    EXPECT_EQ(pool, before);
  }
}

// As the index caches of DeepSeek V3.2: one scale a token, 2^ceil(log2(max(amax, 1e-4) / 448)).
TEST(CacheOpUnit, PlainRowsTakePowerOfTwoScales) {
  std::vector<float> in = {448, 1, 449, -900, 0, 0, 1e-5f, 0, 3.5f, -7}, scales(5, kOld), out(10);
  std::vector<uint8_t> codes(10);
  attune_cache_op op;
  ASSERT_EQ(attune_cache_op_init(&op, sizeof(op)), ATTUNE_OK);
  op.kind = ATTUNE_CACHE_QUANTIZE;
  op.power_of_two_scales = 1;
  op.cache.k = dense(codes, ATTUNE_FLOAT8_E4M3, {1, 5, 1, 2});
  op.cache.k_scale = dense(scales, {1, 5, 1});
  op.k = dense(in, {5, 1, 2});
  ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
  EXPECT_EQ(scales, (std::vector<float>{1, 4, 0x1p-22f, 0x1p-22f, 0x1p-6f}));
  op.kind = ATTUNE_CACHE_DEQUANTIZE;
  op.power_of_two_scales = 0;
  op.k = dense(out, {5, 1, 2});
  ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
  EXPECT_EQ(out[0], 448);
  for (size_t i = 0; i < in.size(); ++i) EXPECT_CLOSE(out[i], in[i], std::fabs(in[i]) / 16 + 1e-9);
}

// K may have a scale a token where V has one for all, and the other way round: powers of two are for what is written.
TEST(CacheOpUnit, PowerOfTwoScalesOfOneOfTheTwo) {
  for (const bool of_v : {false, true}) {
    std::vector<float> k = {449, 1, 3.5f, -7}, v = k, fixed = {3}, scales(2, kOld);
    std::vector<uint8_t> k_codes(4), v_codes(4);
    attune_cache_op op;
    ASSERT_EQ(attune_cache_op_init(&op, sizeof(op)), ATTUNE_OK);
    op.kind = ATTUNE_CACHE_QUANTIZE;
    op.power_of_two_scales = 1;
    op.cache.k = dense(k_codes, ATTUNE_FLOAT8_E4M3, {1, 2, 1, 2});
    op.cache.v = dense(v_codes, ATTUNE_FLOAT8_E4M3, {1, 2, 1, 2});
    (of_v ? op.cache.v_scale : op.cache.k_scale) = dense(scales, {1, 2, 1});
    (of_v ? op.cache.k_scale : op.cache.v_scale) = dense(fixed, {1});
    op.k = dense(k, {2, 1, 2});
    op.v = dense(v, {2, 1, 2});
    ASSERT_EQ(attune_cache_op_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
    EXPECT_EQ(scales, (std::vector<float>{2, 0x1p-6f}));
    EXPECT_EQ(fixed, (std::vector<float>{3}));
  }
}

TEST(CacheOpUnit, BadFieldsAreNamed) {
  using Change = std::function<void(Op&)>;
  std::vector<int32_t> table = {0, 1};
  std::vector<float> f(64), wide(2 * 577);
  const std::pair<const char*, Change> cases[] = {
      {"cache_op.struct_size", [](Op& o) { o.op.struct_size = 1; }},
      {"kind is 4", [](Op& o) { o.op.kind = 4; }},
      {"k is absent", [](Op& o) { o.op.k.dtype = 0; }},
      {"k.dtype is int8", [](Op& o) { o.op.k.dtype = ATTUNE_INT8; }},
      {"k has head_dim 577", [](Op& o) { o.op.k.shape[2] = 577; }},
      {"v is absent, but the cache has", [](Op& o) { o.op.v.dtype = 0; }},
      {"v is set, but V is part of K", [](Op& o) { o.op.cache.v.dtype = 0; }},
      {"v.shape[0]", [](Op& o) { o.op.v.shape[0] = 1; }},
      {"slots and seqused_kv are both absent", [](Op& o) { o.op.slots.dtype = 0; }},
      {"slots.dtype is int32", [](Op& o) { o.op.slots.dtype = ATTUNE_INT32; }},
      {"slots.shape[0] is 3",
       [](Op& o) {
         o.at_slots({0, 1, 2});
       }},
      {"seqused_kv must be absent", [](Op& o) { o.sequences({1}, {}); }},
      {"slots must be absent", [](Op& o) { o.op.kind = ATTUNE_CACHE_QUANTIZE; }},
      {"finished is set; only append",
       [](Op& o) { o.op.kind = ATTUNE_CACHE_GATHER, o.op.slots.dtype = 0, o.sequences({1}, {}), o.finish({0}); }},
      {"cu_seqlens.shape[0] is 2",
       [](Op& o) {
         o.op.slots.dtype = 0, o.sequences({1, 1}, {0, 2});
       }},
      {"cu_seqlens is absent",
       [](Op& o) {
         o.op.slots.dtype = 0, o.sequences({1, 1, 1}, {});
       }},
      {"cache.v has head_dim 577; it must be 1..576",
       [&](Op& o) {
         o.op.cache.v = dense(wide, {2, 1, 1, 577}), o.op.v = dense(wide, {2, 1, 577});
       }},
      {"cache.k is absent", [](Op& o) { o.op.cache.k.dtype = 0, o.op.cache.v.dtype = 0; }},
      {"cache.page_table",
       [&](Op& o) {
         o.op.cache.page_table = dense(table, {1, 2}), o.op.slots.dtype = 0, o.sequences({1, 1}, {});
       }},
      {"power_of_two_scales is 1, but", [](Op& o) { o.op.power_of_two_scales = 1; }},
      {"power_of_two_scales is 3", [](Op& o) { o.op.power_of_two_scales = 3; }},
      {"k.stride[0] is 0; an output must not overlap itself",
       [](Op& o) { o.op.kind = ATTUNE_CACHE_GATHER, o.op.k.stride[0] = 0; }},
      {"k has 3 tokens, but the cache has 2 slots", [&](Op& o) {
         o.op.kind = ATTUNE_CACHE_DEQUANTIZE, o.op.slots.dtype = 0, o.op.k = dense(f, {3, 1, 1}), o.op.v = o.op.k;
       }}};
  for (const auto& [part, change] : cases) {
    SlotCache c(2, 1);
    Op op(ATTUNE_CACHE_APPEND, c, numbers(2));
    op.at_slots({0, 1});
    change(op);
    EXPECT_EQ(op.run(), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find(part), std::string::npos)
        << "wanted: " << part << "\ngot: " << attune_last_error();
  }
  EXPECT_EQ(attune_cache_op_run(nullptr, kCpuDevice, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_cache_op_init(nullptr, sizeof(attune_cache_op)), ATTUNE_INVALID_ARGUMENT);
  attune_cache_op op;
  EXPECT_EQ(attune_cache_op_init(&op, sizeof(op) - 8), ATTUNE_INVALID_ARGUMENT);
  SlotCache c(2, 1);
  Op good(ATTUNE_CACHE_APPEND, c, numbers(2));
  EXPECT_EQ(attune_cache_op_run(&good.op, {ATTUNE_DEVICE_CUDA, 0}, nullptr), ATTUNE_DEVICE_ERROR);
  EXPECT_EQ(attune_cache_op_run(&good.op, {ATTUNE_DEVICE_CPU, 1}, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_cache_op_run(&good.op, {7, 0}, nullptr), ATTUNE_INVALID_ARGUMENT);
}

TEST(AppendRowUnit, SeparateTablesOfKAndV) {
  SlotCache c(3, 2);
  std::vector<int32_t> v_table = {2, 5};
  c.paged({1, 0}, 1);
  c.c.v_page_table = dense(v_table, {1, 2});
  const KvCache view = make_kv_cache("cache", c.c, CacheUse::kSequences, 1, 1, 1, Data::kRequired);
  const float k = 3, v = 4;
  cpu::append_row(view, 0, 1, 0, &k, &v, false);
  EXPECT_EQ(c.k[3], 3.0f);
  EXPECT_EQ(c.v[5], 4.0f);
  // The page of V is bad: the token is hidden, so K is not written either.
  cpu::append_row(view, 0, 2, 0, &k, &v, false);
  cpu::append_row(view, 0, 4, 0, &k, &v, false);
  cpu::append_row(view, 0, -1, 0, &k, &v, false);
  const float o = kOld;
  EXPECT_EQ(c.k, (std::vector<float>{o, o, o, 3, o, o}));
  EXPECT_EQ(c.v, (std::vector<float>{o, o, o, o, o, 4}));
}

}  // namespace
}  // namespace attune::unit
