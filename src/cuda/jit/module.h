// SPDX-License-Identifier: Apache-2.0
// What is compiled as one, and where its machine code comes from.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/architecture.h"

namespace attune::cuda {

using Defines = std::vector<std::pair<std::string, std::string>>;
// A macro with a number.
inline Defines::value_type define(const char* name, int64_t value) { return {name, std::to_string(value)}; }

// Every entry of the source, for one set of macros.
struct ModuleSpec {
  std::string source;
  Defines defines;
  Target target = {};
};
std::string module_name(const ModuleSpec& spec);        // "decode/decode.cu GROUP=8 HEAD_DIM=128"
std::string short_module_name(const ModuleSpec& spec);  // "decode/decode.cu GROUP=8 HEAD_DIM=128 .. and 9 more macros"

enum class KernelOrigin { kBundle, kDiskCache, kCompiled };
const char* origin_name(KernelOrigin origin);

}  // namespace attune::cuda
