// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/tensor_copy.cuh on the CPU: the copy is done at once.
#pragma once

#include <stdexcept>

#include "emulator/tensor_map.h"
#include "ptx/async_copy.cuh"

namespace attune::ptx {

inline bool elect() { return threadIdx.x % 32 == 0; }

// Where a byte lies whose address would be this without swizzling; bits: as TensorMap has them.
inline unsigned swizzled(unsigned address, unsigned bits) { return address ^ (address >> 3 & bits); }

// Into the shared memory of one block; how many bytes.
inline unsigned copy_box_into(unsigned char* memory, unsigned shared, const TensorMap& map, int c0, int c1, int c2,
                              int c3, int c4 = 0) {
  if (c0 * map.element_size % 16 != 0) throw std::runtime_error("a TMA copy begins at no multiple of 16 bytes");
  if (shared % 128 != 0) throw std::runtime_error("a TMA copy goes to no multiple of 128 bytes");
  const int64_t begin[5] = {c0, c1, c2, c3, c4};
  unsigned offset = 0;
  const int rows = map.box[1] * map.box[2] * map.box[3] * map.box[4];
  for (int row = 0; row < rows; ++row) {
    int64_t at[5] = {};
    for (int axis = 1, rest = row; axis < 5; rest /= map.box[axis], ++axis)
      at[axis] = begin[axis] + rest % map.box[axis];
    for (int i0 = 0; i0 < map.box[0]; ++i0) {
      at[0] = begin[0] + i0;
      bool inside = true;
      for (int axis = 0; axis < 5; ++axis) inside &= at[axis] >= 0 && at[axis] < map.shape[axis];
      const unsigned char* from = map.data + at[0] * map.element_size;
      for (int axis = 1; axis < 5; ++axis) from += at[axis] * map.stride_bytes[axis];
      for (int byte = 0; byte < map.element_size; ++byte, ++offset)
        memory[swizzled(shared + offset, map.swizzle) - kSharedBase] = inside ? from[byte] : 0;
    }
  }
  return offset;
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
    throw std::runtime_error("a bulk copy of, from or to no multiple of 16 bytes");
  std::memcpy(shared_pointer(shared), global, bytes);
  emulator::complete_bytes(barrier, bytes);
}

}  // namespace attune::ptx
