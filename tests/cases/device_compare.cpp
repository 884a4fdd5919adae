// SPDX-License-Identifier: Apache-2.0
#include "device_compare.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace attune::cases {
namespace {

std::string text(double x) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.9g", x);
  return digits;
}

}  // namespace

DeviceCompare::DeviceCompare(const Problem& problem, DeviceOracle& oracle, int64_t blocks, int64_t threads,
                             int32_t device_type)
    : oracle_(oracle),
      params_(problem.arena().memory(), "compare's params", sizeof(oracle::CompareParams)),
      verdicts_(problem.arena().memory(), "verdicts", static_cast<size_t>(blocks * threads) * sizeof(oracle::Verdict)) {
  const attune_attention a = problem.device();
  const attune_tensor& scale = problem.host().out_scale;
  oracle::CompareParams p{};
  p.oracle = oracle.params();
  p.terms = bound_terms(problem, rounded_weights(problem, device_type));
  p.out = device_tensor(a.out);
  p.lse = device_tensor(a.lse);
  p.max_logits = device_tensor(a.max_logits);
  p.saturate = a.out.dtype == ATTUNE_FLOAT8_E4M3 ? 1 : 0;
  p.out_scale = p.saturate != 0 && scale.data != nullptr ? decode(ATTUNE_FLOAT32, scale.data) : 1.0;
  p.filler = std::to_integer<int>(kPoison);
  p.verdicts = static_cast<oracle::Verdict*>(verdicts_.device());
  std::memcpy(params_.host(), &p, sizeof(p));
  params_.upload();
  verdicts_.upload();
}

Report DeviceCompare::report() const {
  for (const Buffer* buffer : {&params_, &verdicts_}) {
    if (std::string guards = buffer->check_guards(); !guards.empty()) return {guards, {}, 0};
  }
  const std::vector<std::byte> bytes = verdicts_.download();
  std::vector<oracle::Verdict> verdicts(bytes.size() / sizeof(oracle::Verdict));
  std::memcpy(verdicts.data(), bytes.data(), bytes.size());
  Report report;
  oracle::Verdict first{};
  int64_t num_bad = 0;
  for (const oracle::Verdict& v : verdicts) {
    report.num_elements += v.num_elements;
    if (v.num_bad > 0 && (num_bad == 0 || v.first < first.first)) first = v;
    num_bad += v.num_bad;
  }
  const int64_t lines = oracle_.rows() * oracle_.heads(), elements = lines * oracle_.head_dim_v();
  if (num_bad == 0) return report;
  const bool is_out = first.first < elements;
  const int64_t line = is_out ? first.first / oracle_.head_dim_v() : (first.first - elements) % lines;
  Element& worst = report.worst;
  worst.where = std::string(is_out                           ? "out"
                            : first.first < elements + lines ? "lse"
                                                             : "max_logits") +
                "[row " + std::to_string(line / oracle_.heads()) + ", head " + std::to_string(line % oracle_.heads());
  if (is_out) worst.where += ", dim " + std::to_string(first.first % oracle_.head_dim_v());
  worst.where += "]";
  worst.expected = first.expected;
  worst.actual = first.actual;
  worst.bound = first.bound;
  report.failure = std::to_string(num_bad) + " of " + std::to_string(report.num_elements) +
                   " elements are wrong, first " + worst.where + ": expected " + text(worst.expected) + ", got " +
                   text(worst.actual) + ", allowed error " + text(worst.bound);
  return report;
}

}  // namespace attune::cases
