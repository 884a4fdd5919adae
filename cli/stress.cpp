// SPDX-License-Identifier: Apache-2.0
#include "stress.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attune/attune.hpp"
#include "case_filter.h"
#include "cases/backward_problem.h"
#include "cases/far_guards.h"
#include "cases/problem.h"
#include "cases/stress.h"
#include "commands.h"
#include "device.h"
#include "interrupt.h"
#include "progress.h"
#include "stopwatch.h"
#include "text.h"

namespace attune::cli {
namespace {

constexpr int kRepeats = 2;
constexpr struct {
  uint64_t of_cases;  // each so many-th case
  int repeats;
} kMany{50, 200}, kThousands{1000, 4000};  // the latter on GPUs, where a run takes microseconds
constexpr size_t kMostFailures = 5;        // then it ends
constexpr int kShrinkingRuns = 200;
constexpr uint64_t kFar = 5;  // each so many-th case lies between far guards
constexpr size_t kGiB = size_t{1} << 30, kFarBefore = 8 * kGiB, kNear = 2 * kGiB, kFarBehind = 16 * kGiB;

// Blocks that were released serve again: a case has about twenty, and a device takes its time for each.
class PooledMemory final : public cases::MemoryOver {
 public:
  using MemoryOver::MemoryOver;
  ~PooledMemory() override {
    for (auto& [bytes, block] : free_) below_.release(block);
  }
  void* allocate(size_t bytes) override {
    size_t rounded = 4096;
    while (rounded < bytes) rounded *= 2;
    void* block;
    if (const auto found = free_.find(rounded); found != free_.end()) {
      block = found->second;
      free_.erase(found);
    } else {
      block = below_.allocate(rounded);
    }
    sizes_[block] = rounded;
    return block;
  }
  void release(void* data) noexcept override { free_.emplace(sizes_.at(data), data); }

