// SPDX-License-Identifier: Apache-2.0
// Where the threads of emulated blocks synchronise: barriers, exchanges in a warp, clusters.
#include "emulator/emulator.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "emulator/shadow.h"

namespace attune::emulator {
namespace {

// How often a thread lets others go on where it synchronises with them.
constexpr unsigned kAtExchange = 16, kAtBarrier = 8;

Barrier& barrier_of(Block& block, unsigned barrier) {
  const auto at = block.barriers.find(barrier);
  if (at == block.barriers.end()) throw std::runtime_error("a barrier is used before it is initialised");
  return at->second;
}

Barrier& barrier_at(unsigned barrier) { return barrier_of(*g_block, barrier); }

// Null: nobody asks for races.
Shadow* shadow() { return g_block->cluster->shadow.get(); }
// A thread does something with a barrier.
void note_use(const Block& block, unsigned barrier) {
  if (shadow() != nullptr) shadow()->use_barrier(block.shared + (barrier - kSharedBase));
}
// A wait for that parity is over.
void acquire_phase(Barrier& b, unsigned parity) {
  if (b.phase % 2 != parity) b.phase_seen = b.phase;
  if (shadow() != nullptr) shadow()->acquire(b.meeting.done[parity]);
}

int g_watching = 0;  // of Watched, those that live

void end_phase_if_complete(Barrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  // What a barrier guards is done with when somebody has waited for it: arrivals beyond those of a phase end others.
  if (b.phase_seen != b.phase)
    throw std::runtime_error("a phase of a barrier ends before anybody has waited for the one before: too many arrive");
  b.pending = b.count;
  if (shadow() != nullptr) shadow()->end_phase(b);
  ++b.phase;
  ++g_block->progress;
}

void count_arrival(Barrier& b, unsigned expected_bytes) {
  b.bytes += expected_bytes;
  if (--b.pending < 0) throw std::runtime_error("more arrivals at a barrier than it counts");
  end_phase_if_complete(b);
}

void arrive(Barrier& b, unsigned expected_bytes) {
  if (shadow() != nullptr) shadow()->release(b.meeting);
  count_arrival(b, expected_bytes);
}

void complete_bytes(Barrier& b, unsigned bytes) {
  b.bytes -= bytes;
  end_phase_if_complete(b);
}

// How the running lane comes to what its warp does together.
Warp& come_for(void (*all)(void* const*)) {
  may_fall_behind(kAtExchange);
  Warp& w = g_block->warps[g_block->current / 32];
  if (w.arrived == 0) w.all = all;
  if (w.all != all) throw std::runtime_error("lanes of a warp do different things that need all of them");
  ++g_block->progress;
  if (++w.arrived == 32) may_leave_turn(kAtExchange);
  return w;
}

}  // namespace

bool g_pinned = false;
const char* setting(const char* name) {
  const char* const value = g_pinned ? nullptr : std::getenv((std::string("ATTUNE_EMULATOR_") + name).c_str());
  return value != nullptr && *value != '\0' ? value : nullptr;
}

void fail(const char* what) { throw std::runtime_error(what); }

void note_wait_for_previous_kernels() { g_block->has_waited = true; }
void note_next_kernel_is_allowed() { g_block->has_allowed = true; }

unsigned cluster_rank() { return static_cast<unsigned>(g_block - g_block->cluster->blocks.data()); }
unsigned cluster_size() { return static_cast<unsigned>(g_block->cluster->blocks.size()); }
unsigned char* shared_memory_of(unsigned rank) { return g_block->cluster->blocks.at(rank).shared; }

void arrive_at_cluster() {
  may_leave_turn(kAtBarrier);
  Cluster& c = *g_block->cluster;
  if (shadow() != nullptr) shadow()->release(c.meeting);
  g_block->cluster_generations[g_block->current] = c.generation;
  ++g_block->progress;
  if (++c.arrived == c.blocks.size() * g_block->waits.size()) {
    c.arrived = 0;
    c.meeting.end_phase(c.generation);
    ++c.generation;
  }
}
void wait_for_cluster() {
  const uint64_t generation = g_block->cluster_generations[g_block->current];
  wait_while(g_block->cluster->generation, generation);
  if (shadow() != nullptr) shadow()->acquire(g_block->cluster->meeting.done[generation % 2]);
}
void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

Watched::Watched() { ++g_watching; }
Watched::~Watched() { --g_watching; }
bool is_watched() { return g_watching > 0 || setting("RACES") != nullptr; }

const uint64_t* exchange(uint64_t value, bool orders) {
  Warp& w = come_for(nullptr);
  const uint64_t generation = w.generation;
  w.values[generation % 2][g_block->current % 32] = value;
  if (w.arrived == 32) {
    if (shadow() != nullptr && orders) shadow()->meet_warp();
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

void come_together() {
  collect(nullptr, [](void* const*) {});
}

// A warp comes to a numbered barrier as a whole, and counts as 32 threads.
struct Arrival {
  int id, threads;
  bool x;
  uint64_t generation;
};

void arrive_with_warp(Arrival& mine) {
  collect(&mine, [](void* const* lanes) {
    const Arrival& first = *static_cast<Arrival*>(lanes[0]);
    NumberedBarrier& n = g_block->numbered[static_cast<size_t>(first.id)];
    bool& any = n.any[n.generation % 2];
    if (n.arrived == 0) any = false;
    for (int i = 0; i < 32; ++i) {
      Arrival& lane = *static_cast<Arrival*>(lanes[i]);
      if (lane.id != first.id || lane.threads != first.threads)
        throw std::runtime_error("the lanes of a warp come to different barriers");
      lane.generation = n.generation;
      any |= lane.x;
      if (shadow() != nullptr) shadow()->release_lane(n.meeting, static_cast<unsigned>(i));
    }
    n.arrived += 32;
    if (n.arrived < first.threads) return;
    n.arrived = 0;
    n.meeting.end_phase(n.generation);
    ++n.generation;
  });
}

void arrive_threads(int id, int threads) {
  Arrival mine{id, threads, false, 0};
  arrive_with_warp(mine);
}
void sync_threads(int id, int threads) { sync_any(id, threads, false); }
bool sync_any(bool x) { return sync_any(0, static_cast<int>(g_block->waits.size()), x); }

bool sync_any(int id, int threads, bool x) {
  Arrival mine{id, threads, x, 0};
  arrive_with_warp(mine);
  const NumberedBarrier& n = g_block->numbered[static_cast<size_t>(id)];
  wait_while(n.generation, mine.generation);
  if (shadow() != nullptr) shadow()->acquire(n.meeting.done[mine.generation % 2]);
  return n.any[mine.generation % 2];
}

void init_barrier(unsigned barrier, unsigned count) {
  Barrier b;
  b.count = b.pending = count;
  if (shadow() != nullptr) shadow()->init_barrier(b, g_block->shared + (barrier - kSharedBase));
  g_block->barriers[barrier] = b;
}

// Another block's, or this one's.
void arrive_at(unsigned rank, unsigned barrier) {
  may_leave_turn(kAtBarrier);
  note_use(g_block->cluster->blocks.at(rank), barrier);
  arrive(barrier_of(g_block->cluster->blocks.at(rank), barrier), 0);
}
void complete_bytes_at(unsigned rank, unsigned barrier, unsigned bytes) {
  complete_bytes(barrier_of(g_block->cluster->blocks.at(rank), barrier), bytes);
  may_leave_turn(kAtBarrier);
}
void arrive(unsigned barrier, unsigned expected_bytes) {
  may_leave_turn(kAtBarrier);
  note_use(*g_block, barrier);
  arrive(barrier_at(barrier), expected_bytes);
}
void complete_bytes(unsigned barrier, unsigned bytes) { complete_bytes_at(cluster_rank(), barrier, bytes); }

void let_others_run() {
  g_block->polled = true;
  leave_turn();
}
bool phase_ended(unsigned barrier, unsigned parity) {
  Barrier& b = barrier_at(barrier);
  note_use(*g_block, barrier);
  const bool ended = b.phase % 2 != parity;
  if (!ended) {
    let_others_run();
  } else {
    acquire_phase(b, parity);
  }
  return ended;
}
void wait_phase(unsigned barrier, unsigned parity) {
  may_fall_behind(kAtBarrier);
  Barrier& b = barrier_at(barrier);
  note_use(*g_block, barrier);
  wait_while(b.phase, parity, 1);
  acquire_phase(b, parity);
}

// --- Copies. They are done at once; the shadow knows when they may be.

void copy_async(unsigned shared, const void* global, unsigned bytes, unsigned valid) {
  unsigned char* const to = g_block->shared + (shared - kSharedBase);
  if (shadow() != nullptr) {
    if (valid > 0) shadow()->access(global, valid, false, nullptr);
    shadow()->begin_copy(to, bytes);
  }
  std::memset(to, 0, bytes);
  if (valid > 0) std::memcpy(to, global, valid);
}
void commit_copies() {
  if (shadow() != nullptr) shadow()->close_copies();
}
void wait_copies(unsigned pending) {
  if (shadow() != nullptr) shadow()->wait_for_copies(pending);
}
void arrive_after_copies(unsigned barrier) {
  may_leave_turn(kAtBarrier);
  note_use(*g_block, barrier);
  Barrier& b = barrier_at(barrier);
  if (shadow() != nullptr) shadow()->release_copies(b.meeting);
  count_arrival(b, 0);
}

void tma_load(unsigned rank, unsigned shared, const ptx::TensorMap& map, unsigned barrier, const int (&begin)[5]) {
  Block& to = g_block->cluster->blocks.at(rank);
  const unsigned bytes = copy_box_into(to.shared, shared, map, begin);
  if (shadow() != nullptr) shadow()->write_by_copy(to.shared + (shared - kSharedBase), bytes, barrier_of(to, barrier));
  complete_bytes_at(rank, barrier, bytes);
}
void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  unsigned char* const to = g_block->shared + (shared - kSharedBase);
  if (shadow() != nullptr) {
    shadow()->read_by_copy(global, bytes, barrier_at(barrier));
    shadow()->write_by_copy(to, bytes, barrier_at(barrier));
  }
  std::memcpy(to, global, bytes);
  complete_bytes(barrier, bytes);
}
void store_async(unsigned rank, unsigned at, const void* from, unsigned bytes, unsigned barrier, bool copies) {
  Block& block = g_block->cluster->blocks.at(rank);
  unsigned char* const to = block.shared + (at - kSharedBase);
  if (shadow() != nullptr) {
    if (copies) shadow()->read_by_copy(from, bytes, barrier_of(block, barrier));
    shadow()->write_by_copy(to, bytes, barrier_of(block, barrier), copies);
  }
  std::memcpy(to, from, bytes);
  complete_bytes_at(rank, barrier, bytes);
}

namespace {
// The bytes that a thread's copy engine takes from shared memory.
const unsigned char* copied_bytes(const void* global, unsigned shared, unsigned bytes) {
  if ((shared | bytes | reinterpret_cast<uintptr_t>(global)) % 16 != 0)
    throw std::runtime_error("a bulk copy of, from or to no multiple of 16 bytes");
  const unsigned at = shared - kSharedBase;
  if (at > kSharedBytes || kSharedBytes - at < bytes) throw std::runtime_error("a bulk copy leaves shared memory");
  const unsigned char* const from = g_block->shared + at;
  if (shadow() != nullptr) shadow()->begin_store(from, global, bytes);
  ++g_block->progress;
  return from;
}
}  // namespace
void store_bytes(void* global, unsigned shared, unsigned bytes) {
  std::memcpy(global, copied_bytes(global, shared, bytes), bytes);
}
void add_floats(float* global, unsigned shared, unsigned bytes) {
  const unsigned char* const from = copied_bytes(global, shared, bytes);
  for (unsigned i = 0; i < bytes / 4; ++i) {
    float x;
    std::memcpy(&x, from + 4 * i, 4);
    global[i] += x;
  }
}

void fence_async_proxy() {
  if (shadow() != nullptr) shadow()->fence();
}
void wgmma_commit() {
  if (shadow() != nullptr) shadow()->close_products();
}
void wgmma_wait(unsigned pending) {
  if (shadow() != nullptr) shadow()->wait_for_products(pending);
}

void begin_atomic(const void* at, size_t bytes) {
  may_leave_turn(kAtBarrier);
  if (shadow() != nullptr) shadow()->access(at, bytes, true, nullptr, Cell::kAtomic);
}
void synchronize_atomic(const void* at, bool acquires, bool releases) {
  may_leave_turn(kAtBarrier);
  if (shadow() == nullptr) return;
  shadow()->synchronize_atomic(at, acquires, releases);
  shadow()->access(at, 4, releases, nullptr, Cell::kAtomic);
}

}  // namespace attune::emulator
