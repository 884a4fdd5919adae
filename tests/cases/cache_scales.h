// SPDX-License-Identifier: Apache-2.0
// The scales of a case's cache, by their mode. A new mode belongs here.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "common/kinds.h"

namespace attune::cases {

class Random;

// The modes by their names in JSON.
const std::map<std::string, ScaleMode>& scale_modes();
// Whether rows have scales of their own, which who writes rows computes; and the bytes of those of a row.
bool scales_by_token(ScaleMode mode);
int64_t scale_bytes_of_row(ScaleMode mode);
// The shape of k_scale, or of v_scale; not of kNone. Its element for a slot.
std::vector<int64_t> scale_shape(ScaleMode mode, int32_t layout, int64_t pages, int64_t page_size, int64_t heads);
void* scale_element(const attune_tensor& scales, int32_t layout, int64_t page, int64_t offset, int64_t head);
// The scales of a random cache of this dtype, of 8 bits.
ScaleMode draw_scales(Random& r, attune_dtype dtype);

}  // namespace attune::cases
