// SPDX-License-Identifier: Apache-2.0
// The subcommands of attune. Each adds itself to the application and does its work in the callback.
//
// How a callback ends: it returns (exit code 0), throws UserError for bad input (one line on stderr, exit code 2) or
// throws CLI::RuntimeError(n) after having said what is wrong (exit code n).
#pragma once

#include <CLI/CLI.hpp>

#include "user_error.h"

namespace attune::cli {

inline constexpr int kExitFailed = 1;  // a check failed, or the library or the machine did
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitInterrupted = 130;  // Ctrl-C: what was done until then has been reported

void add_replay_command(CLI::App& app);
void add_demo_command(CLI::App& app);
void add_check_command(CLI::App& app);
void add_bench_command(CLI::App& app);
void add_info_command(CLI::App& app);
void add_explain_command(CLI::App& app);
void add_models_command(CLI::App& app);

}  // namespace attune::cli
