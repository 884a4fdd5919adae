// SPDX-License-Identifier: Apache-2.0
// Row blocks and work tiles of the persistent kernels, prefill and MLA: their configuration, parameters and workspace.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "common/work_tile_params.h"
#include "core/problem.h"
#include "cuda/kernel.h"

namespace attune::cuda::attention {

// Sizes of the partial outputs: rows of a split; statistics and output channels of a row, in floats. listed: the
// schedule lists the split row blocks for a combine kernel.
struct Partials {
  int64_t rows = 0, stats = 0, channels = 0;
  bool listed = false;
};

// The part of their configurations that prefill and MLA share.
struct WorkTiles {
  int keys = 128;          // in a key tile
  int heads_of_tile = 1;   // query heads in a row block
  int tokens_of_tile = 1;  // tokens in a row block, at most
  int fewest_tiles = 1;    // key tiles in a split, at least (WorkTileParams)
  int whole_tiles = 1;     // of the longest row block of a batch in which none is split
  int blocks = 1;          // of the grid; all are resident at once
  int64_t batch = 0;
  int64_t max_work_tiles = 0;  // the most that the schedule may list
  bool splits = true;          // row blocks may be split along the keys
  Partials partials;

  size_t workspace_bytes() const;
};

// The number of query heads of a KV head that fills a row block best, with at most most_tokens tokens; ties go to more
// heads.
int choose_heads_of_tile(int64_t group, int rows_of_tile, int64_t most_tokens = std::numeric_limits<int64_t>::max());

// Sets batch, splits, max_work_tiles and blocks. The size of row blocks must be set already.
void choose_grid(const Problem& p, int num_sms, WorkTiles& c);

// Keys of a TMA box of the cache: the largest power of two that divides the key tile and, in a paged cache, the page.
int keys_of_box(const KvCache& cache, int keys);

// The parameters that both kernels have. The workspace begins with the list of work tiles.
kernels::WorkTileParams to_params(const Problem& p, const kernels::T5Table& t5, const WorkTiles& c, void* workspace);

// The kernel that lists the work tiles. sparse: keys come from index lists.
KernelSpec schedule_kernel(const WorkTiles& c, bool sparse, bool balanced);

// The first array whose address the TMA cannot copy from. copied: a launch before copies q, k and v, so any address
// will do; gathered: threads copy the cache, likewise.
struct Misaligned {
  const char* name = nullptr;
  size_t over = 0;  // bytes beyond a multiple of 16
};
Misaligned find_misaligned(const Problem& p, bool copied, bool gathered);
// The reason to refuse a plan, or "" where every array is aligned.
std::string refusal_of(const Misaligned& m);
// Throws INVALID_ARGUMENT where an array of a run is misaligned.
void check_aligned(const Misaligned& m, const char* kernel);

}  // namespace attune::cuda::attention
