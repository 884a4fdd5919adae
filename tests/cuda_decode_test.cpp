// SPDX-License-Identifier: Apache-2.0
// The decode kernel on a GPU: every case of the table that its coverage takes, against the oracle, twice with the same
// bits (ATTUNE_CASE=<part of a name>: only cases that contain it); a captured graph replayed with other lengths; one
// schedule for several layers. Skipped, with the reason, where there is no GPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "cuda_cases.h"
#include "failure.h"

namespace attune::cuda {
namespace {

constexpr int kRandomDecodeCasesOnCuda = 300;

bool covered(const attune_attention& a, const Problem& p) {
  return decode_kernel().coverage.difference(traits_of(p, a)).empty() && decode::refusal(p).empty();
}

// With clusters, where they are chosen, and without.
class Subject final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (!covered(a, p)) return plans;
    plans.push_back(make_decode_plan(p, kDevice, false));
    auto with_clusters = make_decode_plan(p, kDevice, true);
    if (with_clusters->describe() != plans[0]->describe()) plans.push_back(std::move(with_clusters));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    std::vector<KernelSpec> specs;
    if (!covered(a, p)) return specs;
    for (const bool may_cluster : {false, true}) {
      const decode::Config c =
          decode::choose_config(p, decode::device_shape(tested_device()), may_cluster ? "" : "none are asked for");
      if (c.cluster == 0) specs.push_back(c.schedule_kernel());
      specs.push_back(c.main_kernel());
    }
    return specs;
  }
};

class CudaDecode : public CudaCases {
 protected:
  static int check_all(const std::vector<cases::Case>& list) { return CudaCases::check_all(list, Subject()); }
};

TEST_F(CudaDecode, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomDecodeCasesOnCuda);
  warm_all(list, Subject());
  EXPECT_GT(check_all(list), picks_cases() ? 0 : 650);
}

TEST_F(CudaDecode, SplitsLongSequences) {
  std::vector<cases::Case> list;
  const cases::Row common(R"("name": "long", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "seqlens_kv": [5000, 1, 0, 777, 4096, 64, 12345], "max_logits": true)");
  for (const char* cache :
       {R"("cache": {"page_size": 64})", R"("cache": {"page_size": 16, "layout": "hnd"})",
        R"("cache": {"page_size": 1})", R"("cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
        R"("cache": {"page_size": 64, "dtype": "i8", "scales": "token"})"}) {
    for (const bool invariant : {false, true})
      list.push_back(tests::make_case(common.set("batch_invariant", invariant).with(cache)));
  }
  EXPECT_EQ(check_all(list), 10);
}

// New tokens beside the cache, where splits of an output tile, blocks of rows and a ring share them: appended once, and
// not before the last reader of a slot is done.
TEST_F(CudaDecode, AppendsUnderSplits) {
  std::vector<cases::Case> list;
  const cases::Row common(R"("name": "append", "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_kv": [5000, 1, 0, 777, 12345], "new_tokens": true, "prologue": {"k_bias": true, "append": true,
      "rope": {"style": "linear", "dim": 128, "max_position": 16384}})");
  for (const char* rest :
       {R"("heads": [8, 2], "seqlens_q": [1, 1, 1, 1, 1])", R"("heads": [32, 1], "seqlens_q": [3, 1, 5, 16, 0])",
        R"("heads": [4, 4], "seqlens_q": [2, 40, 1, 7, 1])"}) {
    for (const char* cache : {R"("cache": {"page_size": 16})", R"("cache": {"page_size": 16, "ring_capacity": 4096})",
                              R"("cache": {"page_size": 8, "ring_capacity": 24})",
                              R"("cache": {"page_size": 64, "dtype": "i8", "scales": "token", "ring_capacity": 1024})",
                              R"("cache": {"page_size": 16, "dtype": "e4m3", "scales": "head", "layout": "hnd"})"}) {
      for (const bool invariant : {false, true})
        list.push_back(tests::make_case(common.set("batch_invariant", invariant).with(rest).with(cache)));
    }
  }
  EXPECT_EQ(check_all(list), 30);
}

// Splits of one sequence that one block takes one after the other: what the first would append, the others still read.
TEST_F(CudaDecode, AppendsAfterTheLastReaderOfARing) {
  const std::vector<int64_t> queries(24, 16);
  std::vector<int64_t> keys;
  for (int64_t b = 0; b < 24; ++b) keys.push_back(20 + 7 * b);
  std::vector<cases::Case> list;
  const cases::Row common(R"("name": "ring", "head_dim": [64, 64], "heads": [64, 8], "dtype": "bf16", "kv": "paged",
      "causal": true, "new_tokens": true, "prologue": {"append": true},
      "cache": {"page_size": 8, "ring_capacity": 40})");
  for (const bool invariant : {false, true}) {
    list.push_back(
        tests::make_case(common.set("batch_invariant", invariant).set("seqlens_q", queries).set("seqlens_kv", keys)));
  }
  EXPECT_EQ(check_all(list), 2);
}

