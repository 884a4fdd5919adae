// SPDX-License-Identifier: Apache-2.0
// Runs a kernel of kernels/ on the CPU: each thread of a block is a fiber, blocks, or clusters of them, run one after
// the other. The functions of kernels/ptx, one instruction each, are replaced by those of tests/emulator/ptx;
// everything above them is the kernel's own source, compiled by the host's compiler. It shows what a kernel computes,
// not how fast, and takes the instructions to do what the PTX ISA says; races between threads are not seen.
#pragma once

#include <functional>

#include "emulator/thread.h"

namespace attune::emulator {

// The running lane's `mine`, and those of the other lanes of its warp; all(lanes) is called once, when they have come.
void collect(void* mine, void (*all)(void* const* lanes));

// Runs all blocks, in clusters of so many along x. A kernel's static shared variables are those of all blocks, so it
// needs dynamic shared memory in clusters. Throws where threads wait for what nobody will do, or leave a barrier in the
// middle of a phase.
void run(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster = 1);
inline void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel, unsigned cluster = 1) {
  run(Index{blocks, 1, 1}, threads, kernel, cluster);
}

// While one lives, the threads of a block take turns from the last to the first: two that write to one place show.
struct Backward {
  Backward();
  ~Backward();
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
};

}  // namespace attune::emulator
