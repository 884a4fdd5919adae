// SPDX-License-Identifier: Apache-2.0
// Lengths, tables and lists that make no sense, for attention over latent caches: a run masks them, and the oracle,
// which reads the same nonsense, says what is left.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "support.h"

namespace attune::tests {

// Writes one int32 of a tensor, in the host's bytes; the arena is to be uploaded after.
inline void set_entry(const attune_tensor& t, std::initializer_list<int64_t> index, int64_t value) {
  cases::encode(static_cast<attune_dtype>(t.dtype), static_cast<double>(value), cases::element_at(t, index));
}

// The int32 of a tensor.
inline int64_t entry(const attune_tensor& t, std::initializer_list<int64_t> index) {
  return static_cast<int64_t>(cases::decode(static_cast<attune_dtype>(t.dtype), cases::element_at(t, index)));
}

// What int32 can hold that is no slot and no page: the ends, what public tests plant, and just beyond the pool.
inline int64_t wild(int64_t i, int64_t pool) {
  const int64_t values[] = {INT32_MIN, INT32_MAX, 2147480000, -1, pool, -2147480000};
  return values[i % 6];
}

// Every third entry of V's table is bad, and none of K's.
inline void spoil_value_pages(const attune_attention& a) {
  const attune_tensor& table = a.cache.v_page_table;
  for (int64_t b = 0; b < table.shape[0]; ++b) {
    for (int64_t e = b; e < table.shape[1]; e += 3) set_entry(table, {b, e}, wild(b + e, a.cache.v.shape[0]));
  }
}
// And every fourth of K's.
inline void spoil_pages(const attune_attention& a) {
  spoil_value_pages(a);
  const attune_tensor& table = a.cache.page_table;
  for (int64_t b = 0; b < table.shape[0]; ++b) {
    for (int64_t e = 1; e < table.shape[1]; e += 4) set_entry(table, {b, e}, wild(b + e, a.cache.k.shape[0]));
  }
}

// Multiplies all numbers of an fp32 tensor.
inline void multiply(const attune_tensor& t, float times, int axis = 0, int64_t offset = 0) {
  if (axis == t.rank) {
    static_cast<float*>(t.data)[offset] *= times;
    return;
  }
  for (int64_t i = 0; i < t.shape[axis]; ++i) multiply(t, times, axis + 1, offset + i * t.stride[axis]);
}

struct SpoiltAttention {
  const char* name;
  const char* row;  // what of a case it needs beside its cache
  void (*spoil)(cases::Problem& problem);
};

// Of three sequences in pages, or rows of a contiguous cache.
inline const SpoiltAttention kSpoiltLengths[] = {
    {"lengths", "",
     [](cases::Problem& p) {
       const attune_tensor& lengths = p.host().seqused_kv;
       set_entry(lengths, {0}, INT32_MAX), set_entry(lengths, {1}, INT32_MIN), set_entry(lengths, {2}, -5);
     }},
    {"offsets beyond both ends", R"("seqlens_q": [2, 1, 3])",
     [](cases::Problem& p) {
       const attune_tensor& offsets = p.host().cu_seqlens_q;
       set_entry(offsets, {0}, -7), set_entry(offsets, {1}, 1), set_entry(offsets, {2}, 1);
       set_entry(offsets, {3}, INT32_MAX);
     }},
};

// Of three sequences in pages.
inline const SpoiltAttention kSpoiltPages[] = {
    {"some pages", "",
     [](cases::Problem& p) {
       const attune_tensor& table = p.host().cache.page_table;
       for (int64_t b = 0; b < table.shape[0]; ++b) set_entry(table, {b, b % 2}, wild(b, p.host().cache.k.shape[0]));
     }},
    {"all pages", "",
     [](cases::Problem& p) {
       const attune_tensor& table = p.host().cache.page_table;
       for (int64_t b = 0; b < table.shape[0]; ++b) {
         for (int64_t e = 0; e < table.shape[1]; ++e) set_entry(table, {b, e}, wild(b + e, p.host().cache.k.shape[0]));
       }
     }},
};

// Of lists of a pool, and of a second one.
inline const SpoiltAttention kSpoiltLists[] = {
    {"lengths of lists", R"("sparse": {"topk": 70, "topk_length": "batch", "slots": 300},
        "extra": {"topk": 9, "topk_length": "batch", "page_size": 16})",
     [](cases::Problem& p) {
       const int64_t lengths[] = {INT32_MAX, INT32_MIN, 71, -1};
       for (int64_t b = 0; b < p.host().topk_length.shape[0]; ++b) {
         set_entry(p.host().topk_length, {b}, lengths[b % 4]);
         set_entry(p.host().extra_topk_length, {b}, lengths[(b + 1) % 4]);
       }
     }},
    {"entries", R"("sparse": {"topk": 200, "slots": 300})",
     [](cases::Problem& p) {
       const attune_tensor& list = p.host().indices;
       for (int64_t row = 0; row < list.shape[0]; ++row) {
         // Every third, the whole of a tile, the last.
         for (int64_t k = 0; k < list.shape[1]; ++k) {
           if (k % 3 == row % 3 || (k >= 64 && k < 128) || k + 1 == list.shape[1])
             set_entry(list, {row, k}, wild(row + k, 320));
         }
       }
     }},
    {"nothing but wild entries", R"("sparse": {"topk": 130, "slots": 300}, "sinks": "mixed")",
     [](cases::Problem& p) {
       const attune_tensor& list = p.host().indices;
       for (int64_t row = 0; row < list.shape[0]; ++row) {
         for (int64_t k = 0; k < list.shape[1]; ++k) set_entry(list, {row, k}, wild(row + k, 320));
       }
     }},
    {"one entry many times", R"("sparse": {"topk": 130, "slots": 300, "invalid": 0})",
     [](cases::Problem& p) {
       const attune_tensor& list = p.host().indices;
       for (int64_t row = 0; row < list.shape[0]; ++row) {
         const auto first = static_cast<int64_t>(cases::decode(ATTUNE_INT32, cases::element_at(list, {row, 0})));
         for (int64_t k = 1; k < list.shape[1]; ++k) set_entry(list, {row, k}, first);
       }
     }},
};

