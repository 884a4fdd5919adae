// SPDX-License-Identifier: Apache-2.0
// What keeps `--device auto` from the GPUs of this machine, in the library's words. Apart from device.h: the namespace
// attune::cuda and attune.hpp's function of that name exclude each other.
#pragma once

#include <string>

namespace attune::cli {

// What is wrong with ATTUNE_ARCH; "" if nothing.
std::string wrong_architecture();
// Why no GPU can be used where there are some, or a driver that does not work; else "".
std::string why_gpus_are_not_used();

}  // namespace attune::cli
