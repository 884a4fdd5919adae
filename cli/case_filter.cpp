// SPDX-License-Identifier: Apache-2.0
#include "case_filter.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <regex>

#include "commands.h"
#include "device.h"

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
  if (device.type != ATTUNE_DEVICE_CPU)
    throw UserError(fmt::format("the cases do not run on {} yet; use --device cpu", device_name(device)));
  return cases::host_memory();
}

}  // namespace attune::cli
