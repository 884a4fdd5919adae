// SPDX-License-Identifier: Apache-2.0
// Two runs of unlike batches in flight at once: on two streams, or on the CPU from two threads.
#pragma once

#include <functional>
#include <string>

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

}  // namespace attune::cases
