// SPDX-License-Identifier: Apache-2.0
#include "reference/cache.h"

#include "reference/reference.h"
#include "reference/tensor.h"

namespace attune::reference {
namespace {

constexpr int64_t kHeadDim656 = 576, kHeadDim584 = 512, kHeadDimV = 512;  // of packed rows

}  // namespace

Cache::Cache(const attune_kv_cache& cache, int64_t head_dim_v) : c_(cache), v_aliases_k_(!present(cache.v)) {
  const attune_tensor& k = c_.k;
  num_pages_ = k.shape[0];
  if (c_.format != ATTUNE_KV_PLAIN) {
    num_heads_ = 1;
    page_size_ = c_.format == ATTUNE_KV_MLA_584 ? c_.page_size : k.shape[1];
    head_dim_qk_ = c_.format == ATTUNE_KV_MLA_656 ? kHeadDim656 : kHeadDim584;
    head_dim_v_ = kHeadDimV;
    return;
  }
  switch (c_.layout) {
    case ATTUNE_KV_NHD:
      page_size_ = k.shape[1];
      num_heads_ = k.shape[2];
      head_dim_qk_ = k.shape[3];
      break;
    case ATTUNE_KV_HND:
      num_heads_ = k.shape[1];
      page_size_ = k.shape[2];
      head_dim_qk_ = k.shape[3];
      break;
    default:  // XPACKED
      num_heads_ = k.shape[1];
      page_size_ = k.shape[3];
      head_dim_qk_ = k.shape[2] * k.shape[4];
      break;
  }
  head_dim_v_ = v_aliases_k_ ? head_dim_v : c_.v.shape[c_.layout == ATTUNE_KV_XPACKED ? 2 : 3];
}

int64_t Cache::capacity() const {
  if (is_ring()) return c_.ring_capacity;
  return present(c_.page_table) ? c_.page_table.shape[1] * page_size_ : page_size_;
}

std::optional<int64_t> Cache::page_slot(const attune_tensor& table, int64_t b, int64_t t) const {
  const int64_t page = integer_at(table, b, t / page_size_);
  if (page < 0 || page >= num_pages_) return std::nullopt;
  return page * page_size_ + t % page_size_;
}

std::optional<Slot> Cache::find(int64_t b, int64_t t) const {
  if (is_ring()) t %= c_.ring_capacity;
  if (t < 0 || t >= capacity()) return std::nullopt;
  if (!present(c_.page_table)) {
    const int64_t row = present(c_.batch_index) ? integer_at(c_.batch_index, b) : b;
    if (row < 0 || row >= num_pages_) return std::nullopt;
    return Slot{row * page_size_ + t, row * page_size_ + t};
  }
  const std::optional<int64_t> k = page_slot(c_.page_table, b, t);
  const std::optional<int64_t> v = present(c_.v_page_table) ? page_slot(c_.v_page_table, b, t) : k;
  if (!k || !v) return std::nullopt;
  return Slot{*k, *v};
}

std::vector<double> Cache::k_row(int64_t slot, int64_t head) const {
  return channels(oracle::cached_row(c_, page_size_, slot, head, false), head_dim_qk_);
}

std::vector<double> Cache::v_row(int64_t slot, int64_t head) const {
  return channels(oracle::cached_row(c_, page_size_, slot, head, !v_aliases_k_), head_dim_v_);
}

std::vector<double> cache_row(const attune_kv_cache& cache, int64_t head_dim_v, int64_t slot, int64_t head, bool is_v) {
  const Cache c(cache, head_dim_v);
  return is_v ? c.v_row(slot, head) : c.k_row(slot, head);
}

int64_t cache_slot(const attune_kv_cache& cache, int64_t b, int64_t t, bool is_v) {
  const std::optional<Slot> slot = Cache(cache, 0).find(b, t);
  if (!slot) return -1;
  return is_v ? slot->v : slot->k;
}

}  // namespace attune::reference
