// SPDX-License-Identifier: Apache-2.0
#include "replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "attune/attune.hpp"
#include "cuda_bench.h"
#include "device.h"
#include "interrupt.h"
#include "kv_pool.h"
#include "layer_runner.h"
#include "progress.h"
#include "stopwatch.h"
#include "text.h"
#include "user_error.h"

namespace attune::cli {
namespace {

constexpr int64_t kDefaultPoolBytes = int64_t{1} << 30;

// The requests as they are replayed: arrival scaled, lengths clamped.
std::vector<TraceRequest> prepare_requests(const Trace& trace, const ReplayOptions& options) {
  std::vector<TraceRequest> requests = trace.requests;
  for (TraceRequest& r : requests) {
    r.arrival = options.no_arrival ? 0 : r.arrival / options.time_scale;
    if (options.max_context > 0 && r.prompt_tokens + r.output_tokens > options.max_context) {
      r.output_tokens = std::min(r.output_tokens, options.max_context / 2);
      r.prompt_tokens = std::min(r.prompt_tokens, options.max_context - r.output_tokens);
    }
  }
  return requests;
}

int64_t page_bytes(const Model& model, KvDtype kv, int64_t page_size) {
  return (model.kv_bytes_per_token(kv) + model.index_bytes_per_token()) * page_size;
}

// Enough for the largest requests at once, within the default size of the pool; never less than the largest request
// alone.
int64_t default_pages(const std::vector<TraceRequest>& requests, const SchedulerOptions& options,
                      int64_t bytes_of_page) {
  std::vector<int64_t> needed;
  for (const TraceRequest& r : requests) needed.push_back(Scheduler::pages_needed(r, options));
  std::sort(needed.begin(), needed.end(), std::greater<>());
  int64_t pages = 0;
  for (size_t i = 0; i < needed.size() && static_cast<int64_t>(i) < options.max_batch; ++i) pages += needed[i];
  return std::max(needed[0], std::min(pages, kDefaultPoolBytes / bytes_of_page));
}

RunnerLimits make_limits(const std::vector<TraceRequest>& requests, const SchedulerOptions& options, bool decode_only) {
  RunnerLimits limits;
  limits.max_batch = std::min(options.max_batch, static_cast<int64_t>(requests.size()));
  limits.page_size = options.page_size;
  limits.num_pages = options.num_pages;
  int64_t prompts = 0, tokens = 0;
  for (const TraceRequest& r : requests) {
    const int64_t generated = std::max<int64_t>(r.output_tokens, 1);
    limits.max_seqlen = std::max(limits.max_seqlen, (options.encoder_decoder ? 0 : r.prompt_tokens) + generated);
    limits.max_prompt = std::max(limits.max_prompt, r.prompt_tokens);
    prompts += r.prompt_tokens;
    tokens += r.prompt_tokens + generated;
  }
  // A sequence that was preempted computes its generated tokens again as if they were prompt.
  limits.decode_only = decode_only;
  limits.max_rows = decode_only ? limits.max_batch : std::min(options.chunk, tokens) + limits.max_batch;
  if (options.encoder_decoder) limits.max_encode_rows = std::min(prompts, std::max(options.chunk, limits.max_prompt));
  return limits;
}

// The tokens of a step that were generated: its prompts take no time and leave the cache as it is.
Step decode_part(const Step& step) {
  Step decode;
  for (Chunk chunk : step.chunks) {
    if (chunk.prefill) continue;
    chunk.encode = 0;
    decode.chunks.push_back(chunk);
    decode.tokens += chunk.tokens;
    decode.decode_tokens += chunk.tokens;
  }
  return decode;
}

void note_long_requests(const Model& model, const std::vector<TraceRequest>& requests) {
  const auto is_long = [&](const TraceRequest& r) { return r.prompt_tokens + r.output_tokens > model.max_context; };
  if (const auto count = std::count_if(requests.begin(), requests.end(), is_long); count > 0) {
    say("note: {} of {} {} the {} that {} was trained for; --max-context {} clamps {}\n", count,
        counted(static_cast<int64_t>(requests.size()), "request"), noun(count, "exceeds", "exceed"),
        counted(model.max_context, "token"), model.name, model.max_context, noun(count, "it", "them"));
  }
}

class Replay {
 public:
  Replay(const Trace& trace, const ReplayOptions& options);
  ReplayResult run();

 private:
  void say_start() const;
  std::unique_ptr<LayerRunner> make_runner(attune_device device) const;
  bool decode_only() const { return result_.options.phase == "decode"; }
  void run_step(const Step& whole, double& now);
  void show_progress();

