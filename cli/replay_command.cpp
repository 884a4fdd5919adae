// SPDX-License-Identifier: Apache-2.0
// attune replay, attune demo.
#include <fmt/format.h>

#include <memory>
#include <sstream>

#include "commands.h"
#include "device.h"
#include "embedded.h"
#include "files.h"
#include "replay.h"
#include "report.h"
#include "summary.h"
#include "text.h"

namespace attune::cli {
namespace {

void replay_and_report(const Trace& trace, const ReplayOptions& options) {
  prepare_output(options.output);
  const ReplayResult result = replay(trace, options);
  const Summary summary = summarize(result);
  fmt::print("{}", format_table(table_rows(result, summary)));
  fmt::print("report: {}\n", write_report(result, summary));
  flush_output();
  if (result.verify.first_mismatch) {
    say("attune: {}\n", result.verify.first_mismatch->text());
    throw CLI::RuntimeError(kExitFailed);
  }
  if (result.interrupted) throw CLI::RuntimeError(kExitInterrupted);
}

void add_common_options(CLI::App& command, ReplayOptions& o) {
  command.add_option("--model", o.model, "Model name (see attune models) or a .json file")->capture_default_str();
  command.add_option("--device", o.device, kDeviceHelp)->capture_default_str();
  command.add_option("--threads", o.threads, "Threads of the CPU backend; 0: the default")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command
      .add_option("--verify", o.verify,
                  "Rows of each call to check against the oracle, or a share such as 0.5%; 0: none")
      ->capture_default_str();
  command.add_option("--seed", o.seed, "Seed of the synthetic data and of the sample")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, kMostSeed));
  command.add_option("--output", o.output, "Directory for report.json and report.html")
      ->check(refuse_empty)
      ->capture_default_str();
  command.add_flag("--no-ceilings", o.no_ceilings, "Do not measure the machine's ceilings first");
  command.add_flag("--no-plots", o.no_plots, "report.html without plots");
}

}  // namespace

void add_replay_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("replay", "Replay a serving trace through one layer of a model");
  auto options = std::make_shared<ReplayOptions>();
  auto path = std::make_shared<std::string>();
  ReplayOptions& o = *options;
  const auto whole = [&](const char* name, int64_t& value, int64_t least, int64_t most, const char* text) {
    command->add_option(name, value, text)->check(CLI::Range(least, most))->capture_default_str();
  };
  constexpr int64_t kMany = int64_t{1} << 30;
  command->add_option("trace", *path, "CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens")->required();
  add_common_options(*command, o);
  whole("--limit", o.limit, 0, kMany, "Only the first N requests; 0: all");
  whole("--max-batch", o.max_batch, 1, 1 << 20, "Sequences that run at a time");
  whole("--chunk", o.chunk, 1, 1 << 24, "Prompt tokens in a step, beside one token of each sequence that decodes");
  command->add_option("--kv-dtype", o.kv_dtype, "bf16, fp16, fp32, e4m3, int8 or mla656; default: the model's");
  whole("--page-size", o.page_size, 1, 1 << 16, "Tokens in a page of the KV cache");
  whole("--pages", o.num_pages, 0, kMany, "Pages of the KV cache; 0: what the trace needs, up to 1 GiB");
  command->add_option("--phase", o.phase, "all, or decode: only the steps that generate, over a cache of random keys")
      ->check(CLI::IsMember({"all", "decode"}))
      ->capture_default_str();
  CLI::Option* scale =
      command->add_option("--time-scale", o.time_scale, "Requests arrive so many times as fast as in the trace");
  check_range(scale, 1e-6, 1e6)->capture_default_str();
  command->add_flag("--no-arrival", o.no_arrival, "All requests are there at the start")->excludes(scale);
  whole("--max-context", o.max_context, 0, kMany, "Clamp requests to so many tokens in all; 0: as they are");
  whole("--tensor-parallel", o.tensor_parallel, 1, 1 << 10, "Run the share of the heads that one of N devices holds");
  command->callback([options, path] {
    if (options->max_context == 1) {
      throw UserError("--max-context is 1; it must be at least 2, a prompt token and one to generate");
    }
    replay_and_report(read_trace_file(*path, options->limit), *options);
  });
}

void add_demo_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("demo", "Replay the built-in trace: under a minute on a laptop");
  auto options = std::make_shared<ReplayOptions>();
  options->max_batch = 16;
  options->chunk = 256;
  add_common_options(*command, *options);
  command->callback([options] {
    std::istringstream text{std::string(embedded_file("data/demo.csv"))};
    replay_and_report(read_trace(text, "demo.csv"), *options);
  });
}

}  // namespace attune::cli