// Scales of values by token, some of which are far from the others: one row has P of both kinds of tile.
TEST_F(CudaDecode, TakesScalesThatAreFarApart) {
  const Stream stream(kDevice);
  const cases::Row common(R"("name": "far", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "seqlens_kv": [700, 33, 5000], "poison": false, "data": "spread",
      "cache": {"page_size": 16, "scales": "token"})");
  for (const char* dtype : {"i8", "e4m3"}) {
    cases::CudaMemory memory(kDevice);
    cases::Problem problem(tests::make_case(common.set("cache.dtype", dtype)), memory);
    const attune_tensor& scale = problem.host().cache.v_scale;
    auto* values = static_cast<float*>(scale.data);
    // Some tiles keep to one order of magnitude, others do not.
    for (int64_t i = 0; i < num_elements(scale); ++i) {
      if (i / 200 % 2 == 0) values[i] *= std::ldexp(1.0f, static_cast<int>(i * 37 % 41) - 20);
      if (i % 97 == 50) values[i] = 0.0f;
    }
    problem.arena().upload();
    const cases::Expected expected = cases::evaluate(problem);
    const attune_attention a = problem.device();
    const Problem p = make_problem(a, Data::kRequired);
    const auto plan = decode_kernel().make_plan(p, kDevice);
    EXPECT_EQ(check_plan(*plan, p, problem, expected, memory, stream), "") << dtype;
  }
}

// Lengths are read by the device alone: a graph that was captured with some is right with others.
TEST_F(CudaDecode, ReplaysAGraphWithOtherLengths) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  cases::Problem problem(
      tests::make_case(R"({"name": "graph", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "seqlens_kv": [3000, 900, 17], "poison": false, "max_logits": true})"),
      memory);
  problem.arena().upload();
  const attune_attention a = problem.device();
  const Problem p = make_problem(a, Data::kRequired);
  const auto plan = decode_kernel().make_plan(p, kDevice);
  cases::Workspace workspace(memory, plan->workspace_size());
  const Graph graph(stream, [&] {
    plan->schedule(p, workspace.buffer.device(), stream.handle());
    plan->run(p, workspace.buffer.device(), stream.handle());
  });
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{3000, 900, 17}, {1, 0, 16}, {2999, 1, 0}, {0, 0, 0}, {3000, 900, 17}}) {
    tests::Int32Vector host(lengths);
    const attune_tensor kept = problem.host().seqused_kv;
    problem.host().seqused_kv = host.tensor();
    const cases::Expected expected = cases::evaluate(problem);
    problem.host().seqused_kv = kept;
    // The host's bytes follow, so that the comparison finds the table as it left it.
    std::memcpy(kept.data, lengths.data(), lengths.size() * sizeof(int32_t));
    problem.arena().upload();
    graph.replay(stream);
    stream.synchronize();
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << lengths[0] << ", " << lengths[1] << ", " << lengths[2];
  }
}

TEST_F(CudaDecode, OneScheduleServesSeveralRuns) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  cases::Problem problem(
      tests::make_case(R"({"name": "layers", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "seqlens_kv": [6000, 40]})"),
      memory);
  problem.arena().upload();
  const cases::Expected expected = cases::evaluate(problem);
  const attune_attention a = problem.device();
  const Problem p = make_problem(a, Data::kRequired);
  const auto plan = decode_kernel().make_plan(p, kDevice);
  cases::Workspace workspace(memory, plan->workspace_size());
  plan->schedule(p, workspace.buffer.device(), stream.handle());
  for (int layer = 0; layer < 5; ++layer) plan->run(p, workspace.buffer.device(), stream.handle());
  stream.synchronize();
  EXPECT_EQ(cases::compare(problem, expected).failure, "");
}

// Large batches: more sequences than the schedule kernel has threads.
TEST_F(CudaDecode, SchedulesLargeBatches) {
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < 3000; ++b) lengths.push_back(b % 7 == 0 ? 0 : b % 41);
  const cases::Row common(R"("name": "batch", "heads": [2, 1], "head_dim": [64, 64], "dtype": "f16", "kv": "paged")");
  const cases::Case spec = tests::make_case(common.set("seqlens_kv", lengths));
  EXPECT_EQ(check_all({spec}), 1);
}

