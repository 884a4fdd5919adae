// SPDX-License-Identifier: Apache-2.0
// What a module that is compiled with -fsanitize=thread calls for every load and store, and for every function: the
// emulator's, in the place of a sanitizer's library.
#include "emulator/shadow.h"

namespace attune::emulator {

inline void note(const void* at, size_t bytes, bool write, void* pc) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (address - reinterpret_cast<uintptr_t>(&g_running) < sizeof(g_running)) return;
  if (g_block == nullptr || g_block->cluster->shadow == nullptr) return;
  Shadow& shadow = *g_block->cluster->shadow;
  if (address - g_stack.begin < g_stack.bytes) return shadow.touch_registers(address, bytes, write, pc);
  shadow.access(at, bytes, write, pc);
}

ATTUNE_EMULATOR void load_watched(void* to, const void* from, size_t bytes) {
  note(from, bytes, false, nullptr);
  __builtin_memcpy(to, from, bytes);
}
ATTUNE_EMULATOR void store_watched(void* to, const void* from, size_t bytes) {
  note(to, bytes, true, nullptr);
  __builtin_memcpy(to, from, bytes);
}

}  // namespace attune::emulator

// Where the tests themselves are under ThreadSanitizer there are no fibers, and its library has these.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ATTUNE_HAS_TSAN 1
#endif
#endif
#if !defined(__SANITIZE_THREAD__) && !defined(ATTUNE_HAS_TSAN)

#define ATTUNE_EXPORTED extern "C" __attribute__((visibility("default"), used))
#define ATTUNE_ACCESS(name, bytes, write) \
  ATTUNE_EXPORTED void name(void* at) { attune::emulator::note(at, bytes, write, __builtin_return_address(0)); }
#define ATTUNE_ACCESSES(bytes)                              \
  ATTUNE_ACCESS(__tsan_read##bytes, bytes, false)           \
  ATTUNE_ACCESS(__tsan_write##bytes, bytes, true)           \
  ATTUNE_ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
  ATTUNE_ACCESS(__tsan_unaligned_write##bytes, bytes, true) \
  ATTUNE_ACCESS(__tsan_volatile_read##bytes, bytes, false)  \
  ATTUNE_ACCESS(__tsan_volatile_write##bytes, bytes, true)
ATTUNE_ACCESSES(1)
ATTUNE_ACCESSES(2)
ATTUNE_ACCESSES(4)
ATTUNE_ACCESSES(8)
ATTUNE_ACCESSES(16)
ATTUNE_EXPORTED void __tsan_read_range(void* at, size_t bytes) {
  attune::emulator::note(at, bytes, false, __builtin_return_address(0));
}
ATTUNE_EXPORTED void __tsan_write_range(void* at, size_t bytes) {
  attune::emulator::note(at, bytes, true, __builtin_return_address(0));
}
ATTUNE_EXPORTED void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  attune::emulator::note(from, bytes, false, __builtin_return_address(0));
  attune::emulator::note(to, bytes, true, __builtin_return_address(0));
  return __builtin_memcpy(to, from, bytes);
}
ATTUNE_EXPORTED void* __tsan_memset(void* to, int x, size_t bytes) {
  attune::emulator::note(to, bytes, true, __builtin_return_address(0));
  return __builtin_memset(to, x, bytes);
}
ATTUNE_EXPORTED void __tsan_init() {}
ATTUNE_EXPORTED void __tsan_func_entry(void* from) {
  using attune::emulator::g_block;
  if (g_block != nullptr && g_block->cluster->shadow != nullptr) g_block->cluster->shadow->enter(from);
}
ATTUNE_EXPORTED void __tsan_func_exit() {
  using attune::emulator::g_block;
  if (g_block != nullptr && g_block->cluster->shadow != nullptr) g_block->cluster->shadow->leave();
}

#endif
