// SPDX-License-Identifier: Apache-2.0
// A problem whose pages, and rows of q, k, v and out, lie further apart than 32 bits can count, in bytes and in 16-bit
// elements: the same bits as where they lie side by side. The same of cache operations and of the indexer.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cases/indexer_problem.h"
#include "support.h"

namespace attune::tests {

inline constexpr int64_t kFarBytes = int64_t{9} << 29, kMostFarRows = 6, kFarMemory = kFarBytes * kMostFarRows;
inline constexpr attune_kv_format kFarFormats[] = {ATTUNE_KV_PLAIN, ATTUNE_KV_MLA_656, ATTUNE_KV_MLA_584};

// Address space of the host; only what is touched takes memory.
class Reservation {
 public:
  Reservation()
      : data_(mmap(nullptr, static_cast<size_t>(kFarMemory), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (data() != nullptr) munmap(data_, static_cast<size_t>(kFarMemory));
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  std::byte* data() const { return data_ == MAP_FAILED ? nullptr : static_cast<std::byte*>(data_); }

 private:
  void* data_;
};

// Puts tensors into kFarMemory bytes of the memory, their rows (of the first axis) kFarBytes apart.
class FarRows {
 public:
  FarRows(cases::Memory& memory, std::byte* far) : memory_(memory), next_(far) {}

  // The tensor there, with the bytes that it has on the host. One that is absent stays so.
  attune_tensor spread(const attune_tensor& host) {
    attune_tensor to = host;
    if (host.rank == 0) return to;
    EXPECT_LE(host.shape[0], kMostFarRows);
    to.data = next_;
    to.stride[0] = kFarBytes / cases::element_size(static_cast<attune_dtype>(host.dtype));
    const auto* row = static_cast<const std::byte*>(host.data);
    for (int64_t i = 0; i < host.shape[0]; ++i, row += row_bytes(host))
      memory_.upload(next_ + i * kFarBytes, row, row_bytes(host));
    next_ += int64_t{1} << 29;
    return to;
  }
  // "" if the rows hold the same bytes, all of which are written: host is what was there before.
  std::string compare(const attune_tensor& host, const attune_tensor& near, const attune_tensor& far) const {
    const size_t bytes = row_bytes(host);
    std::vector<std::byte> near_row(bytes), far_row(bytes);
    for (int64_t i = 0; i < host.shape[0]; ++i) {
      memory_.download(near_row.data(), static_cast<std::byte*>(near.data) + i * static_cast<int64_t>(bytes), bytes);
      memory_.download(far_row.data(), static_cast<std::byte*>(far.data) + i * kFarBytes, bytes);
      if (near_row != far_row) return "row " + std::to_string(i) + " differs";
      const auto* before = static_cast<const std::byte*>(host.data) + i * static_cast<int64_t>(bytes);
      if (std::equal(near_row.begin(), near_row.end(), before)) return "row " + std::to_string(i) + " is not written";
    }
    return "";
  }

 private:
  static size_t row_bytes(const attune_tensor& t) {
    return static_cast<size_t>(t.stride[0] * cases::element_size(static_cast<attune_dtype>(t.dtype)));
  }
  cases::Memory& memory_;
  std::byte* next_;
};

// Runs both; "" or what is wrong. far: kFarMemory bytes of the memory, of which little is touched.
inline std::string find_near_sighted(const cases::Case& spec, cases::Memory& memory, std::byte* far,
                                     const std::function<void(const attune_attention& device)>& run) {
  cases::Problem problem(spec, memory);
  const attune_attention host = problem.host(), near = problem.device();
  attune_attention spread = near;
  FarRows rows(memory, far);
  spread.cache.k = rows.spread(host.cache.k), spread.cache.v = rows.spread(host.cache.v);
  spread.q = rows.spread(host.q), spread.k = rows.spread(host.k), spread.v = rows.spread(host.v);
  spread.out = rows.spread(host.out);
  run(near);
  run(spread);
  return rows.compare(host.out, near.out, spread.out);
}

// Tokens are appended to a cache and gathered from it.
inline std::string find_near_sighted_op(attune_kv_format format, cases::Memory& memory, std::byte* far,
                                        const std::function<void(const attune_cache_op& device)>& run) {
  constexpr int64_t kPages = 4, kPageSize = 16, kTokens = 5;
  cases::Arena arena(memory);
  cases::Random random("far", static_cast<uint64_t>(format));
  attune_cache_op op{};
  op.struct_size = sizeof(op);
  op.cache.format = format;
  if (format == ATTUNE_KV_PLAIN) {
    op.cache.k = arena.add("cache.k", ATTUNE_BFLOAT16, {kPages, kPageSize, 2, 128});
    op.cache.v = arena.add("cache.v", ATTUNE_BFLOAT16, {kPages, kPageSize, 2, 128});
  } else {
    int64_t bytes = 0;
    EXPECT_ATTUNE_OK(attune_kv_page_bytes(format, kPageSize, &bytes));
    op.cache.layout = ATTUNE_KV_BYTES;
    op.cache.page_size = kPageSize;
    op.cache.k = format == ATTUNE_KV_MLA_656 ? arena.add("cache.k", ATTUNE_UINT8, {kPages, kPageSize, 656})
                                             : arena.add("cache.k", ATTUNE_UINT8, {kPages, bytes});
  }
  const bool plain = format == ATTUNE_KV_PLAIN;
  const int64_t dim = plain ? 128 : format == ATTUNE_KV_MLA_656 ? 576 : 512;
  const auto add_rows = [&](const char* name) {
    return arena.add(name, ATTUNE_BFLOAT16, {kTokens, plain ? 2 : 1, dim});
  };
  op.k = add_rows("k");
  attune_tensor k_out = add_rows("k_out"), v_out{};
  if (plain) op.v = add_rows("v"), v_out = add_rows("v_out");
  for (const attune_tensor& t : {op.k, op.v}) {
    if (t.rank == 0) continue;
    cases::for_each_element(t, [&](const int64_t*, void* at) { cases::encode(ATTUNE_BFLOAT16, random.normal(), at); });
  }
  const int64_t slots[kTokens] = {0, 17, 63, 40, 33};
  op.slots = arena.add("slots", ATTUNE_INT64, {kTokens});
  std::memcpy(op.slots.data, slots, sizeof(slots));
  arena.upload();

  FarRows rows(memory, far);
  const attune_cache_op near = arena.on_device(op);
  attune_cache_op spread = near;
  spread.cache.k = rows.spread(op.cache.k), spread.cache.v = rows.spread(op.cache.v);
  spread.k = rows.spread(op.k), spread.v = rows.spread(op.v);
  attune_cache_op out = op;
  out.k = k_out, out.v = v_out;
  out = arena.on_device(out);
  const attune_tensor near_out[] = {out.k, out.v}, far_out[] = {rows.spread(k_out), rows.spread(v_out)},
                      host_out[] = {k_out, v_out};
  for (attune_cache_op x : {near, spread}) {
    x.kind = ATTUNE_CACHE_APPEND;
    run(x);
    const attune_tensor* const to = x.k.data == near.k.data ? near_out : far_out;
    x.kind = ATTUNE_CACHE_GATHER, x.k = to[0], x.v = to[1];
    run(x);
  }
  const std::string of_k = rows.compare(host_out[0], near_out[0], far_out[0]);
  return of_k.empty() && plain ? rows.compare(host_out[1], near_out[1], far_out[1]) : of_k;
}

// Index scores, and the choice.
inline std::string find_near_sighted_indexer(cases::Memory& memory, std::byte* far,
                                             const std::function<std::string(const attune_indexer& device)>& run) {
  cases::IndexerProblem problem(make_case(R"({"name": "far", "kv": "paged", "shared_kv": true, "heads": [64, 1],
      "head_dim": [128, 128], "dtype": "e4m3", "cache": {"dtype": "e4m3", "scales": "token", "page_size": 64, "slack": 1},
      "seqlens_q": [2, 1], "seqlens_kv": [190, 70], "causal": true, "indexer": {"topk": 60, "clear": true}})"),
                                memory);
  problem.arena().upload();
  FarRows rows(memory, far);
  for (const attune_indexer_kind kind : {ATTUNE_INDEXER_SCORES, ATTUNE_INDEXER_TOPK}) {
    const attune_indexer host = problem.host(kind), near = problem.device(kind);
    attune_indexer spread = near;
    if (kind == ATTUNE_INDEXER_SCORES) {
      spread.q = rows.spread(host.q), spread.weights = rows.spread(host.weights);
      spread.scores = rows.spread(host.scores);
    } else {
      spread.indices = rows.spread(host.indices);
    }
    spread.cache.k = rows.spread(host.cache.k), spread.cache.k_scale = rows.spread(host.cache.k_scale);
    for (const attune_indexer& op : {near, spread}) {
      if (const std::string failure = run(op); !failure.empty()) return failure;
    }
    const bool scores = kind == ATTUNE_INDEXER_SCORES;
    const std::string wrong = scores ? rows.compare(host.scores, near.scores, spread.scores)
                                     : rows.compare(host.indices, near.indices, spread.indices);
    if (!wrong.empty()) return (scores ? "scores: " : "indices: ") + wrong;
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
