// SPDX-License-Identifier: Apache-2.0
// What happened before what, for the emulator's search for races: vector clocks of the threads of a cluster, and of
// what accesses memory by itself on their behalf.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace attune::emulator {

// Agents are the cluster's threads, the copies (cp.async) of each, the products of each warp, the copies of each
// barrier.
struct Clock {
  std::vector<uint32_t> known;   // by agent: until when what it did came before
  std::vector<uint32_t> fenced;  // the same of ordinary writes, for the async proxy (fence.proxy.async)
  std::map<unsigned, std::shared_ptr<const Clock>> others;  // of other clusters

  static bool holds(const std::vector<uint32_t>& clock, unsigned agent, uint32_t time) {
    return agent < clock.size() && clock[agent] >= time;
  }
  static void raise(std::vector<uint32_t>& clock, unsigned agent, uint32_t time) {
    if (agent >= clock.size()) clock.resize(agent + 1);
    clock[agent] = std::max(clock[agent], time);
  }
  static void raise(std::vector<uint32_t>& clock, const std::vector<uint32_t>& by) {
    if (clock.size() < by.size()) clock.resize(by.size());
    for (size_t i = 0; i < by.size(); ++i) clock[i] = std::max(clock[i], by[i]);
  }
  void join(const Clock& x) {
    raise(known, x.known);
    raise(fenced, x.fenced);
    for (const auto& [cluster, clock] : x.others) {
      std::shared_ptr<const Clock>& mine = others[cluster];
      if (mine == nullptr) mine = clock;
      if (mine == clock) continue;
      const auto both = std::make_shared<Clock>(*mine);
      both->join(*clock);
      mine = both;
    }
  }
};
using ClockPtr = std::shared_ptr<const Clock>;

// What those who come to a meeting point have done before, for those who wait there.
struct Meeting {
  std::shared_ptr<Clock> gathering;
  ClockPtr last;     // in it
  ClockPtr done[2];  // of the latest phases that have ended, by parity

  void end_phase(uint64_t phase) {
    done[phase % 2] = std::move(gathering);
    gathering = nullptr;
    last = nullptr;
  }
};

}  // namespace attune::emulator