  InterruptGuard interrupt_;  // from the start: setting up takes a while too
  ReplayResult result_;
  std::vector<TraceRequest> requests_;
  SchedulerOptions scheduler_options_;
  std::unique_ptr<LayerRunner> runner_;
  Verifier verifier_;
  std::optional<Scheduler> scheduler_;
  Progress progress_{"replay"};
  int64_t total_tokens_ = 0, done_tokens_ = 0;
};

Replay::Replay(const Trace& trace, const ReplayOptions& options)
    : requests_(prepare_requests(trace, options)), verifier_(parse_verify(options.verify), options.seed + 1) {
  result_.options = options;
  result_.trace_name = trace.name;
  result_.model = shard(load_model(options.model), options.tensor_parallel);
  const Model& model = result_.model;
  result_.kv_dtype = options.kv_dtype.empty() ? model.kv_dtype : kv_dtype_from_name(options.kv_dtype);
  require_kv_dtype(model, result_.kv_dtype);
  const attune_device device = parse_device(options.device);
  set_num_threads(static_cast<int32_t>(options.threads));
  result_.threads = num_threads();
  result_.device = device_info(device);

  scheduler_options_ = {
      options.max_batch, options.chunk, options.page_size, options.num_pages, model.kind == ModelKind::kEncoderDecoder,
      options.seed};
  const int64_t bytes_of_page = page_bytes(model, result_.kv_dtype, options.page_size);
  if (options.num_pages == 0) {
    scheduler_options_.num_pages = default_pages(requests_, scheduler_options_, bytes_of_page);
  }
  result_.num_pages = scheduler_options_.num_pages;
  result_.pool_bytes = result_.num_pages * bytes_of_page;
  if (const int64_t most = result_.device.memory_bytes; most > 0 && result_.num_pages > most / bytes_of_page) {
    throw UserError(fmt::format("{} of {} {} {:.1f} GiB and {} has {:.1f}", counted(result_.num_pages, "page"),
                                counted(options.page_size, "token"), noun(result_.num_pages, "takes", "take"),
                                static_cast<double>(result_.num_pages) * bytes_of_page / (1 << 30), device_name(device),
                                static_cast<double>(most) / (1 << 30)));
  }
  result_.num_requests = static_cast<int64_t>(requests_.size());
  scheduler_.emplace(requests_, scheduler_options_);
  for (const TraceRequest& r : requests_) total_tokens_ += r.prompt_tokens + std::max<int64_t>(r.output_tokens, 1) - 1;
  say_start();
  note_long_requests(model, requests_);
  runner_ = make_runner(device);
  result_.plans = runner_->describe();
}

std::unique_ptr<LayerRunner> Replay::make_runner(attune_device device) const {
  const ReplayOptions& o = result_.options;
  try {
    return make_layer_runner(
        {result_.model, result_.kv_dtype, make_limits(requests_, scheduler_options_, decode_only()), device, o.seed});
  } catch (const Error& e) {
    if (e.status() != ATTUNE_UNSUPPORTED || decode_only()) throw;
    throw UserError(
        fmt::format("{} has no kernel for all of this: {}; --phase decode replays only the steps that "
                    "generate, over a cache of random keys, and --device cpu replays everything",
                    device_name(device), e.what()));
  }
}

void Replay::say_start() const {
  const Model& m = result_.model;
  say("{}: {}, {} (one of {}){}, {} cache of {} of {} ({:.0f} MiB), on {} ({}, {})\n", result_.trace_name,
      counted(result_.num_requests, "request"), m.name, counted(m.num_layers, "layer"),
      decode_only() ? ", decode steps alone" : "", kv_dtype_name(result_.kv_dtype), counted(result_.num_pages, "page"),
      counted(result_.options.page_size, "token"), static_cast<double>(result_.pool_bytes) / (1 << 20),
      device_name(result_.device.device), result_.device.isa, units_text(result_));
}

void Replay::show_progress() {
  if (!progress_.due()) return;
  progress_.show(
      std::min(done_tokens_, total_tokens_), total_tokens_,
      fmt::format("{}/{}, {}, {} running", scheduler_->num_finished(), counted(result_.num_requests, "request"),
                  counted(static_cast<int64_t>(result_.steps.size()), "step"), scheduler_->num_running()));
}

void Replay::run_step(const Step& whole, double& now) {
  const Step step = decode_only() ? decode_part(whole) : whole;
  done_tokens_ += whole.prefill_tokens + whole.decode_tokens;
  if (step.empty()) return scheduler_->finish(whole, now);
  StepRecord record;
  record.start = now;
  record.sequences = static_cast<int64_t>(step.chunks.size());
  record.prefill_tokens = step.prefill_tokens;
  record.decode_tokens = step.decode_tokens;
  record.pages_used = scheduler_->pages().num_used();
  StepResult done = runner_->run(step, static_cast<int64_t>(result_.steps.size()), verifier_);
  record.seconds = done.seconds;
  record.work = done.work;
  record.layer_kind = std::move(done.layer_kind);
  now += record.seconds * static_cast<double>(result_.model.num_layers);
  scheduler_->finish(whole, now);
  result_.steps.push_back(std::move(record));
}

ReplayResult Replay::run() {
  if (!result_.options.no_ceilings) {
    say("measuring the machine's ceilings\n");
    if (result_.device.device.type == ATTUNE_DEVICE_CPU) {
      result_.ceilings = measure_ceilings(result_.threads);
    } else {
      result_.ceilings = Ceilings{0, 0, measure_cuda_read(result_.device.device.index), 0};
    }
  }
  const Stopwatch watch;
  double now = 0;
  while (!scheduler_->done() && !interrupt_.interrupted()) {
    const Step step = scheduler_->next(now);
    if (step.empty()) {
      // Nobody is there: the clock jumps to the next arrival.
      if (const auto arrival = scheduler_->next_arrival(); arrival && *arrival > now) now = *arrival;
      continue;
    }
    run_step(step, now);
    show_progress();
  }
  progress_.finish();
  result_.interrupted = !scheduler_->done();
  result_.wall_seconds = watch.seconds();
  result_.num_finished = scheduler_->num_finished();
  result_.num_preemptions = scheduler_->num_preemptions();
  result_.requests = scheduler_->times();
  result_.lengths = std::move(requests_);
  result_.verify = {verifier_.num_rows(), verifier_.num_failed(), verifier_.worst_ratio(), verifier_.seconds(),
                    verifier_.first_mismatch()};
  return std::move(result_);
}

}  // namespace

std::string units_text(const ReplayResult& r) {
  return r.device.device.type == ATTUNE_DEVICE_CUDA ? counted(r.device.num_units, "multiprocessor")
                                                    : counted(r.threads, "thread");
}

ReplayResult replay(const Trace& trace, const ReplayOptions& options) { return Replay(trace, options).run(); }

}  // namespace attune::cli
