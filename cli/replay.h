// SPDX-License-Identifier: Apache-2.0
// Replays a serving trace through one layer of a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "ceilings.h"
#include "model.h"
#include "scheduler.h"
#include "trace.h"
#include "verify.h"
#include "work.h"

namespace attune::cli {

struct ReplayOptions {
  std::string model = "llama-3-8b", device = "auto", kv_dtype, verify = "2", output = ".", phase = "all";
  int64_t limit = 0, max_batch = 64, chunk = 512, page_size = 16, num_pages = 0, max_context = 0, tensor_parallel = 1,
          threads = 0;
  uint64_t seed = 1;
  double time_scale = 1;
  bool no_arrival = false, no_ceilings = false, no_plots = false;
};

// One step, as it went.
struct StepRecord {
  double start = 0;    // on the model's clock
  double seconds = 0;  // of this layer's calls
  int64_t sequences = 0, prefill_tokens = 0, decode_tokens = 0, pages_used = 0;
  Work work;
  std::string layer_kind;
};

struct VerifyResult {
  int64_t rows = 0, failed = 0;
  double worst_ratio = 0, seconds = 0;
  std::optional<Mismatch> first_mismatch;
};

struct ReplayResult {
  ReplayOptions options;
  std::string trace_name;
  Model model;  // the part that one device holds
  KvDtype kv_dtype = KvDtype::kBf16;
  attune_device_info device{};
  int32_t threads = 0;
  int64_t num_pages = 0, pool_bytes = 0, num_requests = 0, num_finished = 0, num_preemptions = 0;
  std::vector<std::string> plans;
  std::optional<Ceilings> ceilings;
  std::vector<StepRecord> steps;
  std::vector<RequestTimes> requests;  // on the model's clock
  std::vector<TraceRequest> lengths;   // of the requests, as replayed
  VerifyResult verify;
  double wall_seconds = 0;
  bool interrupted = false;
};

// "16 threads", "132 multiprocessors".
std::string units_text(const ReplayResult& r);

// Runs until the trace is done or Ctrl-C. Says on stderr what it is doing. Throws UserError for bad options.
//
// The model's clock: requests arrive by the trace, and a step takes what this layer took times the number of layers. So
// batches form as they would if attention were all that the model does.
ReplayResult replay(const Trace& trace, const ReplayOptions& options);

}  // namespace attune::cli
