// SPDX-License-Identifier: Apache-2.0
// The subcommands of attune. Each adds itself to the application and does its work in the callback.
//
// How a callback ends: it returns (exit code 0), throws UserError for bad input (one line on stderr, exit code 2) or
// throws CLI::RuntimeError(n) after having said what is wrong (exit code n).
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <string>

#include "user_error.h"

namespace attune::cli {

inline constexpr int kExitFailed = 1;  // a check failed, or the library or the machine did
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitInterrupted = 130;  // Ctrl-C: what was done until then has been reported

// Of --seed: --stress-case names seeds by up to 18 digits. Signed, as CLI11 reads -1 as the largest unsigned number.
inline constexpr int64_t kMostSeed = 999'999'999'999'999'999;

// As CLI::Range, which nan passes.
inline CLI::Option* check_range(CLI::Option* option, double least, double most) {
  const auto refuse_nan = [least, most](const std::string& text) -> std::string {
    double number = 0;
    if (!CLI::detail::lexical_cast(text, number) || !std::isnan(number)) return "";
    return fmt::format("Value {} not in range {:f} to {:f}", text, least, most);
  };
  return option->check(CLI::Range(least, most))->check(refuse_nan);
}

// Of an option that is a path: an empty one, of a variable that is not set, say, would be as if it were not given.
inline std::string refuse_empty(const std::string& text) { return text.empty() ? "is empty; a path is expected" : ""; }

void add_replay_command(CLI::App& app);
void add_demo_command(CLI::App& app);
void add_check_command(CLI::App& app);
void add_bench_command(CLI::App& app);
void add_info_command(CLI::App& app);
void add_explain_command(CLI::App& app);
void add_models_command(CLI::App& app);

}  // namespace attune::cli