 private:
  std::multimap<size_t, void*> free_;
  std::unordered_map<void*, size_t> sizes_;
};

// Guards that 2^31 elements of four bytes before an output and 2^32 behind it lie in, where the device has the memory.
std::unique_ptr<cases::FarGuards> far_guards(cases::Memory& memory) {
  // Half of the device stays free for what is allocated beside them, by other processes, too.
  const cases::Memory::Room room = memory.room();
  if (!memory.launches() || room.free < kFarBefore + kNear + kFarBehind + room.total / 2) return nullptr;
  try {
    return std::make_unique<cases::FarGuards>(memory, kFarBefore, kNear, kFarBehind);
  } catch (const std::exception&) {
    return nullptr;  // another process has taken the memory since
  }
}

int64_t budget_of(const StressOptions& options, attune_device device) {
  if (options.budget > 0) return options.budget;
  return device.type == ATTUNE_DEVICE_CUDA ? 20000 : 3000;
}

int repeats_of(const StressOptions& options, uint64_t index, attune_device device) {
  if (options.repeats > 0) return options.repeats;
  if (!options.one.empty()) return kMany.repeats;
  for (const auto& [of_cases, repeats] : {kThousands, kMany}) {
    if (device.type == ATTUNE_DEVICE_CPU && repeats == kThousands.repeats) continue;
    if (index % of_cases == of_cases - 1) return repeats;
  }
  return kRepeats;
}

// Plans have their kernels compiled; several at a time.
void warm_backward(const std::vector<cases::Case>& specs, attune_device device) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u); ++t) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < specs.size(); i = next++) {
        try {
          // On the host: data are aligned there as on the device, and that is all that planning sees of them.
          const cases::BackwardProblem problem(specs[i], cases::host_memory(), cases::Forward::kLibrary);
          cases::BackwardCall call = problem.device();
          attune_plan* plan = nullptr;
          if (attune_attention_backward_plan(call.linked(), device, &plan) == ATTUNE_OK) attune_plan_destroy(plan);
        } catch (const std::exception&) {  // said when its turn comes
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What configurations of the planned operations need is compiled side by side before the time begins.
void warm_up(const StressOptions& options, const std::set<std::string>& planned, attune_device device) {
  std::vector<std::unique_ptr<cases::Problem>> problems;
  std::vector<attune_attention> descriptors;
  std::vector<cases::Case> backward;
  for (uint64_t index = 0; index < static_cast<uint64_t>(6 * options.configurations); ++index) {
    const cases::Case spec = cases::serving_case(options.seed, index, options.configurations, 2000);
    const std::string operation = cases::operation_name(spec);
    if (planned.count(operation) == 0) continue;
    if (spec.backward.on && cases::why_not_covered(spec, device).empty()) backward.push_back(spec);
    if (operation != "attention") continue;
    auto problem = std::make_unique<cases::Problem>(spec);
    descriptors.push_back(problem->device());
    if (supported(descriptors.back(), device).status == ATTUNE_UNSUPPORTED) {
      descriptors.pop_back();
    } else {
      problems.push_back(std::move(problem));
    }
  }
  std::vector<const attune_attention*> list;
  for (const attune_attention& a : descriptors) list.push_back(&a);
  warm(list, device);
  warm_backward(backward, device);
}

// Leaves out ever smaller groups of sequences as long as what is left fails.
cases::Case shrunk(const cases::Case& failing, cases::Memory& memory, int repeats) {
  if (failing.beam_width > 1) return failing;  // beams come by the request
  std::vector<size_t> kept(failing.seqlens_q.size());
  for (size_t b = 0; b < kept.size(); ++b) kept[b] = b;
  int runs = 0;
  for (size_t group = std::max<size_t>(1, kept.size() / 2);; group = std::max<size_t>(1, group / 2)) {
    for (size_t first = 0; first < kept.size() && kept.size() > 1 && runs < kShrinkingRuns;) {
      std::vector<size_t> fewer(kept.begin(), kept.begin() + static_cast<ptrdiff_t>(first));
      fewer.insert(fewer.end(), kept.begin() + static_cast<ptrdiff_t>(std::min(first + group, kept.size())),
                   kept.end());
      ++runs;
      if (!fewer.empty() && !cases::stress(cases::with_sequences(failing, fewer), memory, repeats).passed()) {
        kept = std::move(fewer);
      } else {
        first += group;
      }
    }
    if (group == 1 || runs >= kShrinkingRuns) break;
  }
  return cases::with_sequences(failing, kept);
}

// What may be left out of a case; false where it is not there.
struct Part {
  const char* name;
  bool (*leave_out)(cases::Case& c);
};

template <typename T>
bool set(T& field, T value) {
  return std::exchange(field, value) != value;
}

bool halve(std::vector<int64_t>& lengths) {
  bool any = false;
  for (int64_t& n : lengths) any |= set<int64_t>(n, (n + 1) / 2);
  return any;
}

// A row holds a query and its key: there are as many of them.
bool is_packed(const cases::Case& c) { return c.strides == cases::StrideMode::kPacked; }

constexpr Part kParts[] = {
    {"prologue", [](cases::Case& c) { return std::exchange(c.prologue, {}).any(); }},
    {"append", [](cases::Case& c) { return set(c.prologue.append, false); }},
    {"rope", [](cases::Case& c) { return std::exchange(c.prologue.rope, {}).dim > 0; }},
    {"ring", [](cases::Case& c) { return set<int64_t>(c.cache.ring_capacity, 0); }},
    {"window_left", [](cases::Case& c) { return set<int64_t>(c.window_left, -1); }},
    {"window_right", [](cases::Case& c) { return set<int64_t>(c.window_right, -1); }},
    {"mask_bits", [](cases::Case& c) { return set(c.mask_bits, 0); }},
    {"ranges", [](cases::Case& c) { return !std::exchange(c.ranges, {}).empty(); }},
    {"causal", [](cases::Case& c) { return set(c.causal, false); }},
    {"finished", [](cases::Case& c) { return !std::exchange(c.finished, {}).empty(); }},
    {"skip_decode", [](cases::Case& c) { return set(c.skip_decode, false); }},
    {"softcap", [](cases::Case& c) { return set(c.softcap, 0.0); }},
    {"alibi", [](cases::Case& c) { return set(c.alibi, 0); }},
    {"bias", [](cases::Case& c) { return set(c.bias, 0); }},
    {"new_token_bias", [](cases::Case& c) { return set(c.new_token_bias, false); }},
    {"t5", [](cases::Case& c) { return set<int64_t>(c.t5_buckets, 0); }},
    {"sinks", [](cases::Case& c) { return set<std::string>(c.sinks, ""); }},
    {"dlse", [](cases::Case& c) { return set(c.backward.dlse, false); }},
    {"gradients of fp32", [](cases::Case& c) { return set(c.backward.dtype, ATTUNE_DTYPE_NONE); }},
    {"seqused_kv", [](cases::Case& c) { return set(c.seqused, false); }},
    {"spread scores", [](cases::Case& c) { return set<std::string>(c.data, "normal"); }},
    {"second cache", [](cases::Case& c) { return std::exchange(c.extra, {}).topk > 0; }},
    {"page padding", [](cases::Case& c) { return set(c.cache.page_padding, false); }},
    {"v_page_table", [](cases::Case& c) { return set(c.cache.separate_v_table, false); }},
    {"shared prefix", [](cases::Case& c) { return set(c.cache.share_prefix, false); }},
    {"max_logits", [](cases::Case& c) { return set(c.max_logits, false); }},
    {"lse", [](cases::Case& c) { return !c.backward.on && set(c.lse, false); }},
    {"max_seqlen_*", [](cases::Case& c) { return set(c.max_seqlens, false); }},
    {"batch_invariant", [](cases::Case& c) { return set(c.batch_invariant, false); }},
    {"merge of half the parts", [](cases::Case& c) { return set<int64_t>(c.op.parts, (c.op.parts + 1) / 2); }},
    {"odd contents", [](cases::Case& c) { return set(c.op.any_contents, false); }},
    {"odd strides", [](cases::Case& c) { return set(c.strides, cases::StrideMode::kDense); }},
    {"half of the tokens",
     [](cases::Case& c) {
       const bool any = halve(c.seqlens_kv);
       return halve(c.seqlens_q) || any;
     }},
    {"half of the keys", [](cases::Case& c) { return !is_packed(c) && halve(c.seqlens_kv); }},
    {"half of the queries", [](cases::Case& c) { return !is_packed(c) && halve(c.seqlens_q); }},
};

// Leaves out what is not needed for the failure, and returns the names. What the same kernel does not take stays.
std::string leave_out_parts(cases::Case& failing, const std::string& kernel, cases::Memory& memory, int repeats) {
  std::string names;
  for (const Part& part : kParts) {
    cases::Case without = failing;
    if (!part.leave_out(without)) continue;
    const cases::StressReport report = cases::stress(without, memory, repeats);
    if (report.passed() || report.kernel != kernel) continue;
    failing = std::move(without);
    names += (names.empty() ? "" : ", ") + std::string(part.name);
  }
  return names;
}

// False once a kernel's fault has taken the device from the process.
bool answers(cases::Memory& memory) {
  try {
    cases::Buffer probe(memory, "probe", 16);
    probe.upload();
    probe.download();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

std::string lengths(const std::vector<int64_t>& all) {
  constexpr size_t kMost = 24;
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), kMost); ++i) text += (i > 0 ? ", " : "") + std::to_string(all[i]);
  return all.size() > kMost ? text + ", ..." : text;
}

void print_failure(const StressOptions& options, const cases::Case& spec, const cases::StressReport& report,
                   attune_device device, cases::Memory& memory, int repeats) {
  fmt::print("FAILED {} ({}, {})\n       {}\n", spec.name, report.kernel, counted(spec.batch(), "sequence"),
             report.failure);
  fmt::print("       attune check --stress-case {} --configurations {} --budget {} --repeats {} --device {}\n",
             spec.name.substr(spec.name.find('/') + 1), options.configurations, budget_of(options, device),
             std::max(repeats, kMany.repeats), device_name(device));
  std::fflush(stdout);
  if (!answers(memory)) return;
  cases::Case small = shrunk(spec, memory, repeats);
  const std::string parts = leave_out_parts(small, report.kernel, memory, repeats);
  fmt::print("       still fails with {}: queries {}; keys {}\n", counted(small.batch(), "sequence"),
             lengths(small.seqlens_q), lengths(small.seqlens_kv));
  if (!parts.empty()) fmt::print("       and without {}\n", parts);
  std::fflush(stdout);
}

struct Counts {
  int64_t cases = 0, runs = 0;
};

// What of the registry's kernels of attention and of its backward, and of the operations beside them, the device has
// and the expression selects.
std::map<std::string, Counts> selected_kernels(const std::regex& only, attune_device device) {
  std::map<std::string, Counts> kernels;
  for (const attune_kernel_info& kernel : attune::kernels()) {
    const std::string_view operation = kernel.operation;
    const bool drawn = operation == "attention" || operation == "attention_backward";
    if (drawn && kernel.device_type == device.type && std::regex_search(kernel.name, only)) kernels[kernel.name];
  }
  for (const char* name : cases::kOperations) {
    if (std::regex_search(name, only)) kernels[name];
  }
  return kernels;
}

[[noreturn]] void refuse_only(const std::string& expression, attune_device device) {
  std::string known;
  for (const auto& [name, counts] : selected_kernels(std::regex(""), device))
    known += (known.empty() ? "" : ", ") + name;
  throw UserError(fmt::format("--only is '{}', which matches none of {}", expression, known));
}

std::pair<uint64_t, uint64_t> seed_and_index(const std::string& text) {
  static const std::regex form("([0-9]{1,18}):([0-9]{1,18})");
  std::smatch parts;
  if (!std::regex_match(text, parts, form))
    throw UserError(fmt::format("--stress-case is '{}'; it takes SEED:INDEX, two whole numbers", text));
  return {std::stoull(parts[1]), std::stoull(parts[2])};
}

}  // namespace

