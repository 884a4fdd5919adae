// SPDX-License-Identifier: Apache-2.0
// A stack of its own for each emulated thread, and how one gives way to another.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#define ATTUNE_LONGJMP 1  // defined for both files of a build, it is tried on any CPU
#endif
#ifdef ATTUNE_LONGJMP
#include <setjmp.h>
#endif

namespace attune::emulator {

// Where a stack that gave way goes on; or where one begins that never ran.
struct Context {
#ifndef ATTUNE_LONGJMP
  void* top = nullptr;  // of what it keeps: the registers that a function may not change, and where it returns to
#else
  jmp_buf at;
  char* stack = nullptr;  // until it runs
  size_t bytes = 0;
  void (*run)() = nullptr;
#endif
};

// run() will be called at the first turn, on that stack; it never returns.
void begin_on(Context& context, char* stack, size_t bytes, void (*run)());

// Goes on at `to`; returns when somebody goes on at `from`.
#ifndef ATTUNE_LONGJMP
extern "C" void attune_change_stacks(void** from, void* to);
inline void change(Context& from, const Context& to) { attune_change_stacks(&from.top, to.top); }
#else
void change(Context& from, Context& to);
#endif

}  // namespace attune::emulator
