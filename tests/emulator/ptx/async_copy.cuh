// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/async_copy.cuh on the CPU. Shared addresses begin at kSharedBase, so that 0 is none.
#pragma once

namespace attune::ptx {

using emulator::kSharedBase;

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulator::shared_memory()) + kSharedBase;
}
inline unsigned char* shared_pointer(unsigned address) { return emulator::shared_memory() + (address - kSharedBase); }

template <int kBytes>
void copy_async(unsigned shared, const void* global, unsigned valid) {
  emulator::copy_async(shared, global, kBytes, valid);
}
inline unsigned long long evict_first_policy() { return 0; }
template <int kBytes>
void copy_async_cached(unsigned shared, const void* global, unsigned valid) {
  copy_async<kBytes>(shared, global, valid);
}
template <int kBytes>
void copy_async(unsigned shared, const void* global, unsigned valid, unsigned long long) {
  copy_async<kBytes>(shared, global, valid);
}
inline void prefetch_line(const void*) {}
inline unsigned load_early(const unsigned* global) { return *global; }
inline unsigned load_early(const unsigned short* global) { return *global; }
inline void load_early_four(const void* global, unsigned (&x)[4]) {
  emulator::load_bytes(x, global, sizeof x);
}
inline void arrive_after_copies(unsigned barrier) { emulator::arrive_after_copies(barrier); }
inline void commit_copies() { emulator::commit_copies(); }
template <int kPending>
void wait_copies() {
  emulator::wait_copies(kPending);
}

}  // namespace attune::ptx
