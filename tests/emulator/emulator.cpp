// SPDX-License-Identifier: Apache-2.0
#undef _FORTIFY_SOURCE  // takes a jump to another stack for an error
#include "emulator/emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace attune::emulator {
namespace {

// Stacks begin at other lines of the cache each.
constexpr size_t kStackBytes = 256 << 10, kStackLines = 61, kLineBytes = 64, kSharedAlignment = 1024;
constexpr int kNumberedBarriers = 16;
constexpr int64_t kMostIdleRounds = 10000;

// A thread's stack, of one block after the other: between two kernels it stands in run_kernels().
struct Fiber {
  std::unique_ptr<char[]> stack;
  jmp_buf context;
};

// A thread waits while *at, or what the mask leaves of it, is this value.
struct Wait {
  const uint64_t* at;
  uint64_t mask, value;
};
constexpr uint64_t kZero = 0;
constexpr Wait kReady = {&kZero, 0, 1}, kDone = {&kZero, 0, 0};

struct Warp {
  uint64_t values[2][32] = {};
  void* lanes[32] = {};
  void (*all)(void* const*) = nullptr;  // what the lanes have come for
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
  Fiber* fibers = nullptr;
  std::vector<Wait> waits;                    // of each thread
  std::vector<uint64_t> cluster_generations;  // of the cluster's barrier when a thread arrived
  std::vector<Warp> warps;
  std::array<NumberedBarrier, kNumberedBarriers> numbered;
  std::map<unsigned, Barrier> barriers;
  unsigned char* shared = nullptr;
  unsigned turn = 0, current = 0, unfinished = 0;  // turns go through the threads in one order or the other
  Index index = {}, grid = {};
  uint64_t progress = 0;  // changes with everything that somebody may wait for
  const std::function<void()>* kernel = nullptr;
  std::string failure;
  bool has_waited = false, has_allowed = false;  // for the kernels before; the next one to begin
};

struct Cluster {
  std::vector<Block> blocks;
  size_t arrived = 0;
  uint64_t generation = 0;
};

Block* g_block = nullptr;
jmp_buf g_scheduler;

bool g_backward = false;

unsigned thread_of(const Block& b, unsigned turn) {
  return g_backward ? static_cast<unsigned>(b.waits.size()) - 1 - turn : turn;
}
// The turn, from this on, of a thread that does not wait; as many as there are threads if none.
unsigned find_ready(const Block& b, unsigned turn) {
  const size_t threads = b.waits.size();
  for (; turn < threads; ++turn) {
    const Wait& wait = b.waits[thread_of(b, turn)];
    if ((*wait.at & wait.mask) != wait.value) break;
  }
  return turn;
}

void run_kernels();

// By itself, as getcontext() may return twice for all that the compiler knows.
[[gnu::noinline]] void start(Fiber& f, unsigned thread) {
  const size_t offset = thread % kStackLines * kLineBytes;
  f.stack = std::make_unique_for_overwrite<char[]>(kStackBytes + kStackLines * kLineBytes);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = f.stack.get() + offset;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, run_kernels, 0);
  setcontext(&context);
}

// That turn, or the next block's after the last.
[[noreturn, gnu::noinline]] void resume(Block& b, unsigned turn) {
  if (turn == b.waits.size()) _longjmp(g_scheduler, 1);
  b.turn = turn;
  b.current = g_running.thread.x = thread_of(b, turn);
  Fiber& f = b.fibers[b.current];
  if (f.stack == nullptr) start(f, b.current);
  _longjmp(f.context, 1);
}

[[gnu::noinline]] void leave(Wait wait) {
  Block& b = *g_block;
  b.waits[b.current] = wait;
  if (_setjmp(b.fibers[b.current].context) == 0) resume(b, find_ready(b, b.turn + 1));
}

void wait_while(const uint64_t& at, uint64_t value, uint64_t mask = ~uint64_t{0}) {
  if ((at & mask) != value) return;
  leave({&at, mask, value});
}

void run_kernels() {
  while (true) {
    try {
      (*g_block->kernel)();
    } catch (const std::exception& e) {
      g_block->failure = e.what();
    }
    Block& b = *g_block;
    --b.unfinished;
    ++b.progress;
    if (!b.failure.empty()) _longjmp(g_scheduler, 1);
    leave(kDone);
  }
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

// One turn for each thread that does not wait. True if there was one.
[[gnu::noinline]] bool run_turn(Block& b) {
  if (find_ready(b, 0) == b.waits.size()) return false;
  g_block = &b;
  g_running = {{0, 0, 0}, b.index, b.grid, {static_cast<unsigned>(b.waits.size()), 1, 1}, b.shared};
  if (_setjmp(g_scheduler) == 0) resume(b, find_ready(b, 0));
  if (!g_block->failure.empty()) throw std::runtime_error(g_block->failure);
  return true;
}

void run_cluster(Cluster& cluster) {
  for (int64_t idle = 0; idle <= kMostIdleRounds;) {
    uint64_t before = 0, after = 0;
    unsigned unfinished = 0;
    bool ran = false;
    for (Block& b : cluster.blocks) {
      before += b.progress;
      ran |= run_turn(b);
      after += b.progress;
      unfinished += b.unfinished;
    }
    if (unfinished == 0) return;
    if (!ran) break;
    idle = before == after ? idle + 1 : 0;
  }
  std::string who;
  for (const Block& b : cluster.blocks) {
    for (size_t i = 0; i < b.waits.size(); i += 32) {
      if (b.waits[i].value != kDone.value || b.waits[i].mask != kDone.mask) who += ' ' + std::to_string(i / 32);
    }
  }
  throw std::runtime_error("threads wait for what nobody will do; warps that have not ended:" + who);
}

// How the running lane comes to what its warp does together.
Warp& come_for(void (*all)(void* const*)) {
  Warp& w = g_block->warps[g_block->current / 32];
  if (w.arrived == 0) w.all = all;
  if (w.all != all) throw std::runtime_error("lanes of a warp do different things that need all of them");
  ++g_block->progress;
  ++w.arrived;
  return w;
}

}  // namespace

