// SPDX-License-Identifier: Apache-2.0
// The backward of attention on the CPU: the table of cases, and what holds for every gradient.
#include <cmath>
#include <functional>

#include "cases/backward_problem.h"
#include "core/backward.h"
#include "cpu/kernels.h"
#include "cuda/architecture.h"
#include "dispatch/registry.h"
#include "failure.h"
#include "picked_cases.h"
#include "support.h"

namespace attune::tests {
namespace {

using cases::BackwardCall;
using cases::BackwardProblem;

constexpr int kRandomBackwardCases = 150;

const std::vector<cases::Case>& table() {
  static const std::vector<cases::Case> all = [] {
    std::vector<cases::Case> list = cases::backward_cases();
    for (int seed = 0; seed < kRandomBackwardCases; ++seed)
      list.push_back(cases::random_backward_case(static_cast<uint64_t>(seed)));
    return list;
  }();
  return all;
}

void check_table(int32_t threads, size_t first, size_t step) {
  const ThreadCount pool(threads);
  for (size_t i = first; i < table().size(); i += step) {
    const cases::Case& spec = table()[i];
    if (!is_picked(spec)) continue;
    const cases::Report report = cases::run_case(spec);
    EXPECT_TRUE(report.passed()) << spec.name << ": " << report.failure;
  }
}

class Backward : public testing::TestWithParam<int> {};
TEST_P(Backward, MatchesTheOracle) { check_table(2, static_cast<size_t>(GetParam()), 4); }
INSTANTIATE_TEST_SUITE_P(Table, Backward, testing::Range(0, 4));

TEST(BackwardTable, MatchesTheOracleOnEveryInstructionSet) {
  int count = 0;
  const char* const* names = cpu::isa_names(&count);
  for (int i = 0; i < count; ++i) {
    ASSERT_TRUE(cpu::force_isa(names[i]));
    check_table(2, static_cast<size_t>(i), 9);
  }
  EXPECT_TRUE(cpu::force_isa(nullptr));
}

// The oracle and the library must agree on what a pair is worth: one key more or less does not pass.
TEST(BackwardTable, SeesOneKeyMoreOrLess) {
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    BackwardProblem problem(
        make_case(cases::Row(R"("name": "shift", "heads": [4, 2], "queries": "fixed", "seqlens_q": [40, 20],
        "seqlens_kv": [100, 64], "backward": {})")
                      .set("dtype", dtype)));
    Int32Vector shorter({99, 64});
    const cases::Report report = cases::run_and_check(problem, [&](BackwardCall device) {
      device.attention.seqused_kv = shorter.tensor();
      return cases::run(device, cases::host_memory());
    });
    EXPECT_FALSE(report.passed()) << dtype;
  }
}

using Bytes = std::vector<std::vector<std::byte>>;

Bytes gradients(const BackwardCall& call) {
  Bytes all;
  for (const attune_tensor* t :
       {&call.op.dq, &call.op.dk, &call.op.dv, &call.op.dsinks, &call.op.dbias, &call.op.dt5_bias})
    all.push_back(gather(*t));
  return all;
}

constexpr char kEverything[] =
    R"("heads": [6, 2], "head_dim": [40, 24], "causal": true, "softcap": 5, "bias": 1, "t5_buckets": 16, "sinks": "normal",
        "seqlens_q": [600, 40, 1, 130], "seqlens_kv": [700, 40, 300, 20], "backward": {"dlse": true})";

// Whatever the number of threads, and so whether sequences are cut or not.
TEST(BackwardBits, DoNotDependOnThreads) {
  for (const char* dtype : {"f32", "bf16"}) {
    BackwardProblem problem(make_case(cases::Row(kEverything).set("dtype", dtype)));
    const BackwardCall call = problem.device();
    Bytes expected;
    for (const int32_t threads : {1, 2, 3, 16, 16}) {
      const ThreadCount pool(threads);
      problem.arena().upload();
      ASSERT_EQ(cases::run(call, cases::host_memory()), "");
      if (expected.empty()) expected = gradients(call);
      EXPECT_EQ(gradients(call), expected) << threads << " threads, " << dtype;
    }
  }
}

