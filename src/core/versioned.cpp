// SPDX-License-Identifier: Apache-2.0
#include "core/versioned.h"

namespace attune {

void check_struct_size(const char* name, uint64_t size, uint64_t first) {
  require(size >= first && size <= kMostStructSize, name, ".struct_size is ", size, "; it must be ", first,
          " (version 0.1.0) to ", kMostStructSize, ": sizeof the caller's struct, set before the call");
}

void check_unknown_bytes(const char* name, const void* given, uint64_t size, uint64_t known) {
  const auto* const bytes = static_cast<const unsigned char*>(given);
  for (uint64_t i = known; i < size; ++i) {
    require(bytes[i] == 0, name, " has ", static_cast<int>(bytes[i]), " at byte ", i, " of ", size, "; this library (",
            ATTUNE_VERSION_STRING, ") knows ", known, " bytes and needs 0 behind them");
  }
}

}  // namespace attune
