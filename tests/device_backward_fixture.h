// SPDX-License-Identifier: Apache-2.0
// The oracle of gradients on the GPU against that of the CPU, wherever it runs.
#pragma once

#include <string>
#include <vector>

#include "cases/device_backward.h"
#include "device_oracle_fixture.h"

namespace attune::tests {

// What is different in one gradient, or "".
inline std::string find_difference(const reference::Gradient& expected,
                                   const cases::DeviceBackwardOracle::Result& actual,
                                   const oracle::GradientTerms& terms, const std::vector<bool>* written) {
  if (expected.value.size() != actual.value.size()) return "another size";
  for (size_t i = 0; i < expected.value.size(); ++i) {
    if (written != nullptr && !(*written)[i * written->size() / expected.value.size()]) continue;
    const double bound =
        oracle::bound_of_gradient(terms, expected.terms[i], expected.parts[i], expected.scores[i], expected.factors[i]);
    const double magnitude = expected.parts[i] + expected.scores[i] + 1e-30;
    if (!agree(expected.value[i], actual.value[i], magnitude))
      return std::to_string(i) + ": " + std::to_string(actual.value[i]) + ", not " + std::to_string(expected.value[i]);
    if (!agree(bound, actual.bound[i], 1e3 * bound))
      return "bound " + std::to_string(i) + ": " + std::to_string(actual.bound[i]) + ", not " + std::to_string(bound);
  }
  return "";
}

// "" where both oracles say the same.
inline std::string compare_backward_oracles(const cases::Case& spec, cases::Memory& memory, int64_t blocks,
                                            int64_t threads) {
  const cases::BackwardProblem problem(spec, memory);
  cases::DeviceBackwardOracle device(problem, blocks, threads);
  memory.launch(cases::DeviceBackwardOracle::kSource, cases::DeviceBackwardOracle::kEntry, device.blocks(), threads,
                device.params());
  if (std::string guards = device.check_guards(); !guards.empty()) return guards;
  const cases::ExpectedGradients expected = evaluate(problem);
  const auto of_rows = [](std::vector<bool> rows, size_t all) {
    rows.resize(all);
    return rows;
  };
  const reference::Backward& exact = expected.exact;
  if (of_rows(device.q_written(), exact.q_written.size()) != exact.q_written) return "other rows of q";
  if (of_rows(device.kv_written(), exact.kv_written.size()) != exact.kv_written) return "other rows of k";
  const std::vector<cases::NamedGradient> gradients = gradients_of(problem);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const cases::NamedGradient& g = gradients[i];
    if (g.host.dtype == ATTUNE_DTYPE_NONE || cases::num_elements(g.host) == 0) continue;
    const std::vector<bool>* const written = i == 0 ? &exact.q_written : i < 3 ? &exact.kv_written : nullptr;
    const std::string difference = find_difference(exact.*g.exact, device.result(i), g.terms, written);
    if (!difference.empty()) return std::string(g.name) + " " + difference;
  }
  return "";
}

}  // namespace attune::tests
