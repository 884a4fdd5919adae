// SPDX-License-Identifier: Apache-2.0
// Words for people: numbers with their nouns, lines that fit a terminal, and what goes to stderr.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace attune::cli {

// "request" for one, "requests" for any other number. many: where an s will not do.
inline std::string noun(int64_t n, std::string_view one, std::string_view many = "") {
  if (n == 1) return std::string(one);
  return many.empty() ? std::string(one) + "s" : std::string(many);
}

// "1 request", "2 requests".
inline std::string counted(int64_t n, std::string_view one, std::string_view many = "") {
  return fmt::format("{} {}", n, noun(n, one, many));
}

// "536.9 MFLOP", of 536870912 and "FLOP": four digits, of thousands, millions and so on.
std::string with_unit(double value, const char* unit);

// The lines of a text with at most 80 columns each: what is longer goes on below, behind `indent` spaces. A word alone
// is not cut.
std::string wrapped(std::string_view text, size_t indent);

// To stderr, where fmt::print would throw if nobody takes it: progress and notes that are lost are no failure.
template <typename... Parts>
void say(fmt::format_string<Parts...> format, Parts&&... parts) {
  const std::string text = fmt::format(format, std::forward<Parts>(parts)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace attune::cli
