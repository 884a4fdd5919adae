// SPDX-License-Identifier: Apache-2.0
// kernels/manifest.json and kernels/manifest_portable.json: the specialisations that are compiled when the library is
// built, to machine code and to PTX.
//
//   {"arch": "sm_90a",                                    or "compute_80"
//    "kernels": [{"source": "decode/decode.cu",            path inside kernels/
//                 "entries": ["decode"],                   functions whose resources the ledger holds
//                 "dynamic_shared": 98304,                 bytes that launches ask for; only the check of the list
//                 reads it "defines": {"HEAD_DIM": [64, 128], "GROUP": 8, "KV": "bf16"}}]}
//
// A define with a list stands for each of its values; several lists, for every combination.
#pragma once

#include <string>
#include <vector>

#include "cuda/jit/image.h"

namespace attune::bundle {

struct ManifestEntry {
  cuda::ModuleSpec module;
  std::vector<std::string> entries;
};

// Throws std::runtime_error that names the entry and the field that is wrong.
std::vector<ManifestEntry> parse_manifest(const std::string& text);

}  // namespace attune::bundle
