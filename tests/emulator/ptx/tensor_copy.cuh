// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/tensor_copy.cuh on the CPU: the copy is done at once.
#pragma once

#include "emulator/tensor_map.h"
#include "ptx/async_copy.cuh"

namespace attune::ptx {

inline bool elect() {
  emulator::exchange(0);
  return threadIdx.x % 32 == 0;
}

// Into the shared memory of one block; how many bytes.
inline unsigned copy_box_into(unsigned char* memory, unsigned shared, const TensorMap& map, int c0, int c1, int c2,
                              int c3, int c4 = 0) {
  return emulator::copy_box_into(memory, shared, map, {c0, c1, c2, c3, c4});
}

inline void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1, int c2, int c3) {
  emulator::complete_bytes(barrier, copy_box_into(emulator::shared_memory(), shared, map, c0, c1, c2, c3));
}

inline void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1, int c2, int c3, int c4) {
  emulator::complete_bytes(barrier, copy_box_into(emulator::shared_memory(), shared, map, c0, c1, c2, c3, c4));
}

inline void copy_box_to_blocks(unsigned blocks, unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                               int c2, int c3) {
  for (unsigned rank = 0; rank < emulator::cluster_size(); ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    const unsigned bytes = copy_box_into(emulator::shared_memory_of(rank), shared, map, c0, c1, c2, c3);
    emulator::complete_bytes_at(rank, barrier, bytes);
  }
}

inline void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  if ((shared | bytes | reinterpret_cast<uintptr_t>(global)) % 16 != 0)
    emulator::fail("a bulk copy of, from or to no multiple of 16 bytes");
  memcpy(shared_pointer(shared), global, bytes);
  emulator::complete_bytes(barrier, bytes);
}

}  // namespace attune::ptx