void run_stress(const StressOptions& options, attune_device device) {
  std::optional<std::pair<uint64_t, uint64_t>> one;
  if (!options.one.empty()) one = seed_and_index(options.one);
  std::regex only;
  try {
    only = std::regex(options.only);
  } catch (const std::regex_error& e) {
    throw UserError(fmt::format("--only is '{}', which is no regular expression: {}", options.only, e.what()));
  }
  // Kernels that no case reached are to be seen.
  std::map<std::string, Counts> kernels = selected_kernels(only, device);
  if (kernels.empty()) refuse_only(options.only, device);
  PooledMemory pool(case_memory(device));
  const std::unique_ptr<cases::FarGuards> far = far_guards(case_memory(device));
  const int64_t budget = budget_of(options, device);
  std::set<std::string> planned;  // operations of which a kernel is selected
  for (const attune_kernel_info& kernel : attune::kernels()) {
    if (kernels.count(kernel.name) > 0) planned.insert(kernel.operation);
  }
  if (!one && device.type == ATTUNE_DEVICE_CUDA) warm_up(options, planned, device);
  if (one) kernels.clear();
  int64_t cases_run = 0;
  size_t failures = 0;
  const Stopwatch watch;
  const InterruptGuard interrupt;
  Progress progress("stress");
  const uint64_t seed = one ? one->first : options.seed;
  int64_t cases_far = 0;
  for (uint64_t index = one ? one->second : 0; one ? index == one->second : watch.seconds() < options.seconds;
       ++index) {
    const bool is_far = far && index % kFar == kFar - 1;
    cases::Memory& memory = is_far ? static_cast<cases::Memory&>(*far) : pool;
    if (interrupt.interrupted() || failures >= kMostFailures || (failures > 0 && !answers(memory))) break;
    const cases::Case spec = cases::serving_case(seed, index, options.configurations, budget);
    // What runs an operation is known before; of attention and its backward, once it is planned.
    const std::string operation = cases::operation_name(spec);
    if (cases::is_planned(spec) ? planned.count(operation) == 0 : !std::regex_search(operation, only)) continue;
    const int repeats = repeats_of(options, index, device);
    const auto wanted = [&](const std::string& kernel) { return std::regex_search(kernel, only); };
    const cases::StressReport report = cases::stress(spec, memory, repeats, wanted);
    if (report.passed() && (report.kernel.empty() || !wanted(report.kernel)))
      continue;  // no kernel takes it, or another
    ++cases_run;
    cases_far += is_far ? 1 : 0;
    Counts& counts = kernels[report.kernel.empty() ? "no kernel" : report.kernel];
    ++counts.cases;
    counts.runs += report.runs;
    if (!report.passed()) {
      ++failures;
      progress.finish();
      print_failure(options, spec, report, device, memory, repeats);
    }
    if (progress.due())
      progress.show(static_cast<int64_t>(watch.seconds()), static_cast<int64_t>(options.seconds),
                    counted(cases_run, "case"));
  }
  progress.finish();
  fmt::print("seed {} on {}: {} of {} well in {:.0f} s\n", seed, device_name(device),
             cases_run - static_cast<int64_t>(failures), counted(cases_run, "case"), watch.seconds());
  if (far)
    fmt::print("{} between {} GiB before and {} GiB behind that nobody touched\n", counted(cases_far, "case"),
               kFarBefore / kGiB, kFarBehind / kGiB);
  for (const auto& [kernel, counts] : kernels)
    fmt::print("  {:<18} {:>8} {} {:>9} {}\n", kernel, counts.cases, noun(counts.cases, "case"), counts.runs,
               noun(counts.runs, "run"));
  if (interrupt.interrupted()) throw CLI::RuntimeError(kExitInterrupted);
  if (cases_run == 0 && !one)
    fmt::print(
        "no batch that was drawn is for these; more seconds draw more batches, more --configurations than {} more "
        "kinds\n",
        options.configurations);
  if (failures > 0 || cases_run == 0) throw CLI::RuntimeError(kExitFailed);
}

}  // namespace attune::cli
