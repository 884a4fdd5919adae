// SPDX-License-Identifier: Apache-2.0
// Ctrl-C as a flag.
#pragma once

#include <csignal>

namespace attune::cli {

// While one lives, the first Ctrl-C (or SIGTERM) only sets the flag; the second ends the process as usual.
class InterruptGuard {
 public:
  InterruptGuard() {
    flag_ = 0;
    struct sigaction action {};
    action.sa_handler = [](int) { flag_ = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &previous_int_);
    sigaction(SIGTERM, &action, &previous_term_);
  }
  ~InterruptGuard() {
    sigaction(SIGINT, &previous_int_, nullptr);
    sigaction(SIGTERM, &previous_term_, nullptr);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  bool interrupted() const { return flag_ != 0; }

 private:
  static inline volatile std::sig_atomic_t flag_ = 0;
  struct sigaction previous_int_ {
  }, previous_term_{};
};

}  // namespace attune::cli
