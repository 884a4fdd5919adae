// SPDX-License-Identifier: Apache-2.0
// What the emulator does not report: kernels have it on purpose, or the compiler does not tell enough.
#pragma once

#include <string>

namespace attune::emulator {

// A report that has all three; and why that is well.
struct OnPurpose {
  const char *what, *where, *other, *why;
};

inline constexpr OnPurpose kOnPurpose[] = {
    {"reads", "start_early", "store_through", "behind the last task what lies there is multiplied, and nobody looks"},
    {"nobody has written", "multiply_keys", "", "no box brings keys that nobody sees; their scores are hidden"},
    {"nobody has written", "Converter::blocks_of", "", "the same of codes"},
    {"nobody has written", "packed_keys", "", "the same of packed ones"},
    {"nobody has written", "packed_values", "", "and of their values"},
    {"nobody has written", "Converter::convert", "", "which keys are hidden counts only where some are"},
    {"nobody has written", "indexer::Keys::take", "", "a scale that a cache without scales does not have"},
    {"nobody has written", "HalfQueries::convert", "", "rows that a block does not have"},
    {"nobody has written", "mla::TileMask", "", "sparse tiles have no edges"},
    {"of static shared memory", "rows::", "nobody has written", "gcc does not tell of what functions return there"},
    {" writes, perhaps", "lane 0 of warp", "Gatherer::note_hidden", "warps that share keys say the same of them"},
    {" writes, perhaps", "lane ", "run_small_caps", "all who write the flag write 1"},
    {"writes, perhaps later", "fetch_table", "cp.async", "what it copies nobody reads: the L1 is to have it"},
};

inline bool is_on_purpose(const std::string& report) {
  for (const OnPurpose& x : kOnPurpose) {
    const auto has = [&](const char* words) { return report.find(words) != std::string::npos; };
    if (has(x.what) && has(x.where) && has(x.other)) return true;
  }
  return false;
}

}  // namespace attune::emulator
