// SPDX-License-Identifier: Apache-2.0
// The shadow's clocks: what threads know of each other once they have synchronised. And what it reports.
#include <dlfcn.h>

#include <cstdio>

#include "emulator/on_purpose.h"
#include "emulator/shadow.h"

namespace attune::emulator {
namespace {

constexpr size_t kMostReports = 8, kMostFrames = 4;

// "\n    f at file:line" of an address behind a call in the kernel's module, where `code` lies.
std::string describe(uintptr_t pc, uintptr_t code) {
  Dl_info info, kernel;
  if (pc == 0 || dladdr(reinterpret_cast<void*>(pc), &info) == 0) return "";
  if (dladdr(reinterpret_cast<void*>(code), &kernel) == 0 || kernel.dli_fbase != info.dli_fbase) return "";
  char command[4096], line[4096];
  std::snprintf(command, sizeof(command), "addr2line -Cfpse '%s' %zx 2>/dev/null", info.dli_fname,
                pc - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase));
  std::string text;
  FILE* const pipe = popen(command, "r");
  while (pipe != nullptr && std::fgets(line, sizeof(line), pipe) != nullptr) text += line;
  if (pipe != nullptr) pclose(pipe);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  // Namespaces and arguments say little.
  const size_t at = text.rfind(" at "), arguments = text.find('(');
  if (at != std::string::npos && arguments < at) text.erase(arguments, at - arguments);
  return "\n    " + text.substr(0, text.find(" (discriminator"));
}

}  // namespace

void Shadow::meet_warp() {
  const unsigned first = running() & ~31u;
  const auto all = std::make_shared<Clock>(*lanes_[first].base);
  const Clock* last = lanes_[first].base.get();
  for (unsigned i = 0; i < 32; ++i) {
    const ShadowLane& lane = lanes_[first + i];
    if (lane.base.get() != last) all->join(*lane.base);
    last = lane.base.get();
  }
  for (unsigned i = 0; i < 32; ++i) {
    Clock::raise(all->known, first + i, time_of(first));
    Clock::raise(all->fenced, first + i, lanes_[first + i].fenced);
  }
  for (unsigned i = 0; i < 32; ++i) lanes_[first + i].base = all;
  ++time_of(first);
}

void Shadow::release(Meeting& m) { release_lane(m, running() % 32); }
void Shadow::release_lane(Meeting& m, unsigned of_warp) {
  const unsigned thread = (running() & ~31u) + of_warp;
  const ShadowLane& lane = lanes_[thread];
  if (m.gathering == nullptr) m.gathering = std::make_shared<Clock>();
  if (m.last != lane.base) m.gathering->join(*lane.base), m.last = lane.base;
  Clock::raise(m.gathering->known, thread, time_of(thread));
  Clock::raise(m.gathering->fenced, thread, lane.fenced);
  ++time_of(thread);
}

void Shadow::acquire(const ClockPtr& clock) {
  ClockPtr& base = lane().base;
  if (clock == nullptr || base == clock) return;
  if (joined_.a != base || joined_.b != clock) {
    const auto both = std::make_shared<Clock>(*base);
    both->join(*clock);
    joined_ = {base, clock, both};
  }
  base = joined_.result;
}

void Shadow::end_phase(Barrier& b) {
  if (b.meeting.gathering == nullptr) b.meeting.gathering = std::make_shared<Clock>();
  Clock::raise(b.meeting.gathering->known, b.agent, static_cast<uint32_t>(b.phase + 1));
  b.meeting.end_phase(b.phase);
}

void Shadow::fence() {
  ClockPtr& base = lane().base;
  if (fenced_.a != base) {
    const auto fenced = std::make_shared<Clock>(*base);
    Clock::raise(fenced->fenced, fenced->known);
    fenced_ = {base, nullptr, fenced};
  }
  base = fenced_.result;
  lane().fenced = time_of(running())++;
}

void Shadow::close_products() { ++lane().product_groups; }
void Shadow::wait_for_products(uint32_t pending) {
  if (lane().product_groups <= pending) return;
  const uint32_t done = lane().product_groups - pending;
  wait_for(products_of(running()), done);
  std::erase_if(lane().registers, [&](const Registers& r) { return r.group <= done; });
}
void Shadow::close_copies() { lane().copy_groups.push_back(++lane().copies); }
void Shadow::wait_for_copies(size_t pending) {
  const std::vector<uint32_t>& groups = lane().copy_groups;
  if (groups.size() > pending) wait_for(copies_of(running()), groups[groups.size() - 1 - pending]);
}
void Shadow::release_copies(Meeting& m) {
  if (m.gathering == nullptr) m.gathering = std::make_shared<Clock>();
  Clock::raise(m.gathering->known, copies_of(running()), ++lane().copies);
}
void Shadow::wait_for(unsigned agent, uint32_t time) {
  ClockPtr& base = lane().base;
  if (Clock::holds(base->known, agent, time)) return;
  if (waited_.a != base || waited_until_ != time || !Clock::holds(waited_.result->known, agent, time)) {
    const auto waited = std::make_shared<Clock>(*base);
    Clock::raise(waited->known, agent, time);
    waited_ = {base, nullptr, waited};
    waited_until_ = time;
  }
  base = waited_.result;
}

