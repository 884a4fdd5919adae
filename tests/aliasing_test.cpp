// SPDX-License-Identifier: Apache-2.0
// What an operation writes lies apart from all that it reads and writes; what shares memory is refused by both names.
#include <functional>
#include <vector>

#include "cases/backward_problem.h"
#include "cases/indexer_problem.h"
#include "support.h"

namespace attune::tests {
namespace {

using cases::NamedTensor;
using cases::Problem;

bool mentions_both(const std::string& message, const std::string& a, const std::string& b) {
  return message.find(a + " overlaps " + b + ";") == 0 || message.find(b + " overlaps " + a + ";") == 0;
}

attune_tensor* find(const std::vector<NamedTensor>& tensors, const std::string& name) {
  for (const NamedTensor& t : tensors) {
    if (t.first == name) return t.second;
  }
  ADD_FAILURE() << "there is no tensor " << name;
  return nullptr;
}

// Each of `written` lies on the first byte of every other tensor in turn, and must be refused by both names. Addresses
// are far apart and of no memory: a call is refused before it reads any.
template <class Op>
void expect_apart(const Op& good, const std::vector<std::string>& written,
                  const std::function<attune_status(const Op&)>& run) {
  EXPECT_EQ(run(good), ATTUNE_OK) << attune_last_error();
  Op a = good;
  const std::vector<NamedTensor> tensors = cases::tensors_of(a);
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].second->data = reinterpret_cast<void*>((i + 1) << 32);
  for (const std::string& name : written) {
    attune_tensor* const out = find(tensors, name);
    ASSERT_NE(out, nullptr);
    if (out->dtype == ATTUNE_DTYPE_NONE) continue;
    for (const auto& [other, t] : tensors) {
      if (t == out || t->dtype == ATTUNE_DTYPE_NONE) continue;
      void* const own = out->data;
      out->data = t->data;
      EXPECT_EQ(run(a), ATTUNE_INVALID_ARGUMENT) << name << " on " << other;
      EXPECT_TRUE(mentions_both(attune_last_error(), name, other))
          << name << " on " << other << ": " << attune_last_error();
      out->data = own;
    }
  }
}

TEST(Aliasing, AttentionWritesApart) {
  for (const cases::Case& spec : cases::every_tensor_cases()) {
    Problem problem(spec);
    SCOPED_TRACE(spec.name);
    const attune_attention a = problem.device();
    std::vector<std::string> written = {"out", "lse", "max_logits"};
    if (a.prologue.append == 1) written.insert(written.end(), {"cache.k", "cache.v"});
    if (spec.cache.writes_scales() && a.prologue.append == 1)
      written.insert(written.end(), {"cache.k_scale", "cache.v_scale"});
    expect_apart<attune_attention>(a, written,
                                   [](const attune_attention& x) { return attune_validate(&x, kCpu, nullptr); });
  }
}

// A plan of the backward, and its workspace.
class BackwardPlan {
 public:
  explicit BackwardPlan(cases::BackwardCall call) {
    EXPECT_ATTUNE_OK(attune_attention_backward_plan(call.linked(), kCpu, &plan_));
    EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan_, &bytes_));
    memory_.resize(bytes_ + 256);
  }
  ~BackwardPlan() { attune_plan_destroy(plan_); }
  BackwardPlan(const BackwardPlan&) = delete;
  BackwardPlan& operator=(const BackwardPlan&) = delete;

  attune_status run(cases::BackwardCall call) const {
    return attune_attention_backward_run(plan_, call.linked(), workspace(), bytes_, nullptr);
  }
  std::byte* workspace() const {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return const_cast<std::byte*>(memory_.data()) + (256 - at % 256) % 256;
  }
  size_t bytes() const { return bytes_; }

 private:
  attune_plan* plan_ = nullptr;
  size_t bytes_ = 0;
  std::vector<std::byte> memory_;
};

