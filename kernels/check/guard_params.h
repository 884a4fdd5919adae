// SPDX-License-Identifier: Apache-2.0
// What host and device share of the check of guard memory, which must not be written. Compiled by NVRTC and by the
// host's compiler; no standard headers.
#pragma once

namespace attune::oracle {

struct GuardParams {
  const unsigned long long* words;
  long long num_words;
  unsigned long long filler;  // the value of each word
  long long* first;           // [threads of the grid]: the first word of the thread that has another value; -1: none
};

}  // namespace attune::oracle