// What the host decides, without a GPU.
TEST(CudaDecodeConfig, CoversEveryCaseWithAPlainCache) {
  int covered_cases = 0;
  for (const cases::Case& spec : cases::all_cases()) {
    if (!spec.has_cache() || spec.kv == cases::KvSource::kSlots || spec.cache.format != ATTUNE_KV_PLAIN) continue;
    if (std::max(spec.head_dim_qk, spec.head_dim_v) > 256 || spec.head_dim_qk % 8 != 0 || spec.head_dim_v % 8 != 0)
      continue;
    cases::Problem problem(spec);
    const Problem p = make_problem(problem.host(), Data::kRequired);
    if (p.sparse || p.prologue.power_of_two_scales || p.q_rope) continue;
    EXPECT_EQ(decode_kernel().coverage.difference(traits_of(p, problem.host())), "") << spec.name;
    EXPECT_EQ(decode::refusal(p), "") << spec.name;
    ++covered_cases;
  }
  EXPECT_GT(covered_cases, 600);
}

TEST(CudaDecodeConfig, RefusesWhatItCannotDo) {
  cases::Problem problem(tests::make_case(
      R"({"name": "x", "heads": [4, 2], "head_dim": [20, 20], "dtype": "bf16", "kv": "paged", "seqlens_kv": [5]})"));
  const Problem p = make_problem(problem.host(), Data::kRequired);
  EXPECT_NE(decode::refusal(p), "");
}

TEST(CudaDecodeConfig, FitsSharedMemory) {
  const cases::Row common(R"("dtype": "bf16", "kv": "paged", "seqlens_kv": [5])");
  for (const int64_t head_dim : {32, 64, 96, 128, 192, 256}) {
    for (const char* dtype : {"bf16", "e4m3", "f32"}) {
      for (const int64_t heads : {1, 16, 128}) {
        const cases::Row shape = common.set("heads", {heads, 1}).set("head_dim", {head_dim, head_dim});
        cases::Problem problem(tests::make_case(shape.set("cache.dtype", dtype)));
        const Problem p = make_problem(problem.host(), Data::kRequired);
        const decode::DeviceShape h200;
        const decode::Config c = decode::choose_config(p, h200);
        EXPECT_GE(c.stages, 2);
        EXPECT_LE(static_cast<int64_t>(c.shared_bytes() + 1024) * c.blocks_per_sm, h200.shared_bytes_per_sm)
            << head_dim << " " << dtype << " " << heads;
      }
    }
  }
}

// What a sequence's sums are made of, where that must not follow from the rest of the batch: the kernel is the same.
TEST(CudaDecodeConfig, LeavesTheBatchOutWhereItIsAskedTo) {
  const auto kernel = [](int sequences, bool invariant) {
    const cases::Row common(R"("heads": [8, 8], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
        "queries": "fixed")");
    const std::vector<int64_t> lengths(static_cast<size_t>(sequences), 100);
    cases::Problem problem(tests::make_case(common.set("batch_invariant", invariant).set("seqlens_kv", lengths)));
    const decode::Config c =
        decode::choose_config(make_problem(problem.host(), Data::kRequired), decode::DeviceShape());
    return c.main_kernel().defines;
  };
  EXPECT_NE(kernel(1, false), kernel(200, false));
  EXPECT_EQ(kernel(1, true), kernel(200, true));
}

TEST(CudaDecodeConfig, SaysWhyThereAreNoClusters) {
  const auto why = [](const std::string& more, int num_sms = 132) {
    const cases::Problem problem(tests::make_case(cases::Row(R"("heads": [32, 8], "head_dim": [128, 128],
        "dtype": "bf16", "kv": "paged", "queries": "flat")")
                                                      .with(more)));
    const decode::Config c = decode::choose_config(make_problem(problem.host(), Data::kRequired), {num_sms});
    return c.cluster > 0 ? "in clusters" : c.no_clusters;
  };
  EXPECT_EQ(why(R"("batch": 8, "seqlens_kv": 1024)"), "in clusters");
  EXPECT_EQ(why(R"("batch": 1, "seqlens_kv": 1024, "queries": "ragged")"), "cu_seqlens_q is given");
  EXPECT_EQ(why(R"("batch": 1, "seqlens_kv": 1024, "batch_invariant": true)"), "batch_invariant");
  EXPECT_EQ(why(R"("batch": 1, "seqlens_kv": 17000, "cache": {"page_size": 64, "slack": 0})").substr(0, 17),
            "max_seqlen_kv is ");
  EXPECT_EQ(why(R"("batch": 9, "seqlens_kv": 64)"), "72 output tiles on 132 multiprocessors, two for each are needed");
}

