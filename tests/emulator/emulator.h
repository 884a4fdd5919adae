// SPDX-License-Identifier: Apache-2.0
// Runs a kernel of kernels/ on the CPU: each thread of a block is a fiber, blocks, or clusters of them, run one after
// the other, or in an order that follows from a seed. The functions of kernels/ptx, one instruction each, are replaced
// by those of tests/emulator/ptx; everything above them is the kernel's own source, compiled by the host's compiler. It
// shows what a kernel computes, not how fast, and takes the instructions to do what the PTX ISA says.
#pragma once

#include <functional>

#include "emulator/thread.h"

namespace attune::emulator {

// The running lane's `mine`, and those of the other lanes of its warp; all(lanes) is called once, when they have come.
void collect(void* mine, void (*all)(void* const* lanes));

// A box into the shared memory of one block; how many bytes.
unsigned copy_box_into(unsigned char* memory, unsigned shared, const ptx::TensorMap& map, const int (&begin)[5]);

// Runs all blocks, in clusters of so many along x. Throws where threads wait for what nobody will do, leave a
// barrier in the middle of a phase, or end a phase of it before anybody has waited for the one before: where more
// arrive than it counts, they are taken for those of the next phase, as on a GPU.
void run(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster = 1);
inline void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel, unsigned cluster = 1) {
  run(Index{blocks, 1, 1}, threads, kernel, cluster);
}

// Lanes of a warp between two instructions that need all of them: kTogether, as far as each gets by itself, before
// another warp has its turn; kApart, some of them fall behind the others for as long, which the PTX ISA allows, but no
// GPU does to lanes that wait for one phase of a barrier.
enum class Lanes { kTogether, kApart };

// While one lives, so many clusters run at a time, begun in any order, and from the seed follows who has the next turn:
// some warps get far ahead of others, blocks too, and all may be held up wherever threads synchronise. Without one
// ATTUNE_EMULATOR_SEED=<n> does that to every launch; with one it makes another seed of this one.
class Shuffled {
 public:
  explicit Shuffled(uint64_t seed, unsigned clusters = 4, Lanes lanes = Lanes::kTogether);
  ~Shuffled();
  Shuffled(const Shuffled&) = delete;
  Shuffled& operator=(const Shuffled&) = delete;
};

// While one lives, kernels are compiled as for GPUs of this compute capability, 10 * major + minor; else for 9.0.
class Capability {
 public:
  explicit Capability(int capability);
  ~Capability();
  Capability(const Capability&) = delete;
  Capability& operator=(const Capability&) = delete;

 private:
  int before_;
};
int capability();

// While one lives, kernels are compiled to report every load and store, and a launch throws that finds races
// (tests/emulator/shadow.h). ATTUNE_EMULATOR_RACES=1 does that to every launch.
class Watched {
 public:
  Watched();
  ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
};
bool is_watched();

// While one lives, the environment has no say: launches go in order and unwatched, but for what a Shuffled and a
// Watched ask for. For what only some orders show, and what is a race on purpose.
class Pinned {
 public:
  Pinned();
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
};

// Static variables of a module: each block sees its own.
void add_static_shared(unsigned char* begin, size_t bytes);

}  // namespace attune::emulator