void Shadow::synchronize_atomic(const void* at, bool acquires, bool releases) {
  const unsigned me = running();
  std::map<unsigned, std::shared_ptr<Clock>>& there = s_global.atomics[at];
  if (acquires) {
    const auto with = std::make_shared<Clock>(*lane().base);
    for (const auto& [cluster, clock] : there) {
      if (cluster == cluster_) {
        with->join(*clock);
        continue;
      }
      const auto other = std::make_shared<Clock>(*clock);
      if (with->others[cluster] != nullptr) other->join(*with->others[cluster]);
      with->others[cluster] = other;
    }
    lane().base = with;
  }
  if (!releases) return;
  const auto add = [&](unsigned cluster, const Clock& clock) {
    const auto joined =
        there[cluster] != nullptr ? std::make_shared<Clock>(*there[cluster]) : std::make_shared<Clock>();
    joined->join(clock);
    joined->others.clear();
    there[cluster] = joined;
  };
  Clock mine = *lane().base;
  Clock::raise(mine.known, me, time_of(me)++);
  for (const auto& [cluster, clock] : mine.others) add(cluster, *clock);
  add(cluster_, mine);
}

std::string Shadow::name_of(unsigned agent) const {
  const auto threads = static_cast<unsigned>(lanes_.size());
  const size_t blocks = cells_.size(), of_block = threads / blocks;
  const auto warp_of = [&](size_t thread) {
    return "warp " + std::to_string(thread % of_block / 32) +
           (blocks > 1 ? " of block " + std::to_string(thread / of_block) : "");
  };
  const auto lane_of = [&](unsigned thread) {
    return "lane " + std::to_string(thread % 32) + " of " + warp_of(thread);
  };
  if (agent < threads) return lane_of(agent);
  if (agent < 2 * threads) return "cp.async by " + lane_of(agent - threads);
  if (agent < first_barrier()) return "a product of " + warp_of((agent - 2 * threads) * 32);
  return "a copy that the barrier at " + barriers_[agent - first_barrier()] + " counts";
}

void Shadow::report(const Access& access, const std::string& what, Site other) {
  const std::string key = std::to_string(access.site.at) + ' ' + std::to_string(access.site.caller) + ' ' +
                          std::to_string(other.at) + ' ' + (access.write ? "w" : "r");
  if (s_reports.size() == kMostReports || !s_keys.insert(key).second) return;
  const auto whole = [](uint32_t low) {
    return low == 0 ? 0
                    : s_code + static_cast<uintptr_t>(
                                   static_cast<int64_t>(static_cast<int32_t>(low - static_cast<uint32_t>(s_code))));
  };
  std::string text = name_of(access.agent) + (access.write ? " writes " : " reads ");
  if (access.is_register) {
    text += "registers";
  } else if (access.block == nullptr) {
    text += "global memory at " + std::to_string(access.address);
  } else if (access.offset >= kSharedBytes) {
    text += "byte " + std::to_string(access.offset - kSharedBytes) + " of static shared memory";
  } else {
    text += "byte " + std::to_string(access.offset) + " of shared memory";
  }
  text += " in block " + std::to_string(g_block->index.x) + ", " + what + describe(whole(access.site.at), s_code);
  const std::vector<void*>& calls = lanes_[access.lane].calls;
  for (size_t i = calls.size(), frames = 1; i-- > 0 && frames < kMostFrames;) {
    const auto pc = reinterpret_cast<uintptr_t>(calls[i]);
    if (static_cast<uint32_t>(pc) == access.site.at) continue;
    text += describe(pc, s_code), ++frames;
  }
  if (other.at != 0)
    text += "\n  the other:" + describe(whole(other.at), s_code) + describe(whole(other.caller), s_code);
  if (!is_on_purpose(text)) s_reports.push_back(text);
}

void Shadow::begin_launch() {
  s_global = {};
  s_keys.clear();
  s_reports.clear();
}
std::string Shadow::end_launch() {
  std::string all;
  for (const std::string& report : s_reports) all += "\n" + report;
  s_reports.clear();
  s_global = {};
  return all.empty() ? "" : "races:" + all;
}

}  // namespace attune::emulator