TEST(Aliasing, TheBackwardWritesApart) {
  cases::BackwardProblem problem(make_case(
      R"({"name": "x", "heads": [4, 2], "seqlens_q": [5, 2], "seqlens_kv": [9, 7], "seqused": true, "causal": true,
          "mask_bits": 2, "mask_start": 0, "ranges": [[3, 9], [0, 4]], "alibi": 2, "bias": 2, "new_token_bias": true,
          "t5_buckets": 8, "sinks": "normal", "backward": {"dlse": true}})"));
  cases::BackwardCall call = problem.device();
  const BackwardPlan plan(call);
  expect_apart<cases::BackwardCall>(call, {"dq", "dk", "dv", "dsinks", "dbias", "dt5_bias"},
                                    [&](const cases::BackwardCall& x) { return plan.run(x); });
  for (const auto& [name, t] : cases::tensors_of(call)) {
    if (t->dtype == ATTUNE_DTYPE_NONE) continue;
    void* const own = t->data;
    t->data = plan.workspace() + plan.bytes() - 16;
    EXPECT_EQ(plan.run(call), ATTUNE_INVALID_ARGUMENT) << name;
    EXPECT_EQ(std::string(attune_last_error()).find(std::string("workspace overlaps ") + name + ";"), 0u)
        << attune_last_error();
    t->data = own;
  }
  EXPECT_ATTUNE_OK(plan.run(call));
}

