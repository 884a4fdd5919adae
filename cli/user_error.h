// SPDX-License-Identifier: Apache-2.0
// Apart from commands.h, whose CLI11 takes 3 s of each file that includes it.
#pragma once

#include <stdexcept>

namespace attune::cli {

// The user gave something wrong. what() is one line.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace attune::cli
