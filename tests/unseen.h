// SPDX-License-Identifier: Apache-2.0
// What nobody may see changes no bit: the same call with NaN there and with numbers. Stronger than right results, which
// a kernel also has that computes again what NaN has spoilt.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "batch_of.h"

namespace attune::tests {

// Runs the case with either; "" or which bytes differ.
inline std::string find_bits_of_unseen(const cases::Case& spec, cases::Memory& memory, const RunsBatch& run) {
  constexpr std::byte kNumbers{0x47};  // 3.75 in e4m3, 7.3 in fp16, 51,015 in bf16 and fp32
  const auto outputs = [&](std::byte unseen) {
    cases::Problem problem(spec, memory, unseen);
    run(problem.device());
    std::vector<std::vector<std::byte>> all;
    for (const attune_tensor* t : {&problem.host().out, &problem.host().lse, &problem.host().max_logits})
      all.push_back(t->rank == 0 ? std::vector<std::byte>() : problem.arena().owner(t->data)->download());
    return all;
  };
  const auto beside_nan = outputs(cases::kPoison), beside_numbers = outputs(kNumbers);
  std::string wrong;
  for (size_t i = 0; i < beside_nan.size(); ++i) {
    size_t count = 0, first = 0;
    for (size_t n = 0; n < beside_nan[i].size(); ++n) {
      if (beside_nan[i][n] != beside_numbers[i][n] && count++ == 0) first = n;
    }
    if (count > 0)
      wrong += std::string(i == 0   ? "out"
                           : i == 1 ? "lse"
                                    : "max_logits") +
               ": " + std::to_string(count) + " bytes of " + std::to_string(beside_nan[i].size()) + " from " +
               std::to_string(first) + "; ";
  }
  return wrong;
}

// Beside those of batch_invariant_cases(), with batch_invariant and without, where keys are cut: keys that end, or
// begin, within a tile or a page, in every format.
inline std::vector<cases::Case> unseen_cases() {
  std::vector<cases::Case> all = cases::parse_cases(R"({"area": "unseen", "cases": [
    {"name": "dense", "heads": [8, 2], "head_dim": [128, 128], "kv": "dense", "seqlens_q": [40, 129, 300, 0],
     "seqlens_kv": [40, 129, 700, 9], "seqused": true, "causal": true,
     "sweep": {"dtype": ["bf16", "f32", "e4m3"], "with": [
       {"name": "ends"},
       {"name": "few", "seqlens_q": [5, 3, 9, 0], "seqlens_kv": [77, 129, 3000, 9]},
       {"name": "full", "causal": false},
       {"name": "window", "causal": false, "window": [150, 20]}]}},
    {"name": "wide", "heads": [4, 2], "head_dim": [256, 256], "dtype": "bf16", "kv": "dense", "seqlens_q": [40, 129, 0],
     "seqlens_kv": [40, 200, 9], "seqused": true, "causal": true},
    {"name": "cached", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "seqlens_q": [40, 1, 129],
     "seqlens_kv": [900, 130, 33], "causal": true, "window": [500, 0],
     "sweep": {"with": [
       {"name": "nhd", "cache": {"page_size": 16}},
       {"name": "hnd", "cache": {"page_size": 48, "layout": "hnd"}, "new_tokens": true},
       {"name": "xpacked", "cache": {"layout": "xpacked", "page_size": 32}},
       {"name": "e4m3", "cache": {"dtype": "e4m3", "scales": "head", "page_size": 16}},
       {"name": "i8 tokens", "cache": {"dtype": "i8", "scales": "token", "page_size": 64}},
       {"name": "xpacked i8", "cache": {"layout": "xpacked", "dtype": "i8", "scales": "tensor", "page_size": 32}}]}},
    {"name": "steps", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "seqlens_q": [1, 2, 1],
     "seqlens_kv": [900, 130, 33], "causal": true, "window": [500, 0],
     "sweep": {"with": [
       {"name": "nhd", "cache": {"page_size": 16}},
       {"name": "hnd", "cache": {"page_size": 48, "layout": "hnd"}, "new_tokens": true},
       {"name": "xpacked", "cache": {"layout": "xpacked", "page_size": 32}},
       {"name": "e5m2", "cache": {"dtype": "e5m2", "scales": "head", "page_size": 16}},
       {"name": "i8 tokens", "cache": {"dtype": "i8", "scales": "token", "page_size": 64}},
       {"name": "fp32", "dtype": "f32", "cache": {"page_size": 16}}]}}]})");
  for (cases::Case c : batch_invariant_cases()) {
    all.push_back(c);
    c.name += " cut", c.batch_invariant = false;
    all.push_back(c);
  }
  return all;
}

}  // namespace attune::tests
