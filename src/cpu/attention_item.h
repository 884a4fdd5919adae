// SPDX-License-Identifier: Apache-2.0
// One work item: the online softmax over its key tiles, by GEMM tiles (prefill) or straight from the rows (decode).
#pragma once

#include "cpu/score.h"
#include "cpu/tile.h"
#include "cpu/tile_source.h"

namespace attune::cpu {

// Reads the item's query rows through the prologue into scratch.q, then leaves scratch.o unnormalised with row_max
// (base 2) and row_sum.
void run_prefill_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch);
void run_decode_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch);

}  // namespace attune::cpu
