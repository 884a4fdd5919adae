// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention: scores of keys, and which of them a row takes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "reference/cache.h"
#include "reference/operation.h"
#include "reference/reference.h"
#include "reference/tensor.h"

namespace attune::reference {
namespace {

class Indexer {
 public:
  explicit Indexer(const attune_indexer& op) : op_(op), reads_keys_(op.kind != ATTUNE_INDEXER_SELECT) {
    // Scores have rows of columns where q has rows of heads of channels.
    rows_ = reads_keys_ ? op.q : op.scores;
    if (!reads_keys_) {
      rows_.shape[rows_.rank] = 1;
      rows_.stride[rows_.rank] = 0;
      ++rows_.rank;
    }
    sequences_ = split_sequences(rows_, op.cu_seqlens_q, true);
    codes_ = op.cache;
    codes_.v = codes_.k_scale = {};  // scales come after the products
    if (present(codes_.k)) cache_.emplace(codes_, 1);
  }

  std::vector<IndexRow> rows() {
    std::vector<IndexRow> all(static_cast<size_t>(rows_.rank == 4 ? rows_.shape[0] * rows_.shape[1] : rows_.shape[0]));
    for (size_t b = 0; b < sequences_.size(); ++b) {
      const Sequence& s = sequences_[b];
      const int64_t keys = num_keys(static_cast<int64_t>(b));
      keys_.assign(static_cast<size_t>(keys), {});
      for (int64_t i = 0; i < s.num_queries; ++i) {
        const int64_t row = s.first_query + i;
        int64_t first = 0, last = keys;
        if (op_.causal != 0) last = std::min(last, keys - s.num_queries + i + 1);
        if (present(op_.key_begin)) first = std::max<int64_t>(first, integer_at(op_.key_begin, row));
        if (present(op_.key_end)) last = std::min<int64_t>(last, integer_at(op_.key_end, row));
        IndexRow& out = all[static_cast<size_t>(row)];
        out.written = true;
        if (reads_keys_) read_row(row);
        for (int64_t t = first; t < last; ++t) add_key(static_cast<int64_t>(b), row, t, out);
      }
    }
    return all;
  }

 private:
  int64_t num_keys(int64_t b) const {
    int64_t keys = std::max<int64_t>(integer_at(op_.seqused_kv, b), 0);
    if (cache_) keys = std::min(keys, cache_->capacity());
    if (present(op_.slot_table)) keys = std::min(keys, op_.slot_table.shape[1] * op_.slot_page_size);
    if (present(op_.scores)) keys = std::min(keys, op_.scores.shape[op_.scores.rank - 1]);
    if (op_.max_seqlen_kv > 0) keys = std::min(keys, op_.max_seqlen_kv);
    return keys;
  }

  void read_row(int64_t row) {
    const Rows q(op_.q);
    queries_.clear();
    weights_.clear();
    for (int64_t h = 0; h < q.heads(); ++h) {
      queries_.push_back(q.row(row, h));
      weights_.push_back(row_element(op_.weights, row, h));
      if (present(op_.q_scale)) weights_.back() *= row_element(op_.q_scale, row, h);
    }
  }

  void add_key(int64_t b, int64_t row, int64_t t, IndexRow& out) {
    const std::optional<Slot> slot = cache_ ? cache_->find(b, t) : Slot{t, t};
    std::optional<int64_t> entry;
    if (slot) entry = slot->k;
    if (present(op_.slot_table)) {
      const int64_t page = integer_at(op_.slot_table, b, t / op_.slot_page_size);
      if (page < 0 || page >= op_.slot_pages) {
        entry.reset();
      } else if (entry) {
        entry = page * op_.slot_page_size + t % op_.slot_page_size;
      }
    }
    if (!entry) {
      out.hidden.push_back(t);
      return;
    }
    out.positions.push_back(t);
    out.entries.push_back(op_.form == ATTUNE_INDEX_POSITIONS ? t : *entry);
    if (reads_keys_) {
      std::vector<double>& key = keys_[static_cast<size_t>(t)];
      if (key.empty()) key = cache_->k_row(slot->k, 0);
      add_score(key, key_scale(slot->k), out);
    } else {
      out.scores.push_back(row_element(op_.scores, row, t));
      out.scores_abs.push_back(0);
    }
  }

  void add_score(const std::vector<double>& key, double scale, IndexRow& out) const {
    double sum = 0, sum_abs = 0;
    for (size_t h = 0; h < queries_.size(); ++h) {
      const std::vector<double>& query = queries_[h];
      double dot = 0, dot_abs = 0;
      for (size_t d = 0; d < key.size(); ++d) {
        dot += query[d] * key[d];
        dot_abs += std::fabs(query[d] * key[d]);
      }
      sum += weights_[h] * (dot < 0 ? 0.0 : dot);  // NaN stays
      sum_abs += std::fabs(weights_[h]) * dot_abs;
    }
    out.scores.push_back(sum * scale);
    out.scores_abs.push_back(sum_abs * std::fabs(scale));
  }

  double key_scale(int64_t slot) const {
    const int64_t page_size = cache_->num_slots() / op_.cache.k.shape[0];
    return oracle::scale_of(op_.cache, op_.cache.k_scale, slot / page_size, slot % page_size, 0);
  }

  static double row_element(const attune_tensor& t, int64_t row, int64_t column) {
    return t.rank == 3 ? number_at(t, row / t.shape[1], row % t.shape[1], column) : number_at(t, row, column);
  }

  const attune_indexer& op_;
  bool reads_keys_;
  attune_tensor rows_;
  std::vector<Sequence> sequences_;
  attune_kv_cache codes_;
  std::optional<Cache> cache_;
  std::vector<std::vector<double>> queries_;  // of the row at hand
  std::vector<double> weights_;               // times q_scale
  std::vector<std::vector<double>> keys_;     // of the sequence at hand, once they were read
};

}  // namespace

std::vector<IndexRow> index_rows(const attune_indexer& op) { return Indexer(op).rows(); }

std::vector<int64_t> index_select(const IndexRow& row, int64_t topk) {
  std::vector<size_t> order(row.scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Stable: of equal scores, and of NaNs, the lower positions stay in front.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const double x = row.scores[a], y = row.scores[b];
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && !std::isnan(y);
    return x > y;
  });
  order.resize(std::min(order.size(), static_cast<size_t>(topk)));
  std::sort(order.begin(), order.end());
  std::vector<int64_t> entries;
  entries.reserve(order.size());
  for (const size_t i : order) entries.push_back(row.entries[i]);
  return entries;
}

}  // namespace attune::reference
