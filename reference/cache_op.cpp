// SPDX-License-Identifier: Apache-2.0
// Rows between a cache and dense k, v.
#include <algorithm>

#include "reference/operation.h"
#include "reference/reference.h"

namespace attune::reference {
namespace {

bool is_store(const attune_cache_op& op) { return op.kind == ATTUNE_CACHE_APPEND || op.kind == ATTUNE_CACHE_QUANTIZE; }

class Mover {
 public:
  explicit Mover(const attune_cache_op& op) : op_(op), cache_(op.cache, 0), k_(op.k), v_(op.v) {
    if (is_store(op)) return;
    moves_.written.assign(static_cast<size_t>(k_.count()), false);
    moves_.k.assign(static_cast<size_t>(k_.count() * k_.heads() * k_.dim()), 0.0);
    if (v_) moves_.v.assign(static_cast<size_t>(v_.count() * v_.heads() * v_.dim()), 0.0);
  }

  // Dense row to or from a slot. Nowhere: append leaves it out, gather gives zeros.
  void move(int64_t row, const std::optional<Slot>& slot) {
    if (is_store(op_)) {
      if (slot) store(row, *slot);
      return;
    }
    moves_.written[static_cast<size_t>(row)] = true;
    if (!slot) return;
    for (int64_t head = 0; head < k_.heads(); ++head) {
      fetch(cache_.k_row(slot->k, head), row, head, k_, moves_.k);
      if (v_) fetch(cache_.v_row(slot->v, head), row, head, v_, moves_.v);
    }
  }

  const Cache& cache() const { return cache_; }
  int64_t num_rows() const { return k_.count(); }
  CacheMoves moves() && { return std::move(moves_); }

 private:
  void store(int64_t row, const Slot& slot) {
    for (int64_t head = 0; head < k_.heads(); ++head) {
      CacheWrite write{slot.k, slot.v, head, k_.row(row, head), {}};
      if (v_) write.v = v_.row(row, head);
      moves_.writes.push_back(std::move(write));
    }
  }
  static void fetch(const std::vector<double>& from, int64_t row, int64_t head, const Rows& rows,
                    std::vector<double>& to) {
    std::copy(from.begin(), from.end(), to.begin() + (row * rows.heads() + head) * rows.dim());
  }

  const attune_cache_op& op_;
  Cache cache_;
  Rows k_, v_;
  CacheMoves moves_;
};

void move_by_slots(const attune_cache_op& op, Mover& mover) {
  for (int64_t i = 0; i < mover.num_rows(); ++i) {
    const int64_t slot = present(op.slots) ? integer_at(op.slots, i) : i;
    const bool exists = slot >= 0 && slot < mover.cache().num_slots();
    mover.move(i, exists ? std::optional<Slot>({slot, slot}) : std::nullopt);
  }
}

void append_sequence(const Sequence& s, int64_t b, int64_t used, Mover& mover) {
  const Cache& cache = mover.cache();
  // More new tokens than a ring holds: the last ones stay.
  const int64_t first = cache.is_ring() ? std::max<int64_t>(s.num_queries - cache.ring_capacity(), 0) : 0;
  for (int64_t i = first; i < s.num_queries; ++i)
    mover.move(s.first_query + i, cache.find(b, std::max<int64_t>(used, 0) + i));
}

void gather_sequence(const Sequence& s, int64_t b, int64_t used, Mover& mover) {
  const Cache& cache = mover.cache();
  const int64_t count = std::min(used, cache.is_ring() ? s.num_queries : std::min(s.num_queries, cache.capacity()));
  for (int64_t t = 0; t < count; ++t) {
    const bool lost = cache.is_ring() && t < used - cache.ring_capacity();
    mover.move(s.first_query + t, lost ? std::nullopt : cache.find(b, t));
  }
}

}  // namespace

CacheMoves cache_op(const attune_cache_op& op) {
  Mover mover(op);
  if (!present(op.seqused_kv)) {
    move_by_slots(op, mover);
    return std::move(mover).moves();
  }
  const std::vector<Sequence> sequences = split_sequences(op.k, op.cu_seqlens, op.seqused_kv.shape[0] != 1);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto b = static_cast<int64_t>(i);
    const int64_t used = integer_at(op.seqused_kv, b);
    if (!is_store(op)) {
      gather_sequence(sequences[i], b, used, mover);
    } else if (!present(op.finished) || integer_at(op.finished, b) == 0) {
      append_sequence(sequences[i], b, used, mover);
    }
  }
  return std::move(mover).moves();
}

}  // namespace attune::reference
