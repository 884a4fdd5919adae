// SPDX-License-Identifier: Apache-2.0
// Rules of qkv_prepare and merge: what is written, what may overlap, what is refused.
#include <cstring>

#include "core/overlap.h"
#include "unit_cache.h"

namespace attune::unit {
namespace {

attune_tensor view(void* data, attune_dtype dtype, std::vector<int64_t> shape, std::vector<int64_t> stride) {
  attune_tensor t = attune_dense_tensor(data, dtype, static_cast<int32_t>(shape.size()), shape.data());
  for (size_t i = 0; i < stride.size(); ++i) t.stride[i] = stride[i];
  return t;
}

TEST(OverlapUnit, PackedColumnsAreApart) {
  std::vector<float> buffer(1000);
  float* x = buffer.data();
  const attune_tensor q = view(x, ATTUNE_FLOAT32, {10, 2, 4}, {16, 4, 1});
  const attune_tensor k = view(x + 8, ATTUNE_FLOAT32, {10, 1, 4}, {16, 4, 1});
  const attune_tensor late = view(x + 7, ATTUNE_FLOAT32, {10, 1, 4}, {16, 4, 1});
  EXPECT_TRUE(may_overlap(q, q));
  EXPECT_FALSE(may_overlap(q, k));
  EXPECT_FALSE(may_overlap(k, q));
  EXPECT_TRUE(may_overlap(q, late));
  EXPECT_TRUE(may_overlap(late, k));
  // The last columns of one row run into the first of the next.
  EXPECT_TRUE(may_overlap(view(x + 16, ATTUNE_FLOAT32, {9, 1, 4}, {16, 4, 1}),
                          view(x + 14, ATTUNE_FLOAT32, {9, 1, 4}, {16, 4, 1})));
  EXPECT_FALSE(may_overlap(q, view(x + 160, ATTUNE_FLOAT32, {10, 2, 4}, {8, 4, 1})));
  EXPECT_TRUE(may_overlap(q, view(x + 150, ATTUNE_FLOAT32, {10, 2, 4}, {8, 4, 1})));
  EXPECT_FALSE(may_overlap(q, view(x, ATTUNE_FLOAT32, {0, 2, 4}, {8, 4, 1})));
  attune_tensor absent;
  std::memset(&absent, 0, sizeof(absent));
  absent.rank = 1000;
  EXPECT_FALSE(may_overlap(q, absent));
  EXPECT_FALSE(same_rows(absent, absent));
}

TEST(OverlapUnit, SameRowsMayShrinkInPlace) {
  std::vector<float> buffer(1000);
  const attune_tensor in = view(buffer.data(), ATTUNE_FLOAT32, {10, 2, 4}, {16, 4, 1});
  EXPECT_TRUE(same_rows(in, in));
  EXPECT_TRUE(same_rows(view(buffer.data(), ATTUNE_BFLOAT16, {10, 2, 4}, {32, 8, 1}), in));
  EXPECT_FALSE(same_rows(view(buffer.data(), ATTUNE_BFLOAT16, {10, 2, 4}, {8, 4, 1}), in));
  EXPECT_FALSE(same_rows(view(buffer.data() + 1, ATTUNE_FLOAT32, {10, 2, 4}, {16, 4, 1}), in));
  const attune_tensor tight = view(buffer.data(), ATTUNE_BFLOAT16, {10, 2, 4}, {8, 4, 1});
  EXPECT_FALSE(same_rows(view(buffer.data(), ATTUNE_FLOAT32, {10, 2, 4}, {4, 2, 1}), tight))
      << "wider rows run into each other";
}

// q, k and v side by side in one buffer, rotated in place, equal to a run into other tensors.
TEST(QkvPrepareUnit, InPlaceEqualsOutOfPlace) {
  constexpr int64_t kTokens = 7, kHeadsQ = 4, kHeadsKv = 2, kDim = 8, kWidth = (kHeadsQ + 2 * kHeadsKv) * kDim;
  std::vector<float> packed = normal(kTokens * kWidth, 40), cos_sin = normal(64 * 6, 41),
                     bias = normal(kHeadsKv * kDim, 42);
  std::vector<float> outs[3] = {std::vector<float>(kTokens * kHeadsQ * kDim),
                                std::vector<float>(kTokens * kHeadsKv * kDim),
                                std::vector<float>(kTokens * kHeadsKv * kDim)};
  std::vector<int32_t> cu = {0, 3, 3, 7}, used = {5, 9, 0};
  attune_qkv_prepare op;
  ASSERT_EQ(attune_qkv_prepare_init(&op, sizeof(op)), ATTUNE_OK);
  const auto part = [&](int64_t heads, int64_t first) {
    return view(packed.data() + first * kDim, ATTUNE_FLOAT32, {kTokens, heads, kDim}, {kWidth, kDim, 1});
  };
  op.q = part(kHeadsQ, 0), op.k = part(kHeadsKv, kHeadsQ), op.v = part(kHeadsKv, kHeadsQ + kHeadsKv);
  op.cu_seqlens_q = dense(cu, {4});
  op.seqused_kv = dense(used, {3});
  op.prologue.rope_cos_sin = dense(cos_sin, {64, 6});
  op.prologue.v_bias = dense(bias, {kHeadsKv, kDim});
  op.q_out = dense(outs[0], {kTokens, kHeadsQ, kDim});
  op.k_out = dense(outs[1], {kTokens, kHeadsKv, kDim});
  op.v_out = dense(outs[2], {kTokens, kHeadsKv, kDim});
  ASSERT_EQ(attune_qkv_prepare_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
  // Positions are seqused_kv + i: token 3 is the first of sequence 2, at position 0; token 2 at position 7.
  const float* q2 = packed.data() + 2 * kWidth;
  EXPECT_CLOSE(outs[0][2 * kHeadsQ * kDim], cos_sin[7 * 6] * q2[0] - cos_sin[7 * 6 + 3] * q2[3], 1e-5);
  const float* q3 = packed.data() + 3 * kWidth;
  EXPECT_CLOSE(outs[0][3 * kHeadsQ * kDim], cos_sin[0] * q3[0] - cos_sin[3] * q3[3], 1e-5);
  op.q_out = op.q, op.k_out = op.k, op.v_out = op.v;
  ASSERT_EQ(attune_qkv_prepare_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
  for (int64_t t = 0; t < kTokens; ++t) {
    const float* row = packed.data() + t * kWidth;
    EXPECT_EQ(std::memcmp(row, outs[0].data() + t * kHeadsQ * kDim, kHeadsQ * kDim * 4), 0);
    EXPECT_EQ(std::memcmp(row + kHeadsQ * kDim, outs[1].data() + t * kHeadsKv * kDim, kHeadsKv * kDim * 4), 0);
    EXPECT_EQ(std::memcmp(row + (kHeadsQ + kHeadsKv) * kDim, outs[2].data() + t * kHeadsKv * kDim, kHeadsKv * kDim * 4),
              0);
  }
  op.k_out = op.v;
  EXPECT_EQ(attune_qkv_prepare_run(&op, kCpuDevice, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find("k_out overlaps v"), std::string::npos) << attune_last_error();
}

TEST(QkvPrepareUnit, AppendsAndLeavesFinishedRowsAlone) {
  SlotCache c(4, 2);
  c.paged({3, 1, 2, 0}, 2);
  std::vector<float> k = numbers(3), v = numbers(3, 11), k_out(3, kOld);
  std::vector<int32_t> used = {1, 0}, cu = {0, 2, 3};
  std::vector<uint8_t> finished = {0, 1};
  attune_qkv_prepare op;
  ASSERT_EQ(attune_qkv_prepare_init(&op, sizeof(op)), ATTUNE_OK);
  op.k = dense(k, {3, 1, 1}), op.v = dense(v, {3, 1, 1});
  op.cu_seqlens_q = dense(cu, {3});
  op.seqused_kv = dense(used, {2});
  op.finished = dense(finished, ATTUNE_UINT8, {2});
  op.cache = c.c;
  op.prologue.append = 1;
  op.k_out = dense(k_out, {3, 1, 1});
  ASSERT_EQ(attune_qkv_prepare_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
  const float o = kOld;
  EXPECT_EQ(c.k, (std::vector<float>{o, o, 2, o, o, o, o, 1}));
  EXPECT_EQ(c.v, (std::vector<float>{o, o, 12, o, o, o, o, 11}));
  EXPECT_EQ(k_out, (std::vector<float>{1, 2, o}));
}

TEST(QkvPrepareUnit, BadFieldsAreNamed) {
  std::vector<float> f(64, 1.0f);
  std::vector<int32_t> i = {0, 2};
  using Change = std::function<void(attune_qkv_prepare&)>;
  const std::pair<const char*, Change> cases[] = {
      {"qkv_prepare.struct_size", [](auto& o) { o.struct_size = 0; }},
      {"q, k and v are all absent", [](auto& o) { o.q.dtype = o.k.dtype = o.v.dtype = 0; }},
      {"k.shape[0] is 3", [](auto& o) { o.k.shape[0] = 3; }},
      {"k has head_dim 2", [](auto& o) { o.k.shape[2] = 2; }},
      {"v has 2 heads", [](auto& o) { o.v.shape[1] = 2; }},
      {"v has 1 head; it must have 2 as k", [](auto& o) { o.k.shape[1] = 2; }},
      {"q has 0 heads", [](auto& o) { o.q.shape[1] = 0; }},
      {"v has head_dim 577; it must be 1..576", [](auto& o) { o.v.shape[2] = 577; }},
      {"v.rank is 4",
       [&](auto& o) {
         o.v = dense(f, {1, 2, 1, 4});
       }},
      {"q_out is set, but q is absent", [](auto& o) { o.q_out = o.q, o.q.dtype = 0; }},
      {"v_out.dtype is int8", [](auto& o) { o.v_out = o.v, o.v_out.dtype = ATTUNE_INT8; }},
      {"v_out.shape[2]", [](auto& o) { o.v_out = o.v, o.v_out.shape[2] = 3; }},
      {"k_out.stride[0] is 0", [](auto& o) { o.k_out = o.k, o.k_out.stride[0] = 0; }},
      {"seqused_kv.shape[0]", [&](auto& o) { o.seqused_kv = dense(i, {2}); }},
      {"cu_seqlens_q.shape[0] is 0", [&](auto& o) { o.cu_seqlens_q = dense(i, {0}); }},
      {"prologue.append is 1, but cache.k", [](auto& o) { o.prologue.append = 1; }},
      {"prologue.logn.shape[0] is 0", [&](auto& o) { o.prologue.logn = dense(f, {0}); }}};
  for (const auto& [part, change] : cases) {
    std::vector<float> q = normal(16, 1), k = normal(8, 2), v = normal(8, 3);
    attune_qkv_prepare op;
    ASSERT_EQ(attune_qkv_prepare_init(&op, sizeof(op)), ATTUNE_OK);
    op.q = dense(q, {2, 2, 4}), op.k = dense(k, {2, 1, 4}), op.v = dense(v, {2, 1, 4});
    ASSERT_EQ(attune_qkv_prepare_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error();
    change(op);
    EXPECT_EQ(attune_qkv_prepare_run(&op, kCpuDevice, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find(part), std::string::npos)
        << "wanted: " << part << "\ngot: " << attune_last_error();
  }
}

struct MergeCase {
  std::vector<float> outs, lses, sinks = {0}, out = {kNan, kNan}, lse = {kNan};
  attune_merge op;

  MergeCase(std::vector<float> part_out, std::vector<float> part_lse)
      : outs(std::move(part_out)), lses(std::move(part_lse)) {
    EXPECT_EQ(attune_merge_init(&op, sizeof(op)), ATTUNE_OK);
    const auto parts = static_cast<int64_t>(lses.size());
    op.partial_out = dense(outs, {parts, 1, 1, 2});
    op.partial_lse = dense(lses, {parts, 1, 1});
    op.out = dense(out, {1, 1, 2});
    op.lse = dense(lse, {1, 1});
  }
  void run() { ASSERT_EQ(attune_merge_run(&op, kCpuDevice, nullptr), ATTUNE_OK) << attune_last_error(); }
  void with_sink(float s) {
    sinks[0] = s;
    op.sinks = dense(sinks, {1});
    run();
  }
};

TEST(MergeUnit, WeighsByLse) {
  MergeCase m({1, 10, kNan, kInf, 3, 30}, {std::log(1.0f), -kInf, std::log(3.0f)});
  m.run();
  EXPECT_CLOSE(m.out[0], 2.5, 1e-6);
  EXPECT_CLOSE(m.out[1], 25, 1e-5);
  EXPECT_CLOSE(m.lse[0], std::log(4.0), 1e-6);
  m.with_sink(std::log(4.0f));
  EXPECT_CLOSE(m.out[0], 1.25, 1e-6);
  EXPECT_CLOSE(m.lse[0], std::log(4.0), 1e-6);
  m.with_sink(-kInf);
  EXPECT_CLOSE(m.out[0], 2.5, 1e-6);
  for (const float s : {1e30f, kInf}) {
    m.with_sink(s);
    EXPECT_EQ(m.out[0], 0.0f);
    EXPECT_CLOSE(m.lse[0], std::log(4.0), 1e-6);
  }
}

TEST(MergeUnit, ExtremesAndNothing) {
  MergeCase far({1, 2, 3, 4}, {-1e30f, 1e30f});
  far.run();
  EXPECT_EQ(far.out, (std::vector<float>{3, 4}));
  EXPECT_EQ(far.lse[0], 1e30f);
  MergeCase nothing({kNan, kNan, kInf, 1}, {-kInf, -kInf});
  nothing.with_sink(3);
  EXPECT_EQ(nothing.out, (std::vector<float>{0, 0}));
  EXPECT_EQ(nothing.lse[0], -kInf);
  MergeCase broken({1, 2, 3, 4}, {kNan, 0});
  broken.run();
  EXPECT_TRUE(std::isnan(broken.out[0]) && std::isnan(broken.lse[0]));
}

TEST(MergeUnit, BadFieldsAreNamed) {
  using Change = std::function<void(MergeCase&)>;
  const std::pair<const char*, Change> cases[] = {
      {"merge.struct_size", [](auto& m) { m.op.struct_size = 0; }},
      {"partial_lse.shape[0]", [](auto& m) { m.op.partial_lse.shape[0] = 1; }},
      {"out.shape[2]", [](auto& m) { m.op.out.shape[2] = 1; }},
      {"out overlaps partial_out", [](auto& m) { m.op.out.data = m.outs.data(); }},
      {"lse overlaps partial_lse", [](auto& m) { m.op.lse.data = m.lses.data(); }},
      {"out_scale is set, but out is float32", [](auto& m) { m.op.out_scale = dense(m.sinks, {1}); }},
      {"sinks.shape[0]", [](auto& m) { m.op.sinks = dense(m.outs, {2}); }}};
  for (const auto& [part, change] : cases) {
    MergeCase m({1, 2, 3, 4}, {0, 0});
    change(m);
    EXPECT_EQ(attune_merge_run(&m.op, kCpuDevice, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find(part), std::string::npos)
        << "wanted: " << part << "\ngot: " << attune_last_error();
  }
}

}  // namespace
}  // namespace attune::unit
