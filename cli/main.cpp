// SPDX-License-Identifier: Apache-2.0
// The attune command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <new>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "attune/attune.hpp"
#include "commands.h"
#include "files.h"
#include "text.h"

namespace {

using namespace attune::cli;

// CLI11 would only say that a subcommand is missing.
void reject_unknown_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string known;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == argv[1]) return;
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  throw UserError(fmt::format("unknown command '{}'; known are {}", argv[1], known));
}

int distance(const std::string& a, const std::string& b) {  // edits
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const int changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

// CLI11 would list it and the words behind it, the last ones first.
void reject_unknown_option(const CLI::App& app, int argc, char** argv) {
  if (argc < 2) return;
  const CLI::App* command = nullptr;
  for (const CLI::App* known : app.get_subcommands({}))
    if (known->get_name() == argv[1]) command = known;
  for (int i = 2; command != nullptr && i < argc; ++i) {
    const std::string word(argv[i]), name = word.substr(0, word.find('='));
    if (name == "--") return;
    if (name.rfind("--", 0) != 0 || command->get_option_no_throw(name) != nullptr) continue;
    std::string nearest;
    int edits = 3;
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& known : option->get_lnames()) {
        const int more = distance(name, "--" + known);
        if (more < edits) edits = more, nearest = "--" + known;
      }
    }
    const std::string hint = nearest.empty() ? "" : "; did you mean " + nearest + "?";
    throw UserError(fmt::format("{} has no option '{}'{} (see attune {} --help)", argv[1], name, hint, argv[1]));
  }
}

// CLI11 does not wrap: what an option does begins at column 30, and goes on there.
std::string wrapped_help(const std::string& text) {
  std::istringstream lines(text);
  std::string out;
  for (std::string line; std::getline(lines, line);) out += wrapped(line, line.rfind("  ", 0) == 0 ? 30 : 0) + "\n";
  return out;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Attention for LLM inference: replays traces, checks and times kernels, and says what this machine can do.",
      "attune");
  app.set_version_flag("--version", std::string("attune ") + attune_version());
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Help of every subcommand");
  add_replay_command(app);
  add_demo_command(app);
  add_check_command(app);
  add_bench_command(app);
  add_info_command(app);
  add_explain_command(app);
  add_models_command(app);
  reject_unknown_command(app, argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& e) {
    return e.get_exit_code();
  } catch (const CLI::ParseError& e) {
    // Help and version come here too, with exit code 0.
    if (e.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      std::ostringstream text;
      const int code = app.exit(e, text, text);
      fmt::print("{}", wrapped_help(text.str()));
      return code;
    }
    reject_unknown_option(app, argc, argv);
    throw UserError(fmt::format("{} (see attune --help)", e.what()));
  }
  return 0;
}

// One line, whatever a message holds.
int complain(const std::string& message, int code) {
  std::string line = message;
  std::replace(line.begin(), line.end(), '\n', ' ');
  say("attune: {}\n", line);
  return code;
}

// A stream that the caller closed is one that nothing can be written to; the next file that is opened must not take its
// place.
void keep_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY) != stream) return;
  }
}

// lost: the errno of output that did not arrive, else 0.
int run_and_complain(int argc, char** argv, int& lost) {
  try {
    return run(argc, argv);
  } catch (const UserError& e) {
    return complain(e.what(), kExitBadInput);
  } catch (const attune::Error& e) {
    return complain(fmt::format("{}: {}", attune_status_name(e.status()), e.what()), kExitFailed);
  } catch (const std::bad_alloc&) {
    return complain("out of memory", kExitFailed);
  } catch (const std::system_error& e) {
    if (std::ferror(stdout) == 0) return complain(e.what(), kExitFailed);
    lost = e.code().value();  // of what prints
    return kExitFailed;
  } catch (const std::exception& e) {
    return complain(e.what(), kExitFailed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  keep_streams();
  int lost = 0;
  const int code = run_and_complain(argc, argv, lost);
  if (lost == 0 && std::fflush(stdout) != 0) lost = errno;
  if (lost == 0 && std::ferror(stdout) != 0) lost = EIO;
  // A result that nobody has is no success.
  if (lost == 0) return code;
  return complain(file_fault("stdout", "written", lost), code == 0 ? kExitFailed : code);
}
