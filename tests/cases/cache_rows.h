// SPDX-License-Identifier: Apache-2.0
// The memory of a cache: where the channels and scales of a token's rows are, by layout, format and mode of the scales.
// A new one of these belongs here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "common/kv_scale.h"

namespace attune::cases {

class Random;

// Tokens of a page.
int64_t page_size_of(const attune_kv_cache& cache);
// The shape of K or V of a plain format. x: of kXpacked, elements of a pack.
std::vector<int64_t> plane_shape(int32_t layout, bool is_v, int64_t pages, int64_t page_size, int64_t heads,
                                 int64_t dim, int64_t x);
// Element d of a row of a plain cache's K or V.
void* pool_element(const attune_kv_cache& cache, bool is_v, int64_t page, int64_t offset, int64_t head, int64_t d);

// A row of a packed format: codes of e4m3 with a scale for each group, then channels of bf16.
struct PackedRow {
  std::byte *codes, *scales, *rope;
  int64_t num_codes, group, bytes;  // bytes: from codes on
  int64_t scale_bytes;              // of scales that do not lie within these bytes
};
PackedRow packed_row(const attune_kv_cache& cache, int64_t page, int64_t offset);

// The modes and their names in JSON, in the order of ScaleMode.
struct NamedMode {
  const char* name;
  ScaleMode mode;
};
const std::vector<NamedMode>& scale_modes();
// Whether a cache of this dtype may have such scales.
bool takes_scales(attune_dtype dtype, ScaleMode mode);
// Whether rows have scales of their own, which who writes rows computes.
bool scales_by_token(ScaleMode mode);
// The channels of a row of `dim` that share a scale; the bytes of a row's own scales.
int64_t channels_of_scale(ScaleMode mode, int64_t dim);
int64_t scale_bytes_of_row(ScaleMode mode, int64_t dim);
// Whether channels of a row have different scales, so that who reads it may round each of them.
bool scales_channels(attune_kv_format format, ScaleMode mode);
// The shape of k_scale, or of v_scale; not of kNone. The mode of such a tensor, and its element for channel d of a row.
std::vector<int64_t> scale_shape(ScaleMode mode, int32_t layout, int64_t pages, int64_t page_size, int64_t heads,
                                 int64_t dim);
ScaleMode scale_mode(const attune_tensor& scales);
void* scale_element(const attune_kv_cache& cache, bool is_v, int64_t page, int64_t offset, int64_t head, int64_t d);
// The scales of a random cache of this dtype, of 8 bits.
ScaleMode draw_scales(Random& r, attune_dtype dtype);

}  // namespace attune::cases
