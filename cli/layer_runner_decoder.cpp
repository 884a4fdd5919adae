// SPDX-License-Identifier: Apache-2.0
#include "layer_runner_decoder.h"

namespace attune::cli {

DecoderRunner::DecoderRunner(const RunnerConfig& config)
    : state_(config), tables_(config.limits.max_batch, state_.max_pages) {
  const auto num_kinds = static_cast<int64_t>(config.model.windows.size());
  for (int64_t kind = 0; kind < num_kinds; ++kind) {
    state_.add_plan(layer_kind_name(config.model, kind),
                    decoder_call(config.model, config.kv_dtype, state_.parameters, state_.pool.view(), kind,
                                 shape(config.limits.max_batch, config.limits.max_rows)));
  }
  state_.allocate_workspace();
}

CallShape DecoderRunner::shape(int64_t batch, int64_t rows) const {
  const RunnerLimits& limits = state_.config.limits;
  return {batch, rows, state_.max_pages, limits.decode_only ? 1 : std::min(limits.max_rows, limits.max_seqlen),
          limits.max_seqlen};
}

StepResult DecoderRunner::run(const Step& step, int64_t index, Verifier& verifier) {
  const Model& model = state_.config.model;
  const int64_t kind = index % static_cast<int64_t>(model.windows.size()),
                window = model.windows[static_cast<size_t>(kind)];
  StepResult result;
  result.layer_kind = layer_kind_name(model, kind);
  tables_.clear();
  keys_.clear();
  for (const Chunk& chunk : step.chunks) {
    tables_.add(chunk.tokens, chunk.cached, chunk.sequence->pages);
    for (int64_t i = 0; i < chunk.tokens; ++i) keys_.push_back(visible_keys(chunk.cached + i, window));
    result.work += decoder_work(model, state_.config.kv_dtype, chunk.cached, chunk.tokens, window);
  }
  Attention a = decoder_call(model, state_.config.kv_dtype, state_.parameters, state_.pool.view(), kind,
                             shape(tables_.batch(), tables_.rows()));
  state_.set_rows(a);
  LayerState::set_tables(a, tables_);
  verifier.expect(a, keys_);
  result.seconds = state_.run(static_cast<size_t>(kind), a);
  verifier.compare(a, index, result.layer_kind.empty() ? "attention" : "attention (" + result.layer_kind + ")");
  return result;
}

}  // namespace attune::cli
