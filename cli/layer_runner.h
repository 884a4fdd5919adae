// SPDX-License-Identifier: Apache-2.0
// One layer of a model: makes the real attention calls of each step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "model.h"
#include "scheduler.h"
#include "verify.h"
#include "work.h"

namespace attune::cli {

// The most that any step will need.
struct RunnerLimits {
  int64_t max_batch = 0;
  int64_t max_rows = 0;         // of q, in the decoder
  int64_t max_seqlen = 0;       // tokens that the decoder caches for one sequence
  int64_t max_encode_rows = 0;  // encoder-decoder: prompt tokens of a step
  int64_t max_prompt = 0;       // encoder-decoder: of one sequence
  int64_t page_size = 0, num_pages = 0;
  bool decode_only = false;  // one query a sequence, over a cache of random keys; no encoder
};

struct RunnerConfig {
  Model model;
  KvDtype kv_dtype = KvDtype::kBf16;
  RunnerLimits limits;
  attune_device device{};
  uint64_t seed = 0;
};

struct StepResult {
  double seconds = 0;  // in the library
  Work work;
  std::string layer_kind;  // where the model's layers differ
};

class LayerRunner {
 public:
  virtual ~LayerRunner() = default;
  // `index` counts the steps. Models whose layers differ run their kinds in turn.
  virtual StepResult run(const Step& step, int64_t index, Verifier& verifier) = 0;
  // What the library chose: one text for each plan.
  virtual std::vector<std::string> describe() const = 0;
};

// Allocates the KV pool and makes the plans. Throws attune::Error or std::bad_alloc.
std::unique_ptr<LayerRunner> make_layer_runner(const RunnerConfig& config);

}  // namespace attune::cli
