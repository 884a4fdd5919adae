// SPDX-License-Identifier: Apache-2.0
#include "outcome.h"

#include <algorithm>

namespace attune::cases {

Outcome::Outcome(const Arena& arena) {
  for (const auto& buffer : arena.buffers()) {
    std::vector<std::byte> bytes = buffer->download();
    if (!std::equal(bytes.begin(), bytes.end(), buffer->host())) changed_.push_back({buffer.get(), std::move(bytes)});
  }
}

void Outcome::restore() const {
  for (const auto& [buffer, bytes] : changed_) buffer->upload();
}

std::string Outcome::differs() const {
  for (const auto& [buffer, bytes] : changed_) {
    const std::vector<std::byte> now = buffer->download();
    const auto at = std::mismatch(bytes.begin(), bytes.end(), now.begin()).first;
    if (at != bytes.end())
      return "byte " + std::to_string(at - bytes.begin()) + " of \"" + buffer->name() + "\" has other bits";
  }
  return "";
}

}  // namespace attune::cases
