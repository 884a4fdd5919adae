// SPDX-License-Identifier: Apache-2.0
// Batches made of chosen sequences of a problem, and whether a sequence has the same bits in all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support.h"

namespace attune::tests {

// {2, 0, 2}: the problem's third sequence, its first, and its third again. Caches, and what is the same for all
// sequences, are the problem's own.
class BatchOf {
 public:
  BatchOf(cases::Problem& problem, const std::vector<int64_t>& chosen) : arena_(problem.arena()), a_(problem.host()) {
    const cases::Case& c = problem.spec();
    Rows of_sequences, of_queries, of_keys;
    for (const int64_t b : chosen) {
      of_sequences.push_back({b, 1});
      of_queries.push_back({problem.first_row(b), c.seqlens_q[static_cast<size_t>(b)]});
      of_keys.push_back({std::accumulate(c.seqlens_kv.begin(), c.seqlens_kv.begin() + b, int64_t{0}), c.stored(b)});
    }
    const size_t first_buffer = arena_.buffers().size();
    const bool fixed = a_.q.rank == 4;
    rows_ = fixed ? of_sequences : of_queries;
    for (attune_tensor* t : {&a_.q, &a_.indices, &a_.extra_indices, &a_.mask_bits, &a_.out, &a_.lse, &a_.max_logits})
      take(*t, rows_);
    for (attune_tensor* t : {&a_.topk_length, &a_.extra_topk_length})
      take(*t, t->shape[0] == c.batch() ? of_sequences : of_queries);
    for (attune_tensor* t : {&a_.seqused_kv, &a_.cache.page_table, &a_.cache.v_page_table, &a_.cache.batch_index})
      take(*t, of_sequences);
    for (attune_tensor* t : {&a_.k, &a_.v}) take(*t, fixed ? of_sequences : c.has_cache() ? of_queries : of_keys);
    if (a_.cu_seqlens_q.rank > 0) a_.cu_seqlens_q = offsets(of_queries);
    if (a_.cu_seqlens_kv.rank > 0) a_.cu_seqlens_kv = offsets(of_keys);
    for (size_t i = first_buffer; i < arena_.buffers().size(); ++i) arena_.buffers()[i]->upload();
  }

  attune_attention device() const { return arena_.on_device(a_); }

  // After a run: out, lse and max_logits of each of the chosen.
  std::vector<std::vector<std::byte>> results() const {
    std::vector<std::vector<std::byte>> all(rows_.size());
    for (const attune_tensor* t : {&a_.out, &a_.lse, &a_.max_logits}) {
      if (t->rank == 0) continue;
      const std::vector<std::byte> bytes = arena_.owner(t->data)->download();
      auto at = bytes.begin();
      for (size_t i = 0; i < rows_.size(); ++i) {
        const auto end = at + rows_[i].count * t->stride[0] * cases::element_size(static_cast<attune_dtype>(t->dtype));
        all[i].insert(all[i].end(), at, end);
        at = end;
      }
    }
    return all;
  }

 private:
  struct Run {
    int64_t first, count;
  };
  using Rows = std::vector<Run>;  // of each of the chosen

  // These of t, one after the other.
  void take(attune_tensor& t, const Rows& rows) {
    if (t.rank == 0) return;
    const attune_tensor from = t;
    std::vector<int64_t> shape(from.shape, from.shape + from.rank);
    shape[0] = 0;
    for (const Run& run : rows) shape[0] += run.count;
    t = arena_.add("of a batch", static_cast<attune_dtype>(from.dtype), shape);
    int64_t at = 0;
    for (const Run& run : rows) {
      copy_elements(rows_of(from, run.first, run.count), rows_of(t, at, run.count));
      at += run.count;
    }
  }

  attune_tensor offsets(const Rows& rows) {
    const attune_tensor t = arena_.add("offsets of a batch", ATTUNE_INT32, {static_cast<int64_t>(rows.size()) + 1});
    int64_t at = 0;
    for (size_t i = 0; i <= rows.size(); ++i) {
      cases::encode(ATTUNE_INT32, static_cast<double>(at), cases::element_at(t, {static_cast<int64_t>(i)}));
      if (i < rows.size()) at += rows[i].count;
    }
    return t;
  }

