// SPDX-License-Identifier: Apache-2.0
// The order of the axes of q, k and v.
#pragma once

#include "attune/attune.h"

namespace attune::python {

// torch's attention has [batch, heads, seqlen, head_dim], which fits the shapes of [batch, seqlen, heads, head_dim] too
// often to be found by them. Throws InvalidArgument, with the way out, where q and k of rank 4 can only be meant so.
void check_order(const attune_attention& attention);

}  // namespace attune::python
