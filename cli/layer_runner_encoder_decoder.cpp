// SPDX-License-Identifier: Apache-2.0
#include "layer_runner_encoder_decoder.h"

namespace attune::cli {

EncoderDecoderRunner::EncoderDecoderRunner(const RunnerConfig& config)
    : state_(config),
      max_cross_pages_(pages_for(config.limits.max_prompt, config.limits.page_size)),
      encoder_tables_(config.limits.max_batch, max_cross_pages_),
      self_tables_(config.limits.max_batch, state_.max_pages),
      cross_tables_(config.limits.max_batch, max_cross_pages_) {
  const RunnerLimits& limits = config.limits;
  const attune_kv_cache& cache = state_.pool.view();
  if (!limits.decode_only) {
    encoder_plan_ = state_.plans.size();
    state_.add_plan("encoder", encoder_call(config.model, config.kv_dtype, state_.parameters,
                                            encoder_shape(limits.max_batch, limits.max_encode_rows)));
  }
  self_plan_ = state_.plans.size();
  state_.add_plan("self", decoder_call(config.model, config.kv_dtype, state_.parameters, cache, 0,
                                       self_shape(limits.max_batch, limits.max_rows)));
  cross_plan_ = state_.plans.size();
  state_.add_plan("cross", cross_call(config.model, config.kv_dtype, state_.parameters, cache,
                                      cross_shape(limits.max_batch, limits.max_rows)));
  state_.allocate_workspace();
}

CallShape EncoderDecoderRunner::encoder_shape(int64_t batch, int64_t rows) const {
  const int64_t longest = state_.config.limits.max_prompt;
  return {batch, rows, max_cross_pages_, longest, longest};
}

CallShape EncoderDecoderRunner::self_shape(int64_t batch, int64_t rows) const {
  const RunnerLimits& limits = state_.config.limits;
  return {batch, rows, state_.max_pages, max_queries(), limits.max_seqlen};
}

CallShape EncoderDecoderRunner::cross_shape(int64_t batch, int64_t rows) const {
  const RunnerLimits& limits = state_.config.limits;
  return {batch, rows, max_cross_pages_, max_queries(), limits.max_prompt};
}

int64_t EncoderDecoderRunner::max_queries() const {
  const RunnerLimits& limits = state_.config.limits;
  return limits.decode_only ? 1 : std::min(limits.max_rows, limits.max_seqlen);
}

void EncoderDecoderRunner::run_verified(size_t plan, const attune_attention& a, int64_t index, Verifier& verifier,
                                        StepResult& result) {
  verifier.expect(a, keys_);
  result.seconds += state_.run(plan, a);
  verifier.compare(a, index, state_.plans[plan].name + " attention");
}

void EncoderDecoderRunner::encode(const Step& step, int64_t index, Verifier& verifier, StepResult& result) {
  const Model& model = state_.config.model;
  const KvDtype kv = state_.config.kv_dtype;
  encoder_tables_.clear();
  keys_.clear();
  for (const Chunk& chunk : step.chunks) {
    if (chunk.encode == 0) continue;
    encoder_tables_.add(chunk.encode, 0, chunk.sequence->cross_pages);
    keys_.insert(keys_.end(), static_cast<size_t>(chunk.encode), chunk.encode);
    result.work += encoder_work(model, kv, chunk.encode);
  }
  if (encoder_tables_.batch() == 0) return;
  Attention a =
      encoder_call(model, kv, state_.parameters, encoder_shape(encoder_tables_.batch(), encoder_tables_.rows()));
  state_.set_rows(a);
  a.cu_seqlens_q = encoder_tables_.cu_seqlens();
  run_verified(encoder_plan_, a, index, verifier, result);

  // The keys and values that the decoder will see: other projections of the encoder's output.
  CacheOp append(ATTUNE_CACHE_APPEND);
  append.cache = state_.pool.view();
  append.cache.page_table = encoder_tables_.page_table();
  append.cu_seqlens = encoder_tables_.cu_seqlens();
  append.seqused_kv = encoder_tables_.seqused();
  append.k = state_.k.take(encoder_tables_.rows(), state_.random);
  append.v = state_.v->take(encoder_tables_.rows(), state_.random);
  result.seconds += state_.mirror.append(append);
}

void EncoderDecoderRunner::attend_self(const Step& step, int64_t index, Verifier& verifier, StepResult& result) {
  const Model& model = state_.config.model;
  const KvDtype kv = state_.config.kv_dtype;
  self_tables_.clear();
  keys_.clear();
  for (const Chunk& chunk : step.chunks) {
    self_tables_.add(chunk.tokens, chunk.cached, chunk.sequence->pages);
    for (int64_t i = 0; i < chunk.tokens; ++i) keys_.push_back(chunk.cached + i + 1);
    result.work += decoder_work(model, kv, chunk.cached, chunk.tokens, 0);
  }
  Attention a = decoder_call(model, kv, state_.parameters, state_.pool.view(), 0,
                             self_shape(self_tables_.batch(), self_tables_.rows()));
  state_.set_rows(a);
  LayerState::set_tables(a, self_tables_);
  run_verified(self_plan_, a, index, verifier, result);
}

void EncoderDecoderRunner::attend_cross(const Step& step, int64_t index, Verifier& verifier, StepResult& result) {
  const Model& model = state_.config.model;
  const KvDtype kv = state_.config.kv_dtype;
  cross_tables_.clear();
  keys_.clear();
  for (const Chunk& chunk : step.chunks) {
    const int64_t prompt = chunk.sequence->prompt;
    cross_tables_.add(chunk.tokens, prompt, chunk.sequence->cross_pages);
    keys_.insert(keys_.end(), static_cast<size_t>(chunk.tokens), prompt);
    result.work += cross_work(model, kv, chunk.tokens, prompt);
  }
  Attention a = cross_call(model, kv, state_.parameters, state_.pool.view(),
                           cross_shape(cross_tables_.batch(), cross_tables_.rows()));
  state_.set_rows(a);
  LayerState::set_tables(a, cross_tables_);
  run_verified(cross_plan_, a, index, verifier, result);
}

StepResult EncoderDecoderRunner::run(const Step& step, int64_t index, Verifier& verifier) {
  StepResult result;
  encode(step, index, verifier, result);
  attend_self(step, index, verifier, result);
  attend_cross(step, index, verifier, result);
  return result;
}

}  // namespace attune::cli