  cases::Arena& arena_;
  attune_attention a_;  // the host's bytes
  Rows rows_;           // of q
};

// Plans, runs and waits.
using RunsBatch = std::function<void(const attune_attention& device)>;

// Runs each sequence alone, and then in batches of others, in other places; "" or what differs. edit: of the problem's
// memory on the host.
inline std::string find_other_bits(const cases::Case& spec, cases::Memory& memory, const RunsBatch& run,
                                   int64_t most_of_each = 7, const std::function<void(cases::Problem&)>& edit = {}) {
  cases::Problem problem(spec, memory);
  if (edit) edit(problem);
  const int64_t batch = spec.batch();
  std::vector<std::vector<std::byte>> alone;
  for (int64_t b = 0; b < batch; ++b) {
    const BatchOf one(problem, {b});
    const std::vector<std::byte> untouched = one.results()[0];
    run(one.device());
    alone.push_back(one.results()[0]);
    if (!untouched.empty() && alone.back() == untouched) return "nothing is written of sequence " + std::to_string(b);
  }
  std::vector<std::vector<int64_t>> batches(5);
  for (int64_t b = 0; b < batch; ++b) {
    batches[0].push_back(b);
    batches[1].push_back(batch - 1 - b);
  }
  batches[2] = {batch - 1, 0};
  batches[3] = {1, 1, 0};
  for (int64_t i = 0; i < most_of_each * batch; ++i) batches[4].push_back(i * i % batch);
  for (const std::vector<int64_t>& chosen : batches) {
    const BatchOf some(problem, chosen);
    run(some.device());
    const auto results = some.results();
    for (size_t i = 0; i < chosen.size(); ++i) {
      const std::vector<std::byte>& wanted = alone[static_cast<size_t>(chosen[i])];
      if (results[i] == wanted) continue;
      // Those who run again tell what is not the same every time from what follows from the others.
      const BatchOf alone_again(problem, {chosen[i]}), some_again(problem, chosen);
      run(alone_again.device());
      run(some_again.device());
      const auto differ = [&](const std::vector<std::byte>& x) {
        size_t count = 0, first = 0;
        for (size_t n = 0; n < x.size(); ++n) {
          if (x[n] != wanted[n] && count++ == 0) first = n;
        }
        return std::to_string(count) + " bytes of " + std::to_string(x.size()) + " from " + std::to_string(first);
      };
      return "sequence " + std::to_string(chosen[i]) + " as number " + std::to_string(i) + " of " +
             std::to_string(chosen.size()) + ": " + differ(results[i]) + "; again " + differ(some_again.results()[i]) +
             ", alone " + differ(alone_again.results()[0]);
    }
  }
  return "";
}

// Few and many queries, beside each other and not, over every kind of cache; with as many keys as would be split.
inline std::vector<cases::Case> batch_invariant_cases() {
  std::vector<cases::Case> all = cases::parse_cases(R"({"area": "batch", "cases": [
    {"name": "decode", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "seqlens_kv": [1700, 1, 777, 64, 260],
     "sweep": {"with": [
       {"name": "paged", "kv": "paged", "cache": {"page_size": 16}},
       {"name": "fixed", "kv": "paged", "cache": {"page_size": 64, "layout": "hnd"}, "queries": "fixed"},
       {"name": "e4m3", "kv": "paged", "cache": {"page_size": 64, "dtype": "e4m3", "scales": "head"}},
       {"name": "int8", "kv": "contiguous", "cache": {"batch_index": true, "dtype": "i8", "scales": "token"}},
       {"name": "speculation", "kv": "paged", "seqlens_q": [4, 1, 3, 2, 4], "new_tokens": true},
       {"name": "fused", "kv": "paged", "new_tokens": true, "prologue": {"append": true, "q_bias": true,
        "rope": {"style": "linear", "dim": 128, "max_position": 2048}}}]}},
    {"name": "prompts", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16",
     "seqlens_q": [1, 300, 4, 1, 129, 0], "seqlens_kv": [1500, 900, 70, 65, 129, 9],
     "sweep": {"with": [
       {"name": "dense"},
       {"name": "chunks", "kv": "paged", "cache": {"page_size": 64}, "new_tokens": true},
       {"name": "xpacked", "kv": "paged", "new_tokens": true, "cache": {"layout": "xpacked", "dtype": "e4m3",
        "scales": "tensor"}},
       {"name": "window", "kv": "paged", "window": [200, 0], "softcap": 30, "head_dim": [64, 64], "dtype": "f16"},
       {"name": "fp32", "dtype": "f32", "head_dim": [64, 64]},
       {"name": "codes", "dtype": "e4m3", "prologue": {"qkv_scale": true}},
       {"name": "codes beside numbers", "dtype": "e4m3", "prologue": {"qkv_scale": true}, "poison": false}]}},
    {"name": "mla", "dtype": "bf16", "head_dim": [576, 512], "kv": "paged", "seqlens_kv": [900, 1, 0, 330],
     "cache": {"page_size": 64},
     "sweep": {"with": [
       {"name": "h128", "heads": [128, 1], "shared_kv": true},
       {"name": "few", "heads": [16, 1], "shared_kv": true, "queries": "fixed"},
       {"name": "prompt", "heads": [16, 1], "shared_kv": true, "seqlens_q": [70, 1, 9, 1], "new_tokens": true},
       {"name": "few 656", "heads": [16, 1], "cache": {"format": "mla_656"}, "queries": "fixed"}]}},
    {"name": "sparse", "dtype": "bf16", "head_dim": [576, 512], "kv": "slots", "seqlens_q": [2, 1, 3],
     "sparse": {"topk": 700, "topk_length": "token", "slots": 1024},
     "sweep": {"with": [
       {"name": "h128", "heads": [128, 1], "shared_kv": true},
       {"name": "few 656", "heads": [16, 1], "cache": {"format": "mla_656"}},
       {"name": "h128 656", "heads": [128, 1], "cache": {"format": "mla_656"}, "sinks": "normal"},
       {"name": "h64 584", "heads": [64, 1], "head_dim": [512, 512], "cache": {"format": "mla_584"},
        "extra": {"topk": 70, "topk_length": "batch", "page_size": 16}}]}}]})");
  for (cases::Case& c : all) c.causal = c.sparse.topk == 0, c.batch_invariant = c.max_seqlens = c.max_logits = true;
  return all;
}

}  // namespace attune::tests
