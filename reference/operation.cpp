// SPDX-License-Identifier: Apache-2.0
#include "reference/operation.h"

#include <algorithm>
#include <cmath>

#include "reference/reference.h"

namespace attune::reference {
namespace {

struct Extent {
  int64_t first, count;
};

// Extents by cu_seqlens: within [0, total], and never going back, whatever the table says.
std::vector<Extent> ragged_extents(const attune_tensor& cu_seqlens, int64_t total) {
  std::vector<Extent> extents;
  int64_t end = 0;
  for (int64_t b = 0; b + 1 < cu_seqlens.shape[0]; ++b) {
    const int64_t first = std::clamp<int64_t>(integer_at(cu_seqlens, b), end, total);
    end = std::clamp<int64_t>(integer_at(cu_seqlens, b + 1), first, total);
    extents.push_back({first, end - first});
  }
  return extents;
}

std::vector<Extent> extents_of(const attune_tensor& tokens, const attune_tensor& cu_seqlens, bool one_a_row) {
  if (tokens.rank == 3 && present(cu_seqlens)) return ragged_extents(cu_seqlens, tokens.shape[0]);
  int64_t batch = 1, each = tokens.shape[0];
  if (tokens.rank == 4) {
    batch = tokens.shape[0];
    each = tokens.shape[1];
  } else if (one_a_row) {
    batch = tokens.shape[0];
    each = 1;
  }
  std::vector<Extent> extents;
  for (int64_t b = 0; b < batch; ++b) extents.push_back({b * each, each});
  return extents;
}

std::vector<double> excess(std::vector<double> magnitudes, const std::vector<double>& values) {
  for (size_t d = 0; d < values.size(); ++d) magnitudes[d] -= std::fabs(values[d]);
  return magnitudes;
}

}  // namespace

std::vector<Sequence> split_sequences(const attune_tensor& tokens, const attune_tensor& cu_seqlens, bool one_a_row) {
  std::vector<Sequence> sequences;
  for (const Extent& extent : extents_of(tokens, cu_seqlens, one_a_row)) {
    Sequence s;
    s.first_query = extent.first;
    s.num_queries = extent.count;
    sequences.push_back(s);
  }
  return sequences;
}

int64_t num_rows(const attune_attention& a) { return Rows(a.q).count(); }

Operation::Operation(const attune_attention& attention)
    : a(attention),
      q_(attention.q),
      q_rope_(attention.q_rope),
      k_(attention.k),
      v_(attention.v),
      prologue_(attention.prologue),
      magnitudes_(attention.prologue, true) {
  num_rows = q_.count();
  num_heads_q = q_.heads();
  sequences = split_sequences(a.q, a.cu_seqlens_q, present(a.cache.k));
  owner_.assign(static_cast<size_t>(num_rows), -1);
  for (size_t b = 0; b < sequences.size(); ++b) {
    for (int64_t i = 0; i < sequences[b].num_queries; ++i) {
      owner_[static_cast<size_t>(sequences[b].first_query + i)] = static_cast<int64_t>(b);
    }
  }
  head_dim_v = v_ ? v_.dim() : a.head_dim_v;
  if (present(a.cache.k)) {
    cache_.emplace(a.cache, head_dim_v);
    head_dim_v = cache_->head_dim_v();
  }
  if (present(a.extra_cache.k)) extra_cache_.emplace(a.extra_cache, head_dim_v);
  num_heads_kv = cache_ ? cache_->num_heads() : k_.heads();
  set_keys();
}

void Operation::set_keys() {
  std::vector<Extent> dense;
  same_tokens_ = has_new_tokens();
  if (k_ && !cache_) {
    const bool own_cu_seqlens = present(a.cu_seqlens_kv) && a.cu_seqlens_kv.data != a.cu_seqlens_q.data;
    same_tokens_ = k_.count() == num_rows && !own_cu_seqlens;
    const bool shares_cu_seqlens = same_tokens_ && a.k.rank == 3 && present(a.cu_seqlens_q);
    dense = extents_of(a.k, shares_cu_seqlens ? a.cu_seqlens_q : a.cu_seqlens_kv, false);
  }
  for (size_t b = 0; b < sequences.size(); ++b) {
    Sequence& s = sequences[b];
    const int64_t used =
        present(a.seqused_kv) ? std::max<int64_t>(integer_at(a.seqused_kv, static_cast<int64_t>(b)), 0) : -1;
    if (has_new_tokens()) {
      s.first_dense = s.first_query;
      s.num_dense = s.num_queries;
    } else if (b < dense.size()) {
      s.first_dense = dense[b].first;
      s.num_dense = used < 0 ? dense[b].count : std::min(used, dense[b].count);
    }
    if (cache_ && !is_sparse() && used > 0)
      s.num_cached = cache_->is_ring() ? used : std::min(used, cache_->capacity());
  }
}

bool Operation::is_skipped(int64_t b) const {
  if (present(a.finished) && integer_at(a.finished, b) != 0) return true;
  return a.skip_decode != 0 && sequences[static_cast<size_t>(b)].num_queries == 1;
}

std::optional<int64_t> Operation::table_row(int64_t b, int64_t t) const {
  if (!present(a.cache_indirection)) return b;
  const int64_t request = b / a.beam_width * a.beam_width;
  const bool wrapped = cache_->is_ring() && sequences[static_cast<size_t>(b)].num_cached > cache_->ring_capacity();
  if (present(a.beam_prompt_length) && !wrapped && t < integer_at(a.beam_prompt_length, b)) return request;
  const int64_t column = cache_->is_ring() ? t % cache_->ring_capacity() : t;
  if (column >= a.cache_indirection.shape[1]) return std::nullopt;
  const int64_t beam = integer_at(a.cache_indirection, b, column);
  if (beam < 0 || beam >= a.beam_width) return std::nullopt;
  return request + beam;
}

std::vector<Key> Operation::keys_of_sequence(int64_t b) const {
  const Sequence& s = sequences[static_cast<size_t>(b)];
  std::vector<Key> keys;
  const int64_t oldest = cache_ && cache_->is_ring() ? std::max<int64_t>(s.num_cached - cache_->ring_capacity(), 0) : 0;
  for (int64_t t = oldest; t < s.num_cached; ++t) {
    const std::optional<int64_t> row = table_row(b, t);
    const std::optional<Slot> slot = row ? cache_->find(*row, t) : std::nullopt;
    if (slot) keys.push_back({&*cache_, *slot, 0, t});
  }
  for (int64_t j = 0; j < s.num_dense; ++j) keys.push_back({nullptr, {}, s.first_dense + j, s.num_cached + j});
  return keys;
}

void Operation::add_listed(const attune_tensor& indices, const attune_tensor& lengths, const Cache* cache, int64_t b,
                           int64_t row, int64_t kv_head, std::vector<Key>& keys) const {
  const Sequence& s = sequences[static_cast<size_t>(b)];
  const int64_t topk = indices.shape[indices.rank - 1];
  int64_t length = topk;
  if (present(lengths)) {
    const bool by_sequence = lengths.shape[0] == static_cast<int64_t>(sequences.size());
    length = std::clamp<int64_t>(integer_at(lengths, by_sequence ? b : row), 0, topk);
  }
  for (int64_t i = 0; i < length; ++i) {
    int64_t index;
    if (indices.rank == 2) {
      index = integer_at(indices, row, i);
    } else if (a.q.rank == 4) {
      index = integer_at(indices, row / a.q.shape[1], row % a.q.shape[1], i);
    } else {
      index = integer_at(indices, row, kv_head, i);
    }
    if (index < 0 || index >= (cache != nullptr ? cache->num_slots() : s.num_dense)) continue;
    if (cache != nullptr) {
      keys.push_back({cache, {index, index}, 0, 0});
    } else {
      keys.push_back({nullptr, {}, s.first_dense + index, index});
    }
  }
}

std::vector<Key> Operation::keys_of_row(int64_t b, int64_t row, int64_t kv_head) const {
  std::vector<Key> keys;
  add_listed(a.indices, a.topk_length, cache_ ? &*cache_ : nullptr, b, row, kv_head, keys);
  if (present(a.extra_indices) && extra_cache_) {
    add_listed(a.extra_indices, a.extra_topk_length, &*extra_cache_, b, row, kv_head, keys);
  }
  return keys;
}

std::vector<double> Operation::query(int64_t b, int64_t row, int64_t head) const {
  const Sequence& s = sequences[static_cast<size_t>(b)];
  std::vector<double> query = prologue_.query(q_, row, head, {b, row, s.position(row - s.first_query)});
  if (q_rope_) {
    const std::vector<double> rope = q_rope_.row(row, head);
    query.insert(query.end(), rope.begin(), rope.end());
  }
  return query;
}

// positions has an entry for each row of q, which serves the keys where both are the same tokens.
Token Operation::token_of(int64_t b, const Key& key) const { return {b, same_tokens_ ? key.row : -1, key.position}; }

std::vector<double> Operation::key(int64_t b, const Key& key, int64_t kv_head) const {
  if (key.cache != nullptr) return key.cache->k_row(key.slot.k, kv_head);
  return prologue_.key(k_, key.row, kv_head, token_of(b, key));
}

std::vector<double> Operation::value(int64_t b, const Key& key, int64_t kv_head) const {
  if (key.cache != nullptr) return key.cache->v_row(key.slot.v, kv_head);
  if (v_) return prologue_.value(v_, key.row, kv_head, token_of(b, key));
  std::vector<double> row = this->key(b, key, kv_head);
  row.resize(static_cast<size_t>(head_dim_v));
  return row;
}

std::vector<double> Operation::query_lost(int64_t b, int64_t row, int64_t head) const {
  if (!prologue_.has_sums()) return {};
  const Sequence& s = sequences[static_cast<size_t>(b)];
  return excess(magnitudes_.query(q_, row, head, {b, row, s.position(row - s.first_query)}), query(b, row, head));
}

std::vector<double> Operation::key_lost(int64_t b, const Key& key, int64_t kv_head) const {
  if (!prologue_.has_sums() || key.cache != nullptr) return {};
  return excess(magnitudes_.key(k_, key.row, kv_head, token_of(b, key)), this->key(b, key, kv_head));
}

std::vector<double> Operation::value_lost(int64_t b, const Key& key, int64_t kv_head) const {
  if (!prologue_.has_sums() || key.cache != nullptr) return {};
  if (v_) return excess(magnitudes_.value(v_, key.row, kv_head, token_of(b, key)), value(b, key, kv_head));
  std::vector<double> lost = key_lost(b, key, kv_head);
  lost.resize(static_cast<size_t>(head_dim_v));
  return lost;
}

}  // namespace attune::reference
