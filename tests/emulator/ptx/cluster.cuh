// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/cluster.cuh on the CPU.
#pragma once

namespace attune::ptx {

inline int cluster_rank() { return static_cast<int>(emulator::cluster_rank()); }
inline int cluster_size() { return static_cast<int>(emulator::cluster_size()); }
inline void cluster_barrier() { emulator::sync_cluster(); }
template <class T>
const T* in_block(const T* shared, int rank) {
  const auto offset = reinterpret_cast<const unsigned char*>(shared) - emulator::shared_memory();
  return reinterpret_cast<const T*>(emulator::shared_memory_of(static_cast<unsigned>(rank)) + offset);
}

}  // namespace attune::ptx
