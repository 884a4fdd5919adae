// SPDX-License-Identifier: Apache-2.0
#undef _FORTIFY_SOURCE  // takes a jump to another stack for an error
#include "emulator/context.h"

#include <cstdint>
#include <cstring>

#ifdef ATTUNE_LONGJMP
#include <ucontext.h>
#endif

namespace attune::emulator {

#ifndef ATTUNE_LONGJMP

// A call, so that its return is foreseen by the processor: all who wait have called it from the same place. longjmp()
// is never foreseen, and asks for clean-up handlers; half of a kernel's time with many shuffles went there.
asm(R"(
  .text
  .p2align 4
  .globl attune_change_stacks
  .hidden attune_change_stacks
  .type attune_change_stacks, @function
attune_change_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size attune_change_stacks, .-attune_change_stacks
)");

void begin_on(Context& context, char* stack, size_t bytes, void (*run)()) {
  constexpr size_t kRegisters = 6;
  // run() finds the stack as after a call: 8 bytes below a multiple of 16, and 0 as its caller, where unwinding ends.
  const uintptr_t end = (reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16;
  const uintptr_t words[kRegisters + 2] = {0, 0, 0, 0, 0, 0, reinterpret_cast<uintptr_t>(run), 0};
  context.top = reinterpret_cast<void*>(end - sizeof(words));
  std::memcpy(context.top, words, sizeof(words));
}

#else

void begin_on(Context& context, char* stack, size_t bytes, void (*run)()) {
  context.stack = stack, context.bytes = bytes, context.run = run;
}

namespace {
// By itself, as getcontext() may return twice for all that the compiler knows.
[[noreturn, gnu::noinline]] void run_first(Context& to) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = to.stack;
  context.uc_stack.ss_size = to.bytes;
  context.uc_link = nullptr;
  to.stack = nullptr;
  makecontext(&context, to.run, 0);
  setcontext(&context);
  __builtin_unreachable();
}
}  // namespace

void change(Context& from, Context& to) {
  if (_setjmp(from.at) != 0) return;
  if (to.stack != nullptr) run_first(to);
  _longjmp(to.at, 1);
}

#endif

}  // namespace attune::emulator
