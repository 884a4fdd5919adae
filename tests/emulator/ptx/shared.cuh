// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/shared.cuh on the CPU.
#pragma once

#include "ptx/async_copy.cuh"

namespace attune::ptx {

inline unsigned load_shared_u32(unsigned at) {
  unsigned x;
  memcpy(&x, shared_pointer(at), 4);
  return x;
}
inline unsigned short load_shared_u16(unsigned at) {
  unsigned short x;
  memcpy(&x, shared_pointer(at), 2);
  return x;
}
inline unsigned load_shared_u8(unsigned at) { return *shared_pointer(at); }
inline void store_shared_u32(unsigned at, unsigned x) { memcpy(shared_pointer(at), &x, 4); }
inline void store_shared_two(unsigned at, unsigned x, unsigned y) {
  store_shared_u32(at, x);
  store_shared_u32(at + 4, y);
}
inline void store_shared_u8(unsigned at, unsigned x) { *shared_pointer(at) = static_cast<unsigned char>(x); }
inline void store_shared_u16(unsigned at, unsigned short x) { memcpy(shared_pointer(at), &x, 2); }
inline float load_shared(unsigned at) { return __uint_as_float(load_shared_u32(at)); }
inline float2 load_shared_pair(unsigned at) { return {load_shared(at), load_shared(at + 4)}; }
inline void store_shared_zero(unsigned at) { memset(shared_pointer(at), 0, 16); }

inline void load_shared_four(unsigned at, unsigned (&x)[4]) { memcpy(x, shared_pointer(at), 16); }
inline void store_shared_four(unsigned at, const unsigned* x) { memcpy(shared_pointer(at), x, 16); }
// The dynamic shared memory of the block.
inline unsigned char* dynamic_shared() { return emulator::shared_memory(); }

}  // namespace attune::ptx
