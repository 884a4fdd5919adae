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

class WriteChecker {
 public:
  WriteChecker(const attune_kv_cache& cache, bool power_of_two_scales, Snapshot& snapshot, Checker& checker)
      : cache_(cache),
        page_size_(page_size_of(cache)),
        power_of_two_scales_(power_of_two_scales),
        snapshot_(snapshot),
        checker_(checker) {
    for (attune_tensor* t : {&cache_.k, &cache_.v, &cache_.k_scale, &cache_.v_scale}) *t = snapshot.after(*t);
  }

  void plain(bool is_v, const Slot& slot, const std::vector<double>& row) {
    const attune_dtype dtype = dtype_of(is_v ? cache_.v : cache_.k);
    const ScaleMode mode = scale_mode(is_v ? cache_.v_scale : cache_.k_scale);
    const auto group = static_cast<size_t>(channels_of_scale(mode, static_cast<int64_t>(row.size())));
    const char* what = is_v ? "cache.v" : "cache.k";
    const bool narrow = element_size(dtype) == 1;
    const double error = computed_error(row);
    double scale = 1;
    for (size_t d = 0; d < row.size(); ++d) {
      if (mode != ScaleMode::kNone && d % group == 0)
        scale = plain_scale(is_v, slot, row, d, std::min(group, row.size() - d), mode, largest_code(dtype));
      const void* at = pool_element(cache_, is_v, slot.page, slot.offset, slot.head, static_cast<int64_t>(d));
      snapshot_.allow(at, element_size(dtype));
      double code = row[d] / scale;
      const double bound = error / scale + std::fabs(code) * std::ldexp(1.0, -21);
      // The code -128 is left out, so that codes are symmetric.
      if (dtype == ATTUNE_INT8) code = std::clamp(code, -127.0, 127.0);
      checker_.element(what, row_number(slot), slot.head, static_cast<int64_t>(d), dtype, code, narrow ? bound : error,
                       decode(dtype, at), narrow);
    }
  }

  void mla(const Slot& slot, const std::vector<double>& row) {
    const PackedRow to = packed_row(cache_, slot.page, slot.offset);
    const bool is_656 = cache_.format == ATTUNE_KV_MLA_656;
    snapshot_.allow(to.codes, to.bytes);
    if (to.scale_bytes > 0) snapshot_.allow(to.scales, to.scale_bytes);
    const double error = computed_error(row);
    const auto num_codes = static_cast<size_t>(to.num_codes), group = static_cast<size_t>(to.group);
    for (size_t first = 0; first < num_codes; first += group) {
      const size_t index = first / group;
      const double scale = is_656 ? decode(ATTUNE_FLOAT32, to.scales + 4 * index)
                                  : std::ldexp(1.0, std::to_integer<int>(to.scales[index]) - 127);
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
                         error / scale + std::fabs(code) * std::ldexp(1.0, -21),
                         decode(ATTUNE_FLOAT8_E4M3, to.codes + d), true);
      }
    }
    for (size_t d = num_codes; d < row.size(); ++d) {
      checker_.element("cache.k", row_number(slot), 0, static_cast<int64_t>(d), ATTUNE_BFLOAT16, row[d], error,
                       decode(ATTUNE_BFLOAT16, to.rope + 2 * (d - num_codes)));
    }
  }

 private:
  // The scale of channels [first, first + count) of a row of a plain cache, checked where it was written.
  double plain_scale(bool is_v, const Slot& slot, const std::vector<double>& row, size_t first, size_t count,
                     ScaleMode mode, double largest) {
    const void* at = scale_element(cache_, is_v, slot.page, slot.offset, slot.head, static_cast<int64_t>(first));
    const double scale = decode(ATTUNE_FLOAT32, at);
    if (!scales_by_token(mode)) return scale;
    snapshot_.allow(at, 4);
    const char* what = is_v ? "cache.v_scale" : "cache.k_scale";
    const double amax = amax_of(row, first, count), exact = amax / largest;
    if (power_of_two_scales_) {
      power_of_two(what, slot, scale, std::max(amax, 1e-4) / largest);
    } else if (amax > 0) {
      checker_.element(what, row_number(slot), slot.head, static_cast<int64_t>(first), ATTUNE_FLOAT32, exact,
                       exact * 1e-6, scale);
    } else if (!std::isfinite(scale)) {
      checker_.fail(std::string(what) + ": the scale of a row of zeros is not finite");
    }
    return amax == 0 && !power_of_two_scales_ ? 1 : scale;
  }

  int64_t row_number(const Slot& slot) const { return slot.page * page_size_ + slot.offset; }

  // The least that is not below what the row's largest element asks for.
  void power_of_two(const char* what, const Slot& slot, double scale, double least) {
    int exponent = 0;
    if (std::frexp(scale, &exponent) == 0.5 && scale >= least * (1 - 1e-6) && scale <= 2 * least * (1 + 1e-6)) return;
    checker_.fail(std::string(what) + ": slot " + std::to_string(row_number(slot)) + " has scale " +
                  std::to_string(scale) + ", not the power of two that is at least " + std::to_string(least));
  }

  attune_kv_cache cache_;  // as the run has left it
  int64_t page_size_;
  bool power_of_two_scales_;
  Snapshot& snapshot_;
  Checker& checker_;
};

}  // namespace

void check_writes(const attune_kv_cache& host, const std::vector<reference::CacheWrite>& writes,
                  bool power_of_two_scales, Snapshot& snapshot, Checker& checker) {
  WriteChecker write_checker(host, power_of_two_scales, snapshot, checker);
  const int64_t tokens = page_size_of(host);
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
