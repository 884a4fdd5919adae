// SPDX-License-Identifier: Apache-2.0
// One object of a table of cases.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "number.h"

namespace attune::cases {

using nlohmann::json;

// Reads the keys of one object and complains about those nobody read: a misspelt key must not silently test nothing.
class Object {
 public:
  explicit Object(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) throw std::runtime_error(where_ + " must be an object");
  }
  const json* find(const char* key) {
    read_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() ? nullptr : &*it;
  }
  template <typename T>
  void get(const char* key, T& value) {
    const json* found = find(key);
    if (found == nullptr) return;
    try {
      found->get_to(value);
    } catch (const json::exception& e) {
      throw std::runtime_error(where_ + "." + key + ": " + e.what());
    }
  }
  // Of a list of two.
  void get_pair(const char* key, int64_t& first, int64_t& second) {
    std::vector<int64_t> both;
    get(key, both);
    if (both.empty()) return;
    if (both.size() != 2)
      throw std::runtime_error(where_ + "." + key + ": has " + std::to_string(both.size()) + " numbers; it takes 2");
    first = both[0], second = both[1];
  }
  void get(const char* key, attune_dtype& value) {
    std::string name;
    get(key, name);
    if (!name.empty()) value = dtype_from_name(name);
  }
  template <typename T>
  void choose(const char* key, T& value, const std::map<std::string, T>& choices) {
    std::string name;
    get(key, name);
    if (name.empty()) return;
    const auto it = choices.find(name);
    if (it == choices.end()) throw std::runtime_error(where_ + "." + key + ": unknown value \"" + name + "\"");
    value = it->second;
  }
  void finish() const {
    for (const auto& [key, value] : object_.items()) {
      if (read_.count(key) == 0) throw std::runtime_error(where_ + ": unknown key \"" + key + "\"");
    }
  }
  const std::string& where() const { return where_; }

 private:
  const json& object_;
  std::string where_;
  std::set<std::string> read_;
};

}  // namespace attune::cases
