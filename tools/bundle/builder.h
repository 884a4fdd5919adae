// SPDX-License-Identifier: Apache-2.0
// Compiles a manifest into a bundle and a report of what each kernel takes. Modules that the old bundle holds are not
// compiled again.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cuda/jit/nvrtc.h"
#include "ledger.h"
#include "manifest.h"

namespace attune::bundle {

struct Build {
  std::vector<cuda::BundleEntry> entries;
  Ledger resources;
  std::map<std::string, std::vector<std::string>> warnings;  // of each module, by its key in hexadecimal
  size_t compiled = 0;                                       // modules that were not reused
  double longest_ms = 0;                                     // the slowest of them
};

// Throws std::exception naming the module that does not compile, or the entry that its source lacks.
// previous_report: the text of the last report, or ""; used with the bundle at previous_bundle.
Build build_bundle(const std::vector<ManifestEntry>& manifest, const cuda::Nvrtc& nvrtc,
                   const std::string& previous_bundle, const std::string& previous_report, unsigned num_threads);

// What build_bundle needs to reuse modules, and what the ledger is compared with: {"modules": {key: [warnings]},
// "ledger": {..}}.
std::string report_text(const Build& build);
Ledger report_ledger(const std::string& report);
std::vector<std::string> report_warnings(const std::string& report);

}  // namespace attune::bundle
