// SPDX-License-Identifier: Apache-2.0
#include "cpu/cpu_info.h"

#include <unistd.h>

#include <fstream>

namespace attune::cpu {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
#if defined(__x86_64__)
  return "x86-64 CPU";
#elif defined(__aarch64__)
  return "AArch64 CPU";
#else
  return "CPU";
#endif
}

int64_t memory_bytes() {
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && size > 0 ? static_cast<int64_t>(pages) * size : 0;
}

}  // namespace attune::cpu
