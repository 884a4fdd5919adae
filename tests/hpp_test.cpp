// SPDX-License-Identifier: Apache-2.0
// attune.hpp: what the wrapper adds to the C ABI. What the operations compute is tested elsewhere.
#include "attune/attune.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace attune {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

static_assert(std::is_nothrow_move_constructible_v<Plan> && !std::is_copy_constructible_v<Plan>);
static_assert(std::is_nothrow_move_constructible_v<Workspace> && !std::is_copy_constructible_v<Workspace>);
static_assert(!std::is_convertible_v<Support, bool>, "supported() must not turn into a number");
static_assert(Element<float> && Element<const int32_t> && !Element<uint16_t> && !Element<double>);

// Paged decode with V = 1, so that every output is 1 whatever the weights are.
struct PagedDecode {
  static constexpr int64_t kBatch = 3, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 16, kPageSize = 4, kMaxPages = 4;
  std::vector<float> q = std::vector<float>(kBatch * kHeadsQ * kHeadDim, 0.25f);
  std::vector<float> k = std::vector<float>(kBatch * kMaxPages * kPageSize * kHeadsKv * kHeadDim, 0.5f);
  std::vector<float> v = std::vector<float>(k.size(), 1.0f);
  std::vector<float> out = std::vector<float>(q.size(), std::numeric_limits<float>::quiet_NaN());
  std::vector<int32_t> page_table = std::vector<int32_t>(kBatch * kMaxPages);
  std::vector<int32_t> seqused = {1, 7, 16};

  PagedDecode() {
    for (size_t i = 0; i < page_table.size(); ++i) page_table[i] = static_cast<int32_t>(page_table.size() - 1 - i);
  }

  Attention descriptor() {
    Attention a;
    a.q = dense(q.data(), {kBatch, kHeadsQ, kHeadDim});
    a.cache.k = dense(k.data(), {kBatch * kMaxPages, kPageSize, kHeadsKv, kHeadDim});
    a.cache.v = dense(v.data(), {kBatch * kMaxPages, kPageSize, kHeadsKv, kHeadDim});
    a.cache.page_table = dense(page_table.data(), {kBatch, kMaxPages});
    a.seqused_kv = dense(seqused.data(), {kBatch});
    a.out = dense(out.data(), {kBatch, kHeadsQ, kHeadDim});
    return a;
  }

  void expect_ones() const {
    for (float x : out) {
      const float error = std::abs(x - 1);
      if (!(error <= 1e-6f)) FAIL() << "out holds " << x;
    }
  }
};

attune_status status_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_STRNE(e.what(), "");
    return e.status();
  }
  return ATTUNE_OK;
}

TEST(Hpp, TensorsCarryDtypeShapeAndStride) {
  const std::vector<float> data(24);
  const Tensor t = dense(data.data(), {2, 3, 4});
  EXPECT_EQ(t.data, data.data());
  EXPECT_EQ(t.dtype, ATTUNE_FLOAT32);
  EXPECT_EQ(t.rank, 3);
  EXPECT_THAT(std::vector<int64_t>(t.shape, t.shape + 3), ::testing::ElementsAre(2, 3, 4));
  EXPECT_THAT(std::vector<int64_t>(t.stride, t.stride + 3), ::testing::ElementsAre(12, 4, 1));

  std::array<int8_t, 8> bytes{};
  EXPECT_EQ(dense(bytes.data(), {8}).dtype, ATTUNE_INT8);
  EXPECT_EQ(dense(bytes.data(), ATTUNE_FLOAT8_E4M3, {2, 4}).dtype, ATTUNE_FLOAT8_E4M3);
  const Tensor s = strided(bytes.data(), {2, 2}, {5, 2});
  EXPECT_EQ(s.stride[0], 5);
  EXPECT_EQ(s.stride[1], 2);
  EXPECT_EQ(strided(nullptr, ATTUNE_BFLOAT16, {2}, {3}).dtype, ATTUNE_BFLOAT16);
}

TEST(Hpp, TensorsRefuseAWrongRank) {
  const float x = 0;
  EXPECT_EQ(status_of([&] { dense(&x, Shape{}); }), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { dense(&x, {1, 1, 1, 1, 1, 1, 1}); }), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { strided(&x, {1, 1}, {1}); }), ATTUNE_INVALID_ARGUMENT);
}

TEST(Hpp, DescriptorsStartWithTheirDefaults) {
  EXPECT_EQ(Attention().struct_size, sizeof(attune_attention));
  EXPECT_EQ(Attention().window_left, -1);
  EXPECT_EQ(QkvPrepare().struct_size, sizeof(attune_qkv_prepare));
  EXPECT_EQ(Merge().struct_size, sizeof(attune_merge));
  EXPECT_EQ(CacheOp(ATTUNE_CACHE_GATHER).kind, ATTUNE_CACHE_GATHER);
  EXPECT_EQ(Rope().struct_size, sizeof(attune_rope));
}

