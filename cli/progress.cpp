// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "text.h"

namespace attune::cli {
namespace {

constexpr double kBarInterval = 0.1, kLineInterval = 5.0;  // seconds

int terminal_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && term != nullptr && std::strcmp(term, "dumb") != 0;
}

}  // namespace

Progress::Progress(std::string what)
    : what_(std::move(what)), terminal_(is_terminal()), next_(terminal_ ? 0 : kLineInterval) {}

void Progress::show(int64_t done, int64_t total, const std::string& note) {
  const double elapsed = watch_.seconds(),
               share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0;
  next_ = elapsed + (terminal_ ? kBarInterval : kLineInterval);
  // A guess that is worth printing needs some of the work to be done.
  const std::string left =
      share > 0.02 && share < 1 ? fmt::format(", about {:.0f} s left", elapsed / share - elapsed) : "";
  if (!terminal_) {
    say("{}: {:3.0f}%, {}{}\n", what_, 100 * share, note, left);
    return;
  }
  std::string tail = fmt::format(" {:3.0f}% {}{}", 100 * share, note, left);
  const int columns = terminal_columns() - 1,
            width = std::clamp(columns - static_cast<int>(what_.size() + tail.size()) - 1, 0, 30);
  if (width < 8)
    tail.resize(std::min(tail.size(), static_cast<size_t>(std::max(0, columns - static_cast<int>(what_.size()) - 1))));
  std::string bar;
  for (int i = 0; width >= 8 && i < width; ++i) bar += i < share * width ? "█" : "░";
  say("\r\x1b[K{} {}{}", what_, bar, tail);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::finish() {
  if (!drawn_) return;
  say("\r\x1b[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace attune::cli
