// SPDX-License-Identifier: Apache-2.0
// Sparse MLA: RoPE and append first, then attention over the slots that the model's indexer chooses, or, where the
// model has none, such as one might choose.
#pragma once

#include <optional>

#include "index_layer.h"
#include "layer_runner.h"
#include "layer_state.h"

namespace attune::cli {

class SparseRunner : public LayerRunner {
 public:
  explicit SparseRunner(const RunnerConfig& config);
  StepResult run(const Step& step, int64_t index, Verifier& verifier) override;
  std::vector<std::string> describe() const override;

 private:
  CallShape shape(int64_t batch, int64_t rows) const;
  // Slots for the query at `position`: the latest half, and one from each of as many equal parts of what came before.
  void choose_slots(const std::vector<int32_t>& pages, int64_t position, int32_t* slots);

  LayerState state_;
  BatchTables tables_;
  std::optional<IndexLayer> indexer_;
  Buffer prepared_q_;
  std::vector<int32_t> indices_, lengths_;
  std::vector<int64_t> keys_;
};

}  // namespace attune::cli
