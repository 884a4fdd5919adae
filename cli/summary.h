// SPDX-License-Identifier: Apache-2.0
// The figures of a replay, and the table that shows them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "replay.h"

namespace attune::cli {

// Percentiles of a sample; all 0 for an empty one.
struct Distribution {
  double mean = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
  int64_t count = 0;
};
Distribution distribution(std::vector<double> sample);

// Work and time of some of the steps.
struct Rate {
  int64_t steps = 0, tokens = 0;
  double seconds = 0;
  Work work;
  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  double gbps() const { return seconds > 0 ? work.bytes / seconds / 1e9 : 0; }
  double gflops() const { return seconds > 0 ? work.flops / seconds / 1e9 : 0; }
};

struct Summary {
  int64_t prompt_tokens = 0, generated_tokens = 0;  // that were computed
  Rate all, prefill,
      decode;  // of this layer; prefill: steps with any prompt tokens, which they count; decode: the others
  Distribution step_seconds, prefill_step_seconds, decode_step_seconds;
  Distribution first_token_seconds, output_token_seconds;  // of requests, all layers; from arrival, and between tokens
  double kv_peak = 0;                                      // share of the pages in use
  double mean_sequences = 0;                               // of a step
};
Summary summarize(const ReplayResult& result);

struct TableRow {
  std::string label, value, note;
};
std::vector<TableRow> table_rows(const ReplayResult& result, const Summary& summary);
// Columns aligned for a terminal.
std::string format_table(const std::vector<TableRow>& rows);

}  // namespace attune::cli