// A sequence alone gets the bits that it gets in its batch.
TEST(BackwardBits, DoNotDependOnTheBatch) {
  for (const char* dtype : {"f32", "bf16"}) {
    BackwardProblem problem(make_case(
        cases::Row(R"("heads": [6, 2], "head_dim": [40, 24], "causal": true, "queries": "fixed", "seqlens_q": 200,
            "seqlens_kv": [300, 300, 300], "sinks": "normal", "backward": {"dlse": true})")
            .set("dtype", dtype)));
    BackwardCall call = problem.device();
    call.op.dsinks = {};
    ASSERT_EQ(cases::run(call, cases::host_memory()), "");
    const Bytes expected = gradients(call);
    for (int64_t b = 2; b >= 0; --b) {
      const ThreadCount pool(static_cast<int32_t>(4 - b));
      BackwardCall one = call;
      for (attune_tensor* t : {&one.attention.q, &one.attention.k, &one.attention.v, &one.attention.out,
                               &one.attention.lse, &one.op.dout, &one.op.dlse, &one.op.dq, &one.op.dk, &one.op.dv}) {
        *t = rows_of(*t, b, 1);
      }
      for (const attune_tensor* t : {&one.op.dq, &one.op.dk, &one.op.dv}) {
        cases::for_each_element(
            *t, [&](const int64_t*, void* x) { cases::poison(static_cast<attune_dtype>(t->dtype), x, 1); });
      }
      ASSERT_EQ(cases::run(one, cases::host_memory()), "");
    }
    EXPECT_EQ(gradients(call), expected) << dtype;
  }
}

// One key and one query in the middle of a window hold other numbers: who does not see them keeps every bit.
TEST(BackwardBits, DoNotDependOnWhatIsHidden) {
  constexpr int64_t kRows = 150, kOther = 75, kLeft = 10;
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    BackwardProblem problem(make_case(cases::Row(R"("heads": [4, 2], "head_dim": [40, 24], "seqlens_q": [150],
        "window": [10, 0], "softcap": 5, "sinks": "normal", "backward": {"dlse": true, "outputs": ["dq", "dk", "dv"]})")
                                          .set("dtype", dtype)));
    const BackwardCall call = problem.device();
    ASSERT_EQ(cases::run(call, cases::host_memory()), "");
    const auto rows = [](const attune_tensor& t, int64_t first, int64_t end) {
      return gather(rows_of(t, first, end - first));
    };
    // Queries that do not see the key, then keys that the query does not see.
    const auto before = [&](const attune_tensor& t) {
      return rows(t, 0, t.data == call.op.dq.data ? kOther : kOther - kLeft);
    };
    const auto behind = [&](const attune_tensor& t) {
      return rows(t, t.data == call.op.dq.data ? kOther + kLeft + 1 : kOther + 1, kRows);
    };
    Bytes expected;
    for (const double number : {0.5, 1e4, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      for (const attune_tensor* t : {&call.attention.k, &call.attention.v, &call.attention.q, &call.op.dout}) {
        cases::for_each_element(rows_of(*t, kOther, 1), [&](const int64_t*, void* x) {
          cases::encode(static_cast<attune_dtype>(t->dtype), number, x);
        });
      }
      ASSERT_EQ(cases::run(call, cases::host_memory()), "");
      Bytes got;
      for (const attune_tensor* t : {&call.op.dq, &call.op.dk, &call.op.dv})
        got.insert(got.end(), {before(*t), behind(*t)});
      if (expected.empty()) expected = got;
      EXPECT_EQ(got, expected) << dtype << " " << number;
    }
  }
}

// dq, dk and dv as columns of one buffer, as a packed qkv has its gradient.
TEST(BackwardBits, GradientsMayBePacked) {
  for (const char* dtype : {"f32", "bf16"}) {
    BackwardProblem problem(make_case(cases::Row(R"("heads": [4, 2], "head_dim": [40, 40], "seqlens_q": [70, 9],
        "strides": "packed", "causal": true, "backward": {})")
                                          .set("dtype", dtype)));
    BackwardCall call = problem.device();
    ASSERT_EQ(cases::run(call, cases::host_memory()), "");
    const Bytes expected = gradients(call);
    const int64_t size = attune_dtype_size(static_cast<attune_dtype>(call.op.dq.dtype)), row = 8 * 40;
    std::vector<std::byte> packed(static_cast<size_t>(79 * row * size), cases::kPoison);
    int64_t first = 0;
    for (attune_tensor* t : {&call.op.dq, &call.op.dk, &call.op.dv}) {
      t->data = packed.data() + first * size;
      t->stride[0] = row, t->stride[1] = 40;
      first += t->shape[1] * 40;
    }
    ASSERT_EQ(cases::run(call, cases::host_memory()), "");
    EXPECT_EQ(gradients(call), expected) << dtype;
  }
}

