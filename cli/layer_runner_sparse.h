// SPDX-License-Identifier: Apache-2.0
// Sparse MLA: RoPE and append first, then attention over the slots that an indexer would have chosen.
#pragma once

#include "layer_runner.h"
#include "layer_state.h"

namespace attune::cli {

class SparseRunner : public LayerRunner {
 public:
  explicit SparseRunner(const RunnerConfig& config);
  StepResult run(const Step& step, int64_t index, Verifier& verifier) override;
  std::vector<std::string> describe() const override { return state_.describe(); }

 private:
  CallShape shape(int64_t batch, int64_t rows) const;
  // Slots for the query at `position`: the latest half, and one from each of as many equal parts of what came before.
  int64_t choose_slots(const std::vector<int32_t>& pages, int64_t position, int32_t* slots);

  LayerState state_;
  BatchTables tables_;
  Buffer prepared_q_;
  std::vector<int32_t> indices_, lengths_;
  std::vector<int64_t> keys_;
};

}  // namespace attune::cli
