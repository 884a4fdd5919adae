// SPDX-License-Identifier: Apache-2.0
// Which problems the kernels of few rows and of half a block of rows get.
#pragma once

#include "core/problem.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

// Most tokens that see the same keys: of a sequence, or where each has lists of its own one. That other sequences have
// one token counts only where bits may depend on them.
int64_t tokens_of_keys(const Problem& p);

// loader: of the cache's rows. More heads than are few rows are taken too where there are so few tokens that blocks of
// 64 rows would wait for most of their time.
bool takes_few_rows(const Problem& p, kernels::MlaLoader loader, int num_sms);

// What it does not take, of so many heads that few rows are too few, over packed rows of 656 bytes.
bool takes_half_block(const Problem& p, kernels::MlaLoader loader);

}  // namespace attune::cuda::mla
