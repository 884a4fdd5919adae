// SPDX-License-Identifier: Apache-2.0
// The prologue on its own, and what it appends to a cache.
#include <algorithm>

#include "reference/operation.h"
#include "reference/reference.h"

namespace attune::reference {
namespace {

// attune_qkv_prepare taken apart. Its sequences are those of whichever of q, k and v is there.
struct Preparation {
  explicit Preparation(const attune_qkv_prepare& op)
      : q(op.q), k(op.k), v(op.v), prologue(op.prologue), finished(op.finished) {
    const attune_tensor& tokens = q ? op.q : k ? op.k : op.v;
    if (!present(tokens)) return;
    num_rows = Rows(tokens).count();
    sequences = split_sequences(tokens, op.cu_seqlens_q, present(op.cache.k));
    if (present(op.cache.k)) cache.emplace(op.cache, 0);
    for (size_t b = 0; b < sequences.size(); ++b) {
      Sequence& s = sequences[b];
      if (present(op.seqused_kv))
        s.num_cached = std::max<int64_t>(integer_at(op.seqused_kv, static_cast<int64_t>(b)), 0);
      if (cache && !cache->is_ring()) s.num_cached = std::min(s.num_cached, cache->capacity());
      s.first_dense = s.first_query;
      s.num_dense = s.num_queries;
    }
  }

  bool is_finished(int64_t b) const { return present(finished) && integer_at(finished, b) != 0; }

  Rows q, k, v;
  Prologue prologue;
  const attune_tensor& finished;
  std::optional<Cache> cache;
  std::vector<Sequence> sequences;
  int64_t num_rows = 0;
};

// Writes of the new tokens of sequence b. key and value give a row of a token (its number in the sequence) and head.
template <typename KeyRow, typename ValueRow>
void append_sequence(const Cache& cache, int64_t b, const Sequence& s, KeyRow&& key, ValueRow&& value,
                     std::vector<CacheWrite>& writes) {
  // More new tokens than a ring holds: the last ones stay.
  const int64_t first = cache.is_ring() ? std::max<int64_t>(s.num_dense - cache.ring_capacity(), 0) : 0;
  for (int64_t i = first; i < s.num_dense; ++i) {
    const std::optional<Slot> slot = cache.find(b, s.num_cached + i);
    if (!slot) continue;
    for (int64_t head = 0; head < cache.num_heads(); ++head) {
      CacheWrite write{slot->k, slot->v, head, key(i, head), {}};
      if (!cache.v_aliases_k()) write.v = value(i, head);
      writes.push_back(std::move(write));
    }
  }
}

}  // namespace

std::vector<CacheWrite> appended(const attune_attention& a) {
  const Operation op(a);
  std::vector<CacheWrite> writes;
  if (a.prologue.append == 0 || !op.has_new_tokens()) return writes;
  for (size_t i = 0; i < op.sequences.size(); ++i) {
    const auto b = static_cast<int64_t>(i);
    if (op.is_skipped(b)) continue;
    const Sequence& s = op.sequences[i];
    const auto token = [&](int64_t t) { return Key{nullptr, {}, s.first_dense + t, s.num_cached + t}; };
    append_sequence(
        op.cache(), b, s, [&](int64_t t, int64_t head) { return op.key(b, token(t), head); },
        [&](int64_t t, int64_t head) { return op.value(b, token(t), head); }, writes);
  }
  return writes;
}

std::vector<CacheWrite> appended(const attune_qkv_prepare& op) {
  const Preparation p(op);
  std::vector<CacheWrite> writes;
  if (op.prologue.append == 0 || !p.cache || !p.k) return writes;
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    const auto b = static_cast<int64_t>(i);
    if (p.is_finished(b)) continue;
    const Sequence& s = p.sequences[i];
    const auto token = [&](int64_t t) { return Token{b, s.first_query + t, s.num_cached + t}; };
    append_sequence(
        *p.cache, b, s, [&](int64_t t, int64_t head) { return p.prologue.key(p.k, s.first_query + t, head, token(t)); },
        [&](int64_t t, int64_t head) { return p.prologue.value(p.v, s.first_query + t, head, token(t)); }, writes);
  }
  return writes;
}

Prepared qkv_prepare(const attune_qkv_prepare& op) {
  const Preparation p(op);
  Prepared prepared;
  prepared.written.assign(static_cast<size_t>(p.num_rows), false);
  const auto resize = [&](const Rows& rows, std::vector<double>& to) {
    if (rows) to.assign(static_cast<size_t>(p.num_rows * rows.heads() * rows.dim()), 0.0);
  };
  resize(p.q, prepared.q);
  resize(p.k, prepared.k);
  resize(p.v, prepared.v);
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    const auto b = static_cast<int64_t>(i);
    if (p.is_finished(b)) continue;
    const Sequence& s = p.sequences[i];
    for (int64_t t = 0; t < s.num_queries; ++t) {
      const int64_t row = s.first_query + t;
      const Token token{b, row, s.num_cached + t};
      prepared.written[static_cast<size_t>(row)] = true;
      const auto store = [&](const Rows& rows, std::vector<double>& to, auto apply) {
        if (!rows) return;
        for (int64_t head = 0; head < rows.heads(); ++head) {
          const std::vector<double> x = (p.prologue.*apply)(rows, row, head, token);
          std::copy(x.begin(), x.end(), to.begin() + (row * rows.heads() + head) * rows.dim());
        }
      };
      store(p.q, prepared.q, &Prologue::query);
      store(p.k, prepared.k, &Prologue::key);
      store(p.v, prepared.v, &Prologue::value);
    }
  }
  return prepared;
}

}  // namespace attune::reference
