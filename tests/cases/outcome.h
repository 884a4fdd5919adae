// SPDX-License-Identifier: Apache-2.0
// What a run has made of its buffers, for the runs after it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tensors.h"

namespace attune::cases {

// The buffers that a run has changed, and what it has made of them.
class Outcome {
 public:
  explicit Outcome(const Arena& arena);
  // As they were before the run.
  void restore() const;
  // "" where they are again what the first run made of them.
  std::string differs() const;

 private:
  std::vector<std::pair<Buffer*, std::vector<std::byte>>> changed_;
};

}  // namespace attune::cases
