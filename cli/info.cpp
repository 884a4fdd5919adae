// SPDX-License-Identifier: Apache-2.0
// attune info: devices, ceilings, kernels and the support matrix.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "attune/attune.hpp"
#include "ceilings.h"
#include "commands.h"
#include "cuda_bench.h"
#include "device.h"
#include "text.h"

namespace attune::cli {
namespace {

using nlohmann::ordered_json;
using Axes = std::vector<std::pair<std::string, std::string>>;

struct InfoOptions {
  bool json = false, matrix = false, features = false, no_ceilings = false;
};

// "axis: value, value; axis: ..." as pairs.
Axes parse_coverage(std::string_view text) {
  Axes axes;
  while (!text.empty()) {
    const size_t end = std::min(text.find("; "), text.size());
    const std::string_view part = text.substr(0, end);
    const size_t colon = std::min(part.find(": "), part.size());
    axes.emplace_back(part.substr(0, colon), colon < part.size() ? part.substr(colon + 2) : std::string_view());
    text.remove_prefix(std::min(end + 2, text.size()));
  }
  return axes;
}

const char* device_type_name(int32_t type) { return type == ATTUNE_DEVICE_CUDA ? "CUDA" : "CPU"; }

// The axes that any of the kernels has, each once.
std::vector<std::string> axis_names(const std::vector<Axes>& kernels) {
  std::vector<std::string> names;
  for (const Axes& axes : kernels) {
    for (const auto& [axis, values] : axes)
      if (std::find(names.begin(), names.end(), axis) == names.end()) names.push_back(axis);
  }
  return names;
}

// One column for each kernel, one row for each axis that any of them has.
void print_matrix() {
  const std::vector<attune_kernel_info> infos = kernels();
  std::vector<Axes> columns;
  std::string head = "| axis |", rule = "|---|";
  for (const attune_kernel_info& info : infos) {
    head += fmt::format(" {} `{}` |", device_type_name(info.device_type), info.name);
    rule += "---|";
    columns.push_back(parse_coverage(info.coverage));
  }
  fmt::print("{}\n{}\n", head, rule);
  for (const std::string& name : axis_names(columns)) {
    std::string line = fmt::format("| {} |", name);
    for (const Axes& axes : columns) {
      const auto at = std::find_if(axes.begin(), axes.end(), [&](const auto& axis) { return axis.first == name; });
      line += fmt::format(" {} |", at == axes.end() ? "" : at->second);
    }
    fmt::print("{}\n", line);
  }
}

// "1..576" as numbers.
std::optional<std::pair<int64_t, int64_t>> parse_range(const std::string& text) {
  std::pair<int64_t, int64_t> range;
  const size_t dots = text.find("..");
  if (dots == std::string::npos) return std::nullopt;
  const auto parse = [](std::string_view digits, int64_t& x) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), x);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  const std::string_view all = text;
  if (!parse(all.substr(0, dots), range.first) || !parse(all.substr(dots + 2), range.second)) return std::nullopt;
  return range;
}

