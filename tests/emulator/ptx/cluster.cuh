// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/cluster.cuh on the CPU.
#pragma once

#include "ptx/async_copy.cuh"

namespace attune::ptx {

inline int cluster_rank() { return static_cast<int>(emulator::cluster_rank()); }
inline int cluster_size() { return static_cast<int>(emulator::cluster_size()); }
inline void cluster_barrier() { emulator::sync_cluster(); }
inline void arrive_at_cluster() { emulator::arrive_at_cluster(); }
inline void wait_for_cluster() { emulator::wait_for_cluster(); }
template <class T>
T* in_block(T* shared, int rank) {
  const auto offset = reinterpret_cast<const unsigned char*>(shared) - emulator::shared_memory();
  return reinterpret_cast<T*>(emulator::shared_memory_of(static_cast<unsigned>(rank)) + offset);
}

// Addresses in other blocks: the block's number, counted from 1, above those in the own one.
inline constexpr unsigned kOfBlock = 1 << 20;
inline unsigned shared_in_block(unsigned shared, int rank) { return shared + kOfBlock * static_cast<unsigned>(rank + 1); }
inline void arrive_in_cluster(unsigned barrier) { emulator::arrive_at(barrier / kOfBlock - 1, barrier % kOfBlock); }
inline void store_async_bytes(unsigned at, const void* from, unsigned bytes, unsigned barrier, bool copies = false) {
  if (at / kOfBlock != barrier / kOfBlock) emulator::fail("bytes for one block are counted in another");
  emulator::store_async(at / kOfBlock - 1, at % kOfBlock, from, bytes, barrier % kOfBlock, copies);
}
inline void store_async(unsigned at, unsigned x, unsigned barrier) { store_async_bytes(at, &x, 4, barrier); }
inline void store_async_four(unsigned at, const float4& x, unsigned barrier) {
  if (at % 16 != 0) emulator::fail("four numbers are not aligned to 16 bytes");
  store_async_bytes(at, &x, 16, barrier);
}
inline void copy_to_block(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  store_async_bytes(to, shared_pointer(from), bytes, barrier, true);
}

}  // namespace attune::ptx
