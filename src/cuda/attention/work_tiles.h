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

// Partial outputs: rows of a split; words of stats and channels of a row. listed: for a kernel that combines them.
struct Partials {
  int64_t rows = 0, stats = 0, channels = 0;
  bool listed = false;
};

// Of a kernel's configuration.
struct WorkTiles {
  int keys = 128;          // of a tile
  int heads_of_tile = 1;   // query heads in a row block
  int tokens_of_tile = 1;  // tokens in a row block, at most
  int fewest_tiles = 1;    // of a split
  int blocks = 1;          // of the grid; all are resident at once
  int64_t batch = 0;
  int64_t max_work_tiles = 0;  // that the schedule lists
  bool splits = true;          // row blocks may be split along the keys
  Partials partials;

  size_t workspace_bytes() const;
};

// The number of query heads of a KV head that fills a row block best, with at most most_tokens tokens; ties go to more
// heads.
int choose_heads_of_tile(int64_t group, int rows_of_tile, int64_t most_tokens = std::numeric_limits<int64_t>::max());

// Sets batch, splits, max_work_tiles and blocks, of a given size of row blocks.
void choose_grid(const Problem& p, int num_sms, WorkTiles& c);

// Keys of a TMA box of the cache. A power of two, as tiles are.
int keys_of_box(const KvCache& cache, int keys);

// The parameters that both kernels have. The workspace begins with the list of work tiles.
kernels::WorkTileParams to_params(const Problem& p, const kernels::T5Table& t5, const WorkTiles& c, void* workspace);

// The kernel that lists the work tiles. sparse: keys come from index lists.
KernelSpec schedule_kernel(const WorkTiles& c, bool sparse, bool balanced);

// The first array whose address the TMA cannot copy from. copied: q, k and v are copied before; gathered: so is the
// cache.
struct Misaligned {
  const char* name = nullptr;
  size_t over = 0;
};
Misaligned find_misaligned(const Problem& p, bool copied, bool gathered);
// What a kernel does not take, or "".
std::string refusal_of(const Misaligned& m);
// Throws INVALID_ARGUMENT where there is one.
void check_aligned(const Misaligned& m, const char* kernel);

}  // namespace attune::cuda::attention
