// SPDX-License-Identifier: Apache-2.0
// attune check: the table of cases on a device, every element against the float64 oracle.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attune/attune.hpp"
#include "case_filter.h"
#include "cases/backward_problem.h"
#include "cases/compare.h"
#include "cases/indexer_problem.h"
#include "commands.h"
#include "device.h"
#include "interrupt.h"
#include "progress.h"
#include "stopwatch.h"
#include "stress.h"
#include "text.h"

namespace attune::cli {
namespace {

using nlohmann::ordered_json;

struct CheckOptions {
  std::string device = "auto";
  std::string filter;
  int random = 300;
  bool list = false, json = false;
  StressOptions stress;
};

struct Failure {
  std::string name, what;
};

struct CheckResult {
  std::vector<Failure> failures;
  int64_t num_cases = 0, num_elements = 0;
  std::string worst_case;
  cases::Element worst;
  double seconds = 0;
  bool interrupted = false;
};

// Cases that no kernel of the device takes, and what they ask for: a case may count for several reasons.
struct NotCovered {
  int64_t num_cases = 0;
  std::map<std::string, int64_t> reasons;
};

// The parts of "... which lacks mask: bits; score: bias table, and does not take float32 caches".
void count_reasons(std::string_view message, NotCovered& not_covered) {
  for (const std::string_view mark : {"which lacks ", "which does not take "}) {
    if (const size_t at = message.find(mark); at != message.npos) message.remove_prefix(at + mark.size());
  }
  constexpr std::string_view kAlso = ", and does not take ", kNext = "; ";
  while (!message.empty()) {
    const size_t also = message.find(kAlso), end = std::min({message.find(kNext), also, message.size()});
    ++not_covered.reasons[std::string(message.substr(0, end))];
    message.remove_prefix(std::min(end + (end == also ? kAlso : kNext).size(), message.size()));
  }
}

bool has_indexer(attune_device device, const cases::Case& spec) {
  const cases::IndexerProblem problem(spec);
  const attune_indexer op = problem.host(ATTUNE_INDEXER_TOPK);
  size_t bytes = 0;
  return attune_indexer_workspace_size(&op, device, &bytes) != ATTUNE_UNSUPPORTED;
}

Support supports_backward(attune_device device, const cases::Case& spec) {
  cases::BackwardCall call = cases::BackwardProblem(spec).device();  // for planning, which looks at no data
  return supported(*call.linked(), device);
}

// Leaves the cases that the device takes, and has their kernels compiled side by side.
NotCovered keep_covered(std::vector<cases::Case>& picked, attune_device device) {
  NotCovered not_covered;
  std::vector<cases::Case> covered;
  std::vector<attune_attention> descriptors;
  for (cases::Case& spec : picked) {
    if (spec.indexer.topk > 0) {
      if (has_indexer(device, spec)) {
        covered.push_back(std::move(spec));
      } else {
        ++not_covered.num_cases;
        ++not_covered.reasons["the indexer"];
      }
      continue;
    }
    if (spec.backward.on) {
      const Support support = supports_backward(device, spec);
      if (support.status == ATTUNE_UNSUPPORTED) {
        ++not_covered.num_cases;
        count_reasons(support.reason, not_covered);
      } else {
        covered.push_back(std::move(spec));
      }
      continue;
    }
    // On the host: data are aligned there as on the device, and that is all that planning sees of them.
    const cases::Problem problem(spec);
    descriptors.push_back(problem.device());
    const Support support = supported(descriptors.back(), device);
    if (support.status == ATTUNE_UNSUPPORTED) {
      ++not_covered.num_cases;
      count_reasons(support.reason, not_covered);
      descriptors.pop_back();
    } else {
      covered.push_back(std::move(spec));
    }
  }
  std::vector<const attune_attention*> list;
  for (const attune_attention& a : descriptors) list.push_back(&a);
  warm(list, device);
  picked = std::move(covered);
  return not_covered;
}

CheckResult run_cases(const std::vector<cases::Case>& picked, cases::Memory& memory, bool quiet) {
  CheckResult result;
  const Stopwatch watch;
  const InterruptGuard interrupt;
  Progress progress("checking");
  for (const cases::Case& spec : picked) {
    if (interrupt.interrupted()) {
      result.interrupted = true;
      break;
    }
    cases::Report report;
    try {
      report = cases::run_case(spec, memory);
    } catch (const std::exception& e) {
      report.failure = e.what();
    }
    ++result.num_cases;
    result.num_elements += report.num_elements;
    if (!report.passed()) {
      result.failures.push_back({spec.name, report.failure});
      if (!quiet) {
        progress.finish();
        fmt::print("FAILED {}\n{}\n", spec.name, wrapped("       " + report.failure, 7));
      }
    } else if (report.worst.ratio > result.worst.ratio) {
      result.worst = report.worst;
      result.worst_case = spec.name;
    }
    if (!quiet && progress.due()) progress.show(result.num_cases, static_cast<int64_t>(picked.size()), spec.name);
  }
  progress.finish();
  result.seconds = watch.seconds();
  return result;
}

ordered_json to_json(const CheckResult& result, const NotCovered& not_covered, const std::string& device) {
  ordered_json j = {{"device", device},
                    {"num_cases", result.num_cases},
                    {"num_failed", result.failures.size()},
                    {"num_not_covered", not_covered.num_cases},
                    {"not_covered", not_covered.reasons},
                    {"num_elements", result.num_elements},
                    {"seconds", result.seconds}};
  j["failures"] = ordered_json::array();
  for (const Failure& failure : result.failures)
    j["failures"].push_back({{"name", failure.name}, {"failure", failure.what}});
  if (!result.worst_case.empty()) {
    j["worst"] = {{"case", result.worst_case},         {"where", result.worst.where},
                  {"expected", result.worst.expected}, {"actual", result.worst.actual},
                  {"bound", result.worst.bound},       {"share_of_bound", result.worst.ratio}};
  }
  return j;
}

void print_not_covered(const NotCovered& not_covered, const std::string& device) {
  if (not_covered.num_cases == 0) return;
  const bool one = not_covered.num_cases == 1;
  fmt::print("{} {} not covered by a kernel of {}; {} for\n", counted(not_covered.num_cases, "case"),
             one ? "is" : "are", device, one ? "it asks" : "they ask");
  std::vector<std::pair<int64_t, std::string>> reasons;
  for (const auto& [reason, count] : not_covered.reasons) reasons.emplace_back(count, reason);
  std::stable_sort(reasons.begin(), reasons.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [count, reason] : reasons) fmt::print("{}\n", wrapped(fmt::format("  {:>5}  {}", count, reason), 9));
}

void print_text(const CheckResult& result, const std::string& device) {
  fmt::print("{} of {} inside {} bounds on {}: {} in {:.1f} s\n",
             result.num_cases - static_cast<int64_t>(result.failures.size()), counted(result.num_cases, "case"),
             noun(result.num_cases, "its", "their"), device, counted(result.num_elements, "element"), result.seconds);
  if (!result.worst_case.empty()) {
    const cases::Element& worst = result.worst;
    fmt::print("{}\n",
               wrapped(fmt::format("closest to its bound: {} of {}: {:.6g}, exactly {:.6g}, {:.0f} % of the bound",
                                   worst.where, result.worst_case, worst.actual, worst.expected, 100 * worst.ratio),
                       2));
  }
}

// An option of the other kind of check would have no effect.
void refuse_other_options(const CLI::App& command) {
  const bool stress = command.count("--stress") + command.count("--stress-case") > 0;
  for (const char* name : {"--seed", "--only", "--configurations", "--budget", "--repeats"}) {
    if (!stress && command.count(name) > 0)
      throw UserError(fmt::format("{} is an option of --stress and --stress-case, and neither is given", name));
  }
  for (const char* name : {"--filter", "--random", "--list", "--json"}) {
    if (stress && command.count(name) > 0)
      throw UserError(
          fmt::format("{} is an option of the table of cases; --stress and --stress-case do not run it", name));
  }
}

void check(const CheckOptions& options) {
  if (options.stress.seconds > 0 || !options.stress.one.empty()) {
    run_stress(options.stress, parse_device(options.device));
    return;
  }
  std::vector<cases::Case> all = cases::all_cases();
  for (const auto* more : {&cases::indexer_cases(), &cases::backward_cases()})
    all.insert(all.end(), more->begin(), more->end());
  for (int seed = 0; seed < options.random; ++seed) all.push_back(cases::random_case(static_cast<uint64_t>(seed)));
  std::vector<cases::Case> picked = filter_cases(all, options.filter);
  if (options.list) {
    for (const cases::Case& spec : picked) fmt::print("{}\n", spec.name);
    return;
  }
  const attune_device device = parse_device(options.device);
  NotCovered not_covered;
  if (device.type != ATTUNE_DEVICE_CPU) not_covered = keep_covered(picked, device);
  const CheckResult result = run_cases(picked, case_memory(device), options.json);
  const std::string name = device_name(device);
  if (options.json) {
    fmt::print("{}\n", to_json(result, not_covered, name).dump(1));
  } else {
    print_not_covered(not_covered, name);
    print_text(result, name);
  }
  if (result.interrupted) throw CLI::RuntimeError(kExitInterrupted);
  // A device on which nothing was checked is not a device that passed.
  if (!result.failures.empty() || picked.empty()) throw CLI::RuntimeError(kExitFailed);
}

}  // namespace

void add_check_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("check", "Check every case of the table against the float64 oracle");
  auto options = std::make_shared<CheckOptions>();
  command->add_option("--device", options->device, kDeviceHelp)->capture_default_str();
  command->add_option("--filter", options->filter, "Only cases whose name matches this regular expression");
  command->add_option("--random", options->random, "Number of random cases beside the table")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000000));
  command->add_flag("--list", options->list, "Only list the names");
  command->add_flag("--json", options->json, "Report as JSON");
  StressOptions& stress = options->stress;
  check_range(command->add_option("--stress", stress.seconds,
                                  "Instead, so many seconds of random batches as servers have them"),
              0.1, 1e6);
  command->add_option("--seed", stress.seed, "Of --stress: other seeds, other batches")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, kMostSeed));
  command->add_option("--only", stress.only, "Of --stress: kernels and operations that match this regular expression");
  command->add_option("--configurations", stress.configurations, "Of --stress: how many kernels are compiled for")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--budget", stress.budget, "Of --stress: tokens of the largest batches; 0: by the device")
      ->capture_default_str()
      ->check(CLI::Range(0, 100000000));
  command
      ->add_option("--repeats", stress.repeats,
                   "Of --stress: runs of each batch that must give the same bits; 0: 200 of each 50th batch, on a GPU "
                   "4000 of each 1000th, 2 of the others")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000000));
  command->add_option("--stress-case", stress.one, "One batch of --stress, as a failure names it: SEED:INDEX");
  command->callback([options, command] {
    refuse_other_options(*command);
    check(*options);
  });
}

}  // namespace attune::cli
