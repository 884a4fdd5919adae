// SPDX-License-Identifier: Apache-2.0
// append, quantize, dequantize and gather on the CPU for every format and layout, and what they say to bad input.
#include "cache_fixture.h"
#include "core/ops.h"

namespace attune::tests {
namespace {

class CacheOperation : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Formats, CacheOperation, testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CacheOperation, AppendsToSlotsAndGathersThemBack) {
  for (const bool aligned : {false, true}) check_slots(cases::host_memory(), GetParam(), aligned);
}

TEST_P(CacheOperation, QuantizesAndDequantizesTheWholeCache) {
  for (const bool aligned : {false, true}) check_whole_cache(cases::host_memory(), GetParam(), aligned);
}

TEST_P(CacheOperation, AppendsToSequencesAndGathersThem) {
  for (const bool aligned : {false, true}) check_sequences(cases::host_memory(), GetParam(), aligned);
}

TEST(CacheOperations, GatherSequencesRowByRow) { check_gather_by_sequence(cases::host_memory(), false); }
TEST(CacheOperations, GatherGivesZerosForSlotsOutOfRange) { check_gather_out_of_range(cases::host_memory(), false); }
TEST(CacheOperations, SaturateAndKeepNan) { check_saturation(cases::host_memory(), false); }

// Whatever the tables say. (What becomes of infinities has one answer, but not of this oracle.)
TEST(CacheOperations, RandomOnesMatchTheOracle) {
  int ran = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    cases::Case spec = cases::random_cache_op_case(seed);
    spec.op.infinities = false;
    cases::CacheOpProblem op(spec, cases::host_memory());
    try {
      make_cache_op(op.device());
    } catch (const Failure&) {  // some of them are none
      continue;
    }
    ++ran;
    EXPECT_EQ(op.run_and_check(), "") << seed << ": " << op.describe();
  }
  EXPECT_GT(ran, 300);
}

TEST(CacheOperations, PageBytes) {
  int64_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_kv_page_bytes(ATTUNE_KV_MLA_656, 64, &bytes));
  EXPECT_EQ(bytes, 64 * 656);
  ASSERT_ATTUNE_OK(attune_kv_page_bytes(ATTUNE_KV_MLA_584, 64, &bytes));
  EXPECT_EQ(bytes, (64 * 584 + 575) / 576 * 576);
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_584, 0, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_kv_page_bytes(static_cast<attune_kv_format>(77), 64, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_kv_page_bytes(ATTUNE_KV_MLA_656, 64, nullptr), ATTUNE_INVALID_ARGUMENT);
}

TEST(CacheOperations, NameWhatIsWrong) {
  CacheFixture f(cases::host_memory(), kind_of("i8_token"), ATTUNE_KV_NHD, ATTUNE_FLOAT32, 3);
  f.fill_dense();
  f.op().slots = f.add_integers("slots", ATTUNE_INT64, {0, 1, 2});
  f.run(ATTUNE_CACHE_APPEND);
  const attune_cache_op good = f.arena().on_device(f.op());
  const auto expect = [&](void (*spoil)(attune_cache_op&), const char* names) {
    attune_cache_op op = good;
    spoil(op);
    EXPECT_EQ(attune_cache_op_run(&op, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT) << names;
    EXPECT_NE(std::string(attune_last_error()).find(names), std::string::npos) << attune_last_error();
  };
  expect([](attune_cache_op& op) { op.struct_size = 1; }, "struct_size");
  expect([](attune_cache_op& op) { op.kind = 9; }, "kind");
  expect([](attune_cache_op& op) { op.cache.k = {}; }, "cache.k");
  expect([](attune_cache_op& op) { op.cache.layout = 17; }, "layout");
  expect([](attune_cache_op& op) { op.cache.format = -1; }, "format");
  expect([](attune_cache_op& op) { op.k = {}; }, "k");
  expect([](attune_cache_op& op) { op.k.shape[1] = 2; }, "k");
  expect([](attune_cache_op& op) { op.v.shape[2] = 2; }, "v");
  expect([](attune_cache_op& op) { op.v.dtype = ATTUNE_INT8; }, "v");
  expect([](attune_cache_op& op) { op.slots.dtype = ATTUNE_INT32; }, "slots");
  expect([](attune_cache_op& op) { op.slots.shape[0] = 2; }, "slots");
  expect([](attune_cache_op& op) { op.cache.k_scale.shape[0] = 4; }, "k_scale");
  expect([](attune_cache_op& op) { op.cache.k.data = nullptr; }, "cache.k");
  EXPECT_EQ(attune_cache_op_run(nullptr, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attune::tests
