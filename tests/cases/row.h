// SPDX-License-Identifier: Apache-2.0
// A row of the table of cases, put together from parts: what the cases of a test share, and what each varies.
//
//   Row(R"("heads": [4, 2], "kv": "paged")").with(R"("cache": {"page_size": 16})").set("dtype", dtype)
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace attune::cases {

class Row {
 public:
  using Value = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<std::string>>;

  // members: those of a JSON object, without its braces; may be empty. The row's name is "x" if no member says another.
  // Throws std::runtime_error where they are not JSON.
  explicit Row(std::string_view members = {});
  // The row with these members too, in place of those of the same keys.
  [[nodiscard]] Row with(std::string_view members) const;
  // A dotted key ("cache.page_size") reaches into an object.
  [[nodiscard]] Row set(std::string_view key, const Value& value) const;
  [[nodiscard]] Row set(std::string_view key, std::initializer_list<int64_t> list) const;
  // The JSON object, as parse_cases takes it.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace attune::cases