TEST(Hpp, ErrorsCarryStatusAndMessage) {
  Attention empty;
  try {
    Plan plan(empty);
    FAIL() << "a plan without q was made";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), ATTUNE_INVALID_ARGUMENT);
    EXPECT_THAT(e.what(), HasSubstr("q"));
  }
  EXPECT_EQ(status_of([] { Merge().run(); }), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([] { QkvPrepare().run(cuda(1 << 20)); }), ATTUNE_DEVICE_ERROR);
  EXPECT_EQ(status_of([] { set_num_threads(-1); }), ATTUNE_INVALID_ARGUMENT);
}

TEST(Hpp, SupportedGivesTheReason) {
  PagedDecode decode;
  Attention a = decode.descriptor();
  const Support yes = supported(a);
  EXPECT_TRUE(yes) << yes.reason;
  EXPECT_THAT(yes.reason, IsEmpty());

  a.q.shape[2] += 1;
  const Support no = supported(a);
  EXPECT_FALSE(no);
  EXPECT_EQ(no.status, ATTUNE_INVALID_ARGUMENT);
  EXPECT_THAT(no.reason, Not(IsEmpty()));
}

TEST(Hpp, PlansRunAndMove) {
  PagedDecode decode;
  const Attention a = decode.descriptor();
  Plan first(a);
  const Workspace workspace(first.workspace_size());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace.data()) % 256, 0u);
  const Plan plan = std::move(first);
  plan.run(a, workspace);
  decode.expect_ones();

  std::fill(decode.out.begin(), decode.out.end(), std::numeric_limits<float>::quiet_NaN());
  plan.schedule(a, workspace);
  plan.run_scheduled(a, workspace);
  decode.expect_ones();

  const std::string text = plan.describe();
  EXPECT_THAT(text, Not(IsEmpty()));
  EXPECT_EQ(text.find('\0'), std::string::npos);
  if (plan.workspace_size() > 0) {
    EXPECT_EQ(status_of([&] { plan.run(a, workspace.data(), workspace.size() - 1); }), ATTUNE_WORKSPACE_TOO_SMALL);
  }
}

// Two keys with the same P: dv is half of dout, and dq points from the lesser value to the larger.
TEST(Hpp, BackwardOfAttention) {
  const std::vector<float> q = {0, 0}, k = {1, 0, 0, 1}, v = {4, 2}, dout = {1};
  std::vector<float> out(1), lse(1), dq(2), dv(2);
  Attention a;
  a.q = dense(q.data(), {1, 1, 2});
  a.k = dense(k.data(), {2, 1, 2});
  a.v = dense(v.data(), {2, 1, 1});
  a.out = dense(out.data(), {1, 1, 1});
  a.lse = dense(lse.data(), {1, 1});
  a.softmax_scale = 2;
  const Plan forward(a);
  forward.run(a, Workspace(forward.workspace_size()));
  AttentionBackward b(a);
  b.dout = dense(dout.data(), {1, 1, 1});
  b.dq = dense(dq.data(), {1, 1, 2});
  b.dv = dense(dv.data(), {2, 1, 1});
  EXPECT_TRUE(supported(b));
  const Plan plan(b);
  plan.run(b, Workspace(plan.workspace_size()));
  EXPECT_THAT(plan.describe(), HasSubstr("cpu_backward"));
  EXPECT_EQ(dv, (std::vector<float>{0.5f, 0.5f}));
  EXPECT_FLOAT_EQ(dq[0], 1.0f);  // 2 * 0.5 * (4 - 3)
  EXPECT_FLOAT_EQ(dq[1], -1.0f);
  b.dout.shape[0] = 2;
  EXPECT_EQ(supported(b).status, ATTUNE_INVALID_ARGUMENT);
}

TEST(Hpp, ValidateNamesABadPage) {
  PagedDecode decode;
  const Attention a = decode.descriptor();
  EXPECT_NO_THROW(validate(a));
  decode.page_table[PagedDecode::kMaxPages] = 1000;  // first page of sequence 1, which holds 7 tokens
  try {
    validate(a);
    FAIL() << "page 1000 passed";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), ATTUNE_BAD_DATA);
    EXPECT_THAT(e.what(), HasSubstr("1000"));
  }
}

TEST(Hpp, CacheOpsAppend) {
  std::vector<float> pool(8 * 2 * 4, 0.0f);
  const std::vector<float> fresh(3 * 2 * 4, 2.0f);
  const std::vector<int64_t> slots = {5, -1, 0};
  CacheOp op(ATTUNE_CACHE_APPEND);
  op.cache.k = dense(pool.data(), {2, 4, 2, 4});
  op.k = dense(fresh.data(), {3, 2, 4});
  op.slots = dense(slots.data(), {3});
  op.run();
  for (int64_t slot = 0; slot < 8; ++slot) {
    EXPECT_EQ(pool[slot * 8], slot == 5 || slot == 0 ? 2.0f : 0.0f) << "slot " << slot;
  }
}

