// SPDX-License-Identifier: Apache-2.0
#include "trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <optional>
#include <string_view>

#include "files.h"
#include "text.h"
#include "user_error.h"

namespace attune::cli {
namespace {

constexpr std::array<std::string_view, 3> kColumns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"};
constexpr int64_t kMaxTokens = int64_t{1} << 24;

struct Field {
  std::string text;
  size_t column = 0;  // first character in the line, from 1
};

class Reader {
 public:
  Reader(std::istream& in, const std::string& name) : in_(in), name_(name) {}

  // The next line without its end; false at the end of the file.
  bool next() {
    if (!std::getline(in_, line_)) return false;
    ++number_;
    if (!line_.empty() && line_.back() == '\r') line_.pop_back();
    if (number_ == 1 && line_.rfind("\xEF\xBB\xBF", 0) == 0) line_.erase(0, 3);
    return true;
  }
  bool blank() const { return line_.find_first_not_of(" \t") == std::string::npos; }
  int64_t number() const { return number_; }

  [[noreturn]] void fail(size_t column, const std::string& what) const {
    throw UserError(fmt::format("{}: line {}, column {}: {}", name_, number_, column, what));
  }

  // Fields of the line. Quotes may surround a field; a doubled quote inside stands for one.
  void split(std::vector<Field>& fields) const {
    fields.clear();
    size_t at = 0;
    while (true) {
      Field field{"", at + 1};
      if (at < line_.size() && line_[at] == '"') {
        for (++at;; ++at) {
          if (at == line_.size()) fail(field.column, "the quote is never closed");
          if (line_[at] == '"' && (++at == line_.size() || line_[at] != '"')) break;
          field.text += line_[at];
        }
        while (at < line_.size() && (line_[at] == ' ' || line_[at] == '\t')) ++at;
        if (at < line_.size() && line_[at] != ',') fail(at + 1, "a comma must follow the closing quote");
      } else {
        const size_t end = std::min(line_.find(',', at), line_.size());
        field.text = line_.substr(at, end - at);
        at = end;
      }
      trim(field);
      fields.push_back(std::move(field));
      if (at >= line_.size()) return;
      ++at;
    }
  }

 private:
  static void trim(Field& field) {
    const size_t first = field.text.find_first_not_of(" \t");
    if (first == std::string::npos) {
      field.text.clear();
      return;
    }
    field.text = field.text.substr(first, field.text.find_last_not_of(" \t") - first + 1);
    field.column += first;
  }

