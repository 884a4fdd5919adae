// SPDX-License-Identifier: Apache-2.0
// A problem whose pages, and rows of q, k, v and out, lie further apart than 32 bits can count, in bytes and in 16-bit
// elements: the same bits as where they lie side by side.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support.h"

namespace attune::tests {

inline constexpr int64_t kFarBytes = int64_t{9} << 29, kMostFarRows = 6, kFarMemory = kFarBytes * kMostFarRows;

// Runs both; "" or what is wrong. far: kFarMemory bytes of the memory, of which little is touched.
inline std::string find_near_sighted(const cases::Case& spec, cases::Memory& memory, std::byte* far,
                                     const std::function<void(const attune_attention& device)>& run) {
  cases::Problem problem(spec, memory);
  const attune_attention host = problem.host(), near = problem.device();
  attune_attention spread = near;
  const struct {
    const attune_tensor& from;
    attune_tensor& to;
  } tensors[] = {{host.cache.k, spread.cache.k},
                 {host.cache.v, spread.cache.v},
                 {host.q, spread.q},
                 {host.k, spread.k},
                 {host.v, spread.v},
                 {host.out, spread.out}};
  const auto row_bytes = [](const attune_tensor& t) {
    return static_cast<size_t>(t.stride[0] * cases::element_size(static_cast<attune_dtype>(t.dtype)));
  };
  std::byte* begin = far;  // of each tensor's first row
  for (const auto& [from, to] : tensors) {
    if (from.rank == 0) continue;
    if (from.shape[0] > kMostFarRows) return "too many rows";
    to.data = begin;
    to.stride[0] = kFarBytes / cases::element_size(static_cast<attune_dtype>(from.dtype));
    const auto* row = static_cast<const std::byte*>(from.data);
    for (int64_t i = 0; i < from.shape[0]; ++i, row += row_bytes(from))
      memory.upload(begin + i * kFarBytes, row, row_bytes(from));
    begin += int64_t{1} << 29;
  }
  const size_t bytes = row_bytes(host.out);
  std::vector<std::byte> near_row(bytes), far_row(bytes);
  run(near);
  run(spread);
  for (int64_t i = 0; i < host.out.shape[0]; ++i) {
    memory.download(near_row.data(), static_cast<std::byte*>(near.out.data) + i * static_cast<int64_t>(bytes), bytes);
    memory.download(far_row.data(), static_cast<std::byte*>(spread.out.data) + i * kFarBytes, bytes);
    if (near_row != far_row) return "row " + std::to_string(i) + " differs";
    const auto* before = static_cast<const std::byte*>(host.out.data) + i * static_cast<int64_t>(bytes);
    if (std::equal(near_row.begin(), near_row.end(), before)) return "row " + std::to_string(i) + " is not written";
  }
  return "";
}

inline std::vector<cases::Case> far_cases() {
  return cases::parse_cases(R"({"area": "far", "cases": [
    {"name": "plain", "dtype": "bf16", "heads": [8, 2], "head_dim": [128, 128], "kv": "paged", "seqlens_kv": [100, 40],
     "cache": {"page_size": 64, "slack": 1}, "causal": true,
     "sweep": {"with": [
       {"name": "decode"},
       {"name": "hnd e4m3", "cache": {"layout": "hnd", "dtype": "e4m3", "scales": "head"}},
       {"name": "contiguous", "kv": "contiguous"},
       {"name": "chunks", "heads": [16, 1], "seqlens_q": [4, 2], "new_tokens": true},
       {"name": "xpacked chunks", "heads": [16, 1], "seqlens_q": [4, 2], "new_tokens": true,
        "cache": {"layout": "xpacked", "slack": 1, "page_size": 64}},
       {"name": "dense", "heads": [16, 1], "kv": "dense", "seqlens_q": [4, 2], "seqlens_kv": [4, 2], "cache": null}]}},
    {"name": "mla", "dtype": "bf16", "heads": [20, 1], "head_dim": [576, 512], "kv": "paged", "seqlens_kv": [100, 40],
     "cache": {"page_size": 64, "slack": 1}, "causal": true,
     "sweep": {"with": [
       {"name": "boxes", "shared_kv": true, "new_tokens": true, "seqlens_q": [2, 1]},
       {"name": "rows", "shared_kv": true, "seqlens_kv": [9, 3], "cache": {"page_size": 3}},
       {"name": "few", "shared_kv": true, "heads": [16, 1]},
       {"name": "656", "cache": {"format": "mla_656"}},
       {"name": "few 656", "heads": [16, 1], "cache": {"format": "mla_656"}},
       {"name": "584", "head_dim": [512, 512], "cache": {"format": "mla_584"}}]}},
    {"name": "sparse", "dtype": "bf16", "heads": [20, 1], "head_dim": [576, 512], "kv": "slots", "seqlens_q": [2, 1],
     "sparse": {"topk": 70, "slots": 250}, "cache": {"page_size": 64},
     "sweep": {"with": [
       {"name": "rows", "shared_kv": true},
       {"name": "few 656", "heads": [16, 1], "cache": {"format": "mla_656"}},
       {"name": "584", "head_dim": [512, 512], "cache": {"format": "mla_584"}}]}}]})");
}

// A grid's second axis, for one, ends at 65,535.
inline constexpr int64_t kSampledRows = 300;
inline std::vector<cases::Case> many_queries() {
  return cases::parse_cases(R"({"area": "far", "cases": [
    {"name": "queries", "dtype": "bf16", "heads": [1, 1], "head_dim": [576, 512], "seqlens_q": [66000],
     "poison": false, "max_logits": true,
     "sweep": {"with": [
       {"name": "sparse 656", "kv": "slots", "sparse": {"topk": 9}, "cache": {"format": "mla_656"}},
       {"name": "mla", "kv": "paged", "shared_kv": true, "seqlens_kv": [100]},
       {"name": "prompt", "heads": [2, 1], "head_dim": [64, 64], "kv": "paged", "seqlens_kv": [100]},
       {"name": "sparse dense", "shared_kv": true, "queries": "flat", "cu_seqlens_kv": false, "seqlens_kv": [600],
        "sparse": {"topk": 9}}]}}]})");
}

}  // namespace attune::tests
