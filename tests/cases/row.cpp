// SPDX-License-Identifier: Apache-2.0
#include "row.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace attune::cases {
namespace {

using nlohmann::json;

json parse_members(std::string_view members) {
  try {
    return json::parse(std::string("{").append(members).append("}"));
  } catch (const json::exception& e) {
    throw std::runtime_error("members of a row: " + std::string(members) + ": " + e.what());
  }
}

}  // namespace

Row::Row(std::string_view members) {
  json row{{"name", "x"}};
  row.update(parse_members(members));
  text_ = row.dump();
}

Row Row::with(std::string_view members) const {
  json row = json::parse(text_);
  row.update(parse_members(members));
  Row result;
  result.text_ = row.dump();
  return result;
}

Row Row::set(std::string_view key, const Value& value) const {
  std::string pointer = std::string("/").append(key);
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  json row = json::parse(text_);
  std::visit([&](const auto& x) { row[json::json_pointer(pointer)] = x; }, value);
  Row result;
  result.text_ = row.dump();
  return result;
}

Row Row::set(std::string_view key, std::initializer_list<int64_t> list) const {
  return set(key, Value(std::vector<int64_t>(list)));
}

}  // namespace attune::cases
