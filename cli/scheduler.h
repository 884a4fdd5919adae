// SPDX-License-Identifier: Apache-2.0
// Continuous batching: which tokens of which requests a step computes, and which pages hold them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "page_allocator.h"
#include "trace.h"

namespace attune::cli {

struct SchedulerOptions {
  int64_t max_batch = 64;  // sequences in a step
  int64_t chunk = 512;     // prompt tokens in a step
  int64_t page_size = 16;
  int64_t num_pages = 0;
  bool encoder_decoder = false;  // prompts go to an encoder, whole, and are kept for cross attention
  uint64_t seed = 0;
};

// A request while it runs.
struct Sequence {
  int64_t request = 0;  // index in the trace
  int64_t prompt = 0, output = 0;
  int64_t cached = 0, generated = 0;
  bool encoded = false;
  std::vector<int32_t> pages;        // of the tokens that the decoder has seen
  std::vector<int32_t> cross_pages;  // of the encoder's keys
};

// The share of one sequence in a step.
struct Chunk {
  const Sequence* sequence = nullptr;
  int64_t cached = 0;    // tokens in the cache before the step
  int64_t tokens = 0;    // new ones
  int64_t encode = 0;    // tokens for the encoder, first of all
  bool prefill = false;  // prompt tokens rather than one that was generated
};

struct Step {
  std::vector<Chunk> chunks;
  int64_t tokens = 0;  // of the decoder: rows of q
  int64_t prefill_tokens = 0, decode_tokens = 0, encode_tokens = 0;
  bool empty() const { return chunks.empty(); }
};

// What became of a request, on the clock that the caller keeps.
struct RequestTimes {
  double arrival = 0, first_token = -1, finish = -1;
  int64_t preemptions = 0;
};

class Scheduler {
 public:
  // Throws UserError when a request can never fit.
  Scheduler(const std::vector<TraceRequest>& requests, const SchedulerOptions& options);

  // Pages that one request holds at the end.
  static int64_t pages_needed(const TraceRequest& request, const SchedulerOptions& options);

  // What to run at time `now`; empty when every request that has arrived is done. finish() must follow before the next
  // call.
  Step next(double now);
  // The step has run; its tokens count as of `now`.
  void finish(const Step& step, double now);

  bool done() const { return running_.empty() && preempted_.empty() && next_request_ == requests_.size(); }
  // When the next request arrives that has not been admitted; nothing when there is none.
  std::optional<double> next_arrival() const;

  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_finished() const { return num_finished_; }
  int64_t num_preemptions() const { return num_preemptions_; }
  const PageAllocator& pages() const { return pages_; }
  const std::vector<RequestTimes>& times() const { return times_; }

 private:
  int64_t pages_of(int64_t tokens) const { return pages_for(tokens, options_.page_size); }
  // Tokens that the decoder must have seen to make the next one.
  int64_t known_tokens(const Sequence& s) const { return (options_.encoder_decoder ? 1 : s.prompt) + s.generated; }
  // Makes room for `tokens` in all; takes pages from the youngest sequences when there are none left.
  bool grow(size_t index, int64_t tokens);
  void preempt_youngest();
  void schedule_running(Step& step, int64_t& budget);
  void admit(Step& step, int64_t& budget, double now);
  void add_chunk(Step& step, Sequence& s, int64_t tokens, int64_t encode);
  void release(Sequence& s);

  const std::vector<TraceRequest>& requests_;
  SchedulerOptions options_;
  PageAllocator pages_;
  std::vector<std::unique_ptr<Sequence>> running_;   // oldest first
  std::deque<std::unique_ptr<Sequence>> preempted_;  // to be admitted again, before any newcomer
  std::vector<Sequence*> scheduled_;                 // of the step under way, as its chunks
  size_t next_request_ = 0;
  std::vector<RequestTimes> times_;
  int64_t num_finished_ = 0, num_preemptions_ = 0;
};

}  // namespace attune::cli
