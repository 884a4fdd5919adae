// SPDX-License-Identifier: Apache-2.0
// Serving traces: when requests arrive and how many tokens they bring and ask for.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace attune::cli {

struct TraceRequest {
  double arrival = 0;         // seconds after the first request of the trace
  int64_t prompt_tokens = 0;  // at least 1
  int64_t output_tokens = 0;  // may be 0: the prompt is processed, nothing is generated
  int64_t line = 0;           // of the file, from 1
};

struct Trace {
  std::string name;
  std::vector<TraceRequest> requests;  // by arrival
};

// Reads a CSV with a header line and the columns TIMESTAMP, ContextTokens and GeneratedTokens, in any order and among
// others (the format of the Azure LLM inference traces). A timestamp is "2023-11-16 18:15:46.6805900" or a number of
// seconds. limit > 0: only so many requests. Throws UserError with name, line and column.
Trace read_trace(std::istream& in, const std::string& name, int64_t limit = 0);
Trace read_trace_file(const std::string& path, int64_t limit = 0);

}  // namespace attune::cli