void set_entries(const attune_tensor& t, const std::vector<int32_t>& values) {
  for (size_t i = 0; i < values.size(); ++i)
    cases::encode(ATTUNE_INT32, values[i], cases::element_at(t, {static_cast<int64_t>(i)}));
}

// Offsets and lengths that make no sense are bounded as the oracle bounds them. out and lse are of other lengths, so of
// other rows than see something: any numbers do.
TEST(BackwardContents, TablesThatMakeNoSense) {
  struct Spoilt {
    std::vector<int32_t> cu_seqlens_q, cu_seqlens_kv, seqused_kv;
  };
  const Spoilt all[] = {{{-5, 20, 400}, {0, 90, 100}, {}},
                        {{0, 30, 20}, {10, 5, 100}, {}},
                        {{INT32_MAX, INT32_MIN, 7}, {0, INT32_MAX, 3}, {}},
                        {{0, 30, 50}, {0, 60, 100}, {INT32_MIN, INT32_MAX}}};
  for (const Spoilt& spoilt : all) {
    for (const char* dtype : {"f32", "bf16"}) {
      BackwardProblem problem(make_case(cases::Row(R"("heads": [4, 2], "seqlens_q": [30, 20], "seqlens_kv": [60, 37],
          "seqused": true, "causal": true, "poison": false, "backward": {})")
                                            .set("dtype", dtype)));
      attune_attention& a = problem.host().attention;
      for (const attune_tensor* t : {&a.q, &a.k, &a.v, &a.out, &problem.host().op.dout, &a.lse}) {
        double next = 0;  // no NaN is left
        cases::for_each_element(*t, [&](const int64_t*, void* x) {
          const auto dtype_of = static_cast<attune_dtype>(t->dtype);
          if (!std::isfinite(cases::decode(dtype_of, x))) cases::encode(dtype_of, next = 0.75 - next, x);
        });
      }
      set_entries(a.cu_seqlens_q, spoilt.cu_seqlens_q);
      set_entries(a.cu_seqlens_kv, spoilt.cu_seqlens_kv);
      set_entries(a.seqused_kv, spoilt.seqused_kv.empty() ? std::vector<int32_t>{1000, 1000} : spoilt.seqused_kv);
      problem.arena().upload();
      EXPECT_EQ(cases::run_and_check(problem).failure, "") << spoilt.cu_seqlens_q[0] << " " << dtype;
    }
  }
}

