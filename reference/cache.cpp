// SPDX-License-Identifier: Apache-2.0
#include "reference/cache.h"

#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "reference/tensor.h"

namespace attune::reference {
namespace {

constexpr int64_t kMla656Nope = 512, kMla656Group = 128, kMla656ScaleByte = 512, kMla656RopeByte = 528;
constexpr int64_t kMla584Nope = 448, kMla584Group = 64, kMla584RowBytes = 576, kMla584ScaleBytes = 8;
constexpr int64_t kMlaRope = 64, kMlaHeadDimV = 512;

// A power of two with a biased exponent; 255 is NaN.
double decode_e8m0(std::byte code) {
  const int exponent = std::to_integer<int>(code);
  return exponent == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, exponent - 127);
}

}  // namespace

Cache::Cache(const attune_kv_cache& cache, int64_t head_dim_v) : c_(cache), v_aliases_k_(!present(cache.v)) {
  const attune_tensor& k = c_.k;
  num_pages_ = k.shape[0];
  if (c_.format != ATTUNE_KV_PLAIN) {
    num_heads_ = 1;
    page_size_ = c_.format == ATTUNE_KV_MLA_584 ? c_.page_size : k.shape[1];
    head_dim_qk_ = (c_.format == ATTUNE_KV_MLA_656 ? kMla656Nope : kMla584Nope) + kMlaRope;
    head_dim_v_ = kMlaHeadDimV;
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
  const int64_t page = integer_at(table, {b, t / page_size_});
  if (page < 0 || page >= num_pages_) return std::nullopt;
  return page * page_size_ + t % page_size_;
}

std::optional<Slot> Cache::find(int64_t b, int64_t t) const {
  if (is_ring()) t %= c_.ring_capacity;
  if (t < 0 || t >= capacity()) return std::nullopt;
  if (!present(c_.page_table)) {
    const int64_t row = present(c_.batch_index) ? integer_at(c_.batch_index, {b}) : b;
    if (row < 0 || row >= num_pages_) return std::nullopt;
    return Slot{row * page_size_ + t, row * page_size_ + t};
  }
  const std::optional<int64_t> k = page_slot(c_.page_table, b, t);
  const std::optional<int64_t> v = present(c_.v_page_table) ? page_slot(c_.v_page_table, b, t) : k;
  if (!k || !v) return std::nullopt;
  return Slot{*k, *v};
}

double Cache::scale_of(const attune_tensor& scale, int64_t page, int64_t offset, int64_t head) const {
  if (!present(scale)) return 1.0;
  if (scale.rank == 1) return number_at(scale, {scale.shape[0] == 1 ? 0 : head});
  return c_.layout == ATTUNE_KV_NHD ? number_at(scale, {page, offset, head}) : number_at(scale, {page, head, offset});
}

std::vector<double> Cache::plain_row(const attune_tensor& data, const attune_tensor& scale, int64_t slot, int64_t head,
                                     bool is_v) const {
  const int64_t page = slot / page_size_, offset = slot % page_size_;
  std::vector<double> row;
  if (c_.layout == ATTUNE_KV_NHD) {
    row = read_strided(data.dtype, element_at(data, {page, offset, head, 0}), data.stride[3], data.shape[3]);
  } else if (c_.layout == ATTUNE_KV_HND) {
    row = read_strided(data.dtype, element_at(data, {page, head, offset, 0}), data.stride[3], data.shape[3]);
  } else if (is_v) {
    row = read_strided(data.dtype, element_at(data, {page, head, 0, offset}), data.stride[2], data.shape[2]);
  } else {
    const int64_t x = data.shape[4];
    for (int64_t d = 0; d < data.shape[2] * x; ++d) row.push_back(number_at(data, {page, head, d / x, offset, d % x}));
  }
  const double factor = scale_of(scale, page, offset, head);
  for (double& value : row) value *= factor;
  return row;
}

std::vector<double> Cache::mla_656_row(int64_t slot) const {
  const std::byte* token = element_at(c_.k, {slot / page_size_, slot % page_size_, 0});
  std::vector<double> row;
  for (int64_t d = 0; d < kMla656Nope; ++d) {
    const double scale = decode_element(ATTUNE_FLOAT32, token + kMla656ScaleByte + 4 * (d / kMla656Group));
    row.push_back(decode_element(ATTUNE_FLOAT8_E4M3, token + d) * scale);
  }
  for (int64_t d = 0; d < kMlaRope; ++d)
    row.push_back(decode_element(ATTUNE_BFLOAT16, token + kMla656RopeByte + 2 * d));
  return row;
}

std::vector<double> Cache::mla_584_row(int64_t slot) const {
  const int64_t offset = slot % page_size_;
  const std::byte* page = element_at(c_.k, {slot / page_size_, 0});
  const std::byte* token = page + offset * kMla584RowBytes;
  const std::byte* scales = page + page_size_ * kMla584RowBytes + offset * kMla584ScaleBytes;
  std::vector<double> row;
  for (int64_t d = 0; d < kMla584Nope; ++d) {
    row.push_back(decode_element(ATTUNE_FLOAT8_E4M3, token + d) * decode_e8m0(scales[d / kMla584Group]));
  }
  for (int64_t d = 0; d < kMlaRope; ++d) row.push_back(decode_element(ATTUNE_BFLOAT16, token + kMla584Nope + 2 * d));
  return row;
}

std::vector<double> Cache::k_row(int64_t slot, int64_t head) const {
  switch (c_.format) {
    case ATTUNE_KV_MLA_656:
      return mla_656_row(slot);
    case ATTUNE_KV_MLA_584:
      return mla_584_row(slot);
    default:
      return plain_row(c_.k, c_.k_scale, slot, head, false);
  }
}

std::vector<double> Cache::v_row(int64_t slot, int64_t head) const {
  if (!v_aliases_k_) return plain_row(c_.v, c_.v_scale, slot, head, true);
  std::vector<double> row = k_row(slot, head);
  row.resize(static_cast<size_t>(head_dim_v_));
  return row;
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
