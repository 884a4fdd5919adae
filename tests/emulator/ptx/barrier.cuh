// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/barrier.cuh on the CPU.
#pragma once

namespace attune::ptx {

inline void init_barrier(unsigned barrier, unsigned count) { emulator::init_barrier(barrier, count); }
inline void publish_barriers() {}
inline void arrive(unsigned barrier) { emulator::arrive(barrier, 0); }
inline void arrive_expecting(unsigned barrier, unsigned bytes) { emulator::arrive(barrier, bytes); }
inline bool phase_has_ended(unsigned barrier, unsigned parity) { return emulator::phase_ended(barrier, parity); }
inline void wait_phase(unsigned barrier, unsigned parity) {
  emulator::wait_phase(barrier, parity);
}
inline void named_barrier_sync(int id, int threads) { emulator::sync_threads(id, threads); }
inline bool named_barrier_any(int id, int threads, bool x) { return emulator::sync_any(id, threads, x); }
inline void named_barrier_arrive(int id, int threads) { emulator::arrive_threads(id, threads); }
inline void named_barrier_sync_unaligned(int id, int threads) { named_barrier_sync(id, threads); }
inline void named_barrier_arrive_unaligned(int id, int threads) { named_barrier_arrive(id, threads); }
inline void fence_async_proxy_global() {}
inline void fence_async_proxy() { emulator::fence_async_proxy(); }

}  // namespace attune::ptx
