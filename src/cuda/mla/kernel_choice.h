// SPDX-License-Identifier: Apache-2.0
// Which of the MLA kernels a problem gets, by the size of its M blocks.
#pragma once

#include "core/problem.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

// The most tokens that see the same keys: of a sequence, or 1 where each token has its own list. That all sequences
// have one token counts only if bits may depend on the batch.
int64_t tokens_of_keys(const Problem& p);

// The rows of queries in an M block, which say the kernel: kMlaM16Rows, kMlaSwapAbRows or kMlaBlockM; and the fewest
// tiles of a split.
struct KernelChoice {
  int rows, fewest_tiles;
};

// producer: of the cache's rows. The number of heads decides, unless there are so few tokens that blocks would mostly
// be idle.
KernelChoice choose_kernel(const Problem& p, kernels::MlaProducer producer, int num_sms);

}  // namespace attune::cuda::mla
