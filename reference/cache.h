// SPDX-License-Identifier: Apache-2.0
// A KV cache: where the tokens of a sequence lie, and what a slot holds.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attune/attune.h"

namespace attune::reference {

// Numbers of the same token's slots, page * page_size + offset. They differ only where V has its own page table.
struct Slot {
  int64_t k = 0;
  int64_t v = 0;
};

class Cache {
 public:
  // head_dim_v: where V aliases K in a plain format; else the cache knows it.
  Cache(const attune_kv_cache& cache, int64_t head_dim_v);

  int64_t num_heads() const { return num_heads_; }
  int64_t head_dim_v() const { return head_dim_v_; }
  bool v_aliases_k() const { return v_aliases_k_; }
  int64_t num_slots() const { return num_pages_ * page_size_; }
  bool is_ring() const { return c_.ring_capacity > 0; }
  int64_t ring_capacity() const { return c_.ring_capacity; }
  // Tokens that the tables let one sequence hold.
  int64_t capacity() const;
  // Slot of position t of table row b; nothing where the page (of K or of V) is out of range, or t is.
  std::optional<Slot> find(int64_t b, int64_t t) const;

  std::vector<double> k_row(int64_t slot, int64_t head) const;
  std::vector<double> v_row(int64_t slot, int64_t head) const;

 private:
  std::optional<int64_t> page_slot(const attune_tensor& table, int64_t b, int64_t t) const;

  const attune_kv_cache& c_;
  bool v_aliases_k_ = false;
  int64_t num_pages_ = 0, page_size_ = 0, num_heads_ = 0, head_dim_qk_ = 0, head_dim_v_ = 0;
};

}  // namespace attune::reference
