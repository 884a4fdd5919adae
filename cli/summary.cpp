// SPDX-License-Identifier: Apache-2.0
#include "summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "text.h"

namespace attune::cli {
namespace {

// 1234567 as "1,234,567".
std::string grouped(int64_t n) {
  std::string text = std::to_string(n);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > (n < 0 ? 1 : 0); at -= 3)
    text.insert(static_cast<size_t>(at), ",");
  return text;
}

// Three digits or more, with a unit that suits: 0.000123 as "123 us".
std::string duration(double seconds) {
  if (seconds >= 100) return fmt::format("{:.0f} s", seconds);
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.{}f} ms", seconds * 1e3, seconds >= 0.1 ? 0 : seconds >= 0.01 ? 1 : 2);
  return fmt::format("{:.0f} us", seconds * 1e6);
}

std::string flop_rate(double gflops) {
  return gflops >= 1000 ? fmt::format("{:.2f} TFLOP/s", gflops / 1000) : fmt::format("{:.1f} GFLOP/s", gflops);
}

std::string percentiles(const Distribution& d) {
  return fmt::format("p50 {}, p99 {}", duration(d.p50), duration(d.p99));
}

// "31 % of the 18.2 GB/s measured here".
std::string share(double value, double ceiling, const std::string& ceiling_text) {
  return ceiling > 0 ? fmt::format("{:.0f} % of the {} measured here", 100 * value / ceiling, ceiling_text) : "";
}

void add(Rate& rate, const StepRecord& step, int64_t tokens) {
  ++rate.steps;
  rate.tokens += tokens;
  rate.seconds += step.seconds;
  rate.work += step.work;
}

}  // namespace

Distribution distribution(std::vector<double> sample) {
  Distribution d;
  if (sample.empty()) return d;
  std::sort(sample.begin(), sample.end());
  // The smallest value that at least this share of the sample does not exceed.
  const auto quantile = [&](double p) {
    const auto rank = static_cast<size_t>(std::ceil(p * static_cast<double>(sample.size())));
    return sample[std::max<size_t>(rank, 1) - 1];
  };
  d.count = static_cast<int64_t>(sample.size());
  d.mean = std::accumulate(sample.begin(), sample.end(), 0.0) / static_cast<double>(sample.size());
  d.p50 = quantile(0.5);
  d.p90 = quantile(0.9);
  d.p99 = quantile(0.99);
  d.max = sample.back();
  return d;
}

Summary summarize(const ReplayResult& result) {
  Summary s;
  std::vector<double> all, prefill, decode, first, between;
  double sequences = 0;
  for (const StepRecord& step : result.steps) {
    s.prompt_tokens += step.prefill_tokens;
    s.generated_tokens += step.decode_tokens;
    add(s.all, step, step.prefill_tokens + step.decode_tokens);
    all.push_back(step.seconds);
    if (step.prefill_tokens > 0) {
      add(s.prefill, step, step.prefill_tokens);
      prefill.push_back(step.seconds);
    } else {
      add(s.decode, step, step.decode_tokens);
      decode.push_back(step.seconds);
    }
    s.kv_peak = std::max(s.kv_peak, static_cast<double>(step.pages_used) / static_cast<double>(result.num_pages));
    sequences += static_cast<double>(step.sequences);
  }
  for (size_t i = 0; i < result.requests.size(); ++i) {
    const RequestTimes& times = result.requests[i];
    if (times.first_token >= 0) first.push_back(times.first_token - times.arrival);
    const int64_t more = result.lengths[i].output_tokens - 1;
    if (times.finish >= 0 && more > 0)
      between.push_back((times.finish - times.first_token) / static_cast<double>(more));
  }
  s.step_seconds = distribution(std::move(all));
  s.prefill_step_seconds = distribution(std::move(prefill));
  s.decode_step_seconds = distribution(std::move(decode));
  s.first_token_seconds = distribution(std::move(first));
  s.output_token_seconds = distribution(std::move(between));
  s.mean_sequences = result.steps.empty() ? 0 : sequences / static_cast<double>(result.steps.size());
  return s;
}

