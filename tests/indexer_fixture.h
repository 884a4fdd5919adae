// SPDX-License-Identifier: Apache-2.0
// What the tests of the indexer share: a small problem, and tables that make no sense.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "cases/indexer_problem.h"
#include "support.h"

namespace attune::tests {

// A problem whose tables can be overwritten: rows of three sequences over 16-token pages.
inline cases::Case small_case(std::string_view more = {}) {
  const cases::Row row(R"("name": "small", "kv": "paged", "shared_kv": true, "heads": [6, 1], "head_dim": [32, 32],
      "dtype": "e4m3", "cache": {"dtype": "e4m3", "scales": "token"}, "seqlens_q": [2, 1, 5],
      "seqlens_kv": [100, 1, 180], "causal": true, "indexer": {"topk": 30})");
  return make_case(row.with(more));
}

inline void set_integer(const attune_tensor& t, std::initializer_list<int64_t> index, int64_t value) {
  cases::encode(static_cast<attune_dtype>(t.dtype), static_cast<double>(value), cases::element_at(t, index));
}

inline void spoil_pages(cases::IndexerProblem& p) {
  set_integer(p.base().cache.page_table, {0, 1}, -1);
  set_integer(p.base().cache.page_table, {0, 6}, 2147480000);
  set_integer(p.base().cache.page_table, {1, 0}, INT32_MIN);
  set_integer(p.base().cache.page_table, {2, 0}, p.base().cache.k.shape[0]);
}

// A way to spoil small_case(more).
struct Spoilt {
  const char* name;
  const char* more;
  void (*spoil)(cases::IndexerProblem& problem);
};

inline constexpr Spoilt kSpoilt[] = {
    {"bad pages hide their tokens", "", spoil_pages},
    {"bad pages leave fewer than topk", R"("indexer": {"topk": 90})", spoil_pages},
    // Past the end of the longest sequence its table names no page, but the last page has NaN behind the last token.
    {"lengths are clamped", "",
     [](cases::IndexerProblem& p) {
       set_integer(p.base().seqused_kv, {0}, -5);
       set_integer(p.base().seqused_kv, {1}, INT32_MIN);
       set_integer(p.base().seqused_kv, {2}, INT32_MAX);
       p.base().max_seqlen_kv = 182;  // the columns of scores, which clamp lengths too
     }},
    {"lengths are clamped by max_seqlen_kv", "", [](cases::IndexerProblem& p) { p.base().max_seqlen_kv = 64; }},
    {"ranges are clamped", R"("window": [40, 3], "poison": false)",
     [](cases::IndexerProblem& p) {
       const int64_t values[] = {INT32_MIN, -1, 0, 1, 70, 99, 100, INT32_MAX};
       for (int64_t row = 0; row < 8; ++row) {
         set_integer(p.base().key_begin, {row}, values[row]);
         set_integer(p.base().key_end, {row}, values[7 - row]);
       }
     }},
    {"offsets stay in the tensor", R"("poison": false)", [](cases::IndexerProblem& p) {
       set_integer(p.base().cu_seqlens_q, {0}, -3);
       set_integer(p.base().cu_seqlens_q, {1}, 7);
       set_integer(p.base().cu_seqlens_q, {2}, 2);
       set_integer(p.base().cu_seqlens_q, {3}, INT32_MAX);
     }}};

// The host's bytes are changed, so the oracle reads the same nonsense.
inline void spoil(cases::IndexerProblem& problem, const Spoilt& spoilt) {
  spoilt.spoil(problem);
  problem.arena().upload();
}

}  // namespace attune::tests
