// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <system_error>
#include <vector>

#include "attune/attune.hpp"
#include "gpus.h"
#include "text.h"
#include "user_error.h"

namespace attune::cli {

std::string device_name(attune_device device) {
  return device.type == ATTUNE_DEVICE_CUDA ? fmt::format("cuda:{}", device.index) : "cpu";
}

namespace {

// Says why where there are GPUs. An ATTUNE_ARCH that is wrong is not a wish for the CPU.
attune_device cpu_for_auto() {
  if (const std::string why = wrong_architecture(); !why.empty()) throw UserError(why);
  if (const std::string why = why_gpus_are_not_used(); !why.empty()) say("note: --device auto is the CPU: {}\n", why);
  return {ATTUNE_DEVICE_CPU, 0};
}

}  // namespace

attune_device_info device_info(attune_device device) {
  for (const attune_device_info& info : devices()) {
    if (info.device.type == device.type && info.device.index == device.index) return info;
  }
  throw Error(ATTUNE_DEVICE_ERROR, "device " + device_name(device) + " is not available");
}

attune_device parse_device(const std::string& text) {
  const std::vector<attune_device_info> all = devices();
  if (text == "auto") {
    for (const attune_device_info& info : all)
      if (info.device.type == ATTUNE_DEVICE_CUDA) return info.device;
    return cpu_for_auto();
  }
  if (text == "cuda") return parse_device("cuda:0");
  std::string known;
  for (const attune_device_info& info : all) {
    if (text == device_name(info.device)) return info.device;
    known += (known.empty() ? "" : ", ") + device_name(info.device);
  }
  if (text.starts_with("cuda:")) {
    int index = 0;
    const char* const end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data() + 5, end, index);
    if (error != std::errc() || stopped != end || index < 0) {
      throw UserError(fmt::format("unknown device '{}'; N of cuda:N must be 0..{} (this machine has {})", text,
                                  std::numeric_limits<int>::max(), known));
    }
    // The library's own words on why.
    attune_warm(nullptr, 0, cuda(index));
    throw UserError(fmt::format("{}; this machine has {}", attune_last_error(), known));
  }
  throw UserError(
      fmt::format("unknown device '{}'; it must be auto, cpu, cuda or cuda:N (this machine has {})", text, known));
}

}  // namespace attune::cli
