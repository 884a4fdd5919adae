// SPDX-License-Identifier: Apache-2.0
// What attune_validate needs of a problem whose data are on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/problem.h"

namespace attune::cuda {

// Throws INVALID_ARGUMENT naming the first tensor whose data the device cannot reach: host memory that CUDA does not
// know. Where the device reaches all of the host's memory nothing is wrong.
void check_reachable(const attune_attention& a, int32_t device);
// The same for one pointer; null is fine. A fraction of a microsecond.
void check_reachable(const char* name, const void* data, int32_t device);

// A problem with copies of its lengths, tables, indices and flags on the host; the rest still points at the device.
class HostTables {
 public:
  using Copy = std::function<void(void* to, const void* from, size_t bytes)>;

  // Enqueues the copies on the stream and waits for them. The device must reach the problem's pointers.
  HostTables(const Problem& p, int32_t device, void* stream);
  // Copies by any function.
  HostTables(const Problem& p, const Copy& copy);
  const Problem& problem() const { return problem_; }

 private:
  class Copier;
  Problem problem_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<uint8_t> flags_;
};

}  // namespace attune::cuda
