// SPDX-License-Identifier: Apache-2.0
// Properties that hold whatever the numbers are, most of them bit for bit.
#include <algorithm>
#include <cmath>

#include "support.h"

namespace attune::tests {
namespace {

using cases::Case;
using cases::element_at;
using cases::Problem;

// out and lse as bytes.
std::vector<std::byte> results(const attune_attention& a) {
  std::vector<std::byte> bytes = gather(a.out);
  const std::vector<std::byte> lse = gather(a.lse);
  bytes.insert(bytes.end(), lse.begin(), lse.end());
  return bytes;
}

std::vector<std::byte> run_results(const attune_attention& a) {
  plan_and_run(a);
  return results(a);
}

cases::Row row(const std::string& dtype, std::string_view members) {
  return cases::Row(R"("name": "property")").set("dtype", dtype).with(members);
}

// Token t of sequence b of a paged cache in NHD or HND order, on the device.
attune_tensor token_view(const attune_kv_cache& cache, bool is_v, int64_t b, int64_t t) {
  const attune_tensor& pool = is_v ? cache.v : cache.k;
  const bool nhd = cache.layout == ATTUNE_KV_NHD;
  const int64_t page_size = pool.shape[nhd ? 1 : 2];
  const auto page = static_cast<int64_t>(cases::decode(ATTUNE_INT32, element_at(cache.page_table, {b, t / page_size})));
  attune_tensor view{};
  view.dtype = pool.dtype;
  view.rank = 2;
  view.shape[0] = pool.shape[nhd ? 2 : 1];
  view.shape[1] = pool.shape[3];
  view.stride[0] = pool.stride[nhd ? 2 : 1];
  view.stride[1] = pool.stride[3];
  view.data = nhd ? element_at(pool, {page, t % page_size, 0, 0}) : element_at(pool, {page, 0, t % page_size, 0});
  return view;
}

// Bytes for tensors that a test adds to a descriptor.
class Scratch {
 public:
  attune_tensor dense(attune_dtype dtype, const std::vector<int64_t>& shape) {
    size_t bytes = static_cast<size_t>(cases::element_size(dtype));
    for (const int64_t n : shape) bytes *= static_cast<size_t>(n);
    blocks_.emplace_back(bytes, std::byte{0xff});
    return attune_dense_tensor(blocks_.back().data(), dtype, static_cast<int32_t>(shape.size()), shape.data());
  }
  attune_tensor integers(const std::vector<int32_t>& values) {
    const attune_tensor t = dense(ATTUNE_INT32, {static_cast<int64_t>(values.size())});
    std::memcpy(t.data, values.data(), values.size() * sizeof(int32_t));
    return t;
  }