TEST(BackwardErrors, NameWhatIsWrong) {
  BackwardProblem problem(make_case(cases::Row(kEverything).set("dtype", "bf16")));
  const BackwardCall good = problem.device();
  BackwardProblem cached(make_case(R"({"name": "x", "heads": [6, 2], "head_dim": [40, 24], "dtype": "bf16",
      "seqlens_q": [3], "seqlens_kv": [3], "backward": {}})"));
  cases::Problem paged(make_case(R"({"name": "x", "heads": [6, 2], "head_dim": [40, 24], "dtype": "bf16", "kv": "paged",
      "new_tokens": true, "seqlens_q": [3], "seqlens_kv": [20]})"));
  const auto expect = [](attune_status status, BackwardCall call, const char* names) {
    EXPECT_EQ(attune_attention_backward_supported(call.linked(), kCpu), status) << names;
    EXPECT_NE(std::string(attune_last_error()).find(names), std::string::npos) << attune_last_error() << "; " << names;
    attune_plan* plan = nullptr;
    EXPECT_EQ(attune_attention_backward_plan(call.linked(), kCpu, &plan), status) << names;
    EXPECT_EQ(plan, nullptr);
  };
  const auto invalid = [&](const std::function<void(BackwardCall&)>& spoil, const char* names) {
    BackwardCall call = good;
    spoil(call);
    expect(ATTUNE_INVALID_ARGUMENT, call, names);
  };
  const auto unsupported = [&](const std::function<void(BackwardCall&)>& spoil, const char* names) {
    BackwardCall call = cached.device();
    spoil(call);
    expect(ATTUNE_UNSUPPORTED, call, names);
  };
  using Call = BackwardCall;
  invalid([](Call& c) { c.attention.lse = {}; }, "lse is absent");
  invalid([](Call& c) { c.attention.out = {}; }, "out is absent");
  invalid([](Call& c) { c.attention.out.dtype = ATTUNE_FLOAT8_E4M3; }, "out is e4m3");
  invalid([](Call& c) { c.attention.out.shape[0] -= 1; }, "out.shape[0] is 770");
  invalid([](Call& c) { c.attention.out.shape[2] = 40; }, "out.shape[2] is 40");
  invalid([](Call& c) { c.attention.lse.shape[1] = 2; }, "lse.shape[1] is 2");
  invalid([](Call& c) { c.attention.lse.dtype = ATTUNE_BFLOAT16; }, "lse.dtype is bfloat16");
  invalid([](Call& c) { c.attention.q.shape[1] = 5; }, "num_heads_q is 5");
  invalid([](Call& c) { c.op.dout = {}; }, "dout is absent");
  invalid([](Call& c) { c.op.dout.dtype = ATTUNE_FLOAT16; }, "dout.dtype is float16");
  invalid([](Call& c) { c.op.dout.shape[1] = 2; }, "dout.shape[1] is 2; it must be 6");
  invalid([](Call& c) { c.op.dlse.shape[0] = 1; }, "dlse.shape[0] is 1; it must be 771");
  invalid([](Call& c) { c.op.dlse.dtype = ATTUNE_BFLOAT16; }, "dlse.dtype is bfloat16");
  invalid([](Call& c) { c.op.dq.shape[0] = 1; }, "dq.shape[0] is 1; it must be 771");
  invalid([](Call& c) { c.op.dq.dtype = ATTUNE_FLOAT16; }, "dq.dtype is float16");
  invalid([](Call& c) { c.op.dk.rank = 2; }, "dk.rank is 2");
  invalid([](Call& c) { c.op.dv.shape[2] = 40; }, "dv.shape[2] is 40; it must be 24");
  invalid([](Call& c) { c.op.dv.stride[0] = 0; }, "dv");
  invalid([](Call& c) { c.op.dsinks.shape[0] = 2; }, "dsinks.shape[0] is 2; it must be 6");
  invalid([](Call& c) { c.attention.sinks = {}; }, "dsinks is set, but sinks is absent");
  invalid([](Call& c) { c.op.dbias.dtype = ATTUNE_BFLOAT16; }, "dbias.dtype is bfloat16");
  invalid([](Call& c) { c.op.dbias.shape[0] = 6; }, "dbias.shape[0] is 6; it must be 1");
  invalid([](Call& c) { c.attention.bias = {}; }, "dbias is set, but bias is absent");
  invalid([](Call& c) { c.op.dt5_bias.shape[1] = 8; }, "dt5_bias.shape[1] is 8; it must be 16");
  invalid([](Call& c) { c.op.dq = c.op.dk = c.op.dv = c.op.dsinks = c.op.dbias = c.op.dt5_bias = {}; },
          "all absent: there is no gradient");
  unsupported(
      [&](Call& c) {
        c.attention.cache = paged.device().cache, c.attention.seqused_kv = paged.device().seqused_kv;
        c.attention.cu_seqlens_kv = {};
      },
      "KV source: paged cache");
  unsupported([](Call& c) { c.attention.q.dtype = ATTUNE_FLOAT8_E4M3, c.op.dq = {}; }, "query dtype: e4m3");
  unsupported([](Call& c) { c.attention.v.dtype = ATTUNE_FLOAT8_E5M2, c.op.dv = {}; }, "KV format: e5m2");
  unsupported(
      [](Call& c) {
        c.attention.prologue.logn = c.attention.lse;
        c.attention.prologue.logn.rank = 1;
      },
      "prologue: log-n");
  unsupported(
      [](Call& c) {
        c.attention.finished = c.attention.lse;
        c.attention.finished.dtype = ATTUNE_UINT8, c.attention.finished.rank = 1, c.attention.finished.shape[0] = 1;
      },
      "mask: finished rows");
  unsupported([](Call& c) { c.attention.v = c.op.dv = {}, c.attention.head_dim_v = 24; }, "KV format: V part of K");
  unsupported(
      [](Call& c) {
        for (attune_tensor* t : {&c.attention.cu_seqlens_q, &c.attention.cu_seqlens_kv})
          t->shape[0] = int64_t{1} << 59, t->stride[0] = 0;
      },
      "does not take more than 2^31 - 1 sequences");
  EXPECT_EQ(attune_attention_backward_supported(nullptr, kCpu), ATTUNE_INVALID_ARGUMENT);
  EXPECT_STREQ(attune_last_error(), "attention_backward is null");
  attune_attention_backward alone = good.op;
  alone.attention = nullptr;
  EXPECT_EQ(attune_attention_backward_supported(&alone, kCpu), ATTUNE_INVALID_ARGUMENT);
  EXPECT_STREQ(attune_last_error(), "attention is null");
}

