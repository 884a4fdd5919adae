// SPDX-License-Identifier: Apache-2.0
// Whether and how the prefill kernels copy a cache: by the TMA, or by cp.async.
#pragma once

#include <string>

#include "core/problem.h"
#include "cuda/attention/tensor_maps.h"

namespace attune::cuda::prefill {

inline constexpr int64_t kFewestGathered = 4;  // bytes, for cp.async

// "" if the TMA, or with a smaller unit cp.async, can copy the cache; else why not.
std::string refusal_of_cache(const KvCache& cache, int64_t unit = attention::kAlignment);
// The same of an x-packed cache, except its addresses.
std::string xpacked_refusal(const KvCache& cache, int64_t unit = attention::kAlignment);
// Bytes, 16, 8 or 4, of a cp.async from a 16-bit cache that the TMA may not copy: parts of rows; in x-packed caches of
// a key's x elements, and of the tokens of V. 0: none.
int bytes_to_gather(const KvCache& cache);

}  // namespace attune::cuda::prefill
