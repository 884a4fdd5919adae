// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: one kernel row that covers the whole operation space.
//
// Work is cut into items: some packed rows (query-major, the heads of a KV head inside) of one sequence and KV head,
// over a range of keys. Sequences with many queries run GEMM tiles on packed keys (prefill), the others dot products
// straight on the rows (decode). Key tiles start at absolute multiples of the tile size and masked columns change no
// bit, so a row's result does not depend on what else is in its item.
#pragma once

#include "core/kernel.h"

namespace attune::cpu {

const Kernel& attention_kernel();

}  // namespace attune::cpu
