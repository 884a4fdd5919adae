// SPDX-License-Identifier: Apache-2.0
// What an emulated kernel sees of the machine, and the instructions that need more than one thread, or are slow when
// compiled with every kernel. No header of the standard library but those of names: hundreds of kernels include this.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "emulator/tensor_map.h"

// Modules with kernels are loaded while the tests run, and find these functions in the program.
#define ATTUNE_EMULATOR __attribute__((visibility("default")))

namespace attune::emulator {

struct Index {
  unsigned x, y, z;
};

// What the running thread sees.
struct Running {
  Index thread, block, grid, threads;
  unsigned char* shared;  // memory of the block, kSharedBytes, aligned to 1,024
};
extern ATTUNE_EMULATOR Running g_running;
inline constexpr unsigned kSharedBytes = 232448;
inline constexpr unsigned kSharedBase = 1024;  // where shared addresses begin, so that 0 is none

inline unsigned char* shared_memory() { return g_running.shared; }

// Ends the run with these words.
[[noreturn]] ATTUNE_EMULATOR void fail(const char* what);

// Programmatic dependent launch. If a block of a kernel has to do with it, all are to wait: a kernel after the next
// could begin before those before this one have ended.
ATTUNE_EMULATOR void note_wait_for_previous_kernels();
ATTUNE_EMULATOR void note_next_kernel_is_allowed();

// Blocks of one cluster run side by side.
ATTUNE_EMULATOR unsigned cluster_rank();
ATTUNE_EMULATOR unsigned cluster_size();
ATTUNE_EMULATOR void sync_cluster();
ATTUNE_EMULATOR void arrive_at_cluster();
ATTUNE_EMULATOR void wait_for_cluster();  // after this thread's last arrival
ATTUNE_EMULATOR unsigned char* shared_memory_of(unsigned rank);

// Every lane of the warp gives a value and gets all 32; waits for those that have not come. orders: what they did
// before comes before what they do next, which shuffles and votes do not say.
ATTUNE_EMULATOR const uint64_t* exchange(uint64_t value, bool orders = false);
ATTUNE_EMULATOR void come_together();  // and nothing else
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
ATTUNE_EMULATOR bool phase_ended(unsigned barrier, unsigned parity);  // lets the other threads run where it has not
ATTUNE_EMULATOR void wait_phase(unsigned barrier, unsigned parity);
ATTUNE_EMULATOR void let_others_run();  // before this thread looks again for what has not happened yet
// Those of another block of the cluster.
ATTUNE_EMULATOR void arrive_at(unsigned rank, unsigned barrier);
ATTUNE_EMULATOR void complete_bytes_at(unsigned rank, unsigned barrier, unsigned bytes);

// Copies to shared memory, this block's or another's.
ATTUNE_EMULATOR void copy_async(unsigned shared, const void* global, unsigned bytes, unsigned valid);
ATTUNE_EMULATOR void commit_copies();
ATTUNE_EMULATOR void wait_copies(unsigned pending);
ATTUNE_EMULATOR void arrive_after_copies(unsigned barrier);
ATTUNE_EMULATOR void tma_load(unsigned rank, unsigned shared, const ptx::TensorMap& map, unsigned barrier,
                              const int (&begin)[5]);
ATTUNE_EMULATOR void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier);
// copies: from shared memory, by the copy engine.
ATTUNE_EMULATOR void store_async(unsigned rank, unsigned at, const void* from, unsigned bytes, unsigned barrier,
                                 bool copies);

// Copies from shared memory, and sums there, by the copy engine.
ATTUNE_EMULATOR void store_bytes(void* global, unsigned shared, unsigned bytes);
ATTUNE_EMULATOR void add_floats(float* global, unsigned shared, unsigned bytes);

// For the search for races.
ATTUNE_EMULATOR void fence_async_proxy();
ATTUNE_EMULATOR void wgmma_commit();
ATTUNE_EMULATOR void wgmma_wait(unsigned pending);
ATTUNE_EMULATOR void begin_atomic(const void* at, size_t bytes);  // others may go on first
ATTUNE_EMULATOR void synchronize_atomic(const void* at, bool acquires, bool releases);
// The compiler does not instrument every memcpy().
ATTUNE_EMULATOR void load_watched(void* to, const void* from, size_t bytes);
ATTUNE_EMULATOR void store_watched(void* to, const void* from, size_t bytes);
#ifdef ATTUNE_EMULATOR_RACES
__attribute__((always_inline)) inline void load_bytes(void* to, const void* from, size_t bytes) {
  load_watched(to, from, bytes);
}
__attribute__((always_inline)) inline void store_bytes(void* to, const void* from, size_t bytes) {
  store_watched(to, from, bytes);
}
#else
__attribute__((always_inline)) inline void load_bytes(void* to, const void* from, size_t bytes) {
  memcpy(to, from, bytes);
}
__attribute__((always_inline)) inline void store_bytes(void* to, const void* from, size_t bytes) {
  memcpy(to, from, bytes);
}
#endif

// Conversions, as the library's.
ATTUNE_EMULATOR uint16_t to_half(float x);
ATTUNE_EMULATOR float from_half(uint16_t x);
ATTUNE_EMULATOR uint16_t to_bf16(float x);
ATTUNE_EMULATOR uint8_t to_e4m3(float x);
ATTUNE_EMULATOR uint8_t to_e5m2(float x);
ATTUNE_EMULATOR float from_e4m3(uint8_t x);
ATTUNE_EMULATOR float from_e5m2(uint8_t x);

// The instructions of a whole warp are done by the last of its lanes to come. What a lane has of them:
enum class Format { kBf16, kF16, kE4m3, kTf32 };
// kernels/ptx/matrix.cuh: `count` matrices of 8 x 8 from shared memory, or four to it.
struct MatrixLane {
  unsigned* d;
  unsigned shared;
  int count;
  bool transposed;
};
ATTUNE_EMULATOR void load_matrices(MatrixLane lane);
ATTUNE_EMULATOR void store_matrices(MatrixLane lane);
// c [16, 8] += a [16, 16] b [16, 8]; of TF32, a [16, 8] b [8, 8].
struct FragmentLane {
  float* c;
  const unsigned *a, *b;
  Format format;
};
ATTUNE_EMULATOR void multiply_fragments(FragmentLane lane);
// kernels/ptx/wgmma.cuh: 16 rows of d [64, n] (+)= a b; a in registers, or described and K-major.
struct ProductLane {
  float* d;
  const unsigned* a_registers;
  uint64_t a, b;  // descriptors' bits
  int n, accumulate;
  Format format;
  bool b_along_n, a_along_m = false;
};
ATTUNE_EMULATOR void multiply(ProductLane lane);

}  // namespace attune::emulator
