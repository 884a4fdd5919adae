// SPDX-License-Identifier: Apache-2.0
// attune bench: the bench set of the table, each case checked against the oracle first and timed then.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "attune/attune.hpp"
#include "backward_bench.h"
#include "case_filter.h"
#include "cases/compare.h"
#include "cases/work.h"
#include "ceilings.h"
#include "commands.h"
#include "cuda_bench.h"
#include "device.h"
#include "files.h"
#include "interrupt.h"
#include "progress.h"
#include "stopwatch.h"
#include "text.h"

namespace attune::cli {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kCheckedRows = 48;
constexpr int kFewestRuns = 5;

struct BenchOptions {
  std::string device = "auto", filter, json;
  int threads = 0, reps = 0;
  double min_time = 0.5;
  bool list = false, no_check = false, no_ceilings = false;
};

struct Timing {
  const cases::Case* spec = nullptr;
  cases::Work work;
  double median = 0, p10 = 0, p90 = 0;  // seconds of a run
  size_t runs = 0;
  double worst = 0;  // share of the error bound, of the checked rows
  std::string failure, not_covered, plan;
  double gflops() const { return work.flops / median * 1e-9; }
  double gbps() const { return work.bytes / median * 1e-9; }
};

double percentile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

// Runs until both the time and the number of runs are reached, or exactly `reps` times.
std::vector<double> time_runs(const std::function<void()>& run, const BenchOptions& options,
                              const InterruptGuard& interrupt) {
  run();  // warms caches and the thread pool
  std::vector<double> seconds;
  const Stopwatch total;
  while (!interrupt.interrupted() || seconds.empty()) {
    if (options.reps > 0 ? static_cast<int>(seconds.size()) >= options.reps
                         : total.seconds() >= options.min_time && static_cast<int>(seconds.size()) >= kFewestRuns) {
      break;
    }
    const Stopwatch one;
    run();
    seconds.push_back(one.seconds());
  }
  return seconds;
}

void summarise(std::vector<double> seconds, Timing& timing) {
  std::sort(seconds.begin(), seconds.end());
  timing.median = percentile(seconds, 0.5);
  timing.p10 = percentile(seconds, 0.1);
  timing.p90 = percentile(seconds, 0.9);
  timing.runs = seconds.size();
}

// Keys and values alone count as bytes here, as in the numbers that others publish for decode.
Timing bench_on_cuda(const cases::Case& spec, int32_t index, const BenchOptions& options) {
  Timing timing;
  timing.spec = &spec;
  timing.work = cases::work_of(spec);
  CudaTiming measured = time_on_cuda(spec, index, !options.no_check, options.min_time);
  timing.work.bytes = measured.kv_bytes;
  timing.worst = measured.worst;
  timing.failure = std::move(measured.failure);
  timing.not_covered = std::move(measured.not_covered);
  timing.plan = std::move(measured.plan);
  if (!measured.seconds.empty()) summarise(std::move(measured.seconds), timing);
  return timing;
}

// About the seconds of a run over data that the device's caches do not hold.
double estimate_of(const cases::Work& work) { return work.flops / 4e14 + 2e-5; }

Timing bench_backward(const cases::Case& spec, attune_device device, const BenchOptions& options,
                      const InterruptGuard& interrupt) {
  Timing timing;
  timing.spec = &spec;
  timing.work = cases::work_of(spec);
  BackwardBench bench(spec, case_memory(device));
  timing.not_covered = bench.not_covered();
  if (!timing.not_covered.empty()) return timing;
  timing.plan = bench.describe();
  if (!options.no_check) {
    const cases::Report report = bench.check();
    timing.failure = report.failure;
    timing.worst = report.worst.ratio;
    if (!timing.failure.empty()) return timing;
  }
  if (device.type == ATTUNE_DEVICE_CUDA) {
    const auto enqueue = [&](int, void* stream) { bench.run(stream); };
    summarise(time_graphs(device.index, enqueue, estimate_of(timing.work), 1, options.min_time), timing);
  } else {
    summarise(time_runs([&] { bench.run(); }, options, interrupt), timing);
  }
  return timing;
}

Timing bench_case(const cases::Case& spec, attune_device device, const BenchOptions& options,
                  const InterruptGuard& interrupt) {
  if (spec.backward.on) return bench_backward(spec, device, options, interrupt);
  if (device.type == ATTUNE_DEVICE_CUDA) return bench_on_cuda(spec, device.index, options);
  Timing timing;
  timing.spec = &spec;
  timing.work = cases::work_of(spec);
  cases::Memory& memory = case_memory(device);
  cases::Problem problem(spec, memory);
  if (!options.no_check) {
    const cases::Expected expected = cases::evaluate_sample(problem, kCheckedRows);
    timing.failure = cases::run(problem);
    if (timing.failure.empty()) {
      const cases::Report report = cases::compare(problem, expected);
      timing.failure = report.failure;
      timing.worst = report.worst.ratio;
    }
    // A wrong result has no speed.
    if (!timing.failure.empty()) return timing;
  }
  const attune_attention a = problem.device();
  const Plan plan(a, device);
  const size_t bytes = plan.workspace_size();
  cases::Workspace workspace(memory, bytes);
  summarise(time_runs([&] { plan.run(a, workspace.buffer.device(), bytes); }, options, interrupt), timing);
  return timing;
}

ordered_json shape_of(const cases::Case& c) {
  ordered_json j = {{"dtype", cases::short_name(c.dtype)},
                    {"heads", {c.num_heads_q, c.num_heads_kv}},
                    {"head_dim", {c.head_dim_qk, c.head_dim_v}},
                    {"seqlens_q", c.seqlens_q},
                    {"seqlens_kv", c.seqlens_kv},
                    {"kv", c.kv == cases::KvSource::kDense        ? "dense"
                           : c.kv == cases::KvSource::kContiguous ? "contiguous"
                           : c.kv == cases::KvSource::kPaged      ? "paged"
                                                                  : "slots"},
                    {"new_tokens", c.new_tokens},
                    {"causal", c.causal},
                    {"window", {c.window_left, c.window_right}},
                    {"topk", c.sparse.topk}};
  if (c.has_cache()) {
    j["cache_dtype"] = c.cache.format == ATTUNE_KV_MLA_656   ? "mla_656"
                       : c.cache.format == ATTUNE_KV_MLA_584 ? "mla_584"
                                                             : cases::short_name(c.cache_dtype());
    j["page_size"] = c.cache.page_size;
  }
  return j;
}

ordered_json to_json(const std::vector<Timing>& timings, const std::optional<Ceilings>& ceilings,
                     attune_device device) {
  const attune_device_info info = device_info(device);
  ordered_json j = {{"version", attune_version()},
                    {"device", device_name(device)},
                    {"name", info.name},
                    {"isa", info.isa},
                    {"threads", num_threads()}};
  if (ceilings) {
    j["ceilings"] = {{"read_gbps_all", ceilings->read_gbps_all}};
    if (ceilings->fma_gflops_all > 0) {
      j["ceilings"].update({{"fma_gflops_1", ceilings->fma_gflops_1}, {"fma_gflops_all", ceilings->fma_gflops_all}});
    }
  }
  j["results"] = ordered_json::array();
  for (const Timing& t : timings) {
    ordered_json r = {
        {"name", t.spec->name}, {"shape", shape_of(*t.spec)}, {"flops", t.work.flops}, {"bytes", t.work.bytes}};
    if (!t.plan.empty()) r["plan"] = t.plan;
    if (!t.failure.empty()) {
      r["failure"] = t.failure;
    } else if (!t.not_covered.empty()) {
      r["not_covered"] = t.not_covered;
    } else {
      r.update({{"runs", t.runs},
                {"seconds", {{"median", t.median}, {"p10", t.p10}, {"p90", t.p90}}},
                {"gflops", t.gflops()},
                {"gbps", t.gbps()},
                {"share_of_bound", t.worst}});
      if (ceilings) r["share_of_read"] = t.gbps() / ceilings->read_gbps_all;
      if (ceilings && ceilings->fma_gflops_all > 0) r["share_of_fma"] = t.gflops() / ceilings->fma_gflops_all;
    }
    j["results"].push_back(std::move(r));
  }
  return j;
}

std::string milliseconds(double seconds) { return fmt::format("{:.3f}", seconds * 1e3); }

// Columns of the figures: what is left of 80 is the name's, and a table with longer names has them on lines of their
// own.
constexpr size_t kFigures = 59, kNameColumns = 80 - kFigures;

void print_row(const std::string& name, size_t width, const std::string& figures) {
  if (width <= kNameColumns) {
    fmt::print("{:<{}}{}\n", name, width, figures);
  } else {
    fmt::print("{}\n{:<{}}{}\n", name, "", kNameColumns, figures);
  }
}

void print_head(attune_device device, const std::optional<Ceilings>& ceilings, size_t width) {
  const bool on_cuda = device.type == ATTUNE_DEVICE_CUDA;
  if (ceilings && on_cuda) {
    fmt::print("{}; measured ceiling: {:.0f} GB/s read\n", device_info(device).name, ceilings->read_gbps_all);
  } else if (ceilings) {
    fmt::print("{}; measured ceilings: {:.1f} fp32 GFLOP/s, {:.1f} GB/s read\n", counted(num_threads(), "thread"),
               ceilings->fma_gflops_all, ceilings->read_gbps_all);
  }
  const std::string figures = on_cuda ? fmt::format("{:>11}{:>9}{:>9}{:>8}{:>8}{:>6}{:>8}", "median us", "p10", "p90",
                                                    "graphs", "GB/s", "peak", "TFLOP/s")
                                      : fmt::format("{:>10}{:>9}{:>9}{:>5}{:>8}{:>6}{:>7}{:>5}", "median ms", "p10",
                                                    "p90", "runs", "GFLOP/s", "peak", "GB/s", "peak");
  fmt::print("{:<{}}{}\n", "case", std::min(width, kNameColumns), figures);
}

void print_timing(const Timing& t, attune_device device, const std::optional<Ceilings>& ceilings, size_t width) {
  if (!t.failure.empty() || !t.not_covered.empty()) {
    const std::string what = t.failure.empty() ? "not covered: " + t.not_covered : "FAILED " + t.failure;
    fmt::print("{}\n", wrapped(fmt::format("{}  {}", t.spec->name, what), 2));
    return;
  }
  const auto share = [&](double value, double ceiling) {
    return ceilings ? fmt::format("{:.0f} %", 100 * value / ceiling) : std::string();
  };
  const std::string read = share(t.gbps(), ceilings ? ceilings->read_gbps_all : 1);
  if (device.type == ATTUNE_DEVICE_CUDA) {
    print_row(t.spec->name, width,
              fmt::format("{:>11.2f}{:>9.2f}{:>9.2f}{:>8}{:>8.0f}{:>6}{:>8.0f}", t.median * 1e6, t.p10 * 1e6,
                          t.p90 * 1e6, t.runs, t.gbps(), read, t.gflops() * 1e-3));
    return;
  }
  print_row(t.spec->name, width,
            fmt::format("{:>10}{:>9}{:>9}{:>5}{:>8.1f}{:>6}{:>7.2f}{:>5}", milliseconds(t.median), milliseconds(t.p10),
                        milliseconds(t.p90), t.runs, t.gflops(),
                        share(t.gflops(), ceilings ? ceilings->fma_gflops_all : 1), t.gbps(), read));
}

std::optional<Ceilings> measure(attune_device device) {
  say("measuring the machine's ceilings\n");
  if (device.type == ATTUNE_DEVICE_CPU) return measure_ceilings(num_threads());
  Ceilings ceilings{};
  ceilings.read_gbps_all = measure_cuda_read(device.index);
  return ceilings;
}

void bench(const BenchOptions& options) {
  // The names of a device's set can be listed where there is no such device.
  const std::string wanted = options.device == "auto" ? device_name(parse_device("auto")) : options.device;
  const bool on_cuda = wanted.rfind("cuda", 0) == 0;
  const std::vector<cases::Case> picked =
      filter_cases(on_cuda ? cases::cuda_bench_cases() : cases::bench_cases(), options.filter);
  if (options.list) {
    for (const cases::Case& spec : picked) fmt::print("{}\n", spec.name);
    return;
  }
  const attune_device device = parse_device(wanted);
  std::optional<OutputFile> file;
  if (!options.json.empty()) file.emplace(options.json);
  if (options.threads > 0) set_num_threads(options.threads);
  std::optional<Ceilings> ceilings;
  if (!options.no_ceilings) ceilings = measure(device);
  size_t width = 4;
  for (const cases::Case& spec : picked) width = std::max(width, spec.name.size());
  print_head(device, ceilings, width);
  const InterruptGuard interrupt;
  std::vector<Timing> timings;
  bool failed = false;
  for (const cases::Case& spec : picked) {
    if (interrupt.interrupted()) break;
    timings.push_back(bench_case(spec, device, options, interrupt));
    failed |= !timings.back().failure.empty();
    print_timing(timings.back(), device, ceilings, width);
    flush_output();
  }
  if (file) file->write(to_json(timings, ceilings, device).dump(1) + "\n");
  if (interrupt.interrupted()) throw CLI::RuntimeError(kExitInterrupted);
  if (failed) throw CLI::RuntimeError(kExitFailed);
}

}  // namespace

void add_bench_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Check, then time the bench set of the table of cases");
  auto options = std::make_shared<BenchOptions>();
  command->add_option("--device", options->device, kDeviceHelp)->capture_default_str();
  command->add_option("--filter", options->filter, "Only cases whose name matches this regular expression");
  command->add_option("--threads", options->threads, "Threads of the CPU backend; 0: the default")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
  CLI::Option* reps = command->add_option("--reps", options->reps, "Runs of each case, instead of --min-time")
                          ->check(CLI::Range(1, 1000000));
  CLI::Option* min_time = command->add_option("--min-time", options->min_time,
                                              "Seconds to spend on each case at least; on CUDA, of device time");
  check_range(min_time, 0.0, 3600.0)->capture_default_str()->excludes(reps);
  command->add_option("--json", options->json, "Also write the results to this file")->check(refuse_empty);
  command->add_flag("--no-check", options->no_check, "Do not compare with the oracle first");
  command->add_flag("--no-ceilings", options->no_ceilings, "Do not measure the machine's ceilings");
  command->add_flag("--list", options->list, "Only list the names");
  command->callback([options] { bench(*options); });
}

}  // namespace attune::cli
