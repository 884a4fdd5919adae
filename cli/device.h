// SPDX-License-Identifier: Apache-2.0
// --device: which of the library's devices runs the work.
#pragma once

#include <string>

#include "attune/attune.h"

namespace attune::cli {

inline constexpr char kDeviceHelp[] = "auto (a GPU where there is one), cpu, cuda (cuda:0) or cuda:N";
// "auto": the first GPU that can be used, else the CPU; "cpu", "cuda" or "cuda:N". Throws UserError with the devices
// that there are. Where "auto" passes GPUs by, a line on stderr says why; if ATTUNE_ARCH is the reason, UserError does.
attune_device parse_device(const std::string& text);
attune_device_info device_info(attune_device device);
// "cpu", "cuda:0".
std::string device_name(attune_device device);

}  // namespace attune::cli
