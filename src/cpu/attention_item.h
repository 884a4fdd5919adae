// SPDX-License-Identifier: Apache-2.0
// One work item: the online softmax over its key tiles, by GEMM tiles (attention_prefill.cpp) or straight from the rows
// (attention_decode.cpp), and what both share.
#pragma once

#include "cpu/score.h"
#include "cpu/tile.h"
#include "cpu/tile_source.h"

namespace attune::cpu {

// Reads the item's query rows through the prologue into scratch.q, then leaves scratch.o unnormalised with row_max
// (base 2) and row_sum.
void run_prefill_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch);
void run_decode_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch);

// Writes the item's query rows, through the prologue, to scratch.q.
void load_queries(const ScoreRows& rows, const Compute& compute, Scratch& scratch);
void start_rows(int num_rows, Scratch& scratch);

// The softmax of rows [row, row + m) against the first n columns of the tile.
SoftmaxTile softmax_tile(const Problem& p, const Compute& compute, const KvTile& tile, int row, int m, int n,
                         float scale2, Scratch& scratch);

// An item is computed by GEMMs or sums over whole tiles first. There 0 * NaN reaches a row that does not see the key.
// If a row has a finite row_sum and an output that is not, some value, visible or masked, is NaN or infinite: the item
// is recomputed, and tiles with such values add visible columns one by one. Rare, hence simple.
bool needs_recompute(const Problem& p, const Compute& compute, int64_t num_rows, const Scratch& scratch);
// True if V or its scale is NaN or infinite somewhere in the tile.
bool v_nonfinite(const Problem& p, const Compute& compute, TileType row_type, const KvTile& tile);
// visible [m][kMaxTileN]: the scores that are not -inf. Recorded before the softmax overwrites them.
void record_visible(const float* s, int m, int n, bool* visible);
void pv_of_visible(const Problem& p, TileType row_type, const KvTile& tile, int m, const bool* visible,
                   const void* p_tile, TileType p_type, float* o, int64_t ld_o);

}  // namespace attune::cpu
