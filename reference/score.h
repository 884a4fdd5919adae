// SPDX-License-Identifier: Apache-2.0
// Who sees whom, and the score z of those who do.
#pragma once

#include <cstdint>

#include "reference/operation.h"

namespace attune::reference {

// One query of one head.
struct Query {
  int64_t sequence = 0;
  int64_t row = 0;       // of q
  int64_t index = 0;     // in the sequence
  int64_t position = 0;  // absolute
  int64_t head = 0;
};

double softmax_scale(const attune_attention& a);
// Whether the masks let a query see the key at this position.
bool is_visible(const attune_attention& a, const Query& query, int64_t key_position);
// z of a product <q, k>: scale, softcap, additive terms.
double score(const Operation& op, const Query& query, int64_t key_position, double product);

}  // namespace attune::reference
