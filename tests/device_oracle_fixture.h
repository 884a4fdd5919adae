// SPDX-License-Identifier: Apache-2.0
// The oracle of the GPU against that of the CPU, wherever it runs.
#pragma once

#include <cmath>
#include <functional>
#include <string>

#include "cases/device_oracle.h"

namespace attune::tests {

// Equal infinities and NaN, else no further apart than the two orders of summing let them be.
inline bool agree(double expected, double actual, double magnitude) {
  if (std::isnan(expected) || std::isinf(expected) || std::isinf(magnitude) || std::isnan(magnitude))
    return std::isnan(expected) ? std::isnan(actual) : std::isinf(expected) ? expected == actual : !std::isnan(actual);
  return std::fabs(expected - actual) <= 1e-12 * magnitude;
}

// What is different in one row, or "".
inline std::string find_difference(const reference::RowResult& expected, const reference::RowResult& actual) {
  const auto text = [](const char* what, double x, double y) {
    return std::string(what) + ": " + std::to_string(x) + ", not " + std::to_string(y);
  };
  if (expected.written != actual.written) return text("written", actual.written, expected.written);
  if (!expected.written) return "";
  if (expected.num_visible != actual.num_visible)
    return text("num_visible", static_cast<double>(actual.num_visible), static_cast<double>(expected.num_visible));
  // A score is as wrong as its sum, and a weight by so much of itself.
  const double scores = 1 + expected.z_abs + (std::isfinite(expected.max_logit) ? std::fabs(expected.max_logit) : 0);
  const auto differs = [&](const char* what, double x, double y, double magnitude) {
    return agree(x, y, magnitude) ? std::string() : text(what, y, x);
  };
  for (const std::string& failure : {differs("lse", expected.lse, actual.lse, scores),
                                     differs("max_logit", expected.max_logit, actual.max_logit, scores),
                                     differs("z_abs", expected.z_abs, actual.z_abs, expected.z_abs),
                                     differs("z_lost", expected.z_lost, actual.z_lost, scores + expected.z_lost),
                                     differs("largest_p", expected.largest_p, actual.largest_p, scores)}) {
    if (!failure.empty()) return failure;
  }
  for (size_t d = 0; d < expected.out.size(); ++d) {
    const double pv_abs = expected.pv_abs[d] * scores, v_abs = expected.v_abs[d];
    const double pv_lost = expected.pv_lost[d] * scores;
    for (const std::string& failure : {differs("out", expected.out[d], actual.out[d], pv_abs),
                                       differs("pv_abs", expected.pv_abs[d], actual.pv_abs[d], pv_abs),
                                       differs("pv_lost", expected.pv_lost[d], actual.pv_lost[d], pv_abs + pv_lost),
                                       differs("v_abs", expected.v_abs[d], actual.v_abs[d], v_abs)}) {
      if (!failure.empty()) return "channel " + std::to_string(d) + ", " + failure;
    }
  }
  return "";
}

// launch: runs the kernel with so many blocks, and waits. "" where both oracles say the same of every row.
inline std::string compare_oracles(const cases::Case& spec, cases::Memory& memory, int64_t blocks, int64_t threads,
                                   const std::function<void(const oracle::OracleParams*, int64_t blocks)>& launch) {
  cases::Problem problem(spec, memory);
  problem.arena().upload();
  cases::DeviceOracle oracle(problem, blocks, threads);
  launch(oracle.params(), oracle.blocks());
  if (std::string guards = oracle.check_guards(); !guards.empty()) return guards;
  const std::vector<reference::RowResult> expected = reference::attention(problem.host()), actual = oracle.results();
  if (expected.size() != actual.size()) return "other rows";
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::string failure = find_difference(expected[i], actual[i]); !failure.empty())
      return "row and head " + std::to_string(i) + ": " + failure;
  }
  return "";
}

}  // namespace attune::tests