// A case, and what spoils it.
struct SpoiltCase {
  cases::Case spec;
  void (*spoil)(cases::Problem& problem);
};

// For each way in which keys of MLA come: its cases.
inline std::vector<SpoiltCase> spoilt_mla_cases() {
  std::vector<SpoiltCase> list;
  const auto add = [&](const cases::Row& common, const auto& spoilt) {
    for (const SpoiltAttention& s : spoilt) {
      const std::string name = "spoilt " + std::to_string(list.size()) + " " + s.name;
      list.push_back({make_case(common.with(s.row).set("name", name)), s.spoil});
    }
  };
  const cases::Row latent(R"("dtype": "bf16", "head_dim": [576, 512], "max_logits": true)");
  const cases::Row paged = latent.with(R"("kv": "paged", "causal": true, "seqlens_kv": [192, 65, 130])");
  for (const char* cache :
       {R"("heads": [16, 1], "shared_kv": true, "seqlens_q": [2, 1, 1], "cache": {"page_size": 64})",
        R"("heads": [20, 1], "shared_kv": true, "seqlens_q": [2, 1, 1], "cache": {"page_size": 3})",
        R"("heads": [128, 1], "shared_kv": true, "cache": {"page_size": 16})",
        R"("heads": [128, 1], "cache": {"format": "mla_656", "page_size": 64})",
        R"("heads": [40, 1], "head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})",
        R"("heads": [16, 1], "shared_kv": true, "cache": {"page_size": 64})",
        R"("heads": [16, 1], "cache": {"format": "mla_656", "page_size": 64})"}) {
    add(paged.with(cache), kSpoiltLengths);
    add(paged.with(cache), kSpoiltPages);
  }
  add(paged.with(R"("kv": "contiguous", "heads": [20, 1], "shared_kv": true)"), kSpoiltLengths);
  for (const char* cache :
       {R"("heads": [20, 1], "shared_kv": true)", R"("heads": [5, 1], "shared_kv": true)",
        R"("heads": [128, 1], "cache": {"format": "mla_656"})",
        R"("heads": [20, 1], "head_dim": [512, 512], "cache": {"format": "mla_584"})",
        R"("heads": [16, 1], "cache": {"format": "mla_656"})", R"("heads": [32, 1], "cache": {"format": "mla_656"})"})
    add(latent.with(R"("kv": "slots", "seqlens_q": [2, 1, 1, 2])").with(cache), kSpoiltLists);
  const cases::Row half = paged.with(R"("heads": [32, 1], "cache": {"format": "mla_656", "page_size": 64})");
  add(half, kSpoiltLengths);
  add(half, kSpoiltPages);
  return list;
}

}  // namespace attune::tests
