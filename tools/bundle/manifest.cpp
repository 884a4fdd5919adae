// SPDX-License-Identifier: Apache-2.0
#include "manifest.h"

#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "core/status.h"

namespace attune::bundle {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void wrong(const std::string& where, const std::string& what) {
  throw std::runtime_error(where + ": " + what);
}

// A number, a string or a boolean (1 or 0), as the macro's text.
std::string macro_text(const Json& value, const std::string& where) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "1" : "0";
  if (value.is_number_integer()) return std::to_string(value.get<int64_t>());
  wrong(where, "must be an integer, a string or a boolean, or a list of them");
}

// Every combination of the defines' values.
std::vector<cuda::Defines> expand(const Json& defines, const std::string& where) {
  std::vector<cuda::Defines> all = {{}};
  for (const auto& [macro, value] : defines.items()) {
    const std::string here = where + "." + macro;
    const Json values = value.is_array() ? value : Json::array({value});
    if (values.empty()) wrong(here, "is an empty list");
    std::vector<cuda::Defines> longer;
    for (const cuda::Defines& prefix : all) {
      for (const Json& v : values) {
        longer.push_back(prefix);
        longer.back().emplace_back(macro, macro_text(v, here));
      }
    }
    all = std::move(longer);
  }
  return all;
}

void check_fields(const Json& object, const std::string& where, const std::set<std::string>& allowed) {
  if (!object.is_object()) wrong(where, "must be an object");
  for (const auto& item : object.items()) {
    if (!allowed.contains(item.key())) wrong(where, "has an unknown field '" + item.key() + "'");
  }
}

}  // namespace

std::vector<ManifestEntry> parse_manifest(const std::string& text) {
  Json manifest;
  try {
    manifest = Json::parse(text);
  } catch (const Json::parse_error& e) {
    throw std::runtime_error(std::string("the manifest is not JSON: ") + e.what());
  }
  check_fields(manifest, "manifest", {"arch", "kernels"});
  const cuda::Target hopper, portable = cuda::portable_target();
  const Json arch = manifest.value("arch", Json());
  if (arch != Json(hopper.option()) && arch != Json(portable.option()))
    wrong("manifest.arch", cat("must be \"", hopper.option(), "\" or \"", portable.option(), "\""));
  const cuda::Target& target = arch == Json(hopper.option()) ? hopper : portable;
  if (!manifest.contains("kernels") || !manifest["kernels"].is_array()) wrong("manifest.kernels", "must be a list");

  std::vector<ManifestEntry> list;
  std::set<std::string> seen;
  for (size_t i = 0; i < manifest["kernels"].size(); ++i) {
    const Json& kernel = manifest["kernels"][i];
    const std::string where = cat("manifest.kernels[", i, "]");
    check_fields(kernel, where, {"source", "entries", "defines", "dynamic_shared"});
    if (!kernel.contains("source") || !kernel["source"].is_string()) wrong(where + ".source", "must be a string");
    if (!kernel.contains("entries") || !kernel["entries"].is_array() || kernel["entries"].empty()) {
      wrong(where + ".entries", "must be a list of function names");
    }
    std::vector<std::string> entries;
    for (const Json& entry : kernel["entries"]) {
      if (!entry.is_string()) wrong(where + ".entries", "must be a list of function names");
      entries.push_back(entry.get<std::string>());
    }
    const Json defines = kernel.value("defines", Json::object());
    if (!defines.is_object()) wrong(where + ".defines", "must be an object");
    for (cuda::Defines& one : expand(defines, where + ".defines")) {
      ManifestEntry entry{{kernel["source"].get<std::string>(), std::move(one), target}, entries};
      const std::string name = cuda::module_name(entry.module);
      if (!seen.insert(name).second) wrong(where, "repeats " + name);
      list.push_back(std::move(entry));
    }
  }
  return list;
}

}  // namespace attune::bundle
