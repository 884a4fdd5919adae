// SPDX-License-Identifier: Apache-2.0
// Deals the key tiles of a batch to the blocks of the decode kernel, from lengths on the device.
//
//   tiles(b) = num_heads_kv * row blocks(b) * key tiles(b), total = sum over b
//   share c  = tiles [boundary(c), boundary(c + 1)) of the line that all sequences form one after the other
//
// One block of 1,024 threads: each sums a run of sequences, a scan over the threads places the runs, and each thread writes the shares
// that begin in its run. Decode blocks do the same for themselves where the batch is small, so this runs for large batches only.
#include "ptx/grid.cuh"
#include "schedule/share.cuh"

namespace attune::schedule {

struct Config {
  static constexpr int kThreads = 1024;
  static constexpr int kTileKeys = ATTUNE_WARPS * kernels::kKeysOfWarp;
  static constexpr int kBlockRows = 8 * ATTUNE_ROW_TILES;
  static_assert(kThreads % 32 == 0, "the scan works by warps");
};

}  // namespace attune::schedule

extern "C" __global__ void __launch_bounds__(attune::schedule::Config::kThreads)
    attune_schedule_decode(const __grid_constant__ attune::kernels::DecodeParams p) {
  using namespace attune;
  using schedule::Config;
  __shared__ long long scan[Config::kThreads / 32 + 1];
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  schedule::deal<Config::kThreads, Config::kTileKeys, Config::kBlockRows>(p, 0, p.slots * p.waves, scan,
                                                                         [&](int c, const kernels::Share& s) { p.shares[c] = s; });
}
