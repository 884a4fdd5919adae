// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <algorithm>
#include <iterator>

namespace attune::cli {
namespace {

constexpr size_t kColumns = 80;

// Bytes that continue a character of UTF-8 take no column.
bool begins_column(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

// Where a line too long is cut: the last space that leaves it inside the columns, else the first one after them.
size_t cut_of(std::string_view line, size_t indent) {
  size_t cut = line.npos, column = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == ' ' && column > indent && line[i - 1] != ' ') {
      if (column > kColumns && cut != line.npos) return cut;
      cut = i;
      if (column > kColumns) return cut;
    }
    column += begins_column(line[i]) ? 1 : 0;
  }
  return column > kColumns ? cut : line.npos;
}

}  // namespace

std::string with_unit(double value, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  size_t i = 0;
  // What four digits would round to 1000 has the next prefix.
  for (; value >= 999.95 && i + 1 < std::size(kPrefixes); ++i) value /= 1000;
  return fmt::format("{:.4g} {}{}", value, kPrefixes[i], unit);
}

std::string wrapped(std::string_view text, size_t indent) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string line(text.substr(0, end));
    for (size_t cut = cut_of(line, indent); cut != line.npos; cut = cut_of(line, indent)) {
      out += line.substr(0, cut) + "\n";
      line = std::string(indent, ' ') + line.substr(line.find_first_not_of(' ', cut));
    }
    out += line;
    if (end < text.size()) out += "\n";
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace attune::cli
