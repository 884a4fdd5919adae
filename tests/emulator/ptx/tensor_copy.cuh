// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/tensor_copy.cuh on the CPU: the copy is done at once.
#pragma once

#include "emulator/tensor_map.h"
#include "ptx/async_copy.cuh"

static_assert(__CUDA_ARCH__ >= 900, "a kernel for older GPUs includes this");

namespace attune::ptx {

inline bool elect() {
  emulator::come_together();
  return threadIdx.x % 32 == 0;
}

inline void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1, int c2, int c3,
                     int c4 = 0) {
  emulator::tma_load(emulator::cluster_rank(), shared, map, barrier, {c0, c1, c2, c3, c4});
}

inline void tma_load_multicast(unsigned blocks, unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                               int c2, int c3) {
  for (unsigned rank = 0; rank < emulator::cluster_size(); ++rank) {
    if ((blocks >> rank & 1) != 0) emulator::tma_load(rank, shared, map, barrier, {c0, c1, c2, c3, 0});
  }
}

inline void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  if ((shared | bytes | reinterpret_cast<uintptr_t>(global)) % 16 != 0)
    emulator::fail("a bulk copy of, from or to no multiple of 16 bytes");
  emulator::copy_bytes(shared, global, bytes, barrier);
}

inline void store_bytes(void* global, unsigned shared, unsigned bytes) {
  emulator::store_bytes(global, shared, bytes);
}
inline void add_floats(float* global, unsigned shared, unsigned bytes) { emulator::add_floats(global, shared, bytes); }
inline void commit_stores() { emulator::commit_copies(); }
inline void wait_until_read() { emulator::wait_copies(0); }
inline void wait_until_stored() { emulator::wait_copies(0); }

}  // namespace attune::ptx
