// SPDX-License-Identifier: Apache-2.0
#include "layer_runner_sparse.h"

#include <cstring>

#include "cases/tensors.h"

namespace attune::cli {

SparseRunner::SparseRunner(const RunnerConfig& config)
    : state_(config),
      tables_(config.limits.max_batch, state_.max_pages),
      prepared_q_(static_cast<size_t>(config.limits.max_rows * config.model.num_heads_q * config.model.head_dim_qk *
                                      cases::element_size(activation_dtype(config.kv_dtype)))),
      indices_(static_cast<size_t>(config.limits.max_rows * config.model.topk)),
      lengths_(static_cast<size_t>(config.limits.max_rows)) {
  if (config.model.index_heads > 0) indexer_.emplace(config, state_.random);
  state_.add_plan("", sparse_call(config.model, config.kv_dtype, state_.parameters, state_.pool.view(),
                                  shape(config.limits.max_batch, config.limits.max_rows)));
  state_.allocate_workspace();
}

CallShape SparseRunner::shape(int64_t batch, int64_t rows) const {
  const RunnerLimits& limits = state_.config.limits;
  return {batch, rows, state_.max_pages, std::min(limits.max_rows, limits.max_seqlen), limits.max_seqlen};
}

void SparseRunner::choose_slots(const std::vector<int32_t>& pages, int64_t position, int32_t* slots) {
  const int64_t page_size = state_.config.limits.page_size, topk = state_.config.model.topk, num_visible = position + 1;
  const auto slot = [&](int64_t t) {
    return static_cast<int32_t>(pages[static_cast<size_t>(t / page_size)] * page_size + t % page_size);
  };
  if (num_visible <= topk) {
    for (int64_t t = 0; t < num_visible; ++t) slots[t] = slot(t);
    return;
  }
  const int64_t num_parts = topk / 2, earlier = num_visible - (topk - num_parts);
  for (int64_t i = 0; i < num_parts; ++i)
    slots[i] = slot(state_.random.integer(i * earlier / num_parts, (i + 1) * earlier / num_parts - 1));
  for (int64_t i = num_parts; i < topk; ++i) slots[i] = slot(earlier + i - num_parts);
}

std::vector<std::string> SparseRunner::describe() const {
  std::vector<std::string> texts = state_.describe();
  const Model& model = state_.config.model;
  if (indexer_) {
    texts.push_back("indexer: " + std::to_string(model.index_heads) + " heads of " +
                    std::to_string(model.index_head_dim) + ", e4m3, the " + std::to_string(model.topk) + " best keys");
  }
  return texts;
}

StepResult SparseRunner::run(const Step& step, int64_t index, Verifier& verifier) {
  const Model& model = state_.config.model;
  const KvDtype kv = state_.config.kv_dtype;
  StepResult result;
  tables_.clear();
  keys_.clear();
  for (const Chunk& chunk : step.chunks) {
    tables_.add(chunk.tokens, chunk.cached, chunk.sequence->pages);
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      const auto row = static_cast<int64_t>(keys_.size());
      keys_.push_back(std::min(chunk.cached + i + 1, model.topk));
      if (!indexer_) choose_slots(chunk.sequence->pages, chunk.cached + i, indices_.data() + row * model.topk);
      lengths_[static_cast<size_t>(row)] = static_cast<int32_t>(keys_.back());
      result.work += sparse_work(model, kv, keys_.back());
    }
    if (indexer_) result.work += index_work(model, chunk.cached, chunk.tokens);
  }
  const CallShape call_shape = shape(tables_.batch(), tables_.rows());
  QkvPrepare prepare = prepare_call(model, kv, state_.parameters, state_.pool.view(), call_shape);
  const attune_tensor fresh_q = state_.q.take(call_shape.rows, state_.random);
  std::memcpy(prepared_q_.data(), fresh_q.data,
              static_cast<size_t>(cases::num_elements(fresh_q) *
                                  cases::element_size(static_cast<attune_dtype>(fresh_q.dtype))));
  prepare.q.data = prepare.q_out.data = prepared_q_.data();  // in place, as an engine does
  state_.set_new_tokens(prepare);
  LayerState::set_tables(prepare, tables_);
  Attention a = sparse_call(model, kv, state_.parameters, state_.pool.view(), call_shape);
  a.q.data = prepared_q_.data();
  a.out.data = state_.out.data();
  a.indices.data = indices_.data();
  a.topk_length.data = lengths_.data();

  result.seconds = state_.mirror.prepare(prepare);
  if (indexer_) {
    result.seconds += state_.mirror.append(indexer_->append(tables_, state_.random));
    const Indexer choice = indexer_->choose(tables_, indices_.data(), lengths_.data(), state_.random);
    result.seconds += indexer_->run(choice, state_.mirror);
    verifier.compare_index(choice, index);
  }
  verifier.expect(a, keys_);
  result.seconds += state_.run(0, a);
  verifier.compare(a, index, "sparse attention");
  return result;
}

}  // namespace attune::cli
