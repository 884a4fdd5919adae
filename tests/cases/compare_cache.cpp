// SPDX-License-Identifier: Apache-2.0
// Checks what was written to a cache: exact up to the rounding of an fp32 result, codes of 8-bit formats up to ties.
#include <algorithm>
#include <cmath>

#include "compare.h"

namespace attune::cases {
namespace {

attune_dtype dtype_of(const attune_tensor& t) { return static_cast<attune_dtype>(t.dtype); }

double largest_code(attune_dtype dtype) {
  return dtype == ATTUNE_INT8 ? 127.0 : dtype == ATTUNE_FLOAT8_E4M3 ? 448.0 : 57344.0;
}

double amax_of(const std::vector<double>& row, size_t first, size_t count) {
  double amax = 0;
  for (size_t d = first; d < first + count; ++d) amax = std::max(amax, std::fabs(row[d]));
  return amax;
}

// Error of the row before it is stored: a few roundings of fp32, relative to its largest element (RoPE mixes pairs).
double computed_error(const std::vector<double>& row) { return amax_of(row, 0, row.size()) * std::ldexp(1.0, -22); }

struct Slot {
  int64_t page, offset, head;
};

int64_t tokens_of_page(const attune_kv_cache& cache) {
  if (cache.format == ATTUNE_KV_MLA_584) return cache.page_size;
  if (cache.layout == ATTUNE_KV_HND) return cache.k.shape[2];
  if (cache.layout == ATTUNE_KV_XPACKED) return cache.k.shape[3];
  return cache.k.shape[1];
}

class WriteChecker {
 public:
  WriteChecker(const attune_kv_cache& cache, bool power_of_two_scales, Snapshot& snapshot, Checker& checker)
      : cache_(cache), power_of_two_scales_(power_of_two_scales), snapshot_(snapshot), checker_(checker) {}

  void plain(bool is_v, const Slot& slot, const std::vector<double>& row) {
    const attune_tensor data = snapshot_.after(is_v ? cache_.v : cache_.k);
    const attune_tensor scales = snapshot_.after(is_v ? cache_.v_scale : cache_.k_scale);
    const char* what = is_v ? "cache.v" : "cache.k";
    const bool narrow = element_size(dtype_of(data)) == 1;
    double scale = 1;
    if (scales.dtype != ATTUNE_DTYPE_NONE) {
      const void* at = scale_element(scales, cache_.layout, slot.page, slot.offset, slot.head);
      scale = decode(ATTUNE_FLOAT32, at);
      if (scales.rank == 3) {
        snapshot_.allow(at, 4);
        const double amax = amax_of(row, 0, row.size());
        const double exact = amax / largest_code(dtype_of(data));
        if (power_of_two_scales_) {
          power_of_two(what, slot, scale, std::max(amax, 1e-4) / largest_code(dtype_of(data)));
        } else if (amax > 0) {
          checker_.element(is_v ? "cache.v_scale" : "cache.k_scale", row_number(slot), slot.head, -1, ATTUNE_FLOAT32,
                           exact, exact * 1e-6, scale);
        } else if (!std::isfinite(scale)) {
          checker_.fail(std::string(what) + ": the scale of a row of zeros is not finite");
        }
        if (amax == 0 && !power_of_two_scales_) scale = 1;
      }
    }
    const double error = computed_error(row);
    for (size_t d = 0; d < row.size(); ++d) {
      const void* at = element(data, is_v, slot, static_cast<int64_t>(d));
      snapshot_.allow(at, element_size(dtype_of(data)));
      double code = row[d] / scale;
      const double bound = error / scale + std::fabs(code) * std::ldexp(1.0, -21);
      // The code -128 is left out, so that codes are symmetric.
      if (dtype_of(data) == ATTUNE_INT8) code = std::clamp(code, -127.0, 127.0);
      checker_.element(what, row_number(slot), slot.head, static_cast<int64_t>(d), dtype_of(data), code,
                       narrow ? bound : error, decode(dtype_of(data), at), narrow);
    }
  }

