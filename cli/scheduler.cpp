// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <fmt/format.h>

#include <algorithm>

#include "text.h"
#include "user_error.h"

namespace attune::cli {

int64_t Scheduler::pages_needed(const TraceRequest& request, const SchedulerOptions& options) {
  const auto pages = [&](int64_t tokens) { return pages_for(tokens, options.page_size); };
  // The last token that is generated is never fed back.
  const int64_t fed = std::max<int64_t>(request.output_tokens - 1, 0);
  if (options.encoder_decoder) return pages(request.prompt_tokens) + pages(1 + fed);
  return pages(request.prompt_tokens + fed);
}

Scheduler::Scheduler(const std::vector<TraceRequest>& requests, const SchedulerOptions& options)
    : requests_(requests), options_(options), pages_(options.num_pages, options.seed) {
  for (const TraceRequest& r : requests) {
    if (const int64_t needed = pages_needed(r, options); needed > options.num_pages) {
      throw UserError(
          fmt::format("the request of line {} needs {} and the pool has {}; raise --pages or clamp with --max-context",
                      r.line, counted(needed, "page"), options.num_pages));
    }
    times_.push_back({r.arrival, -1, -1, 0});
  }
}

std::optional<double> Scheduler::next_arrival() const {
  if (next_request_ == requests_.size()) return std::nullopt;
  return requests_[next_request_].arrival;
}

void Scheduler::add_chunk(Step& step, Sequence& s, int64_t tokens, int64_t encode) {
  const bool prefill = tokens > 1 || (s.generated == 0 && !options_.encoder_decoder);
  step.chunks.push_back({&s, s.cached, tokens, encode, prefill});
  scheduled_.push_back(&s);
  step.tokens += tokens;
  step.encode_tokens += encode;
  step.prefill_tokens += encode + (prefill ? tokens : 0);
  step.decode_tokens += prefill ? 0 : tokens;
}

void Scheduler::release(Sequence& s) {
  pages_.release(s.pages);
  pages_.release(s.cross_pages);
}

void Scheduler::preempt_youngest() {
  std::unique_ptr<Sequence> s = std::move(running_.back());
  running_.pop_back();
  release(*s);
  // Its tokens are computed again, those that it had generated as part of the prompt.
  s->cached = 0;
  s->encoded = false;
  ++times_[static_cast<size_t>(s->request)].preemptions;
  ++num_preemptions_;
  preempted_.push_front(std::move(s));
}

bool Scheduler::grow(size_t index, int64_t tokens) {
  Sequence& s = *running_[index];
  const int64_t more = pages_of(tokens) - static_cast<int64_t>(s.pages.size());
  while (more > 0 && !pages_.allocate(more, s.pages)) {
    const bool itself = running_.size() == index + 1;
    preempt_youngest();
    if (itself) return false;
  }
  return true;
}

void Scheduler::schedule_running(Step& step, int64_t& budget) {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& s = *running_[i];
    const int64_t missing = known_tokens(s) - s.cached;
    const bool decode = missing == 1 && s.generated > 0;
    const int64_t tokens = decode ? 1 : std::min(missing, budget);
    if (tokens == 0) continue;
    if (!grow(i, s.cached + tokens)) return;
    if (!decode) budget -= tokens;
    add_chunk(step, s, tokens, 0);
  }
}

void Scheduler::admit(Step& step, int64_t& budget, double now) {
  while (static_cast<int64_t>(running_.size()) < options_.max_batch && budget > 0) {
    const bool again = !preempted_.empty();
    if (!again && (next_request_ == requests_.size() || requests_[next_request_].arrival > now)) return;
    std::unique_ptr<Sequence> fresh;
    if (!again) {
      const TraceRequest& r = requests_[next_request_];
      fresh = std::make_unique<Sequence>();
      fresh->request = static_cast<int64_t>(next_request_);
      fresh->prompt = r.prompt_tokens;
      fresh->output = r.output_tokens;
    }
    Sequence& s = again ? *preempted_.front() : *fresh;
    // An encoder sees its whole prompt at once; a longer one than the budget has a step to itself.
    if (options_.encoder_decoder && s.prompt > budget && step.encode_tokens > 0) return;
    // Only what can hold all of its present tokens: otherwise it would be preempted before it makes any.
    const int64_t known = known_tokens(s), cross = options_.encoder_decoder ? pages_of(s.prompt) : 0;
    if (pages_of(known) + cross > pages_.num_free()) return;
    const int64_t tokens = std::min(known, budget);
    pages_.allocate(pages_of(tokens), s.pages);
    pages_.allocate(cross, s.cross_pages);
    if (again) {
      running_.push_back(std::move(preempted_.front()));
      preempted_.pop_front();
    } else {
      running_.push_back(std::move(fresh));
      ++next_request_;
    }
    const int64_t encode = options_.encoder_decoder ? s.prompt : 0;
    add_chunk(step, s, tokens, encode);
    budget = std::max<int64_t>(budget - encode - tokens, 0);
  }
}

Step Scheduler::next(double now) {
  Step step;
  scheduled_.clear();
  int64_t budget = options_.chunk;
  const int64_t before = num_preemptions_;
  schedule_running(step, budget);
  // After a preemption there is no room for anyone else.
  if (num_preemptions_ == before) admit(step, budget, now);
  return step;
}

void Scheduler::finish(const Step& step, double now) {
  for (size_t i = 0; i < step.chunks.size(); ++i) {
    const Chunk& chunk = step.chunks[i];
    Sequence& s = *scheduled_[i];
    RequestTimes& times = times_[static_cast<size_t>(s.request)];
    s.cached += chunk.tokens;
    if (chunk.encode > 0) s.encoded = true;
    if (s.cached < known_tokens(s)) continue;
    ++s.generated;
    if (times.first_token < 0) times.first_token = now;
    if (s.generated < std::max<int64_t>(s.output, 1)) continue;
    times.finish = now;
    ++num_finished_;
    release(s);
  }
  std::erase_if(running_, [](const auto& s) { return s->generated >= std::max<int64_t>(s->output, 1); });
}

}  // namespace attune::cli
