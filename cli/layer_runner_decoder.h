// SPDX-License-Identifier: Apache-2.0
// Decoders, MLA included: prefill and decode of a step in one call over the paged cache, which appends the new tokens.
#pragma once

#include "layer_runner.h"
#include "layer_state.h"

namespace attune::cli {

class DecoderRunner : public LayerRunner {
 public:
  explicit DecoderRunner(const RunnerConfig& config);
  StepResult run(const Step& step, int64_t index, Verifier& verifier) override;
  std::vector<std::string> describe() const override { return state_.describe(); }

 private:
  CallShape shape(int64_t batch, int64_t rows) const;

  LayerState state_;
  BatchTables tables_;
  std::vector<int64_t> keys_;  // that each row sees
};

}  // namespace attune::cli
