// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/atomic.cuh on the CPU: one thread runs at a time.
#pragma once

namespace attune::ptx {

ATTUNE_UNSEEN inline unsigned count_arrival(unsigned* counter, unsigned last) {
  emulator::synchronize_atomic(counter, true, true);
  const unsigned before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
ATTUNE_UNSEEN inline unsigned add_arrivals(unsigned* counter, unsigned count) {
  emulator::synchronize_atomic(counter, true, true);
  const unsigned before = *counter;
  *counter += count;
  return before;
}
ATTUNE_UNSEEN inline void release_arrival(unsigned* counter) {
  emulator::synchronize_atomic(counter, false, true);
  *counter += 1;
}
ATTUNE_UNSEEN inline void store_release(unsigned* at, unsigned x) {
  emulator::synchronize_atomic(at, false, true);
  *at = x;
}
ATTUNE_UNSEEN inline unsigned load_acquire(const unsigned* at) {
  emulator::synchronize_atomic(at, true, false);
  return *at;
}
inline void wait_for_arrivals(const unsigned* counter, unsigned count) {
  while (load_acquire(counter) < count) emulator::let_others_run();
}
// Kernels run one after the other.
inline void wait_for_change(const unsigned* at, unsigned x) {
  if (load_acquire(at) == x) emulator::fail("a kernel waits for what none before it has released");
}
inline float4 load_from_l2(const float4* at) { return *at; }
inline float4 load_from_l2_if(bool loads, const float4* at) { return loads ? *at : float4{0, 0, 0, 0}; }
inline float2 load_from_l2(const float2* at) { return *at; }

}  // namespace attune::ptx
