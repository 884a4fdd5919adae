// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/atomic.cuh on the CPU: one thread runs at a time.
#pragma once

namespace attune::ptx {

inline unsigned count_arrival(unsigned* counter, unsigned last) {
  emulator::may_be_held_up();
  const unsigned before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
inline unsigned add_arrivals(unsigned* counter, unsigned count) {
  emulator::may_be_held_up();
  const unsigned before = *counter;
  *counter += count;
  return before;
}
inline void store_release(unsigned* at, unsigned x) {
  emulator::may_be_held_up();
  *at = x;
}
inline unsigned load_acquire(const unsigned* at) {
  emulator::may_be_held_up();
  return *at;
}
// Kernels run one after the other.
inline void wait_for_change(const unsigned* at, unsigned x) {
  if (*at == x) emulator::fail("a kernel waits for what none before it has released");
}
inline float4 load_from_l2(const float4* at) { return *at; }
inline float2 load_from_l2(const float2* at) { return *at; }

}  // namespace attune::ptx
