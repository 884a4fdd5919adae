// SPDX-License-Identifier: Apache-2.0
#include "emulator/emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/dtype.h"

namespace attune::emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10, kSharedBytes = 232448, kSharedAlignment = 1024;
constexpr int kNumberedBarriers = 16;
constexpr int64_t kMostIdleRounds = 10000;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  uint64_t cluster_generation = 0;  // of the cluster's barrier when this thread arrived
};

struct Warp {
  uint64_t values[2][32] = {};
  int arrived = 0;
  uint64_t generation = 0;
};

struct NumberedBarrier {
  int arrived = 0;
  uint64_t generation = 0;
  bool any[2] = {};  // of sync_any, by generation
};

struct Barrier {
  int64_t count = 0, pending = 0, bytes = 0;
  uint64_t phase = 0;
};

struct Cluster;

struct Block {
  Cluster* cluster = nullptr;
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::array<NumberedBarrier, kNumberedBarriers> numbered;
  std::map<unsigned, Barrier> barriers;
  unsigned char* shared = nullptr;
  unsigned current = 0;
  Index index = {}, grid = {};
  uint64_t progress = 0;  // changes with everything that somebody may wait for
  const std::function<void()>* kernel = nullptr;
  std::string failure;
};

struct Cluster {
  std::vector<Block> blocks;
  size_t arrived = 0;
  uint64_t generation = 0;
};

Block* g_block = nullptr;

void start_fiber() {
  Block& b = *g_block;
  try {
    (*b.kernel)();
  } catch (const std::exception& e) {
    b.failure = e.what();
  }
  b.fibers[b.current].done = true;
  ++b.progress;
}

Barrier& barrier_of(Block& block, unsigned barrier) {
  const auto at = block.barriers.find(barrier);
  if (at == block.barriers.end()) throw std::runtime_error("a barrier is used before it is initialised");
  return at->second;
}

Barrier& barrier_at(unsigned barrier) { return barrier_of(*g_block, barrier); }

void end_phase_if_complete(Barrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  b.pending = b.count;
  ++b.phase;
  ++g_block->progress;
}

void arrive(Barrier& b, unsigned expected_bytes) {
  b.bytes += expected_bytes;
  if (--b.pending < 0) throw std::runtime_error("more arrivals at a barrier than it counts");
  end_phase_if_complete(b);
}

void complete_bytes(Barrier& b, unsigned bytes) {
  b.bytes -= bytes;
  end_phase_if_complete(b);
}

// By itself, as getcontext() may return twice for all that the compiler knows.
void ready_fiber(Fiber& f, ucontext_t* scheduler) {
  getcontext(&f.context);
  f.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);  // zeros would cost most of the time
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = kStackBytes;
  f.context.uc_link = scheduler;
  makecontext(&f.context, start_fiber, 0);
}
void start_block(Block& b) {
  for (Fiber& f : b.fibers) ready_fiber(f, &b.scheduler);
}

// One turn for each thread. True if one of them has not ended.
bool run_turn(Block& b) {
  bool running = false;
  g_block = &b;
  for (b.current = 0; b.current < b.fibers.size(); ++b.current) {
    Fiber& f = b.fibers[b.current];
    if (f.done) continue;
    running = true;
    swapcontext(&b.scheduler, &f.context);
    if (!b.failure.empty()) throw std::runtime_error(b.failure);
  }
  return running;
}

void run_cluster(Cluster& cluster) {
  for (Block& b : cluster.blocks) start_block(b);
  int64_t idle = 0;
  for (bool running = true; running;) {
    running = false;
    uint64_t before = 0, after = 0;
    for (Block& b : cluster.blocks) {
      before += b.progress;
      running |= run_turn(b);
      after += b.progress;
    }
    idle = before == after ? idle + 1 : 0;
    if (running && idle > kMostIdleRounds) {
      std::string who;
      for (const Block& b : cluster.blocks) {
        for (size_t i = 0; i < b.fibers.size(); i += 32) who += b.fibers[i].done ? "" : " " + std::to_string(i / 32);
      }
      throw std::runtime_error("threads wait for what nobody will do; warps that have not ended:" + who);
    }
  }
}

}  // namespace

Index thread_index() { return {g_block->current, 0, 0}; }
Index block_index() { return g_block->index; }
Index grid_size() { return g_block->grid; }
Index block_size() { return {static_cast<unsigned>(g_block->fibers.size()), 1, 1}; }
unsigned char* shared_memory() { return g_block->shared; }
unsigned cluster_rank() { return static_cast<unsigned>(g_block - g_block->cluster->blocks.data()); }
unsigned cluster_size() { return static_cast<unsigned>(g_block->cluster->blocks.size()); }
unsigned char* shared_memory_of(unsigned rank) { return g_block->cluster->blocks.at(rank).shared; }

