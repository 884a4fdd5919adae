// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/tensor_copy.cuh on the CPU: the copy is done at once.
#pragma once

#include <stdexcept>

#include "emulator/tensor_map.h"
#include "ptx/async_copy.cuh"

namespace attune::ptx {

inline bool elect() { return threadIdx.x % 32 == 0; }

// Where a byte lies whose address would be this without swizzling.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 3 & 0x70); }

// Into the shared memory of one block; how many bytes.
inline unsigned copy_box_into(unsigned char* memory, unsigned shared, const TensorMap& map, int c0, int c1, int c2,
                              int c3) {
  if (c0 * map.element_size % 16 != 0) throw std::runtime_error("a TMA copy begins at no multiple of 16 bytes");
  if (shared % 128 != 0) throw std::runtime_error("a TMA copy goes to no multiple of 128 bytes");
  const int64_t begin[4] = {c0, c1, c2, c3};
  unsigned offset = 0;
  for (int i3 = 0; i3 < map.box[3]; ++i3) {
    for (int i2 = 0; i2 < map.box[2]; ++i2) {
      for (int i1 = 0; i1 < map.box[1]; ++i1) {
        for (int i0 = 0; i0 < map.box[0]; ++i0) {
          const int64_t at[4] = {begin[0] + i0, begin[1] + i1, begin[2] + i2, begin[3] + i3};
          bool inside = true;
          for (int axis = 0; axis < 4; ++axis) inside &= at[axis] >= 0 && at[axis] < map.shape[axis];
          const unsigned char* from = map.data + at[0] * map.element_size + at[1] * map.stride_bytes[1] +
                                      at[2] * map.stride_bytes[2] + at[3] * map.stride_bytes[3];
          for (int byte = 0; byte < map.element_size; ++byte, ++offset) {
            const unsigned to = shared + offset;
            memory[(map.swizzled ? swizzled(to) : to) - kSharedBase] = inside ? from[byte] : 0;
          }
        }
      }
    }
  }
  return offset;
}

inline void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1, int c2, int c3) {
  emulator::complete_bytes(barrier, copy_box_into(emulator::shared_memory(), shared, map, c0, c1, c2, c3));
}

inline void copy_box_to_blocks(unsigned blocks, unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                               int c2, int c3) {
  for (unsigned rank = 0; rank < emulator::cluster_size(); ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    const unsigned bytes = copy_box_into(emulator::shared_memory_of(rank), shared, map, c0, c1, c2, c3);
    emulator::complete_bytes_at(rank, barrier, bytes);
  }
}

inline void prefetch_box(const TensorMap&, int, int, int, int) {}

}  // namespace attune::ptx
