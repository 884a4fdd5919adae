// SPDX-License-Identifier: Apache-2.0
// Plain attention is never more than twice as far from the truth as two matrix products of the same precision: scores
// in fp32, a softmax in fp32, probabilities rounded to the type of the inputs, products accumulated in fp32, the result
// rounded once.
#include <algorithm>
#include <cmath>

#include "support.h"

namespace attune::tests {
namespace {

using cases::decode;
using cases::element_at;
using cases::round_to;

struct Error {
  double largest = 0, square_sum = 0;
  void add(double e) {
    largest = std::max(largest, std::fabs(e));
    square_sum += e * e;
  }
};

// One row and head of dense causal or full attention.
std::vector<double> two_gemm_row(const cases::Problem& problem, int64_t i, int64_t h) {
  const attune_attention& a = problem.host();
  const auto dtype = static_cast<attune_dtype>(a.q.dtype);
  const int64_t keys = a.causal ? i + 1 : a.k.shape[0], dim = a.q.shape[2];
  const int64_t g = h / (a.q.shape[1] / a.k.shape[1]);
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  std::vector<float> p(static_cast<size_t>(keys));
  float largest = -INFINITY, sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    float z = 0;
    for (int64_t d = 0; d < dim; ++d) {
      z += static_cast<float>(decode(dtype, element_at(a.q, {i, h, d})) * decode(dtype, element_at(a.k, {j, g, d})));
    }
    p[static_cast<size_t>(j)] = z * scale;
    largest = std::max(largest, z * scale);
  }
  for (float& x : p) sum += x = std::exp(x - largest);
  for (float& x : p) x = static_cast<float>(round_to(dtype, x / sum));
  std::vector<double> out;
  for (int64_t d = 0; d < a.v.shape[2]; ++d) {
    float o = 0;
    for (int64_t j = 0; j < keys; ++j)
      o += p[static_cast<size_t>(j)] * static_cast<float>(decode(dtype, element_at(a.v, {j, g, d})));
    out.push_back(round_to(dtype, o));
  }
  return out;
}

class Baseline : public testing::TestWithParam<const char*> {};

TEST_P(Baseline, ErrorIsAtMostTwiceThatOfTwoGemms) {
  const std::string dtype = GetParam();
  const cases::Row common(R"("name": "baseline", "heads": [4, 2])");
  for (const char* shape : {R"("seqlens_q": [150], "causal": true)", R"("seqlens_q": [40], "seqlens_kv": [300])"}) {
    const cases::Problem problem(make_case(common.set("dtype", dtype).with(shape)));
    const std::vector<reference::RowResult> exact = reference::attention(problem.host());
    plan_and_run(problem.device());
    const cases::Snapshot snapshot(problem.arena());
    const attune_tensor out = snapshot.after(problem.host().out);
    Error ours, baseline;
    for (int64_t i = 0; i < out.shape[0]; ++i) {
      for (int64_t h = 0; h < out.shape[1]; ++h) {
        const std::vector<double> two_gemms = two_gemm_row(problem, i, h);
        for (int64_t d = 0; d < out.shape[2]; ++d) {
          const double truth = exact[static_cast<size_t>(i * out.shape[1] + h)].out[static_cast<size_t>(d)];
          ours.add(decode(static_cast<attune_dtype>(out.dtype), element_at(out, {i, h, d})) - truth);
          baseline.add(two_gemms[static_cast<size_t>(d)] - truth);
        }
      }
    }
    EXPECT_TRUE(ours.largest <= 2 * baseline.largest) << ours.largest << " against " << baseline.largest;
    EXPECT_TRUE(std::sqrt(ours.square_sum) <= 2 * std::sqrt(baseline.square_sum))
        << std::sqrt(ours.square_sum) << " against " << std::sqrt(baseline.square_sum);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Baseline, testing::Values("f32", "f16", "bf16"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace attune::tests
