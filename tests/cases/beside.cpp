// SPDX-License-Identifier: Apache-2.0
#include "beside.h"

#include <algorithm>
#include <optional>

namespace attune::cases {
namespace {

constexpr double kShare = 1.0 / 7;
constexpr int kRounds = 5, kRoundsInARow = 32;

template <typename T>
void reverse(std::vector<T>& all) {
  std::reverse(all.begin(), all.end());
}

}  // namespace

bool runs_beside(const Case& spec) { return Random(spec.name + " beside", 0).chance(kShare); }

Case other_of(const Case& spec) {
  Case c = spec;
  c.name += " beside";
  if (c.beam_width > 1) return c;  // beams come by the request
  reverse(c.seqlens_q), reverse(c.seqlens_kv), reverse(c.finished), reverse(c.ranges);
  return c;
}

std::string run_beside(const Side& one, const Outcome& first, const Side& other,
                       const std::function<std::string()>& check, int64_t& runs) {
  std::optional<Outcome> second;
  for (int round = 0; round < kRounds; ++round) {
    first.restore();
    if (second) second->restore();
    one.arena.memory().side_by_side(one.run, other.run);
    runs += 2;
    if (std::string failure = first.differs(); !failure.empty()) return "beside another run: " + failure;
    std::string failure = second ? second->differs() : check();
    if (!failure.empty()) return "the run beside it: " + failure;
    if (!second) second.emplace(other.arena);
  }
  std::string failure = one.arena.check_guards();
  return failure.empty() ? other.arena.check_guards() : failure;
}

std::string run_in_a_row(const std::vector<KnownSide>& sides, int64_t& runs) {
  Memory& memory = sides.front().side.arena.memory();
  const auto queue = [&](void* stream) {
    for (int round = 0; round < kRoundsInARow; ++round) {
      for (const KnownSide& known : sides) known.side.run(stream);
    }
  };
  const std::function<void()> replay = memory.captured(queue);
  if (!replay) return "";
  for (const bool graph : {false, true}) {
    for (const KnownSide& known : sides) known.alone.restore();
    graph ? replay() : queue(nullptr);
    runs += kRoundsInARow * static_cast<int64_t>(sides.size());
    for (const KnownSide& known : sides) {
      if (std::string failure = known.alone.differs(); !failure.empty())
        return std::string(graph ? "a replayed graph of " : "") + "runs in a row: " + failure;
      if (std::string failure = known.side.arena.check_guards(); !failure.empty()) return failure;
    }
  }
  return "";
}

}  // namespace attune::cases
