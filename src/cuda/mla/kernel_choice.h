// SPDX-License-Identifier: Apache-2.0
// How blocks of rows of a problem are formed, and so which of the MLA kernels it gets.
#pragma once

#include "core/problem.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

// Most tokens that see the same keys: of a sequence, or where each has lists of its own one. That other sequences have
// one token counts only where bits may depend on them.
int64_t tokens_of_keys(const Problem& p);

// Which kernel a problem gets, by the rows of queries that its blocks have at most: kMlaFewRows, kMlaHalfRows or
// kMlaRowsOfBlock; and tiles of a part of such a block at least, where it is cut along the keys.
struct KernelChoice {
  int rows, fewest_tiles;
};

// loader: of the cache's rows. What the number of heads says, but for so few tokens that blocks would wait for most of
// their time.
KernelChoice choose_kernel(const Problem& p, kernels::MlaProducer producer, int num_sms);

}  // namespace attune::cuda::mla
