// SPDX-License-Identifier: Apache-2.0
#include "cuda/prefill/cache_copies.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace attune::cuda::prefill {

using attention::kAlignment;

std::string refusal_of_cache(const KvCache& cache, int64_t unit) {
  const std::pair<const char*, const KvPlane*> planes[] = {{"cache.k", &cache.k}, {"cache.v", &cache.v}};
  if (cache.x_packed) {
    if (std::string why = xpacked_refusal(cache, unit); !why.empty()) return why;
  } else {
    for (const auto& [name, plane] : planes)
      if (!attention::strides_fit(*plane, unit))
        return cat("rows of ", name, " that do not lie at multiples of ", unit, " bytes");
  }
  for (const auto& [name, plane] : planes)
    if (reinterpret_cast<uintptr_t>(plane->data) % static_cast<uintptr_t>(unit) != 0)
      return cat("data that do not lie at multiples of ", unit, " bytes, as ", name, ".data here");
  return "";
}

namespace {

// The largest power of two, at most 16, that divides all of them.
int common_unit(std::initializer_list<int64_t> bytes) {
  uint64_t bits = kAlignment;
  for (const int64_t x : bytes) bits |= static_cast<uint64_t>(x);
  return static_cast<int>(bits & (~bits + 1));
}
int64_t address_of(const KvPlane& v) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(v.data)); }

}  // namespace

int bytes_to_gather(const KvCache& cache) {
  const KvPlane &k = cache.k, &v = cache.v;
  int unit = 0;
  if (!cache.x_packed) {
    const auto of_rows = [](const KvPlane& x) {
      return !x.contiguous || x.inner_stride != 1
                 ? 1
                 : common_unit({address_of(x), 2 * x.page_stride, 2 * x.slot_stride, 2 * x.head_stride});
    };
    unit = std::min(of_rows(k), of_rows(v));
  } else if (!cache.v_aliases_k && k.inner_stride == 1 && 2 * k.pack == kAlignment && v.slot_stride == 1) {
    unit = std::min(
        common_unit({address_of(k), 2 * k.page_stride, 2 * k.slot_stride, 2 * k.head_stride, 2 * k.outer_stride}),
        common_unit({address_of(v), 2 * v.page_stride, 2 * cache.page_size, 2 * v.head_stride, 2 * v.inner_stride}));
  }
  return unit < kFewestGathered ? 0 : unit;
}

std::string xpacked_refusal(const KvCache& cache, int64_t unit) {
  const KvPlane &k = cache.k, &v = cache.v;
  const bool by_threads = unit < kAlignment;
  if (cache.v_aliases_k) return "an x-packed cache whose V is part of K";
  if (k.element_size > 2) return "an x-packed cache of more than 16 bits";
  if (k.pack * k.element_size != kAlignment) return "an x-packed cache whose x elements are not 16 bytes";
  const auto fits = [&](int64_t elements) { return elements * k.element_size % unit == 0; };
  if (!by_threads && cache.page_size % 16 != 0) return "x-packed pages whose size is no multiple of 16";
  if (by_threads && !fits(cache.page_size)) return "x-packed pages of an odd number of tokens";
  if (k.inner_stride != 1 || !(by_threads ? fits(k.slot_stride) : k.slot_stride == k.pack) || v.slot_stride != 1)
    return "x-packed pages whose tokens do not follow each other";
  if (!fits(k.head_stride) || !fits(k.page_stride) || !fits(k.outer_stride) || !fits(v.head_stride) ||
      !fits(v.page_stride) || !fits(v.inner_stride))
    return cat("an x-packed cache whose rows of tokens do not lie at multiples of ", unit, " bytes");
  return "";
}

}  // namespace attune::cuda::prefill
