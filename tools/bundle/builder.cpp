// SPDX-License-Identifier: Apache-2.0
#include "builder.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "core/parallel.h"
#include "core/status.h"
#include "cuda/kernel.h"

namespace attune::bundle {
namespace {

using Json = nlohmann::ordered_json;

struct Module {
  std::string image;
  std::vector<std::string> warnings;
  std::map<std::string, Resources> resources;  // by entry
};

// Entries whose resources are known: of machine code. What PTX takes is known on the GPU that it is compiled for.
std::vector<std::string> measured(const ManifestEntry& entry) {
  return entry.module.target.as_ptx ? std::vector<std::string>() : entry.entries;
}

std::string name_of(const ManifestEntry& entry, const std::string& kernel) {
  return cuda::spec_name({entry.module.source, kernel, entry.module.defines, 0});
}

// Of cuda::to_hex()'s text; of another text, a digest that no bundle has.
cuda::Digest from_hex(const std::string& text) {
  cuda::Digest digest = {};
  for (size_t i = 0; i < digest.size() && 2 * i + 2 <= text.size(); ++i)
    digest[i] = static_cast<uint8_t>(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
  return digest;
}

// What the last build left, where its compiler was the same.
class Previous {
 public:
  Previous(const std::string& bundle_path, const std::string& report, const std::string& compiler) {
    std::string why;
    if (!report.empty()) bundle_ = cuda::Bundle::open(bundle_path, &why);
    if (bundle_ == nullptr) return;
    try {
      report_ = Json::parse(report);
      ledger_ = report_ledger(report);
    } catch (const std::exception&) {
      ledger_ = {};  // a report that was cut short: everything is compiled again
    }
    if (ledger_.compiler != compiler) bundle_.reset();
  }

  // By the code, as the key changes with comments too.
  bool find(const std::string& code, const ManifestEntry& entry, Module* module) const {
    if (bundle_ == nullptr || !report_["modules"].contains(code)) return false;
    const Json& found = report_["modules"][code];
    for (const std::string& name : measured(entry)) {
      const auto it = ledger_.kernels.find(name_of(entry, name));
      if (it == ledger_.kernels.end()) return false;
      module->resources[name] = it->second;
    }
    std::string why;
    module->image = bundle_->find(from_hex(found["key"].get<std::string>()), &why);
    module->warnings = found["warnings"].get<std::vector<std::string>>();
    return !module->image.empty();
  }

 private:
  std::unique_ptr<cuda::Bundle> bundle_;
  Json report_;
  Ledger ledger_;
};

Module compile(const ManifestEntry& entry, const cuda::SourceUnit& unit, std::vector<std::string> options,
               const cuda::Nvrtc& nvrtc) {
  if (!entry.module.target.as_ptx) options.push_back("--ptxas-options=-v");  // reports, and changes nothing
  cuda::Compiled compiled = nvrtc.compile(unit, options);
  Module module;
  module.image = std::move(compiled.code);
  const std::map<std::string, Resources> all = parse_ptxas_log(compiled.log, &module.warnings);
  if (compares_clamped(module.image))
    module.warnings.push_back(entry.module.source + ": compares max(0, min(x, n)) with n, by VIMNMX.RELU's predicate");
  for (const std::string& name : measured(entry)) {
    const auto it = all.find(name);
    if (it == all.end()) throw std::runtime_error(entry.module.source + " has no entry " + name);
    module.resources[name] = it->second;
  }
  return module;
}

// The resources of all entries, where the ledger has them of this code.
std::map<std::string, Resources> recorded_of(const ManifestEntry& entry, const Ledger& known,
                                             const std::string& compiler, const std::string& code) {
  std::map<std::string, Resources> all;
  for (const std::string& name : measured(entry)) {
    const std::optional<Resources> one = recorded(known, compiler, name_of(entry, name), code);
    if (!one) return {};
    all[name] = *one;
  }
  return all;
}

}  // namespace

Build build_bundle(const std::vector<ManifestEntry>& manifest, const cuda::Nvrtc& nvrtc,
                   const std::string& previous_bundle, const std::string& previous_report, const Ledger* known) {
  const Previous previous(previous_bundle, previous_report, nvrtc.version());
  Build build;
  build.resources.compiler = nvrtc.version();
  std::mutex mutex;
  std::set<std::string> sources;
  std::set<const ManifestEntry*> firsts;
  for (const ManifestEntry& entry : manifest) {
    if (sources.insert(entry.module.source).second) firsts.insert(&entry);
  }

  auto one = [&](const ManifestEntry& entry) {
    const cuda::SourceUnit unit = cuda::read_source(entry.module.source);
    const std::vector<std::string> options = cuda::compiler_options(entry.module);
    const cuda::Digest key = cuda::module_key(unit, options);
    const std::string code = code_digest(unit, options);
    Module module;
    if (known != nullptr && !firsts.contains(&entry))
      module.resources = recorded_of(entry, *known, nvrtc.version(), code);
    const bool left_out = !module.resources.empty();
    const bool reused = left_out || previous.find(code, entry, &module);
    const auto start = std::chrono::steady_clock::now();
    if (!reused) module = compile(entry, unit, options, nvrtc);
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;

    std::lock_guard lock(mutex);
    if (!reused) {
      ++build.compiled;
      build.longest_ms = std::max(build.longest_ms, elapsed.count());
    }
    for (const auto& [name, resources] : module.resources) {
      build.resources.kernels[name_of(entry, name)] = resources;
      if (module.warnings.empty()) build.resources.code[name_of(entry, name)] = code;
    }
    if (left_out) return build.left_out.push_back(cuda::module_name(entry.module));
    build.entries.push_back({key, std::move(module.image)});
    build.modules[code] = {key, std::move(module.warnings)};
  };
  run_in_parallel(manifest.size(), [&](size_t i) {
    try {
      one(manifest[i]);
    } catch (const std::exception& e) {
      throw std::runtime_error(cuda::module_name(manifest[i].module) + ": " + e.what());
    }
  });
  return build;
}

std::string report_text(const Build& build) {
  Json report;
  for (const auto& [code, module] : build.modules)
    report["modules"][code] = {{"key", cuda::to_hex(module.key)}, {"warnings", module.warnings}};
  report["left_out"] = build.left_out;
  report["ledger"] = Json::parse(ledger_text(build.resources));
  return report.dump(1) + "\n";
}

Ledger report_ledger(const std::string& report) { return parse_ledger(Json::parse(report).at("ledger").dump()); }

std::vector<std::string> report_warnings(const std::string& report) {
  std::vector<std::string> all;
  const Json json = Json::parse(report);
  for (const auto& item : json.at("modules").items()) {
    for (const Json& line : item.value().at("warnings")) all.push_back(line.get<std::string>());
  }
  return all;
}

std::vector<std::string> report_left_out(const std::string& report) {
  return Json::parse(report).at("left_out").get<std::vector<std::string>>();
}

}  // namespace attune::bundle
