// SPDX-License-Identifier: Apache-2.0
// The addresses of a token's cached rows and their scales.
#pragma once

#include "common/mla_codec.cuh"
#include "rows/plane.cuh"
#include "rows/tokens.cuh"

namespace attune::rows {

using Mla = common::MlaRow<kFormat == 584 ? 584 : 656>;  // 0 has no packed row: any one will do

// Sets address.cache and address.scales to head 0 at slots k and v. They stay null if there is no slot.
template <class Params, class Addresses>
__device__ __forceinline__ void set_slot_addresses(const Params& p, const Slot& k, const Slot& v, Addresses& address) {
  if (k.page < 0) return;
  address.cache[0] = row_at(p.cache.k, k.page, k.offset);
  address.cache[1] = row_at(p.cache.v, v.page, v.offset);
  if constexpr (kFormat == 0) {
    address.scales[0] = scale_at(p.cache.k_scale, k.page, k.offset);
    address.scales[1] = scale_at(p.cache.v_scale, v.page, v.offset);
  } else {
    address.scales[0] = Mla::scales(address.cache[0], row_at(p.cache.k, k.page, 0), p.cache.page_size, k.offset);
  }
}

}  // namespace attune::rows