TEST(CudaDecodeConfig, ChecksAlignmentAtRun) {
  cases::Problem problem(tests::make_case(
      R"({"name": "x", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "seqlens_kv": [5]})"));
  Problem p = make_problem(problem.host(), Data::kRequired);
  const decode::Config c = decode::choose_config(p, {});
  EXPECT_NO_THROW(decode::check_alignment(p, c));
  p.cache.k.data += 2;
  EXPECT_THROW(decode::check_alignment(p, c), Failure);
}

// A run may bring other addresses and strides than its plan saw: the one array is named, with what its lanes need.
TEST(CudaDecodeConfig, NamesWhatARunMayNotBring) {
  const auto change = [](const char* rest, const std::function<void(Problem&)>& other) -> std::string {
    cases::Problem problem(tests::make_case(
        cases::Row(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "paged", "causal": true, "seqlens_kv": [70, 9],
            "new_tokens": true)")
            .with(rest)));
    Problem p = make_problem(problem.host(), Data::kRequired);
    const decode::Config c = decode::choose_config(p, {});
    EXPECT_TRUE(c.vectors) << rest;
    decode::check_run(p, c);
    other(p);
    return failure_of([&] { decode::check_run(p, c); });
  };
  const auto beyond = [](const char* what, int over, int unit) {
    return cat(what, " is ", over, " bytes beyond a multiple of ", unit, "; kernel cuda_decode needs a multiple of ",
               unit, ", or a plan made for such data");
  };
  const auto apart = [](const char* what, int unit) {
    return cat("rows of ", what, " do not lie at multiples of ", unit,
               " bytes, as they did when the plan was made; plan with such rows");
  };
  const auto side_by_side = [](const char* what) {
    return cat("channels of a row of ", what,
               " do not lie side by side, as they did when the plan was made; plan with such rows");
  };
  const char* const plain = R"("dtype": "bf16")";
  const char* const floats = R"("dtype": "f32")";
  const char* const tables =
      R"("dtype": "bf16", "prologue": {"q_bias": true, "k_bias": true, "v_bias": true, "ia3_tasks": 2,
      "append": true, "rope": {"style": "linear", "dim": 32}})";
  EXPECT_EQ(change(plain, [](Problem& p) { p.q.data += 2; }), beyond("q.data", 2, 8));
  EXPECT_EQ(change(plain, [](Problem& p) { p.k.data += 4; }), beyond("k.data", 4, 8));
  EXPECT_EQ(change(floats, [](Problem& p) { p.v.data += 4; }), beyond("v.data", 4, 16));
  EXPECT_EQ(change(plain, [](Problem& p) { p.q.head_stride += 1; }), apart("q", 8));
  EXPECT_EQ(change(plain, [](Problem& p) { p.k.row_stride += 2; }), apart("k", 8));
  EXPECT_EQ(change(plain, [](Problem& p) { p.v.dim_stride = 2; }), side_by_side("v"));
  EXPECT_EQ(change(plain, [](Problem& p) { p.cache.k.data += 2; }), beyond("cache.k.data", 2, 16));
  EXPECT_EQ(change(plain, [](Problem& p) { p.cache.v.data += 8; }), beyond("cache.v.data", 8, 16));
  EXPECT_EQ(change(plain, [](Problem& p) { p.cache.k.slot_stride += 1; }), apart("cache.k", 16));
  EXPECT_EQ(change(plain, [](Problem& p) { p.cache.v.page_stride += 4; }), apart("cache.v", 16));
  EXPECT_EQ(change(plain, [](Problem& p) { p.cache.v.inner_stride = 2; }), side_by_side("cache.v"));
  EXPECT_EQ(change(plain, [](Problem& p) { p.q.head_stride += 4, p.cache.k.page_stride += 8; }), "");
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.q_bias.data += 4; }), beyond("prologue.q_bias.data", 4, 16));
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.v_bias.stride[2] *= 2; }), side_by_side("prologue.v_bias"));
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.ia3_k.stride[0] += 4; }), apart("prologue.ia3_k", 16));
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.ia3_v.data += 4; }), beyond("prologue.ia3_v.data", 4, 16));
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.cos_sin += 1; }), beyond("prologue.rope_cos_sin.data", 4, 16));
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.position_stride += 1; }), apart("prologue.rope_cos_sin", 16));
  EXPECT_EQ(change(tables, [](Problem& p) { p.prologue.rope_offset = 2; }),
            "prologue.rope_offset is 2; the plan was made for multiples of 4");
}

}  // namespace
}  // namespace attune::cuda
