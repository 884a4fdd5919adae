// SPDX-License-Identifier: Apache-2.0
// T5: encoder self attention over whole prompts, decoder self attention over the cache, cross attention over the
// encoder's keys.
#pragma once

#include "layer_runner.h"
#include "layer_state.h"

namespace attune::cli {

class EncoderDecoderRunner : public LayerRunner {
 public:
  explicit EncoderDecoderRunner(const RunnerConfig& config);
  StepResult run(const Step& step, int64_t index, Verifier& verifier) override;
  std::vector<std::string> describe() const override { return state_.describe(); }

 private:
  void encode(const Step& step, int64_t index, Verifier& verifier, StepResult& result);
  void attend_self(const Step& step, int64_t index, Verifier& verifier, StepResult& result);
  void attend_cross(const Step& step, int64_t index, Verifier& verifier, StepResult& result);
  void run_verified(size_t plan, const attune_attention& a, int64_t index, Verifier& verifier, StepResult& result);
  CallShape encoder_shape(int64_t batch, int64_t rows) const;
  CallShape self_shape(int64_t batch, int64_t rows) const;
  CallShape cross_shape(int64_t batch, int64_t rows) const;

  int64_t max_queries() const;  // of one sequence, in the decoder

  LayerState state_;
  size_t encoder_plan_ = 0, self_plan_ = 0, cross_plan_ = 0;  // of state_.plans
  int64_t max_cross_pages_;
  BatchTables encoder_tables_, self_tables_, cross_tables_;
  std::vector<int64_t> keys_;
};

}  // namespace attune::cli
