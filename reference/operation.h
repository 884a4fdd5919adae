// SPDX-License-Identifier: Apache-2.0
// attune_attention taken apart: its sequences, which keys each of them has, and where they lie.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attune/attune.h"
#include "reference/cache.h"
#include "reference/prologue.h"
#include "reference/tensor.h"

namespace attune::reference {

// Queries and keys of one sequence, after lengths were clamped to what the tensors hold.
struct Sequence {
  int64_t first_query = 0, num_queries = 0;  // rows of q
  int64_t first_dense = 0, num_dense = 0;    // rows of k: all keys, or the new tokens
  int64_t num_cached = 0;                    // in a ring all that ever were, of which the last ring_capacity are left
  int64_t num_keys() const { return num_cached + num_dense; }
  int64_t position(int64_t query) const { return num_keys() - num_queries + query; }
};

// Cuts a tensor of new tokens into sequences: by cu_seqlens or by its first axis (rank 4); else all rows are one
// sequence, or each row is one.
std::vector<Sequence> split_sequences(const attune_tensor& tokens, const attune_tensor& cu_seqlens, bool one_a_row);

// Where one key and its value are.
struct Key {
  const Cache* cache = nullptr;  // null: dense
  Slot slot;
  int64_t row = 0;       // dense
  int64_t position = 0;  // in the sequence; in a list of indices without meaning
};

class Operation {
 public:
  explicit Operation(const attune_attention& attention);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  const attune_attention& a;
  std::vector<Sequence> sequences;
  int64_t num_rows = 0, num_heads_q = 0, num_heads_kv = 0, head_dim_v = 0;

  bool is_sparse() const { return present(a.indices); }
  bool has_new_tokens() const { return cache_ && k_; }
  const Cache& cache() const { return *cache_; }
  int64_t kv_head(int64_t head) const { return head / (num_heads_q / num_heads_kv); }
  // Finished, or left to another call by skip_decode.
  bool is_skipped(int64_t b) const;
  // Owner of a row of q; -1: none.
  int64_t sequence_of(int64_t row) const { return owner_[static_cast<size_t>(row)]; }

  // All keys of a sequence that exist: what a bad page, beam or a ring has hidden is left out.
  std::vector<Key> keys_of_sequence(int64_t b) const;
  // The keys that indices and extra_indices list for a row of q.
  std::vector<Key> keys_of_row(int64_t b, int64_t row, int64_t kv_head) const;

  std::vector<double> query(int64_t b, int64_t row, int64_t head) const;
  std::vector<double> key(int64_t b, const Key& key, int64_t kv_head) const;
  std::vector<double> value(int64_t b, const Key& key, int64_t kv_head) const;

  // How much of the magnitude of each channel cancels in the prologue's sums. Empty where nothing can cancel.
  std::vector<double> query_lost(int64_t b, int64_t row, int64_t head) const;
  std::vector<double> key_lost(int64_t b, const Key& key, int64_t kv_head) const;
  std::vector<double> value_lost(int64_t b, const Key& key, int64_t kv_head) const;

 private:
  void set_keys();
  // The table row that holds cached position t; nothing for a bad beam.
  std::optional<int64_t> table_row(int64_t b, int64_t t) const;
  void add_listed(const attune_tensor& indices, const attune_tensor& lengths, const Cache* cache, int64_t b,
                  int64_t row, int64_t kv_head, std::vector<Key>& keys) const;
  Token token_of(int64_t b, const Key& key) const;

  Rows q_, q_rope_, k_, v_;
  std::optional<Cache> cache_, extra_cache_;
  Prologue prologue_, magnitudes_;
  bool same_tokens_ = false;  // row r of k is the token of row r of q
  std::vector<int64_t> owner_;
};

}  // namespace attune::reference