Running g_running;

Backward::Backward() { g_backward = true; }
Backward::~Backward() { g_backward = false; }

void fail(const char* what) { throw std::runtime_error(what); }

void note_wait_for_previous_kernels() { g_block->has_waited = true; }
void note_next_kernel_is_allowed() { g_block->has_allowed = true; }

unsigned cluster_rank() { return static_cast<unsigned>(g_block - g_block->cluster->blocks.data()); }
unsigned cluster_size() { return static_cast<unsigned>(g_block->cluster->blocks.size()); }
unsigned char* shared_memory_of(unsigned rank) { return g_block->cluster->blocks.at(rank).shared; }

void arrive_at_cluster() {
  Cluster& c = *g_block->cluster;
  g_block->cluster_generations[g_block->current] = c.generation;
  ++g_block->progress;
  if (++c.arrived == c.blocks.size() * g_block->waits.size()) {
    c.arrived = 0;
    ++c.generation;
  }
}
void wait_for_cluster() { wait_while(g_block->cluster->generation, g_block->cluster_generations[g_block->current]); }
void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

const uint64_t* exchange(uint64_t value) {
  Warp& w = come_for(nullptr);
  const uint64_t generation = w.generation;
  w.values[generation % 2][g_block->current % 32] = value;
  if (w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
  } else {
    wait_while(w.generation, generation);
  }
  return w.values[generation % 2];
}

void collect(void* mine, void (*all)(void* const*)) {
  Warp& w = come_for(all);
  w.lanes[g_block->current % 32] = mine;
  if (w.arrived < 32) return wait_while(w.generation, w.generation);
  all(w.lanes);
  w.arrived = 0;
  ++w.generation;
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
  wait_while(n.generation, generation);
}

bool sync_any(bool x) { return sync_any(0, static_cast<int>(g_block->waits.size()), x); }

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
  if (!ended) leave(kReady);
  return ended;
}
void wait_phase(unsigned barrier, unsigned parity) { wait_while(barrier_at(barrier).phase, parity, 1); }

void run(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster) {
  if (threads % 32 != 0) throw std::runtime_error("blocks are of whole warps");
  if (grid.x % cluster != 0) throw std::runtime_error("grids are of whole clusters");
  static std::vector<Fiber> fibers;
  if (fibers.size() < size_t{threads} * cluster) fibers.resize(size_t{threads} * cluster);
  std::vector<std::unique_ptr<void, decltype(&std::free)>> shared;
  for (unsigned i = 0; i < cluster; ++i)
    shared.emplace_back(std::aligned_alloc(kSharedAlignment, kSharedBytes), &std::free);
  const unsigned blocks = grid.x * grid.y * grid.z;
  bool beside_others = false, all_wait = true;  // other kernels, by programmatic dependent launch
  try {
    for (unsigned first = 0; first < blocks; first += cluster) {
      Cluster c;
      c.blocks.resize(cluster);
      for (unsigned i = 0; i < cluster; ++i) {
        Block& block = c.blocks[i];
        // As on a GPU, whatever was there before: here what is no number.
        std::fill_n(static_cast<unsigned char*>(shared[i].get()), kSharedBytes, static_cast<unsigned char>(0xff));
        block.cluster = &c;
        block.fibers = &fibers[size_t{threads} * i];
        block.unfinished = threads;
        block.waits.resize(threads, kReady);
        block.cluster_generations.resize(threads);
        block.warps.resize(threads / 32);
        block.shared = static_cast<unsigned char*>(shared[i].get());
        const unsigned at = first + i;
        block.index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
        block.grid = grid, block.kernel = &kernel;
      }
      run_cluster(c);
      for (const Block& block : c.blocks) {
        beside_others |= block.has_waited || block.has_allowed;
        all_wait &= block.has_waited;
        for (const auto& [at, b] : block.barriers) {
          if (b.bytes != 0) throw std::runtime_error("a barrier still expects bytes at the end");
        }
      }
    }
    if (beside_others && !all_wait) throw std::runtime_error("a block ends that has not waited for the kernels before");
  } catch (...) {
    fibers.clear();  // they stand in the middle of kernels
    throw;
  }
  g_block = nullptr;
}

}  // namespace attune::emulator
