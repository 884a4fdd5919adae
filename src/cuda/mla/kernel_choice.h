// SPDX-License-Identifier: Apache-2.0
// Which of the MLA kernels a problem gets, by the size of its M blocks.
#pragma once

#include "core/problem.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

// The most tokens that see the same keys: those of a sequence, or 1 where each token has its own list. With
// batch_invariant a batch of one-token sequences is treated like any other, as bits must not depend on it.
int64_t tokens_of_keys(const Problem& p);

// Query rows of an M block, which name the kernel (kMlaM16Rows, kMlaSwapAbRows or kMlaBlockM), and the fewest key tiles
// of a split.
struct KernelChoice {
  int rows, fewest_tiles;
};

// producer: that of the cache. The number of heads decides, unless so few tokens come that most blocks would be idle.
KernelChoice choose_kernel(const Problem& p, kernels::MlaProducer producer, int num_sms);

}  // namespace attune::cuda::mla
