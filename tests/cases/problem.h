// SPDX-License-Identifier: Apache-2.0
// A case made real: an attune_attention with data, poisoned wherever nothing may be read.
#pragma once

#include <cstdint>
#include <vector>

#include "case.h"
#include "tensors.h"

namespace attune::cases {

class Problem {
 public:
  // unseen: the bytes of what nobody may see, where the case asks for poison.
  explicit Problem(Case spec, Memory& memory = host_memory(), std::byte unseen = kPoison);
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const Case& spec() const { return case_; }
  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }
  // The descriptor with the host's bytes (as before the run), for the oracle, and with the device's, for the library.
  const attune_attention& host() const { return host_; }
  attune_attention& host() { return host_; }
  attune_attention device() const { return arena_.on_device(host_); }
  int64_t num_rows() const { return num_rows_; }
  // First row of q of sequence b.
  int64_t first_row(int64_t b) const { return first_row_[static_cast<size_t>(b)]; }
  // Bound of |score terms added after softcap|, for the error bound.
  double additive_bound() const { return additive_bound_; }

 private:
  struct Placement;

  attune_tensor add_rows(const char* name, attune_dtype dtype, int64_t rows, int64_t seqlen, int64_t heads,
                         int64_t dim);
  attune_tensor add_vector(const char* name, attune_dtype dtype, const std::vector<int64_t>& values);
  void build_queries();
  void build_dense();
  void build_sparse();
  void fill_indices(const char* name, const SparseSpec& spec, int64_t slots, attune_tensor& indices,
                    attune_tensor& lengths, std::vector<uint8_t>& named);
  void build_mask();
  void build_scores();
  void build_prologue();
  void build_rope();
  void build_outputs();
  void build_beams();
  void build_cache();
  void place_pages(Placement& p);
  void mark_needed(Placement& p);
  void write_tables(const Placement& p);
  void make_pool(attune_kv_cache& cache, const CacheSpec& spec, int64_t pages, int64_t page_size, const char* prefix);
  void fill_pool(attune_kv_cache& cache, const CacheSpec& spec, const std::vector<uint8_t>& k_needed,
                 const std::vector<uint8_t>& v_needed);
  // The key that data "plant" spoils, and the spoiling itself.
  void choose_bad_key();
  void spoil(attune_dtype dtype, void* element);
  // Spoils key or value of row `row` of dense k and v.
  void spoil_dense(int64_t b, int64_t row_in_sequence, int64_t row);
  attune_dtype aux_dtype() const { return dtype_from_name(case_.aux_dtype); }
  // Fills with scale * N(0, 1).
  void fill_normal(const attune_tensor& t, double scale);
  double key_value(int64_t d);
  double value_value();

  Case case_;
  Arena arena_;
  Random random_;
  attune_attention host_{};
  int64_t num_rows_ = 0;
  std::vector<int64_t> first_row_;
  std::vector<std::vector<uint8_t>> seen_;  // [b][key]
  std::vector<double> shared_key_;          // the one key of data "equal"
  double additive_bound_ = 0;
  int64_t bad_batch_ = -1, bad_key_ = -1;
};

}  // namespace attune::cases
