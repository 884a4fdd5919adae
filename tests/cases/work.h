// SPDX-License-Identifier: Apache-2.0
// How much arithmetic and how many bytes a case asks for at least: what its speed is measured by.
#pragma once

#include "case.h"

namespace attune::cases {

struct Work {
  double flops = 0;  // 2 (head_dim_qk + head_dim_v) for every visible pair of a query head and a key; of the backward
                     // 2 (3 head_dim_qk + 2 head_dim_v), its five products
  double bytes = 0;  // q, out, and every visible key and value once, as stored; of the backward dout and gradients, too
  double tokens = 0;  // queries
};

// Counts causality, windows and topk; finer masks count as visible.
Work work_of(const Case& c);

}  // namespace attune::cases