void arrive_at_cluster() {
  Cluster& c = *g_block->cluster;
  g_block->fibers[g_block->current].cluster_generation = c.generation;
  ++g_block->progress;
  if (++c.arrived == c.blocks.size() * g_block->fibers.size()) {
    c.arrived = 0;
    ++c.generation;
  }
}
void wait_for_cluster() {
  while (g_block->cluster->generation == g_block->fibers[g_block->current].cluster_generation) yield();
}
void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

void yield() { swapcontext(&g_block->fibers[g_block->current].context, &g_block->scheduler); }

const uint64_t* exchange(uint64_t value) {
  Warp& w = g_block->warps[g_block->current / 32];
  const uint64_t generation = w.generation;
  w.values[generation % 2][g_block->current % 32] = value;
  ++g_block->progress;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
  } else {
    while (w.generation == generation) yield();
  }
  return w.values[generation % 2];
}

void arrive_threads(int id, int threads) {
  NumberedBarrier& n = g_block->numbered[static_cast<size_t>(id)];
  ++g_block->progress;
  if (++n.arrived == threads) {
    n.arrived = 0;
    ++n.generation;
  }
}

void sync_threads(int id, int threads) {
  NumberedBarrier& n = g_block->numbered[static_cast<size_t>(id)];
  const uint64_t generation = n.generation;
  arrive_threads(id, threads);
  while (n.generation == generation) yield();
}

bool sync_any(bool x) { return sync_any(0, static_cast<int>(g_block->fibers.size()), x); }

bool sync_any(int id, int threads, bool x) {
  NumberedBarrier& n = g_block->numbered[static_cast<size_t>(id)];
  const size_t slot = n.generation % 2;
  n.any[slot] = (n.arrived > 0 && n.any[slot]) || x;
  sync_threads(id, threads);
  return n.any[slot];
}

void init_barrier(unsigned barrier, unsigned count) {
  Barrier b;
  b.count = b.pending = count;
  g_block->barriers[barrier] = b;
}

void arrive(unsigned barrier, unsigned expected_bytes) { arrive(barrier_at(barrier), expected_bytes); }
void complete_bytes(unsigned barrier, unsigned bytes) { complete_bytes(barrier_at(barrier), bytes); }
void arrive_at(unsigned rank, unsigned barrier) { arrive(barrier_of(g_block->cluster->blocks.at(rank), barrier), 0); }
void complete_bytes_at(unsigned rank, unsigned barrier, unsigned bytes) {
  complete_bytes(barrier_of(g_block->cluster->blocks.at(rank), barrier), bytes);
}

bool phase_ended(unsigned barrier, unsigned parity) {
  const bool ended = barrier_at(barrier).phase % 2 != parity;
  if (!ended) yield();
  return ended;
}

uint16_t to_half(float x) { return float_to_half(x); }
float from_half(uint16_t x) { return half_to_float(x); }
uint16_t to_bf16(float x) { return float_to_bf16(x); }
uint8_t to_e4m3(float x) { return float_to_e4m3(x); }
uint8_t to_e5m2(float x) { return float_to_e5m2(x); }
float from_e4m3(uint8_t x) { return e4m3_to_float(x); }
float from_e5m2(uint8_t x) { return e5m2_to_float(x); }

void run(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster) {
  if (threads % 32 != 0) throw std::runtime_error("blocks are of whole warps");
  if (grid.x % cluster != 0) throw std::runtime_error("grids are of whole clusters");
  std::vector<std::unique_ptr<void, decltype(&std::free)>> shared;
  for (unsigned i = 0; i < cluster; ++i)
    shared.emplace_back(std::aligned_alloc(kSharedAlignment, kSharedBytes), &std::free);
  const unsigned blocks = grid.x * grid.y * grid.z;
  for (unsigned first = 0; first < blocks; first += cluster) {
    Cluster c;
    c.blocks.resize(cluster);
    for (unsigned i = 0; i < cluster; ++i) {
      Block& block = c.blocks[i];
      // As on a GPU, whatever was there before: here what is no number.
      std::fill_n(static_cast<unsigned char*>(shared[i].get()), kSharedBytes, static_cast<unsigned char>(0xff));
      block.cluster = &c;
      block.fibers.resize(threads);
      block.warps.resize(threads / 32);
      block.shared = static_cast<unsigned char*>(shared[i].get());
      const unsigned at = first + i;
      block.index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
      block.grid = grid, block.kernel = &kernel;
    }
    run_cluster(c);
    for (const Block& block : c.blocks) {
      for (const auto& [at, b] : block.barriers) {
        if (b.bytes != 0) throw std::runtime_error("a barrier still expects bytes at the end");
      }
    }
  }
  g_block = nullptr;
}

}  // namespace attune::emulator