TEST(BackwardErrors, BiasOfFewerKeys) {
  BackwardProblem problem(make_case(R"({"name": "x", "heads": [6, 2], "queries": "fixed", "seqlens_q": [3],
      "seqlens_kv": [9], "bias": 2, "backward": {}})"));
  BackwardCall call = problem.device();
  call.attention.bias.shape[2] = call.op.dbias.shape[2] = 8;
  EXPECT_EQ(attune_attention_backward_supported(call.linked(), kCpu), ATTUNE_INVALID_ARGUMENT);
  EXPECT_STREQ(attune_last_error(), "bias.shape[2] is 8; it must be at least 9 (seqlen_kv)");
}

TEST(BackwardErrors, RunsFitTheirPlans) {
  BackwardProblem problem(make_case(R"({"name": "x", "heads": [6, 2], "seqlens_q": [30, 5], "seqlens_kv": [40, 9],
      "causal": true, "sinks": "normal", "backward": {}})"));
  BackwardCall call = problem.device();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_attention_backward_plan(call.linked(), kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  const cases::Workspace workspace(cases::host_memory(), bytes);
  void* const data = const_cast<cases::Buffer&>(workspace.buffer).device();
  const auto run = [&](BackwardCall c, size_t size) {
    return attune_attention_backward_run(plan, c.linked(), data, size, nullptr);
  };
  EXPECT_ATTUNE_OK(run(call, bytes));
  EXPECT_EQ(run(call, bytes - 1), ATTUNE_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(attune_attention_backward_run(plan, call.linked(), data, bytes, &bytes), ATTUNE_INVALID_ARGUMENT);
  EXPECT_STREQ(attune_last_error(), "stream is set, but the CPU has no streams; it must be null there");
  const auto refused = [&](const std::function<void(BackwardCall&)>& change, const char* message) {
    BackwardCall other = call;
    change(other);
    EXPECT_EQ(run(other, bytes), ATTUNE_INVALID_ARGUMENT) << message;
    EXPECT_NE(std::string(attune_last_error()).find(message), std::string::npos) << attune_last_error();
  };
  refused([](BackwardCall& c) { c.attention.causal = 0; }, "mask is none; the plan was made for causal");
  refused([](BackwardCall& c) { c.attention.sinks = c.op.dsinks = {}; },
          "score is scale; the plan was made for scale, sinks");
  refused([](BackwardCall& c) { c.op.dk = {}; }, "dk is absent; in the plan it is float32");
  refused(
      [](BackwardCall& c) {
        for (attune_tensor* t : {&c.attention.out, &c.op.dout}) t->dtype = ATTUNE_BFLOAT16;
      },
      "out is bfloat16; in the plan it is float32");
  refused([](BackwardCall& c) { c.op.dout.data = nullptr; }, "dout");
  // The other operation's plan and run.
  EXPECT_EQ(attune_run(plan, &call.attention, data, bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find("plan is of attention_backward"), std::string::npos);
  attune_plan* forward = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&call.attention, kCpu, &forward));
  EXPECT_EQ(attune_attention_backward_run(forward, call.linked(), data, bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find("plan is of attention;"), std::string::npos);
  EXPECT_ATTUNE_OK(attune_plan_destroy(forward));
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

// A forward forced to one of its kernels does not take the backward's.
TEST(BackwardErrors, KernelsAreForcedByOperation) {
  BackwardProblem problem(make_case(R"({"name": "x", "heads": [2, 1], "seqlens_q": [3], "backward": {}})"));
  BackwardCall call = problem.device();
  for (const char* name : {"cpu_attention", "cpu_backward"}) {
    ASSERT_EQ(setenv("ATTUNE_KERNEL", name, 1), 0);
    EXPECT_ATTUNE_OK(attune_attention_backward_supported(call.linked(), kCpu));
    EXPECT_ATTUNE_OK(attune_supported(&call.attention, kCpu));
  }
  ASSERT_EQ(setenv("ATTUNE_KERNEL", "cloud", 1), 0);
  EXPECT_EQ(attune_attention_backward_supported(call.linked(), kCpu), ATTUNE_UNSUPPORTED);
  ASSERT_EQ(unsetenv("ATTUNE_KERNEL"), 0);
}

// A P that a rounded lse makes is at most 1, however large the scores are.
TEST(BackwardContents, ABiasOfAnySizeOnAllKeysGivesNumbers) {
  for (const double bias : {-1e9, -1e10, -1e20, -3.38e38, 1e10}) {
    BackwardProblem problem(make_case(R"({"name": "x", "heads": [2, 1], "head_dim": [40, 40], "seqlens_q": [20],
        "seqlens_kv": [75], "bias": 1, "aux_dtype": "f32", "backward": {}})"));
    cases::for_each_element(problem.host().attention.bias,
                            [&](const int64_t*, void* at) { cases::encode(ATTUNE_FLOAT32, bias, at); });
    cases::for_each_element(problem.host().attention.lse,
                            [&](const int64_t*, void* at) { cases::encode(ATTUNE_FLOAT32, bias, at); });
    problem.arena().upload();
    const BackwardCall call = problem.device();
    ASSERT_EQ(cases::run(call, cases::host_memory()), "");
    for (const attune_tensor& t : {call.op.dq, call.op.dk, call.op.dv}) {
      for (const double x : gather_values(t)) ASSERT_TRUE(std::isfinite(x)) << bias;
    }
  }
}

TEST(BackwardErrors, WhatCudaLacks) {
  BackwardProblem problem(
      make_case(R"({"name": "x", "heads": [2, 1], "seqlens_q": [3], "head_dim": [288, 64], "backward": {}})"));
  const BackwardCall call = problem.device();
  const attune::BackwardProblem p = make_backward(call.op, call.attention, Data::kOptional);
  EXPECT_EQ(failure_of(
                [&] { choose_kernel(p.forward, traits_of(p, call.attention), ATTUNE_DEVICE_CUDA, kAttentionBackward); },
                ATTUNE_UNSUPPORTED),
            "no kernel covers this; the nearest is cuda_backward_fp32, which lacks head_dim_qk: 288 (at most 256)");
}

// GPUs with wgmma have a kernel of their own for 16 bits, which leaves rows that it cannot copy.
TEST(BackwardChoice, FollowsTheGpuAndTheRows) {
  const auto choose = [](const char* members, int capability) -> std::string {
    const cases::Row row(R"("name": "x", "heads": [2, 1], "head_dim": [64, 64], "seqlens_q": [3], "backward": {})");
    BackwardProblem problem(make_case(row.with(members)));
    const BackwardCall call = problem.device();
    const attune::BackwardProblem p = make_backward(call.op, call.attention, Data::kOptional);
    try {
      return choose_kernel(p.forward, traits_of(p, call.attention), ATTUNE_DEVICE_CUDA, kAttentionBackward,
                           cuda::own_target(capability), &p)
          .name;
    } catch (const Failure& e) {
      return e.what();
    }
  };
  EXPECT_EQ(choose(R"("dtype": "bf16")", 90), "cuda_backward");
  EXPECT_EQ(choose(R"("dtype": "bf16", "strides": "odd")", 90), "cuda_backward_mma");
  for (const int capability : {80, 86, 100, 120}) {
    EXPECT_EQ(choose(R"("dtype": "f16")", capability), "cuda_backward_mma");
    EXPECT_EQ(choose(R"("dtype": "f32", "strides": "odd")", capability), "cuda_backward_fp32");
  }
  EXPECT_EQ(choose(R"("dtype": "f32")", 90), "cuda_backward_fp32");
  EXPECT_EQ(choose(R"("dtype": "f32", "bias": 1)", 90), "cuda_backward_fp32");
  EXPECT_EQ(choose(R"("dtype": "bf16", "t5_buckets": 16)", 90), "cuda_backward");
  EXPECT_EQ(choose(R"("dtype": "bf16", "bias": 2, "t5_buckets": 16)", 80), "cuda_backward_mma");
  EXPECT_EQ(choose(R"("dtype": "bf16", "t5_buckets": 600, "t5_max_distance": 5000)", 90),
            "no kernel covers this; the nearest is cuda_backward, which does not take more than 128 T5 buckets in one "
            "direction");
}

}  // namespace
}  // namespace attune::tests
