// SPDX-License-Identifier: Apache-2.0
// Progress on stderr: a bar on a terminal, otherwise a line now and then.
#pragma once

#include <cstdint>
#include <string>

#include "stopwatch.h"

namespace attune::cli {

class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // True when it is time to say something; so the caller composes the note only then.
  bool due() const { return watch_.seconds() >= next_; }
  // done of total; note: a few words that change.
  void show(int64_t done, int64_t total, const std::string& note);
  // Removes the bar.
  void finish();

 private:
  std::string what_;
  bool terminal_;
  bool drawn_ = false;
  double next_;
  Stopwatch watch_;
};

}  // namespace attune::cli
