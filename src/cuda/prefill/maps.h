// SPDX-License-Identifier: Apache-2.0
// How the kernels of prefill and of MLA see a problem's arrays: what the TMA must know, and rows that threads read.
#pragma once

#include <string>

#include "core/problem.h"
#include "cuda/tensor_map.h"
#include "prefill/prefill_params.h"

namespace attune::cuda::prefill {

inline constexpr int64_t kAlignment = 16;      // bytes, of everything that the TMA copies
inline constexpr int64_t kFewestGathered = 4;  // bytes that threads copy at a time at least

// Whether all rows lie at multiples of 16 bytes, or so many, from the first, their elements side by side.
bool strides_fit(const RowView& v);
bool strides_fit(const KvPlane& v, int64_t unit = kAlignment);

// "" if the TMA, or for fewer than 16 bytes threads, takes the cache as it lies, else what it does not take.
std::string refusal_of_cache(const KvCache& cache, int64_t unit = kAlignment);
// The same of an x-packed one but for its addresses.
std::string xpacked_refusal(const KvCache& cache, int64_t unit = kAlignment);
// Bytes, 16, 8 or 4, that threads can copy at a time from a cache of 16 bits, which the TMA may not take: pieces of
// rows, of the keys' elements and the values' tokens where it is x-packed. 0: not even that.
int bytes_to_gather(const KvCache& cache);

kernels::NewRows dense_rows(const RowView& v);

// [batch or 1, rows, heads, channels] in boxes of 64 channels, swizzled by 128 bytes.
TensorMapDesc row_map(const Problem& p, const RowView& v, int64_t heads, int64_t head_dim, int rows_of_box,
                      int heads_of_box);
// [pages or sequences, slots, heads, channels]; codes of 8 bits come as they are.
TensorMapDesc cache_map(const Problem& p, const KvPlane& v, int64_t head_dim, int rows_of_box);

// Of an x-packed cache, for boxes of so many tokens: K [pages, heads, eights of tokens, xs of channels, 8 tokens x x
// channels]; V of 16 bits [pages, heads, sixteens of tokens, channels, 16 tokens], swizzled by 32 bytes, and of codes
// [pages, heads, 1, channels, tokens].
TensorMapDesc xpacked_k_map(const Problem& p, int tokens_of_box);
TensorMapDesc xpacked_v_map(const Problem& p, int tokens_of_box);
TensorMapDesc xpacked_quantized_v_map(const Problem& p, int tokens_of_box);

}  // namespace attune::cuda::prefill
