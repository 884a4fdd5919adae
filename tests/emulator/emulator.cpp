// SPDX-License-Identifier: Apache-2.0
// Where the threads of emulated blocks meet: barriers, exchanges in a warp, clusters.
#include "emulator/emulator.h"

#include <stdexcept>

#include "emulator/machine.h"

namespace attune::emulator {
namespace {

// How often a thread lets others go on where it meets them.
constexpr unsigned kAtExchange = 16, kAtBarrier = 8;

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

void fail(const char* what) { throw std::runtime_error(what); }

void note_wait_for_previous_kernels() { g_block->has_waited = true; }
void note_next_kernel_is_allowed() { g_block->has_allowed = true; }

unsigned cluster_rank() { return static_cast<unsigned>(g_block - g_block->cluster->blocks.data()); }
unsigned cluster_size() { return static_cast<unsigned>(g_block->cluster->blocks.size()); }
unsigned char* shared_memory_of(unsigned rank) { return g_block->cluster->blocks.at(rank).shared; }

void may_be_held_up() { may_leave_turn(kAtBarrier); }

void arrive_at_cluster() {
  may_leave_turn(kAtBarrier);
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
    }
    n.arrived += 32;
    if (n.arrived < first.threads) return;
    n.arrived = 0;
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
  return n.any[mine.generation % 2];
}

void init_barrier(unsigned barrier, unsigned count) {
  Barrier b;
  b.count = b.pending = count;
  g_block->barriers[barrier] = b;
}

// Another block's, or this one's.
void arrive_at(unsigned rank, unsigned barrier) {
  may_leave_turn(kAtBarrier);
  arrive(barrier_of(g_block->cluster->blocks.at(rank), barrier), 0);
}
void complete_bytes_at(unsigned rank, unsigned barrier, unsigned bytes) {
  complete_bytes(barrier_of(g_block->cluster->blocks.at(rank), barrier), bytes);
  may_leave_turn(kAtBarrier);
}
void arrive(unsigned barrier, unsigned expected_bytes) {
  may_leave_turn(kAtBarrier);
  arrive(barrier_at(barrier), expected_bytes);
}
void complete_bytes(unsigned barrier, unsigned bytes) { complete_bytes_at(cluster_rank(), barrier, bytes); }

bool phase_ended(unsigned barrier, unsigned parity) {
  const bool ended = barrier_at(barrier).phase % 2 != parity;
  if (!ended) {
    g_block->polled = true;
    leave_turn();
  }
  return ended;
}
void wait_phase(unsigned barrier, unsigned parity) {
  may_fall_behind(kAtBarrier);
  wait_while(barrier_at(barrier).phase, parity, 1);
}

}  // namespace attune::emulator
