// SPDX-License-Identifier: Apache-2.0
// What each kernel takes of a multiprocessor, as ptxas reports it, and kernels/ledger.json, which holds what it should
// take.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/sources.h"

namespace attune::bundle {

struct Resources {
  int64_t registers = 0;      // a thread
  int64_t static_shared = 0;  // bytes a block
  int64_t stack = 0;          // bytes a thread: spills and arrays indexed at run time
  int64_t spill_stores = 0, spill_loads = 0;
  bool operator==(const Resources&) const = default;
};

// Reads the compiler's log under --ptxas-options=-v: resources by function. What else it says goes to *warnings, a line
// each.
std::map<std::string, Resources> parse_ptxas_log(const std::string& log, std::vector<std::string>* warnings);

// Whether a module takes a comparison from the predicate of VIMNMX.RELU, as CUDA 13.0's ptxas makes of
// `max(0, min(x, 128)) != 128`: it says whether x was clamped at all. Instructions have 16 bytes; nothing else is read.
bool compares_clamped(const std::string& image);

// Kernels by name: "decode/decode.cu decode GROUP=8 HEAD_DIM=128".
struct Ledger {
  std::string compiler;  // NVRTC's version: others give other numbers
  std::map<std::string, Resources> kernels;
  std::map<std::string, std::string> code;  // code_digest() of what was compiled; none where the compiler warned
};
Ledger parse_ledger(const std::string& text);
std::string ledger_text(const Ledger& ledger);

// A digest, in hexadecimal, of what the compiler sees of a module: its sources without comments, and the options.
std::string code_digest(const cuda::SourceUnit& unit, const std::vector<std::string>& options);

// What a kernel takes, where the ledger is of this compiler and of this code: compiling it again would say the same.
std::optional<Resources> recorded(const Ledger& ledger, const std::string& compiler, const std::string& name,
                                  const std::string& code);

// What is wrong with measured: spills always; with the ledger's own compiler, any difference from it; with another
// compiler, only kernels that the ledger does not name.
std::vector<std::string> check_ledger(const Ledger& expected, const Ledger& measured);

}  // namespace attune::bundle
