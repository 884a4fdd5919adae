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
// Bytes of a cp.async, 16, 8 or 4, by which threads copy a 16-bit cache that the TMA cannot; 0: not even 4 fit. It
// copies part of a row; in an x-packed cache part of a key's x elements, or some tokens of a channel of V.
int bytes_to_gather(const KvCache& cache);

}  // namespace attune::cuda::prefill