std::vector<TableRow> table_rows(const ReplayResult& r, const Summary& s) {
  std::vector<TableRow> rows;
  const double read = r.ceilings ? r.ceilings->read_gbps_all : 0, fma = r.ceilings ? r.ceilings->fma_gflops_all : 0;
  const auto fma_share = [&](const Rate& rate) { return share(rate.gflops(), fma, flop_rate(fma) + " fp32 FMA peak"); };
  const std::string preempted =
      r.num_preemptions > 0 ? grouped(r.num_preemptions) + " " + noun(r.num_preemptions, "preemption") : "";
  rows.push_back({"requests", fmt::format("{} of {}", grouped(r.num_finished), grouped(r.num_requests)),
                  r.interrupted ? "interrupted; " + preempted : preempted});
  rows.push_back(
      {"tokens", fmt::format("{} prompt, {} decode", grouped(s.prompt_tokens), grouped(s.generated_tokens)), ""});
  rows.push_back(
      {"steps", grouped(s.all.steps),
       fmt::format("{} with prefill; {:.1f} sequences a step; up to {:.0f} % of {} {} in use", grouped(s.prefill.steps),
                   s.mean_sequences, 100 * s.kv_peak, grouped(r.num_pages), noun(r.num_pages, "page"))});
  rows.push_back({"step time", percentiles(s.step_seconds),
                  fmt::format("mean {}, max {}", duration(s.step_seconds.mean), duration(s.step_seconds.max))});
  if (s.prefill.steps > 0) {
    rows.push_back({"prefill", fmt::format("{:.0f} tokens/s", s.prefill.tokens_per_second()),
                    "steps: " + percentiles(s.prefill_step_seconds)});
    rows.push_back({"", flop_rate(s.prefill.gflops()), fma_share(s.prefill)});
  }
  if (s.decode.steps > 0) {
    rows.push_back({"decode", fmt::format("{:.0f} tokens/s", s.decode.tokens_per_second()),
                    "steps: " + percentiles(s.decode_step_seconds)});
    rows.push_back({"", fmt::format("{:.2f} GB/s", s.decode.gbps()),
                    share(s.decode.gbps(), read, fmt::format("{:.1f} GB/s read bandwidth", read))});
    // Many heads on one KV head (MLA) make decode a matter of arithmetic.
    const bool by_arithmetic = fma > 0 && s.decode.work.flops * read > s.decode.work.bytes * fma;
    if (by_arithmetic) rows.push_back({"", flop_rate(s.decode.gflops()), fma_share(s.decode)});
  }
  if (s.first_token_seconds.count > 0) {
    rows.push_back({"first token", percentiles(s.first_token_seconds),
                    fmt::format("from arrival; attention of {}",
                                r.model.num_layers == 1 ? std::string("the one layer")
                                                        : fmt::format("all {} layers", r.model.num_layers))});
  }
  if (s.output_token_seconds.count > 0)
    rows.push_back({"output token", percentiles(s.output_token_seconds), "the same, between tokens"});
  if (r.verify.rows > 0) {
    const std::string worst = fmt::format("worst error {:.3g} of its bound", r.verify.worst_ratio);
    rows.push_back(
        {"verified", grouped(r.verify.rows) + " " + noun(r.verify.rows, "row"),
         r.verify.failed > 0 ? fmt::format("{} FAILED; {}", grouped(r.verify.failed), worst) : "all inside; " + worst});
  }
  rows.push_back({"time", duration(r.wall_seconds),
                  fmt::format("attention {}, oracle {}, rest {}", duration(s.all.seconds), duration(r.verify.seconds),
                              duration(std::max(0.0, r.wall_seconds - s.all.seconds - r.verify.seconds)))});
  return rows;
}

std::string format_table(const std::vector<TableRow>& rows) {
  size_t label = 0, value = 0;
  for (const TableRow& row : rows) {
    label = std::max(label, row.label.size());
    value = std::max(value, row.value.size());
  }
  std::string text;
  for (const TableRow& row : rows) {
    std::string line = fmt::format("  {:<{}}  {:<{}}  {}", row.label, label, row.value, value, row.note);
    line.erase(line.find_last_not_of(' ') + 1);
    text += wrapped(line, label + value + 6) + "\n";  // goes on below the notes
  }
  return text;
}

}  // namespace attune::cli
