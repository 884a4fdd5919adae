// SPDX-License-Identifier: Apache-2.0
// Runs a kernel of kernels/ on the CPU: each thread of a block is a fiber, blocks, or clusters of them, run
// one after the other. The
// functions of kernels/ptx, one instruction each, are replaced by those of tests/emulator/ptx; everything above them is
// the kernel's own source, compiled by the host's compiler. It shows what a kernel computes, not how fast, and takes
// the instructions to do what the PTX ISA says; races between threads are not seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// Modules with kernels are loaded while the tests run, and find these functions in the program.
#define ATTUNE_EMULATOR __attribute__((visibility("default")))

namespace attune::emulator {

struct Index {
  unsigned x, y, z;
};

// What the running thread sees.
ATTUNE_EMULATOR Index thread_index();
ATTUNE_EMULATOR Index block_index();
ATTUNE_EMULATOR Index grid_size();
ATTUNE_EMULATOR Index block_size();
ATTUNE_EMULATOR unsigned char* shared_memory();  // of the block, 232,448 bytes, aligned to 1,024

// Blocks of one cluster run side by side.
ATTUNE_EMULATOR unsigned cluster_rank();
ATTUNE_EMULATOR unsigned cluster_size();
ATTUNE_EMULATOR void sync_cluster();
ATTUNE_EMULATOR void arrive_at_cluster();
ATTUNE_EMULATOR void wait_for_cluster();  // after this thread's last arrival
ATTUNE_EMULATOR unsigned char* shared_memory_of(unsigned rank);

// Lets the other threads run.
ATTUNE_EMULATOR void yield();
// Every lane of the warp gives a value and gets all 32; waits for those that have not come.
ATTUNE_EMULATOR const uint64_t* exchange(uint64_t value);
// Barrier `id` of `threads` threads; waiting or only counted.
ATTUNE_EMULATOR void sync_threads(int id, int threads);
ATTUNE_EMULATOR void arrive_threads(int id, int threads);
// Barrier 0 of all threads of the block; whether one of them gave true.
ATTUNE_EMULATOR bool sync_any(bool x);
ATTUNE_EMULATOR bool sync_any(int id, int threads, bool x);  // of a numbered barrier's

// Barriers in shared memory.
ATTUNE_EMULATOR void init_barrier(unsigned barrier, unsigned count);
ATTUNE_EMULATOR void arrive(unsigned barrier, unsigned expected_bytes);
ATTUNE_EMULATOR void complete_bytes(unsigned barrier, unsigned bytes);
ATTUNE_EMULATOR bool phase_ended(unsigned barrier, unsigned parity);
// Those of another block of the cluster.
ATTUNE_EMULATOR void arrive_at(unsigned rank, unsigned barrier);
ATTUNE_EMULATOR void complete_bytes_at(unsigned rank, unsigned barrier, unsigned bytes);

// Conversions, as the library's.
ATTUNE_EMULATOR uint16_t to_half(float x);
ATTUNE_EMULATOR float from_half(uint16_t x);
ATTUNE_EMULATOR uint16_t to_bf16(float x);
ATTUNE_EMULATOR uint8_t to_e4m3(float x);
ATTUNE_EMULATOR uint8_t to_e5m2(float x);
ATTUNE_EMULATOR float from_e4m3(uint8_t x);
ATTUNE_EMULATOR float from_e5m2(uint8_t x);

// Runs all blocks, in clusters of so many along x. A kernel's static shared variables are those of all blocks, so it
// needs dynamic shared memory in clusters. Throws where threads wait for what nobody will do, or leave a barrier in the
// middle of a phase.
void run(Index grid, unsigned threads, const std::function<void()>& kernel, unsigned cluster = 1);
inline void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel, unsigned cluster = 1) {
  run(Index{blocks, 1, 1}, threads, kernel, cluster);
}

}  // namespace attune::emulator
