// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/shared.cuh on the CPU.
#pragma once

#include "ptx/async_copy.cuh"

namespace attune::ptx {

template <class T>
__attribute__((always_inline)) inline T load_shared_as(unsigned at) {
  T x;
  emulator::load_bytes(&x, shared_pointer(at), sizeof x);
  return x;
}
template <class T>
__attribute__((always_inline)) inline void store_shared_as(unsigned at, const T& x) {
  emulator::store_bytes(shared_pointer(at), &x, sizeof x);
}

inline unsigned load_shared_u32(unsigned at) { return load_shared_as<unsigned>(at); }
inline unsigned short load_shared_u16(unsigned at) { return load_shared_as<unsigned short>(at); }
inline unsigned load_shared_u8(unsigned at) { return load_shared_as<unsigned char>(at); }
inline void store_shared_u32(unsigned at, unsigned x) { store_shared_as(at, x); }
inline void store_shared_two(unsigned at, unsigned x, unsigned y) { store_shared_as(at, uint2{x, y}); }
inline void store_shared_u8(unsigned at, unsigned x) { store_shared_as(at, static_cast<unsigned char>(x)); }
inline void store_shared_u16(unsigned at, unsigned short x) { store_shared_as(at, x); }
inline float load_shared(unsigned at) { return load_shared_as<float>(at); }
inline float2 load_shared_pair(unsigned at) { return load_shared_as<float2>(at); }
inline void store_shared_zero(unsigned at) { store_shared_as(at, uint4{}); }

inline void load_shared_four(unsigned at, unsigned (&x)[4]) {
  const uint4 four = load_shared_as<uint4>(at);
  memcpy(x, &four, sizeof x);
}
inline void store_shared_four(unsigned at, const unsigned* x) {
  uint4 four;
  memcpy(&four, x, sizeof four);
  store_shared_as(at, four);
}
// The dynamic shared memory of the block.
inline unsigned char* dynamic_shared() { return emulator::shared_memory(); }

}  // namespace attune::ptx