  void mla(const Slot& slot, const std::vector<double>& row) {
    const attune_tensor data = snapshot_.after(cache_.k);
    const bool is_656 = cache_.format == ATTUNE_KV_MLA_656;
    const size_t nope = is_656 ? 512 : 448, group = is_656 ? 128 : 64;
    auto* page = static_cast<std::byte*>(data.data) + slot.page * data.stride[0];
    std::byte* bytes = page + slot.offset * (is_656 ? data.stride[1] : 576);
    std::byte* scales = is_656 ? bytes + 512 : page + tokens_of_page(cache_) * 576 + slot.offset * 8;
    snapshot_.allow(bytes, is_656 ? 656 : 576);
    if (!is_656) snapshot_.allow(scales, 8);
    const double error = computed_error(row);
    for (size_t first = 0; first < nope; first += group) {
      const size_t index = first / group;
      const double scale = is_656 ? decode(ATTUNE_FLOAT32, scales + 4 * index)
                                  : std::ldexp(1.0, std::to_integer<int>(scales[index]) - 127);
      const double exact = amax_of(row, first, group) / 448;
      if (!is_656 || power_of_two_scales_ || exact == 0) {
        power_of_two("cache.k", slot, scale, std::max(exact, 1e-4));
      } else {
        checker_.element("cache.k, scale", row_number(slot), 0, static_cast<int64_t>(index), ATTUNE_FLOAT32, exact,
                         exact * 1e-6, scale);
      }
      for (size_t d = first; d < first + group; ++d) {
        const double code = row[d] / scale;
        checker_.element("cache.k", row_number(slot), 0, static_cast<int64_t>(d), ATTUNE_FLOAT8_E4M3, code,
                         error / scale + std::fabs(code) * std::ldexp(1.0, -21), decode(ATTUNE_FLOAT8_E4M3, bytes + d),
                         true);
      }
    }
    const std::byte* rope = bytes + (is_656 ? 528 : 448);
    for (size_t d = nope; d < row.size(); ++d) {
      checker_.element("cache.k", row_number(slot), 0, static_cast<int64_t>(d), ATTUNE_BFLOAT16, row[d], error,
                       decode(ATTUNE_BFLOAT16, rope + 2 * (d - nope)));
    }
  }

 private:
  int64_t row_number(const Slot& slot) const { return slot.page * tokens_of_page(cache_) + slot.offset; }

  const void* element(const attune_tensor& data, bool is_v, const Slot& slot, int64_t d) const {
    switch (cache_.layout) {
      case ATTUNE_KV_NHD:
        return element_at(data, {slot.page, slot.offset, slot.head, d});
      case ATTUNE_KV_HND:
        return element_at(data, {slot.page, slot.head, slot.offset, d});
      default:
        if (is_v) return element_at(data, {slot.page, slot.head, d, slot.offset});
        return element_at(data, {slot.page, slot.head, d / data.shape[4], slot.offset, d % data.shape[4]});
    }
  }

  // The least that is not below what the row's largest element asks for.
  void power_of_two(const char* what, const Slot& slot, double scale, double least) {
    int exponent = 0;
    if (std::frexp(scale, &exponent) == 0.5 && scale >= least * (1 - 1e-6) && scale <= 2 * least * (1 + 1e-6)) return;
    checker_.fail(std::string(what) + ": slot " + std::to_string(row_number(slot)) + " has scale " +
                  std::to_string(scale) + ", not the power of two that is at least " + std::to_string(least));
  }

  const attune_kv_cache& cache_;
  bool power_of_two_scales_;
  Snapshot& snapshot_;
  Checker& checker_;
};

}  // namespace

void check_writes(const attune_kv_cache& host, const std::vector<reference::CacheWrite>& writes,
                  bool power_of_two_scales, Snapshot& snapshot, Checker& checker) {
  WriteChecker write_checker(host, power_of_two_scales, snapshot, checker);
  const int64_t tokens = writes.empty() ? 1 : tokens_of_page(host);
  for (const reference::CacheWrite& write : writes) {
    const Slot k_slot{write.slot / tokens, write.slot % tokens, write.head};
    if (host.format != ATTUNE_KV_PLAIN) {
      write_checker.mla(k_slot, write.k);
      continue;
    }
    write_checker.plain(false, k_slot, write.k);
    if (!write.v.empty())
      write_checker.plain(true, {write.v_slot / tokens, write.v_slot % tokens, write.head}, write.v);
  }
}

}  // namespace attune::cases
