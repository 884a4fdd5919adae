// SPDX-License-Identifier: Apache-2.0
#include "case_filter.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <regex>

#include "cases/cuda_memory.h"
#include "user_error.h"

namespace attune::cli {

std::vector<cases::Case> filter_cases(const std::vector<cases::Case>& all, const std::string& expression) {
  if (expression.empty()) return all;
  std::vector<cases::Case> picked;
  try {
    const std::regex regex(expression);
    std::copy_if(all.begin(), all.end(), std::back_inserter(picked),
                 [&](const cases::Case& spec) { return std::regex_search(spec.name, regex); });
  } catch (const std::regex_error& e) {
    throw UserError(fmt::format("--filter \"{}\" is not a regular expression: {}", expression, e.what()));
  }
  if (picked.empty())
    throw UserError(fmt::format("no case matches --filter \"{}\"; --list shows the names", expression));
  return picked;
}

cases::Memory& case_memory(attune_device device) {
  if (device.type == ATTUNE_DEVICE_CPU) return cases::host_memory();
  // Kept: streams and blocks of a device outlive the cases that use them.
  static std::map<int32_t, cases::CudaMemory> memories;
  return memories.try_emplace(device.index, device.index).first->second;
}

}  // namespace attune::cli
