// SPDX-License-Identifier: Apache-2.0
// Two runs of unlike batches in flight at once: on two streams, or on the CPU from two threads; and runs that are
// queued on one stream, as those of a model's layers are.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "case.h"
#include "outcome.h"

namespace attune::cases {

// Whether a stress case is also run beside another: one of seven is, by its name.
bool runs_beside(const Case& spec);
// The other: of the same configuration, with other data, its sequences in reverse.
Case other_of(const Case& spec);

// What runs, on a stream, over the buffers of an arena.
struct Side {
  Arena& arena;
  std::function<void(void* stream)> run;
};

// first: what one gives alone. check: what is wrong with the other's buffers after its first run, by the oracle. Then
// both repeat. "" where both have given, each time, what they give alone.
std::string run_beside(const Side& one, const Outcome& first, const Side& other,
                       const std::function<std::string()>& check, int64_t& runs);

// A side, and what it gives alone.
struct KnownSide {
  Side side;
  const Outcome& alone;
};
// Queues runs of all sides in turn on one stream, many times, and waits at the end only: from the host, then as a
// graph. They may share a workspace. Each run must leave what the next one needs. "" where all sides have given what
// they give alone. Does nothing on a device that has no streams.
std::string run_in_a_row(const std::vector<KnownSide>& sides, int64_t& runs);

}  // namespace attune::cases
