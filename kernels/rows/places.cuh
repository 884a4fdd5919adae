// SPDX-License-Identifier: Apache-2.0
// Where the cached rows of a token and their scales lie, for the kernels that read or write them.
#pragma once

#include "rows/plane.cuh"
#include "rows/tokens.cuh"
#include "tile/mla_codec.cuh"

namespace attune::rows {

using Mla = tile::MlaRow<kFormat == 584 ? 584 : 656>;  // where kFormat is not 0

// Fills place.cache and place.scales with the addresses of head 0 at slots k and v; leaves them where there is no
// token.
template <class Params, class Place>
__device__ __forceinline__ void place_slots(const Params& p, const Slot& k, const Slot& v, Place& place) {
  if (k.page < 0) return;
  place.cache[0] = row_at(p.cache.k, k.page, k.offset);
  place.cache[1] = row_at(p.cache.v, v.page, v.offset);
  if constexpr (kFormat == 0) {
    place.scales[0] = scale_at(p.cache.k_scale, k.page, k.offset);
    place.scales[1] = scale_at(p.cache.v_scale, v.page, v.offset);
  } else {
    place.scales[0] = Mla::scales(place.cache[0], row_at(p.cache.k, k.page, 0), p.cache.page_size, k.offset);
  }
}

}  // namespace attune::rows
