// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/async_copy.cuh on the CPU. Shared addresses begin at kSharedBase, so that 0 is none.
#pragma once

namespace attune::ptx {

using emulator::kSharedBase;

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulator::shared_memory()) + kSharedBase;
}
inline unsigned char* shared_pointer(unsigned address) { return emulator::shared_memory() + (address - kSharedBase); }

// Copies are done at once.
template <int kBytes>
void copy_async(unsigned shared, const void* global, unsigned valid) {
  memset(shared_pointer(shared), 0, kBytes);
  if (valid > 0) memcpy(shared_pointer(shared), global, valid);
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
inline void load_early_four(const void* global, unsigned (&x)[4]) { memcpy(x, global, sizeof x); }
inline void arrive_after_copies(unsigned barrier) { emulator::arrive(barrier, 0); }
inline void commit_copies() {}
template <int kPending>
void wait_copies() {}

}  // namespace attune::ptx