  std::istream& in_;
  const std::string& name_;
  std::string line_;
  int64_t number_ = 0;
};

std::array<size_t, 3> find_columns(Reader& reader) {
  if (!reader.next())
    reader.fail(1, "the file is empty; a header with TIMESTAMP, ContextTokens and GeneratedTokens is needed");
  std::vector<Field> fields;
  reader.split(fields);
  std::array<size_t, 3> found{};
  for (size_t i = 0; i < kColumns.size(); ++i) {
    const auto is_it = [&](const Field& f) { return f.text == kColumns[i]; };
    const auto at = std::find_if(fields.begin(), fields.end(), is_it);
    if (at == fields.end()) reader.fail(1, fmt::format("the header has no column {}", kColumns[i]));
    const auto again = std::find_if(at + 1, fields.end(), is_it);
    if (again != fields.end())
      reader.fail(again->column, fmt::format("the header has the column {} twice", kColumns[i]));
    found[i] = static_cast<size_t>(at - fields.begin());
  }
  return found;
}

int64_t parse_tokens(const Reader& reader, const Field& field, std::string_view column, int64_t least) {
  int64_t value = 0;
  const char* end = field.text.data() + field.text.size();
  const auto [stop, error] = std::from_chars(field.text.data(), end, value);
  if (field.text.empty() || error != std::errc() || stop != end || value < least || value > kMaxTokens) {
    reader.fail(field.column, fmt::format("{} is '{}'; it must be a whole number from {} to {}", column, field.text,
                                          least, kMaxTokens));
  }
  return value;
}

// Reads `count` digits at `at`.
std::optional<int64_t> digits(std::string_view text, size_t at, size_t count) {
  int64_t value = 0;
  if (at + count > text.size()) return std::nullopt;
  for (size_t i = at; i < at + count; ++i) {
    if (text[i] < '0' || text[i] > '9') return std::nullopt;
    value = value * 10 + (text[i] - '0');
  }
  return value;
}

// Days since 1970-01-01 in the Gregorian calendar; nothing for a day that does not exist.
std::optional<int64_t> days(int64_t year, int64_t month, int64_t day) {
  constexpr int kBefore[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365};
  if (year < 1 || month < 1 || month > 12 || day < 1) return std::nullopt;
  const bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
  const int64_t length = kBefore[month] - kBefore[month - 1] + (leap && month == 2 ? 1 : 0);
  if (day > length) return std::nullopt;
  const int64_t before = year - 1;
  const int64_t whole_years = before * 365 + before / 4 - before / 100 + before / 400;
  return whole_years - 719162 + kBefore[month - 1] + (leap && month > 2 ? 1 : 0) + day - 1;
}

// Whole seconds, and the fraction apart: a double cannot hold both to 100 ns.
struct Instant {
  int64_t seconds = 0;
  double fraction = 0;
  bool operator<(const Instant& other) const {
    return seconds != other.seconds ? seconds < other.seconds : fraction < other.fraction;
  }
};

// "YYYY-MM-DD HH:MM:SS", then an optional fraction and an optional Z or +00:00.
std::optional<Instant> parse_date(std::string_view text) {
  if (text.size() < 19 || text[4] != '-' || text[7] != '-' || (text[10] != ' ' && text[10] != 'T') || text[13] != ':' ||
      text[16] != ':') {
    return std::nullopt;
  }
  const auto year = digits(text, 0, 4), month = digits(text, 5, 2), day = digits(text, 8, 2);
  const auto hour = digits(text, 11, 2), minute = digits(text, 14, 2), second = digits(text, 17, 2);
  if (!year || !month || !day || !hour || !minute || !second || *hour > 23 || *minute > 59 || *second > 60)
    return std::nullopt;
  const auto date = days(*year, *month, *day);
  if (!date) return std::nullopt;
  Instant t{*date * 86400 + *hour * 3600 + *minute * 60 + *second, 0};
  size_t at = 19;
  if (at < text.size() && text[at] == '.') {
    double unit = 0.1;
    for (++at; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at, unit /= 10)
      t.fraction += unit * (text[at] - '0');
  }
  const std::string_view zone = text.substr(at);
  if (!zone.empty() && zone != "Z" && zone != "+00:00") return std::nullopt;
  return t;
}

Instant parse_time(const Reader& reader, const Field& field) {
  if (const auto date = parse_date(field.text)) return *date;
  double seconds = 0;
  const char* end = field.text.data() + field.text.size();
  const auto [stop, error] = std::from_chars(field.text.data(), end, seconds);
  if (field.text.empty() || error != std::errc() || stop != end || !(std::fabs(seconds) < 1e15)) {
    reader.fail(
        field.column,
        fmt::format("TIMESTAMP is '{}'; it must look like 2023-11-16 18:15:46.6805900, or be a number of seconds",
                    field.text));
  }
  const double whole = std::floor(seconds);
  return {static_cast<int64_t>(whole), seconds - whole};
}

}  // namespace

Trace read_trace(std::istream& in, const std::string& name, int64_t limit) {
  Reader reader(in, name);
  const std::array<size_t, 3> columns = find_columns(reader);
  const size_t needed = *std::max_element(columns.begin(), columns.end()) + 1;
  struct Row {
    Instant time;
    TraceRequest request;
  };
  std::vector<Row> rows;
  std::vector<Field> fields;
  while ((limit <= 0 || static_cast<int64_t>(rows.size()) < limit) && reader.next()) {
    if (reader.blank()) continue;
    reader.split(fields);
    if (fields.size() < needed) {
      const Field& last = fields.back();
      reader.fail(last.column + last.text.size(), fmt::format("the line ends after {} of {}", fields.size(),
                                                              counted(static_cast<int64_t>(needed), "column")));
    }
    Row row;
    row.time = parse_time(reader, fields[columns[0]]);
    row.request.prompt_tokens = parse_tokens(reader, fields[columns[1]], kColumns[1], 1);
    row.request.output_tokens = parse_tokens(reader, fields[columns[2]], kColumns[2], 0);
    row.request.line = reader.number();
    rows.push_back(row);
  }
  if (in.bad()) throw UserError(file_fault(name, fmt::format("read after line {}", reader.number()).c_str(), errno));
  if (rows.empty()) reader.fail(1, "the trace has a header but no requests");
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.time < b.time; });
  Trace trace{name, {}};
  for (Row& row : rows) {
    row.request.arrival =
        static_cast<double>(row.time.seconds - rows[0].time.seconds) + (row.time.fraction - rows[0].time.fraction);
    trace.requests.push_back(row.request);
  }
  return trace;
}

Trace read_trace_file(const std::string& path, int64_t limit) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in || in.peek() == std::ifstream::traits_type::eof()) {
    if (in.is_open() && in.eof() && !in.bad()) throw UserError(path + ": line 1, column 1: the file is empty");
    throw UserError(file_fault(path, "read", errno));
  }
  return read_trace(in, path, limit);
}

}  // namespace attune::cli
