// SPDX-License-Identifier: Apache-2.0
// A case of the indexer made real: queries, index keys and tables of the attention case of the same shape, so with its
// poison, and beside them what only the indexer has.
#pragma once

#include <functional>
#include <string>

#include "compare.h"
#include "problem.h"

namespace attune::cases {

class IndexerProblem {
 public:
  explicit IndexerProblem(const Case& spec, Memory& memory = host_memory());

  const Case& spec() const { return problem_.spec(); }
  Arena& arena() { return problem_.arena(); }
  // The operation with the host's bytes. SELECT and TOPK write to their own indices.
  attune_indexer host(attune_indexer_kind kind) const;
  attune_indexer& base() { return base_; }  // what the kinds share, to change before the run
  attune_indexer device(attune_indexer_kind kind) const { return problem_.arena().on_device(host(kind)); }

 private:
  void add_inputs();
  void add_ranges();
  void add_slot_table();
  void add_outputs();
  attune_tensor add_row_tensor(const char* name, attune_dtype dtype, int64_t last);

  Problem problem_;
  Random random_;
  attune_indexer base_{};
  attune_tensor scores_{}, indices_[2]{}, topk_length_[2]{};  // of TOPK and of SELECT
};

// Runs one kind in a guarded workspace of the size that it asks for. "" or what failed.
std::string run(const attune_indexer& device, Memory& memory);

using IndexerRunner = std::function<std::string(const attune_indexer& device)>;

// Scores against the oracle, SELECT against an exact selection from those very scores, and TOPK against SELECT, bit for
// bit.
Report run_and_check(IndexerProblem& problem);
Report run_and_check(IndexerProblem& problem, const IndexerRunner& runner);  // instead of run
Report run_indexer_case(const Case& spec, Memory& memory = host_memory());

}  // namespace attune::cases