// What a device type's kernels take of an axis together: each value once; the widest range, then numbers beyond it.
std::string union_of(const std::vector<Axes>& kernels, const std::string& name) {
  std::vector<std::string> values;
  std::optional<std::pair<int64_t, int64_t>> widest;
  for (const Axes& axes : kernels) {
    const auto at = std::find_if(axes.begin(), axes.end(), [&](const auto& axis) { return axis.first == name; });
    if (at == axes.end()) continue;
    if (at->second == "any") return at->second;
    if (const auto range = parse_range(at->second)) {
      if (!widest) widest = range;
      widest = {std::min(widest->first, range->first), std::max(widest->second, range->second)};
      continue;
    }
    std::istringstream list(at->second);
    for (std::string value; std::getline(list >> std::ws, value, ',');)
      if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  if (widest) {
    const auto within = [&](const std::string& number) {
      return parse_range(number + ".." + number).value_or(*widest).second <= widest->second;
    };
    values.erase(std::remove_if(values.begin(), values.end(), within), values.end());
    values.insert(values.begin(), fmt::format("{}..{}", widest->first, widest->second));
  }
  return fmt::format("{}", fmt::join(values, ", "));
}

// One column for each type of device, one row for each axis.
void print_features() {
  std::vector<Axes> all, of_cpu, of_cuda;
  for (const attune_kernel_info& info : kernels()) {
    all.push_back(parse_coverage(info.coverage));
    (info.device_type == ATTUNE_DEVICE_CUDA ? of_cuda : of_cpu).push_back(all.back());
  }
  fmt::print("| feature | CPU | CUDA (Hopper) |\n|---|---|---|\n");
  for (const std::string& name : axis_names(all)) {
    const std::string cpu = union_of(of_cpu, name), cuda = union_of(of_cuda, name);
    fmt::print("| {} | {} | {} |\n", name, cpu, cuda == cpu ? "the same" : cuda);
  }
}

// "name: text" lines as pairs.
Axes cuda_lines() {
  Axes lines;
  std::istringstream text(describe_cuda());
  for (std::string line; std::getline(text, line);) {
    const size_t colon = std::min(line.find(": "), line.size());
    lines.emplace_back(line.substr(0, colon), colon < line.size() ? line.substr(colon + 2) : "");
  }
  return lines;
}

// Read bandwidth in GB/s of each GPU that can be used.
std::vector<std::pair<std::string, double>> measure_gpus() {
  std::vector<std::pair<std::string, double>> reads;
  for (const attune_device_info& d : devices()) {
    if (d.device.type == ATTUNE_DEVICE_CUDA)
      reads.emplace_back(device_name(d.device), measure_cuda_read(d.device.index));
  }
  return reads;
}

ordered_json to_json(const std::optional<Ceilings>& ceilings) {
  ordered_json j;
  j["version"] = std::string(version());
  j["devices"] = ordered_json::array();
  for (const attune_device_info& d : devices()) {
    j["devices"].push_back({{"device", device_name(d.device)},
                            {"name", d.name},
                            {"isa", d.isa},
                            {"num_units", d.num_units},
                            {"memory_bytes", d.memory_bytes}});
  }
  for (const auto& [name, text] : cuda_lines()) j["cuda"][name] = text;
  j["threads"] = num_threads();
  if (ceilings) {
    j["ceilings"] = {{"fma_gflops_1", ceilings->fma_gflops_1},
                     {"fma_gflops_all", ceilings->fma_gflops_all},
                     {"read_gbps_all", ceilings->read_gbps_all},
                     {"threads", ceilings->threads}};
    for (const auto& [name, gbps] : measure_gpus()) j["ceilings"][name] = {{"read_gbps", gbps}};
  }
  j["kernels"] = ordered_json::array();
  for (const attune_kernel_info& k : kernels()) {
    ordered_json coverage;
    for (const auto& [axis, values] : parse_coverage(k.coverage)) coverage[axis] = values;
    j["kernels"].push_back({{"name", k.name},
                            {"operation", k.operation},
                            {"device", device_type_name(k.device_type)},
                            {"coverage", coverage}});
  }
  return j;
}

// "  name    text", which goes on below itself.
void print_item(const std::string& name, size_t width, const std::string& text) {
  fmt::print("{}\n", wrapped(fmt::format("  {:<{}} {}", name, width, text), width + 3));
}

void print_text(const std::optional<Ceilings>& ceilings) {
  fmt::print("attune {}\n\ndevices\n", version());
  for (const attune_device_info& d : devices()) {
    print_item(device_name(d.device), 7,
               fmt::format("{}, {}, {}, {:.1f} GiB", d.name, d.isa,
                           counted(d.num_units, d.device.type == ATTUNE_DEVICE_CUDA ? "multiprocessor" : "thread"),
                           static_cast<double>(d.memory_bytes) / (1 << 30)));
  }
  fmt::print("\nCUDA\n");
  for (const auto& [name, text] : cuda_lines()) print_item(name, 11, text);
  if (ceilings) {
    fmt::print("\nceilings of the CPU, measured now\n");
    fmt::print("  fp32 FMA  {:.1f} GFLOP/s on 1 thread, {:.1f} on {}\n", ceilings->fma_gflops_1,
               ceilings->fma_gflops_all, ceilings->threads);
    fmt::print("  read      {:.1f} GB/s on {}\n", ceilings->read_gbps_all, counted(ceilings->threads, "thread"));
    for (const auto& [name, gbps] : measure_gpus())
      fmt::print("\nceiling of {}, measured now\n  read      {:.0f} GB/s\n", name, gbps);
  }
  fmt::print("\nkernels\n");
  for (const attune_kernel_info& k : kernels()) {
    fmt::print("  {} ({}, {})\n", k.name, k.operation, device_type_name(k.device_type));
    for (const auto& [axis, values] : parse_coverage(k.coverage)) print_item("  " + axis, 15, values);
  }
}

}  // namespace

void add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Show devices, measured ceilings and kernels");
  auto options = std::make_shared<InfoOptions>();
  CLI::Option* json = command->add_flag("--json", options->json, "As JSON");
  CLI::Option* matrix =
      command->add_flag("--matrix", options->matrix, "Only what each kernel takes, as a Markdown table")
          ->excludes(json);
  command->add_flag("--features", options->features, "Only what each type of device takes, as a Markdown table")
      ->excludes(json)
      ->excludes(matrix);
  command->add_flag("--no-ceilings", options->no_ceilings, "Do not measure the machine's ceilings");
  command->callback([options] {
    if (options->matrix) return print_matrix();
    if (options->features) return print_features();
    std::optional<Ceilings> ceilings;
    if (!options->no_ceilings) {
      say("measuring the machine's ceilings\n");
      ceilings = measure_ceilings(num_threads());
    }
    if (options->json) {
      fmt::print("{}\n", to_json(ceilings).dump(1));
    } else {
      print_text(ceilings);
    }
  });
}

}  // namespace attune::cli
