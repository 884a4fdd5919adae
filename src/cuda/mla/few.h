// SPDX-License-Identifier: Apache-2.0
// Which problems the kernel of few rows gets.
#pragma once

#include "core/problem.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

// The most heads of a group, `most` at most, by which it can be divided.
int heads_of_one_token(int64_t group, int most);

// loader: of the cache's rows. More heads than are few rows are taken too where there are so few tokens that blocks of
// 64 rows would wait for most of their time.
bool takes_few_rows(const Problem& p, kernels::MlaLoader loader, int num_sms);

}  // namespace attune::cuda::mla
