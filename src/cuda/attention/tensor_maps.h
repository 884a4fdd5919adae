// SPDX-License-Identifier: Apache-2.0
// How the prefill and MLA kernels see a problem's arrays: tensor maps.
#pragma once

#include "common/work_tile_params.h"
#include "core/problem.h"
#include "cuda/tensor_map.h"

namespace attune::cuda::attention {

inline constexpr int64_t kAlignment = 16;  // bytes, for the TMA

// Whether channels are contiguous, and rows lie at multiples of 16 bytes, or of `unit`, from the first row on. The
// address of the first row is not looked at.
bool strides_fit(const RowView& v);
bool strides_fit(const KvPlane& v, int64_t unit = kAlignment);

// [batch or 1, rows, heads, channels] in boxes of 64 channels, swizzled by 128 bytes.
TensorMapDesc row_map(const Problem& p, const RowView& v, int64_t heads, int64_t head_dim, int rows_of_box,
                      int heads_of_box);
// [pages or sequences, slots, heads, channels]; 8-bit elements are copied as they are.
TensorMapDesc cache_map(const Problem& p, const KvPlane& v, int64_t head_dim, int rows_of_box);

// x-packed caches, for boxes of tokens_of_box tokens: K [pages, heads, groups of 8 tokens, groups of x channels, 8
// tokens x x channels]; 16-bit V [pages, heads, groups of 16 tokens, channels, 16 tokens], swizzled by 32 bytes; 8-bit
// V [pages, heads, 1, channels, tokens].
TensorMapDesc xpacked_k_map(const Problem& p, int tokens_of_box);
TensorMapDesc xpacked_v_map(const Problem& p, int tokens_of_box);
TensorMapDesc xpacked_quantized_v_map(const Problem& p, int tokens_of_box);

}  // namespace attune::cuda::attention
