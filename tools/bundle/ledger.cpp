// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <stdexcept>

#include "core/status.h"
#include "cuda/jit/sha256.h"

namespace attune::bundle {
namespace {

using Json = nlohmann::ordered_json;

// In the order of the file.
struct Field {
  const char* name;
  int64_t Resources::*value;
};
constexpr Field kFields[] = {{"registers", &Resources::registers},
                             {"static_shared", &Resources::static_shared},
                             {"stack", &Resources::stack},
                             {"spill_stores", &Resources::spill_stores},
                             {"spill_loads", &Resources::spill_loads}};

std::string text_of(const Resources& r) {
  std::string text;
  for (const Field& field : kFields) text += cat(text.empty() ? "" : ", ", field.name, " ", r.*field.value);
  return text;
}

// Without what follows // in a line, blanks at its ends, and lines of which nothing is left.
std::string without_comments(const std::string& source) {
  std::string code;
  std::istringstream lines(source);
  for (std::string line; std::getline(lines, line);) {
    bool in_string = false;
    for (size_t i = 0; i < line.size(); ++i) {
      if (line[i] == '"' && (i == 0 || line[i - 1] != '\\')) in_string = !in_string;
      if (!in_string && line.compare(i, 2, "//") == 0) line.resize(i);
    }
    const size_t first = line.find_first_not_of(" \t");
    if (first != std::string::npos) code += line.substr(first, line.find_last_not_of(" \t") + 1 - first) + "\n";
  }
  return code;
}

}  // namespace

std::string code_digest(const cuda::SourceUnit& unit, const std::vector<std::string>& options) {
  cuda::Sha256 hash;
  hash.update_field(unit.path).update_field(without_comments(unit.text));
  for (const auto& [path, text] : unit.headers) hash.update_field(path).update_field(without_comments(text));
  for (const std::string& option : options) hash.update_field(option);
  return cuda::to_hex(hash.finish()).substr(0, 32);
}

std::optional<Resources> recorded(const Ledger& ledger, const std::string& compiler, const std::string& name,
                                  const std::string& code) {
  const auto known = ledger.code.find(name);
  if (ledger.compiler != compiler || known == ledger.code.end() || known->second != code) return std::nullopt;
  return ledger.kernels.at(name);
}

bool compares_clamped(const std::string& image) {
  constexpr uint64_t kRelu = 1 << 12, kNoPredicates = 63, kThirdOperand = 0xff;
  for (size_t at = 0; at + 16 <= image.size(); at += 16) {
    uint64_t half[2];
    std::memcpy(half, image.data() + at, sizeof(half));
    const uint64_t opcode = half[0] & 0xfff;
    if (opcode != 0x248 && opcode != 0x848 && opcode != 0xc48)
      continue;  // VIMNMX of registers, with a constant, uniform
    const bool is_code =
        half[1] >> 41 != 0 && (half[1] & kThirdOperand) == 0;  // when it is issued, and no such operand
    if (is_code && (half[1] & kRelu) != 0 && (half[1] >> 17 & kNoPredicates) != kNoPredicates) return true;
  }
  return false;
}

std::map<std::string, Resources> parse_ptxas_log(const std::string& log, std::vector<std::string>* warnings) {
  static const std::regex entry("ptxas info +: Compiling entry function '([^']+)' for .*");
  static const std::regex frame(
      R"(ptxas +\. +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads)");
  static const std::regex used(R"(ptxas info +: Used (\d+) registers(.*))");
  // Advice with a number is called info, and is none: "(C7508) Potential Performance Loss: 'setmaxnreg' ignored".
  static const std::regex advice(R"(ptxas info +: \(C\d+\).*)");
  static const std::regex shared(R"((\d+) bytes smem)");
  std::map<std::string, Resources> kernels;
  std::string current;
  std::istringstream lines(log);
  std::smatch match;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, match, entry)) {
      current = match[1];
      kernels[current] = {};
    } else if (std::regex_match(line, match, frame)) {
      // A function that is called, not inlined, has a frame of its own: it counts for the entry that it follows.
      Resources& r = kernels[current];
      r.stack += std::stoll(match[1]);
      r.spill_stores += std::stoll(match[2]);
      r.spill_loads += std::stoll(match[3]);
    } else if (std::regex_match(line, match, used)) {
      kernels[current].registers = std::stoll(match[1]);
      const std::string rest = match[2];
      if (std::regex_search(rest, match, shared)) kernels[current].static_shared = std::stoll(match[1]);
    } else if (std::regex_match(line, advice) || (!line.empty() && !line.starts_with("ptxas info"))) {
      warnings->push_back(line);
    }
  }
  return kernels;
}

Ledger parse_ledger(const std::string& text) {
  Ledger ledger;
  try {
    const Json json = Json::parse(text);
    ledger.compiler = json.at("compiler").get<std::string>();
    for (const auto& [name, fields] : json.at("kernels").items()) {
      Resources& r = ledger.kernels[name];
      for (const Field& field : kFields) r.*field.value = fields.at(field.name).get<int64_t>();
      if (fields.contains("code")) ledger.code[name] = fields["code"].get<std::string>();
    }
  } catch (const Json::exception& e) {
    throw std::runtime_error(std::string("the ledger cannot be read: ") + e.what());
  }
  return ledger;
}

std::string ledger_text(const Ledger& ledger) {
  // A kernel a line, so that a change of one shows as one.
  std::string text = "{\n  \"compiler\": " + Json(ledger.compiler).dump() + ",\n  \"kernels\": {";
  const char* separator = "\n";
  for (const auto& [name, resources] : ledger.kernels) {
    text += separator + ("    " + Json(name).dump()) + ": {";
    for (const Field& field : kFields) {
      text += cat(field.name == kFields[0].name ? "" : ", ", "\"", field.name, "\": ", resources.*field.value);
    }
    const auto code = ledger.code.find(name);
    if (code != ledger.code.end()) text += ", \"code\": " + Json(code->second).dump();
    text += "}";
    separator = ",\n";
  }
  return text + "\n  }\n}\n";
}

std::vector<std::string> check_ledger(const Ledger& expected, const Ledger& measured) {
  std::vector<std::string> faults;
  for (const auto& [name, r] : measured.kernels) {
    if (r.spill_stores != 0 || r.spill_loads != 0) faults.push_back(name + " spills: " + text_of(r));
    const auto it = expected.kernels.find(name);
    if (it == expected.kernels.end()) {
      faults.push_back(name + " is not in the ledger: " + text_of(r));
    } else if (expected.compiler == measured.compiler && it->second != r) {
      faults.push_back(name + ": " + text_of(r) + "; the ledger says " + text_of(it->second));
    }
  }
  for (const auto& item : expected.kernels) {
    if (!measured.kernels.contains(item.first))
      faults.push_back(item.first + " is in the ledger and not in the manifest");
  }
  return faults;
}

}  // namespace attune::bundle