// A plan, and a workspace with room behind it.
class Plan {
 public:
  explicit Plan(const attune_attention& a) {
    EXPECT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan_));
    EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan_, &bytes_));
    memory_.resize(bytes_ + kRoom + 256);
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    workspace_ = memory_.data() + (256 - at % 256) % 256;
  }
  ~Plan() { attune_plan_destroy(plan_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  attune_status run(const attune_attention& a) const { return attune_run(plan_, &a, workspace_, bytes_, nullptr); }
  // All of the memory is given, of which a run uses the first bytes() only.
  attune_status run_with_more(const attune_attention& a) const {
    return attune_run(plan_, &a, workspace_, bytes_ + kRoom, nullptr);
  }
  std::byte* workspace() const { return workspace_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kRoom = 1 << 16;
  attune_plan* plan_ = nullptr;
  size_t bytes_ = 0;
  std::vector<std::byte> memory_;
  std::byte* workspace_ = nullptr;
};

TEST(Aliasing, ARunRefusesToo) {
  Problem problem(make_case(R"({"name": "x", "heads": [2, 2], "seqlens_q": [5], "seqlens_kv": [5]})"));
  attune_attention a = problem.device();
  const Plan plan(a);
  a.out.data = a.q.data;  // in place would be right in some kernels only
  EXPECT_EQ(plan.run(a), ATTUNE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions_both(attune_last_error(), "out", "q")) << attune_last_error();
}

TEST(Aliasing, TheWorkspaceIsApartFromEveryTensor) {
  for (const cases::Case& spec : cases::every_tensor_cases()) {
    Problem problem(spec);
    SCOPED_TRACE(spec.name);
    attune_attention a = problem.device();
    const Plan plan(a);
    for (const auto& [name, t] : cases::tensors_of(a)) {
      if (t->dtype == ATTUNE_DTYPE_NONE) continue;
      void* const own = t->data;
      t->data = plan.workspace() + plan.bytes() - 16;
      EXPECT_EQ(plan.run(a), ATTUNE_INVALID_ARGUMENT) << name;
      EXPECT_EQ(std::string(attune_last_error()).find(std::string("workspace overlaps ") + name + ";"), 0u)
          << attune_last_error();
      t->data = own;
    }
    EXPECT_ATTUNE_OK(plan.run(a));
  }
}

TEST(Aliasing, BehindTheWorkspaceIsFree) {
  Problem problem(make_case(R"({"name": "x", "heads": [2, 2], "seqlens_q": [5], "seqlens_kv": [5]})"));
  attune_attention a = problem.device();
  const Plan plan(a);
  a.out.data = plan.workspace() + plan.bytes();
  EXPECT_ATTUNE_OK(plan.run_with_more(a));
}

// q, k, v and out as columns of one buffer, and k serving as v: neither is an overlap of what is written.
TEST(Aliasing, PackedColumnsAndSharedInputsAreFine) {
  constexpr int64_t kRows = 7, kHeads = 2, kDim = 16, kWidth = 4 * kHeads * kDim;
  std::vector<float> packed(kRows * kWidth), lse_and_max(kRows * kHeads * 2), apart(kRows * kHeads * kDim);
  for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<float>(i % 23) / 23 - 0.5f;
  const auto column = [&](int64_t i) {
    const int64_t shape[3] = {kRows, kHeads, kDim};
    attune_tensor t = attune_dense_tensor(packed.data() + i * kHeads * kDim, ATTUNE_FLOAT32, 3, shape);
    t.stride[0] = kWidth;
    return t;
  };
  attune_attention a;
  ASSERT_ATTUNE_OK(attune_attention_init(&a, sizeof(a)));
  a.q = column(0), a.k = column(1), a.v = column(2), a.out = column(3);
  const int64_t rows[3] = {kRows, kHeads, 2};
  a.lse = attune_dense_tensor(lse_and_max.data(), ATTUNE_FLOAT32, 3, rows);
  a.lse.rank = 2;
  a.max_logits = a.lse;
  a.max_logits.data = lse_and_max.data() + 1;
  plan_and_run(a);
  attune_attention b = a;
  b.out = column(0);
  b.out.data = apart.data(), b.out.stride[0] = kHeads * kDim;
  plan_and_run(b);
  EXPECT_EQ(gather(a.out), gather(b.out));

  a.v = a.k, a.q = a.k;
  plan_and_run(a);
  a.lse.stride[0] += 1;  // now it overlaps max_logits
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  EXPECT_EQ(attune_validate(&a, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions_both(attune_last_error(), "max_logits", "lse")) << attune_last_error();
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(Aliasing, PlansNeedNoData) {
  Problem problem(every_tensor_case("cache"));
  attune_attention a = problem.device();
  for (const auto& [name, t] : cases::tensors_of(a)) t->data = nullptr;
  EXPECT_ATTUNE_OK(attune_supported(&a, kCpu));
}

TEST(Aliasing, QkvPrepareWritesApart) {
  Problem problem(every_tensor_case("cache"));
  const attune_attention a = problem.device();
  std::vector<uint16_t> outputs[3];
  attune_qkv_prepare op;
  ASSERT_ATTUNE_OK(attune_qkv_prepare_init(&op, sizeof(op)));
  op.q = a.q, op.k = a.k, op.v = a.v;
  attune_tensor* const outs[3] = {&op.q_out, &op.k_out, &op.v_out};
  for (int i = 0; i < 3; ++i) {
    const attune_tensor& in = i == 0 ? op.q : i == 1 ? op.k : op.v;
    outputs[i].resize(static_cast<size_t>(cases::num_elements(in)));
    *outs[i] = attune_dense_tensor(outputs[i].data(), ATTUNE_BFLOAT16, in.rank, in.shape);
  }
  op.cu_seqlens_q = a.cu_seqlens_q, op.seqused_kv = a.seqused_kv, op.finished = a.finished;
  op.cache = a.cache, op.prologue = a.prologue;
  // An output on its own input is refused here because their strides differ, unless they are the same.
  const auto run = [](const attune_qkv_prepare& x) { return attune_qkv_prepare_run(&x, kCpu, nullptr); };
  for (attune_tensor* t : {&op.q, &op.k, &op.v}) ASSERT_EQ(t->rank, 3);
  attune_qkv_prepare other_rows = op;
  for (attune_tensor* t : {&other_rows.q_out, &other_rows.k_out, &other_rows.v_out}) t->dtype = ATTUNE_FLOAT32;
  std::vector<float> wide(4096);
  float* at = wide.data();
  for (attune_tensor* t : {&other_rows.q_out, &other_rows.k_out, &other_rows.v_out}) {
    t->data = at;
    at += cases::num_elements(*t);
  }
  expect_apart<attune_qkv_prepare>(
      other_rows, {"q_out", "k_out", "v_out", "cache.k", "cache.v", "cache.k_scale", "cache.v_scale"}, run);
  op.q_out = op.q, op.k_out = op.k, op.v_out = op.v;
  EXPECT_EQ(run(op), ATTUNE_OK) << attune_last_error();
}

attune_tensor floats(std::vector<float>& data, std::vector<int64_t> shape) {
  return attune_dense_tensor(data.data(), ATTUNE_FLOAT32, static_cast<int32_t>(shape.size()), shape.data());
}

TEST(Aliasing, MergeWritesApart) {
  std::vector<float> outs(64), lses(16), sinks(2), out(16), lse(4);
  attune_merge op;
  ASSERT_ATTUNE_OK(attune_merge_init(&op, sizeof(op)));
  op.partial_out = floats(outs, {3, 2, 2, 4}), op.partial_lse = floats(lses, {3, 2, 2});
  op.sinks = floats(sinks, {2}), op.out = floats(out, {2, 2, 4}), op.lse = floats(lse, {2, 2});
  expect_apart<attune_merge>(op, {"out", "lse"},
                             [](const attune_merge& x) { return attune_merge_run(&x, kCpu, nullptr); });
}

TEST(Aliasing, CacheOperationsWriteApart) {
  std::vector<float> k(512), v(512), cache_k(512), cache_v(512);
  Int32Vector table({0, 1}), lengths({0, 0}), offsets({0, 3, 6});
  for (const int32_t kind :
       {ATTUNE_CACHE_APPEND, ATTUNE_CACHE_QUANTIZE, ATTUNE_CACHE_DEQUANTIZE, ATTUNE_CACHE_GATHER}) {
    attune_cache_op op;
    ASSERT_ATTUNE_OK(attune_cache_op_init(&op, sizeof(op)));
    op.kind = kind;
    op.k = floats(k, {6, 2, 4}), op.v = floats(v, {6, 2, 4});
    op.cache.k = floats(cache_k, {2, 4, 2, 4}), op.cache.v = floats(cache_v, {2, 4, 2, 4});
    if (kind == ATTUNE_CACHE_APPEND || kind == ATTUNE_CACHE_GATHER) {
      op.cache.page_table = table.tensor();
      op.cache.page_table.rank = 2;
      op.cache.page_table.shape[0] = 2, op.cache.page_table.shape[1] = 1, op.cache.page_table.stride[1] = 1;
      op.seqused_kv = lengths.tensor(), op.cu_seqlens = offsets.tensor();
    }
    const bool writes_cache = kind == ATTUNE_CACHE_APPEND || kind == ATTUNE_CACHE_QUANTIZE;
    expect_apart<attune_cache_op>(
        op, writes_cache ? std::vector<std::string>{"cache.k", "cache.v"} : std::vector<std::string>{"k", "v"},
        [](const attune_cache_op& x) { return attune_cache_op_run(&x, kCpu, nullptr); });
  }
}

TEST(Aliasing, TheIndexerWritesApart) {
  cases::IndexerProblem problem(
      make_case(R"({"name": "indexer", "heads": [3, 1], "head_dim": [16, 16], "dtype": "e4m3", "kv": "paged",
          "shared_kv": true, "causal": true, "window": [30, 2], "seqlens_q": [3, 1], "seqlens_kv": [40, 7],
          "cache": {"dtype": "e4m3", "scales": "token"},
          "indexer": {"topk": 5, "q_scale": true, "slot_page_size": 8, "positions": false}})"));
  for (const auto kind : {ATTUNE_INDEXER_TOPK, ATTUNE_INDEXER_SCORES, ATTUNE_INDEXER_SELECT}) {
    attune_indexer op = problem.device(kind);
    size_t bytes = 0;
    ASSERT_ATTUNE_OK(attune_indexer_workspace_size(&op, kCpu, &bytes));
    std::vector<std::byte> memory(bytes + 256);
    std::byte* const workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
    const auto run = [&](const attune_indexer& x) { return attune_indexer_run(&x, kCpu, workspace, bytes, nullptr); };
    expect_apart<attune_indexer>(op,
                                 kind == ATTUNE_INDEXER_SCORES ? std::vector<std::string>{"scores"}
                                                               : std::vector<std::string>{"indices", "topk_length"},
                                 run);
    if (bytes == 0) continue;
    for (const auto& [name, t] : cases::tensors_of(op)) {
      if (t->dtype == ATTUNE_DTYPE_NONE) continue;
      void* const own = t->data;
      t->data = workspace + bytes - 16;
      EXPECT_EQ(run(op), ATTUNE_INVALID_ARGUMENT) << name;
      EXPECT_EQ(std::string(attune_last_error()).find(std::string("workspace overlaps ") + name + ";"), 0u)
          << attune_last_error();
      t->data = own;
    }
  }
}

}  // namespace
}  // namespace attune::tests
