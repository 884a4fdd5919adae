// SPDX-License-Identifier: Apache-2.0
// What the machine says about itself.
#pragma once

#include <cstdint>
#include <string>

namespace attune::cpu {

std::string cpu_name();  // "AMD EPYC 9654", or the architecture where the name is unknown
int64_t memory_bytes();  // physical memory; 0 if unknown

}  // namespace attune::cpu