 private:
  std::vector<std::vector<std::byte>> blocks_;
};

class Property : public testing::TestWithParam<const char*> {
 protected:
  std::string dtype() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, Property, testing::Values("f32", "f16", "bf16"),
                         [](const auto& info) { return info.param; });

TEST_P(Property, ValuesOfOneGiveOne) {
  for (const char* shape : {R"("seqlens_q": [70, 1])", R"("kv": "paged", "seqlens_kv": [300, 1, 17])"}) {
    Problem problem(make_case(
        row(dtype(), R"("heads": [4, 2], "causal": true, "data": "ones_v", "out_dtype": "f32")").with(shape)));
    const attune_attention a = problem.device();
    plan_and_run(a);
    // Probabilities may be rounded, but the sum divides by what was added up.
    for (const double x : gather_values(a.out)) EXPECT_TRUE(std::fabs(x - 1) <= 1e-6) << x;
  }
}

TEST_P(Property, PagedEqualsContiguousBitForBit) {
  for (const char* layout : {"nhd", "hnd"}) {
    const cases::Row common = row(dtype(), R"("heads": [4, 2], "kv": "paged", "causal": true, "seqlens_q": [1, 5, 1],
        "seqlens_kv": [200, 33, 1], "cache": {"page_size": 16})");
    Problem problem(make_case(common.set("cache.layout", layout)));
    attune_attention paged = problem.device();
    const std::vector<std::byte> expected = run_results(paged);
    Scratch scratch;
    attune_attention contiguous = paged;
    contiguous.cache = {};
    contiguous.cache.layout = ATTUNE_KV_NHD;
    const auto element = static_cast<attune_dtype>(paged.cache.k.dtype);
    for (const bool is_v : {false, true}) {
      const attune_tensor rows = scratch.dense(element, {3, 200, 2, 64});
      for (int64_t b = 0; b < 3; ++b) {
        for (int64_t t = 0; t < problem.spec().seqlens_kv[static_cast<size_t>(b)]; ++t) {
          attune_tensor to = token_view(paged.cache, is_v, b, t);
          const attune_tensor from = to;
          to.data = element_at(rows, {b, t, 0, 0});
          to.stride[0] = rows.stride[2];
          to.stride[1] = 1;
          copy_elements(from, to);
        }
      }
      (is_v ? contiguous.cache.v : contiguous.cache.k) = rows;
    }
    EXPECT_EQ(run_results(contiguous), expected) << layout;
  }
}

TEST_P(Property, OtherPagesSameBits) {
  Problem problem(make_case(row(
      dtype(), R"("heads": [4, 2], "kv": "paged", "seqlens_kv": [130, 40], "cache": {"page_size": 16, "slack": 4})")));
  attune_attention a = problem.device();
  const std::vector<std::byte> expected = run_results(a);
  // Rotate the pages of the pool by one and the table with them.
  const int64_t pages = a.cache.k.shape[0];
  Scratch scratch;
  for (const bool is_v : {false, true}) {
    attune_tensor& pool = is_v ? a.cache.v : a.cache.k;
    const attune_tensor moved =
        scratch.dense(static_cast<attune_dtype>(pool.dtype), {pages, pool.shape[1], pool.shape[2], pool.shape[3]});
    for (int64_t page = 0; page < pages; ++page)
      copy_elements(rows_of(pool, page, 1), rows_of(moved, (page + 1) % pages, 1));
    pool = moved;
  }
  cases::for_each_element(a.cache.page_table, [&](const int64_t*, void* element) {
    int32_t page;
    std::memcpy(&page, element, sizeof(page));
    if (page < 0 || page >= pages) return;
    page = static_cast<int32_t>((page + 1) % pages);
    std::memcpy(element, &page, sizeof(page));
  });
  EXPECT_EQ(run_results(a), expected);
}

TEST_P(Property, GroupedHeadsEqualRepeatedKv) {
  Problem problem(make_case(row(dtype(), R"("heads": [6, 2], "causal": true, "seqlens_q": [70, 9])")));
  attune_attention a = problem.device();
  a.batch_invariant = 1;
  const std::vector<std::byte> expected = run_results(a);
  Scratch scratch;
  for (attune_tensor* t : {&a.k, &a.v}) {
    const attune_tensor repeated = scratch.dense(static_cast<attune_dtype>(t->dtype), {t->shape[0], 6, t->shape[2]});
    for (int64_t h = 0; h < 6; ++h) {
      attune_tensor from = *t, to = repeated;
      from.data = element_at(*t, {0, h / 3, 0});
      to.data = element_at(repeated, {0, h, 0});
      from.shape[1] = to.shape[1] = 1;
      copy_elements(from, to);
    }
    *t = repeated;
  }
  EXPECT_EQ(run_results(a), expected);
}

TEST_P(Property, WideWindowEqualsNoWindow) {
  for (const char* shape : {R"("seqlens_q": [130])", R"("kv": "paged", "seqlens_kv": [200, 5])"}) {
    Problem problem(make_case(row(dtype(), R"("heads": [2, 1], "causal": true)").with(shape)));
    attune_attention a = problem.device();
    const std::vector<std::byte> expected = run_results(a);
    a.window_left = 200;
    a.window_right = 0;
    EXPECT_EQ(run_results(a), expected) << shape;
  }
}

TEST_P(Property, TenRunsGiveTheSameBits) {
  for (const char* shape : {R"("seqlens_q": [130, 20])", R"("kv": "paged", "seqlens_kv": [900, 5, 0, 64])"}) {
    Problem problem(make_case(row(dtype(), R"("heads": [8, 2], "causal": true)").with(shape)));
    const attune_attention a = problem.device();
    const std::vector<std::byte> expected = run_results(a);
    for (int repeat = 0; repeat < 9; ++repeat) EXPECT_EQ(run_results(a), expected) << shape;
  }
}

TEST_P(Property, OrderOfSlotsDoesNotMatter) {
  Problem problem(
      make_case(row(dtype(), R"("heads": [4, 1], "kv": "slots", "seqlens_q": [2, 1], "sparse": {"topk": 50})")));
  const cases::Expected expected = cases::evaluate(problem);
  const attune_attention a = problem.device();
  for (int64_t r = 0; r < a.indices.shape[0]; ++r) {
    auto* list = static_cast<int32_t*>(element_at(a.indices, {r, 0}));
    std::reverse(list, list + a.indices.shape[1]);
  }
  plan_and_run(a);
  // The bytes of indices differ from what they were; out and lse must not care.
  cases::Checker checker;
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    const cases::Bounds bounds(problem, expected.results[i]);
    for (int64_t d = 0; d < 64; ++d) {
      const void* at = element_at(a.out, {expected.rows[i].row, expected.rows[i].head, d});
      checker.element("out", expected.rows[i].row, expected.rows[i].head, d, static_cast<attune_dtype>(a.out.dtype),
                      expected.results[i].out[static_cast<size_t>(d)],
                      bounds.out(expected.results[i], static_cast<size_t>(d)),
                      cases::decode(static_cast<attune_dtype>(a.out.dtype), at));
    }
  }
  EXPECT_EQ(checker.report().failure, "");
}

TEST_P(Property, OneScheduleServesSeveralRuns) {
  Problem problem(make_case(row(
      dtype(), R"("heads": [4, 2], "kv": "paged", "seqlens_kv": [300, 5, 64], "new_tokens": true, "causal": true)")));
  const attune_attention a = problem.device();
  const std::vector<std::byte> expected = run_results(a);
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  cases::Workspace workspace(cases::host_memory(), bytes);
  ASSERT_ATTUNE_OK(attune_schedule(plan, &a, workspace.buffer.device(), bytes, nullptr));
  for (int layer = 0; layer < 3; ++layer) {
    cases::poison(static_cast<attune_dtype>(a.out.dtype), a.out.data, cases::num_elements(a.out));
    ASSERT_ATTUNE_OK(attune_run_scheduled(plan, &a, workspace.buffer.device(), bytes, nullptr));
    EXPECT_EQ(results(a), expected) << "layer " << layer;
  }
  // The same plan and workspace with other lengths: schedule anew.
  Int32Vector shorter({7, 5, 0});
  attune_attention other = a;
  other.seqused_kv = shorter.tensor();
  ASSERT_ATTUNE_OK(attune_run(plan, &other, workspace.buffer.device(), bytes, nullptr));
  const std::vector<std::byte> replayed = results(other);
  ASSERT_ATTUNE_OK(attune_run(plan, &a, workspace.buffer.device(), bytes, nullptr));
  EXPECT_EQ(results(a), expected);
  EXPECT_EQ(run_results(other), replayed);
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

// Two halves of the keys, merged by lse, are the whole.
TEST_P(Property, MergedHalvesAreTheWhole) {
  Problem problem(make_case(row(
      dtype(), R"("heads": [4, 2], "seqlens_q": [20], "seqlens_kv": [101], "out_dtype": "f32", "sinks": "normal")")));
  const cases::Expected expected = cases::evaluate(problem);
  const attune_attention a = problem.device();
  Scratch scratch;
  const attune_tensor parts = scratch.dense(ATTUNE_FLOAT32, {2, 20, 4, 64});
  const attune_tensor part_lse = scratch.dense(ATTUNE_FLOAT32, {2, 20, 4});
  for (int64_t half = 0; half < 2; ++half) {
    attune_attention one = a;
    const int64_t first = half * 37, count = half == 0 ? 37 : 64;
    one.sinks = {};
    one.k = rows_of(a.k, first, count);
    one.v = rows_of(a.v, first, count);
    one.cu_seqlens_kv = scratch.integers({0, static_cast<int32_t>(count)});
    const auto slice = [&](attune_tensor t) {
      t.data = element_at(t, {half});
      --t.rank;
      std::copy(t.shape + 1, t.shape + ATTUNE_MAX_RANK, t.shape);
      std::copy(t.stride + 1, t.stride + ATTUNE_MAX_RANK, t.stride);
      return t;
    };
    one.out = slice(parts);
    one.lse = slice(part_lse);
    plan_and_run(one);
  }
  attune_merge merge;
  ASSERT_ATTUNE_OK(attune_merge_init(&merge, sizeof(merge)));
  merge.partial_out = parts;
  merge.partial_lse = part_lse;
  merge.sinks = a.sinks;
  merge.out = a.out;
  merge.lse = a.lse;
  ASSERT_ATTUNE_OK(attune_merge_run(&merge, kCpu, nullptr));
  const cases::Report report = cases::compare(problem, expected);
  EXPECT_EQ(report.failure, "");
}

// Whatever block and tile of the prompt the key is in, and first or second of a pair.
TEST_P(Property, ValuesThatAreNanReachOnlyTheRowsThatSeeThem) {
  constexpr int64_t kRows = 64, kKeys = 65;
  for (int64_t key = 0; key < kKeys; ++key) {
    Problem problem(make_case(row(dtype(), R"("causal": true, "seqlens_q": [64], "seqlens_kv": [65])")));
    const attune_attention a = problem.device();
    cases::poison(static_cast<attune_dtype>(a.v.dtype), element_at(a.v, {key, 0, 0}), a.v.shape[2]);
    plan_and_run(a);
    for (int64_t i = 0; i < kRows; ++i) {
      const double first = cases::decode(static_cast<attune_dtype>(a.out.dtype), element_at(a.out, {i, 0, 0}));
      ASSERT_EQ(std::isnan(first), kKeys - kRows + i >= key) << "key " << key << ", row " << i;
    }
  }
}

size_t planned_workspace(int64_t seqlen, attune_dtype dtype) {
  attune_attention a;
  EXPECT_ATTUNE_OK(attune_attention_init(&a, sizeof(a)));
  const int64_t q[] = {seqlen, 32, 128}, kv[] = {seqlen, 8, 128};
  a.q = a.out = attune_dense_tensor(nullptr, dtype, 3, q);
  a.k = a.v = attune_dense_tensor(nullptr, dtype, 3, kv);
  a.causal = 1;
  attune_plan* plan = nullptr;
  EXPECT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
  return bytes;
}

// As a mask of floats for a row of padding has it: all keys alike, and far below, down to the lowest number.
TEST_P(Property, ABiasOfAnySizeOnAllKeysGivesTheMeanOfTheValues) {
  for (const double bias : {-1e4, -1e9, -1e10, -1e20, -2.3e38, -3.38e38, 1e10, 1e30}) {
    Problem problem(make_case(row(GetParam(), R"("heads": [2, 1], "head_dim": [40, 40], "seqlens_q": [20],
        "seqlens_kv": [75], "data": "equal", "bias": 1, "aux_dtype": "f32")")));
    cases::for_each_element(problem.host().bias,
                            [&](const int64_t*, void* at) { cases::encode(ATTUNE_FLOAT32, bias, at); });
    problem.arena().upload();
    plan_and_run(problem.device());
    const std::vector<double> v = gather_values(problem.device().v), out = gather_values(problem.device().out);
    for (size_t n = 0; n < out.size(); ++n) {
      double mean = 0;
      for (size_t key = 0; key < 75; ++key) mean += v[key * 40 + n % 40] / 75;
      ASSERT_NEAR(out[n], mean, 0.01) << bias << ", element " << n;
    }
  }
}

TEST(Memory, OfALongPrefillGrowsWithTilesNotWithItsSquare) {
  for (const attune_dtype dtype : {ATTUNE_FLOAT32, ATTUNE_BFLOAT16}) {
    const size_t small = planned_workspace(4096, dtype), large = planned_workspace(32768, dtype);
    // Eight times the tokens: at most eight times the schedule, and no score matrix (4 GiB for one head).
    EXPECT_LE(large, 8 * small);
    EXPECT_LE(large, size_t{256} << 20);
  }
}

// RoPE turns q and k into rows that are small where the other is large. What fp32 loses there is relative to what
// cancels, not to the products of the score.
TEST(Accuracy, OfAPrologueThatCancels) {
  cases::Problem problem(make_case(R"({"name": "x", "heads": [4, 2], "head_dim": [64, 64], "dtype": "f32",
      "kv": "dense", "seqlens_q": [9], "seqlens_kv": [9], "max_logits": true,
      "prologue": {"rope": {"style": "linear", "dim": 64}}})"));
  const attune_attention& a = problem.host();
  const auto fill = [](const attune_tensor& t, auto&& value) {
    cases::for_each_element(
        t, [&](const int64_t* at, void* x) { *static_cast<float*>(x) = static_cast<float>(value(at)); });
  };
  fill(a.prologue.rope_cos_sin,
       [](const int64_t* at) { return 0.5 + 0.37 / static_cast<double>(1 + at[1] % 32 + at[0]); });
  for (const double sign : {1.0, -1.0}) {
    fill(sign > 0 ? a.q : a.k, [sign](const int64_t* at) {
      const int64_t pair = at[2] % 32;
      const double x = 1 + 0.7 * std::sin(static_cast<double>(7 * at[0] + 3 * at[1] + 11 * pair));
      return at[2] < 32 ? x : sign * x * (1 + std::ldexp(std::cos(static_cast<double>(5 * at[0] + pair)), -12));
    });
  }
  problem.arena().upload();
  const cases::Expected expected = cases::evaluate(problem);
  plan_and_run(problem.device());
  EXPECT_EQ(cases::compare(problem, expected).failure, "");
}

}  // namespace
}  // namespace attune::tests
