// SPDX-License-Identifier: Apache-2.0
// Who sees whom, and the score z of those who do, by the functions of kernels/check/, which the oracle on the GPU has
// too.
#pragma once

#include <cmath>
#include <cstdint>

#include "check/scores.h"
#include "reference/operation.h"

namespace attune::reference {

using oracle::is_visible;
using oracle::Query;

inline double softmax_scale(const attune_attention& a) {
  return a.softmax_scale != 0 ? static_cast<double>(a.softmax_scale)
                              : 1.0 / std::sqrt(static_cast<double>(head_dim_qk(a)));
}
// z of a product <q, k>: scale, softcap, additive terms.
inline double score(const Operation& op, const Query& query, int64_t key_position, double product) {
  return oracle::score(op.a, softmax_scale(op.a), query, key_position, product);
}

}  // namespace attune::reference