TEST(Hpp, IndexersSelect) {
  const std::vector<float> scores = {1, 5, 3, 5};
  const std::vector<int32_t> seqused = {4};
  std::vector<int32_t> indices(3, -7);
  Indexer op(ATTUNE_INDEXER_SELECT);
  EXPECT_EQ(Indexer().kind, ATTUNE_INDEXER_TOPK);
  op.form = ATTUNE_INDEX_POSITIONS;
  op.scores = dense(scores.data(), {1, 4});
  op.seqused_kv = dense(seqused.data(), {1});
  op.indices = dense(indices.data(), {1, 3});
  op.run(Workspace(op.workspace_size()));
  EXPECT_EQ(indices, (std::vector<int32_t>{1, 2, 3}));
  op.indices.shape[1] = 0;
  EXPECT_THROW(op.workspace_size(), Error);
}

TEST(Hpp, MergesPartialResults) {
  const std::vector<float> parts = {1, 3};
  const std::vector<float> part_lse = {0, 0};
  float out = 0, lse = 0;
  Merge merge;
  merge.partial_out = dense(parts.data(), {2, 1, 1, 1});
  merge.partial_lse = dense(part_lse.data(), {2, 1, 1});
  merge.out = dense(&out, {1, 1, 1});
  merge.lse = dense(&lse, {1, 1});
  merge.run();
  EXPECT_FLOAT_EQ(out, 2);
  EXPECT_FLOAT_EQ(lse, std::log(2.0f));
}

TEST(Hpp, Tables) {
  Rope rope;
  rope.style = ATTUNE_ROPE_LINEAR;
  rope.dim = 8;
  rope.theta = 10000;
  const std::vector<float> table = rope.table(3, 1);
  ASSERT_EQ(table.size(), 24u);
  EXPECT_FLOAT_EQ(table[8], std::cos(2.0f));  // pair 0 of position 2
  EXPECT_FLOAT_EQ(table[12], std::sin(2.0f));
  ASSERT_EQ(rope.frequencies().size(), 4u);
  EXPECT_DOUBLE_EQ(rope.frequencies()[2], 0.01);
  EXPECT_FLOAT_EQ(alibi_slopes(8)[0], 0.5f);
  EXPECT_FLOAT_EQ(logn_table(4, 8)[3], 1.0f);
  EXPECT_EQ(kv_page_bytes(ATTUNE_KV_MLA_656, 64), 656 * 64);
  EXPECT_EQ(status_of([] { logn_table(1, 8); }), ATTUNE_INVALID_ARGUMENT);
}

TEST(Hpp, ListsDevicesAndKernels) {
  ASSERT_THAT(devices(), Not(IsEmpty()));
  EXPECT_EQ(devices()[0].device.type, ATTUNE_DEVICE_CPU);
  EXPECT_STRNE(devices()[0].isa, "");
  ASSERT_THAT(kernels(), Not(IsEmpty()));
  EXPECT_THAT(std::string_view(kernels()[0].coverage), HasSubstr(":"));
  EXPECT_EQ(version(), ATTUNE_VERSION_STRING);
}

TEST(Hpp, NumThreadsIsKept) {
  const int32_t before = num_threads();
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  set_num_threads(0);
  EXPECT_GE(num_threads(), 1);
  set_num_threads(before);
}

// One plan, several threads, each with its own workspace and output.
TEST(HppThreads, ShareOnePlan) {
  PagedDecode shape;
  const Plan plan(shape.descriptor());
  std::vector<PagedDecode> work(4);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (PagedDecode& decode : work) {
    threads.emplace_back([&plan, &decode] {
      const Attention a = decode.descriptor();
      const Workspace workspace(plan.workspace_size());
      for (int i = 0; i < 20; ++i) plan.run(a, workspace);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const PagedDecode& decode : work) decode.expect_ones();
}

// Each thread plans, fails and reads the message of its own failure.
TEST(HppThreads, KeepTheirOwnErrors) {
  std::vector<std::thread> threads;
  threads.reserve(4);
  std::vector<std::string> messages(4);
  for (size_t i = 0; i < messages.size(); ++i) {
    threads.emplace_back([&messages, i] {
      PagedDecode decode;
      Attention a = decode.descriptor();
      a.softcap = -static_cast<float>(i + 2);
      for (int repeat = 0; repeat < 50; ++repeat) messages[i] = supported(a).reason;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < messages.size(); ++i) EXPECT_THAT(messages[i], HasSubstr(std::to_string(i + 2)));
}

}  // namespace
}  // namespace attune
