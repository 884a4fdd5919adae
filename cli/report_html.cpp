// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>

#include "device.h"
#include "embedded.h"
#include "files.h"
#include "report.h"
#include "text.h"

extern char** environ;

namespace attune::cli {
namespace {

constexpr int kNoMatplotlib = 3;  // exit code of report.py

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string html_rows(const std::vector<TableRow>& rows) {
  std::string html;
  for (const TableRow& row : rows) {
    html += fmt::format("<tr><th>{}</th><td>{}</td><td class=\"note\">{}</td></tr>\n", escaped(row.label),
                        escaped(row.value), escaped(row.note));
  }
  return html;
}

std::vector<TableRow> setting_rows(const ReplayResult& r) {
  const ReplayOptions& o = r.options;
  const Model& m = r.model;
  std::vector<TableRow> rows;
  rows.push_back({"model", m.name, m.title});
  rows.push_back(
      {"layer", fmt::format("{}, {}", counted(m.num_heads_q, "query head"), counted(m.num_heads_kv, "KV head")),
       fmt::format("head dims {} and {}; one of {}{}", m.head_dim_qk, m.head_dim_v, counted(m.num_layers, "layer"),
                   o.tensor_parallel > 1 ? fmt::format("; one of {} parts", o.tensor_parallel) : "")});
  rows.push_back({"device", fmt::format("{} ({})", device_name(r.device.device), units_text(r)),
                  fmt::format("{}; {}", r.device.name, r.device.isa)});
  rows.push_back(
      {"KV cache",
       fmt::format("{}, {:.0f} MiB", kv_dtype_name(r.kv_dtype), static_cast<double>(r.pool_bytes) / (1 << 20)),
       fmt::format("{} of {}", counted(r.num_pages, "page"), counted(o.page_size, "token"))});
  rows.push_back({"batching", "up to " + counted(o.max_batch, "sequence"),
                  fmt::format("and {} a step", counted(o.chunk, "prompt token"))});
  const std::string arrival = o.time_scale == 1 ? "as in the trace" : fmt::format("{:g} times as fast", o.time_scale);
  rows.push_back({"arrival", o.no_arrival ? "all at once" : arrival,
                  o.max_context > 0 ? "requests clamped to " + counted(o.max_context, "token") : ""});
  rows.push_back(
      {"checked", o.verify + (o.verify == "1" ? " row a call" : " rows a call"), fmt::format("seed {}", o.seed)});
  return rows;
}

std::string plan_paragraphs(const std::vector<std::string>& plans) {
  std::string html;
  for (const std::string& plan : plans) html += fmt::format("<p class=\"plan\">{}</p>\n", escaped(plan));
  return html;
}

// A directory of its own, removed at the end.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::error_code error;
    path_ = (std::filesystem::temp_directory_path(error) / "attune-XXXXXX").string();
    if (error || mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~ScratchDirectory() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove_all(path_, error);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  bool good() const { return !path_.empty(); }
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Runs a program found on the PATH; stderr goes to a file. Its exit code, or -1 when it cannot be started or dies.
int run_program(std::vector<std::string> arguments, const std::string& stderr_path) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, stderr_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return -1;
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm tm{};
  gmtime_r(&now, &tm);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &tm);
  return text;
}

}  // namespace

std::string make_plots(const std::string& json_path, std::string& why) try {
  const ScratchDirectory scratch;
  if (!scratch.good()) {
    why = "no plots: no temporary directory can be made";
    return "";
  }
  const std::string script = scratch.file("report.py"), plots = scratch.file("plots.html"),
                    errors = scratch.file("errors.txt");
  OutputFile(script).write(embedded_file("report.py"));
  int code = -1;
  // The first python3 may be one that a user installed, without the system's packages.
  for (const char* python : {"python3", "/usr/bin/python3"}) {
    code = run_program({python, script, json_path, plots}, errors);
    if (code == 0) return read_file(plots);
    if (code != kNoMatplotlib) break;
  }
  if (code == kNoMatplotlib) {
    why = "no plots: they need matplotlib for python3 (Debian and Ubuntu: apt install python3-matplotlib)";
  } else if (code == 127 || code == -1) {
    why = "no plots: they need python3 with matplotlib (Debian and Ubuntu: apt install python3-matplotlib)";
  } else {
    std::string text = read_file(errors);
    text.erase(text.find_last_not_of(" \n") + 1);
    const size_t last_line = text.rfind('\n');
    why = fmt::format("no plots: the plotting script failed: {}",
                      last_line == std::string::npos ? text : text.substr(last_line + 1));
  }
  return "";
} catch (const std::runtime_error& e) {  // of a file in the scratch directory
  why = fmt::format("no plots: {}", e.what());
  return "";
}

std::string report_html(const ReplayResult& r, const Summary& s, const std::string& plots,
                        const std::string& why_no_plots) {
  const std::string title =
      fmt::format("{} on {}", r.model.name, std::filesystem::path(r.trace_name).filename().string());
  const bool failed = r.verify.failed > 0;
  const std::string verdict = failed               ? r.verify.first_mismatch->text()
                              : r.verify.rows == 0 ? "Nothing was checked against the oracle."
                              : r.verify.rows == 1
                                  ? std::string("The one sampled row agrees with the float64 oracle.")
                                  : fmt::format("All {} sampled rows agree with the float64 oracle.", r.verify.rows);
  const std::pair<std::string_view, std::string> values[] = {
      {"TITLE", escaped(title)},
      {"SUBTITLE", escaped(fmt::format("attune {} · {}{}", std::string(attune_version()), utc_now(),
                                       r.interrupted ? " · interrupted, partial" : ""))},
      {"VERDICT", escaped(verdict)},
      {"VERDICT_CLASS", failed               ? "bad"
                        : r.verify.rows == 0 ? "plain"
                                             : "good"},
      {"RESULTS", html_rows(table_rows(r, s))},
      {"SETTINGS", html_rows(setting_rows(r))},
      {"PLANS", plan_paragraphs(r.plans)},
      {"PLOTS", plots.empty() ? fmt::format("<p class=\"missing\">{}</p>", escaped(why_no_plots)) : plots},
  };
  const std::string_view page = embedded_file("report.html");
  std::string html;
  for (size_t at = 0; at < page.size();) {
    const size_t open = page.find("{{", at), close = page.find("}}", open);
    if (open == std::string_view::npos || close == std::string_view::npos) {
      html += page.substr(at);
      break;
    }
    html += page.substr(at, open - at);
    for (const auto& [name, value] : values) {
      if (name == page.substr(open + 2, close - open - 2)) html += value;
    }
    at = close + 2;
  }
  return html;
}

}  // namespace attune::cli
