// SPDX-License-Identifier: Apache-2.0
// What the emulator keeps of blocks that run: for launch.cpp, which lets them run, and emulator.cpp, in which they
// synchronise.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/clock.h"
#include "emulator/emulator.h"

namespace attune::emulator {

struct Fiber;
class Shadow;

// A thread waits while *at, or what the mask leaves of it, is this value.
struct Wait {
  const uint64_t* at;
  uint64_t mask, value;
};
inline constexpr uint64_t kZero = 0;
inline constexpr Wait kReady = {&kZero, 0, 1}, kDone = {&kZero, 0, 0};

struct Warp {
  uint64_t values[2][32] = {};
  void* lanes[32] = {};
  void (*all)(void* const*) = nullptr;  // what the lanes have come for
  int arrived = 0;
  uint64_t generation = 0;
  uint64_t priority = 0;  // in an order by seed
};

struct NumberedBarrier {
  int arrived = 0;
  uint64_t generation = 0;
  bool any[2] = {};  // of sync_any, by generation
  Meeting meeting;
};

struct Barrier {
  int64_t count = 0, pending = 0, bytes = 0;
  uint64_t phase = 0;
  uint64_t phase_seen = 0;  // somebody has waited for the end of the one before it
  unsigned agent = 0;       // of the shadow's clocks
  Meeting meeting;
};

struct Cluster;

// The turns of some threads of a block: `count` from `first` on, beginning with any of them.
struct Turns {
  unsigned first = 0, count = 0, start = 0, step = 1;
  unsigned thread(unsigned turn) const {
    const unsigned i = start + turn * step;
    return first + (i < count ? i : i % count);
  }
};

struct Block {
  Cluster* cluster = nullptr;
  Fiber* fibers = nullptr;
  std::vector<Wait> waits;                    // of each thread
  std::vector<uint64_t> cluster_generations;  // of the cluster's barrier when a thread arrived
  std::vector<Warp> warps;
  std::array<NumberedBarrier, 16> numbered;
  std::map<unsigned, Barrier> barriers;
  unsigned char* shared = nullptr;
  std::vector<unsigned char> static_shared;  // while another block has the modules' variables
  Turns turns;
  unsigned turn = 0, current = 0, unfinished = 0;
  unsigned first_thread = 0;  // of the cluster's
  Index index = {}, grid = {};
  uint64_t progress = 0;  // changes with everything that somebody may wait for
  const std::function<void()>* kernel = nullptr;
  std::string failure;
  bool has_waited = false, has_allowed = false;  // for the kernels before; the next one to begin
  bool polled = false;                           // a thread of the last turns asks for what has not happened yet
};

struct Cluster {
  std::vector<Block> blocks;
  size_t arrived = 0;
  uint64_t generation = 0;
  std::shared_ptr<Shadow> shadow;  // null: nobody asks for races
  Meeting meeting;
};

// ATTUNE_EMULATOR_<name> of the environment; null: not set, or a Pinned lives.
const char* setting(const char* name);
extern bool g_pinned;

extern Block* g_block;
// The running thread's.
struct Stack {
  uintptr_t begin;
  size_t bytes;
};
extern Stack g_stack;
// Among all static shared variables; SIZE_MAX: none is there.
size_t offset_among_statics(const unsigned char* at);

// The running thread waits while at & mask is that value, and others take their turns.
void wait_while(const uint64_t& at, uint64_t value, uint64_t mask = ~uint64_t{0});
// It has its next turn after others.
void leave_turn();
// By seed: one time in so many others go on first.
void may_leave_turn(unsigned one_in);
// As well, where lanes of a warp come together in practice but need not.
void may_fall_behind(unsigned one_in);

}  // namespace attune::emulator
