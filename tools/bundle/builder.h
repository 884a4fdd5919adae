// SPDX-License-Identifier: Apache-2.0
// Compiles a manifest into a bundle and a report of what each kernel takes. Modules that the old bundle holds are not
// compiled again. A sample leaves out those that a ledger knows, but for one of each source.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cuda/jit/nvrtc.h"
#include "ledger.h"
#include "manifest.h"

namespace attune::bundle {

struct BuiltModule {
  cuda::Digest key;  // in the bundle
  std::vector<std::string> warnings;
};

struct Build {
  std::vector<cuda::BundleEntry> entries;
  Ledger resources;
  std::map<std::string, BuiltModule> modules;  // by code_digest()
  std::vector<std::string> left_out;           // names of a sample's modules that are not in the bundle
  size_t compiled = 0;                         // modules that were not reused
  double longest_ms = 0;                       // the slowest of them
};

// Throws std::exception naming the module that does not compile, or the entry that its source lacks.
// previous_report: the text of the last report, or ""; used with the bundle at previous_bundle.
// known: null for the whole bundle; else makes a sample, in which modules recorded() in it with all of their entries
// are left out. One of each source is compiled all the same.
Build build_bundle(const std::vector<ManifestEntry>& manifest, const cuda::Nvrtc& nvrtc,
                   const std::string& previous_bundle, const std::string& previous_report,
                   const Ledger* known = nullptr);

// What build_bundle needs to reuse modules, and what the ledger is compared with: {"modules": {code: {"key":,
// "warnings": []}}, "left_out": [name], "ledger": {..}}.
std::string report_text(const Build& build);
Ledger report_ledger(const std::string& report);
std::vector<std::string> report_warnings(const std::string& report);
std::vector<std::string> report_left_out(const std::string& report);

}  // namespace attune::bundle
