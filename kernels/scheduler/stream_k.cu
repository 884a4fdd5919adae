// SPDX-License-Identifier: Apache-2.0
// The stream-K schedule of the decode kernel: cuts the key tiles of a batch into one range for each block, from the
// lengths on the device, and clears the blocks' counters.
//
//   tiles(b) = groups of heads * row blocks(b) * key tiles(b);  total = sum over b
//   range c  = tiles [first(c), first(c + 1)) of all sequences, one after the other
//
// The partial outputs of a split output tile must be combined. If no range gets much longer without splits, each output
// tile goes whole to the range that has its first key tile (StreamKRange::whole).
//
// Grid: one thread block, with few threads for a small batch, because only its latency counts. Each thread sums the
// tiles of a run of consecutive sequences, and a scan yields where runs end. Then each thread finds the sequences in
// which its ranges begin: by bisection over the runs, then along one run. One schedule serves every layer with the same
// lengths.
#include "common/stamp.cuh"
#include "ptx/grid.cuh"
#include "scheduler/scan.cuh"
#include "scheduler/stream_k_range.cuh"

namespace attune::scheduler {

struct Config {
  static constexpr int kThreads = ATTUNE_THREADS, kWarps = kThreads / 32;
  static constexpr int kTileKeys = ATTUNE_WARPS * kernels::kKeysOfWarp;
  static constexpr int kBlockRows = 8 * ATTUNE_ROW_TILES;
  static_assert(kThreads % 32 == 0 && kWarps <= 32, "one warp scans the sums of all warps");
};

struct SharedStorage {
  long long warp_sum[Config::kWarps];
  long long end[Config::kThreads];  // the stream-K tile after each thread's run of sequences
  int to_next[Config::kThreads];    // of each range, tiles_to_next()
  unsigned stamp;
};

__device__ __forceinline__ long long tiles_of(const AttentionParams& p, int b) {
  return tiles_of_sequence(p, read_sequence<Config::kTileKeys, Config::kBlockRows>(p, b));
}

// Fills shared.end.
__device__ __forceinline__ void scan_tiles(const AttentionParams& p, int run, SharedStorage& shared) {
  const int begin = min(p.batch, static_cast<int>(threadIdx.x) * run), end = min(p.batch, begin + run);
  long long mine = 0;
  for (int b = begin; b < end; ++b) mine += tiles_of(p, b);
  const long long sum = inclusive_sum_of_warp(mine);
  if (threadIdx.x % 32 == 31) shared.warp_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    const long long all = inclusive_sum_of_warp(threadIdx.x < Config::kWarps ? shared.warp_sum[threadIdx.x] : 0);
    if (threadIdx.x < Config::kWarps) shared.warp_sum[threadIdx.x] = all;
  }
  __syncthreads();
  shared.end[threadIdx.x] = sum + (threadIdx.x < 32 ? 0 : shared.warp_sum[threadIdx.x / 32 - 1]);
  __syncthreads();
}

// The number of blocks that get work. Beside a prefill kernel it is proportional to decode's fraction of all work, plus
// a margin, because prefill takes the multiprocessors that are left or become free.
__device__ __forceinline__ int blocks_to_use(const AttentionParams& p, long long total) {
  if (p.prompt_tiles == nullptr) return p.blocks;
  constexpr float kMargin = 1.35f;
  const float tiles = static_cast<float>(total) * static_cast<float>(p.head_lanes);
  const float part = tiles / fmaxf(tiles + p.prompt_tile * static_cast<float>(*p.prompt_tiles), 1.0f);
  return max(min(static_cast<int>(kMargin * part * static_cast<float>(p.blocks)) + 1, p.blocks), 1);
}

// Range `block` before its first split: its tiles, and the sequence in which they begin.
__device__ __forceinline__ StreamKRange find_range(const AttentionParams& p, int run, const SharedStorage& shared,
                                                   const StreamKPartition& partition, int block) {
  StreamKRange s{};
  if (block >= partition.blocks) return s;
  s.total_tiles = shared.end[Config::kThreads - 1];
  s.next_tile = partition.first_tile(block), s.tiles_left = partition.num_tiles(block);
  int low = 0, high = Config::kThreads - 1;  // bisection for the first run that ends after next_tile
  while (low < high) {
    const int middle = (low + high) / 2;
    if (shared.end[middle] > s.next_tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  s.batch = low * run;
  long long at = low == 0 ? 0 : shared.end[low - 1];
  for (;; ++s.batch) {
    s.sequence = read_sequence<Config::kTileKeys, Config::kBlockRows>(p, s.batch);
    s.tile_in_sequence = s.next_tile - at;
    if (run == 1 || s.tile_in_sequence < tiles_of_sequence(p, s.sequence)) return s;
    at += tiles_of_sequence(p, s.sequence);
  }
}

// Whether no range gets much longer if no output tile is split. A split costs a second epilogue, a partial store and
// the combine: about as much as a few tiles. So a range may be longer by an eighth, but at most by 8 tiles. range: of
// block threadIdx.x.
__device__ __forceinline__ bool fits_whole(const AttentionParams& p, const StreamKPartition& partition,
                                           const StreamKRange& range, SharedStorage& shared) {
  const long long most_output_tiles = static_cast<long long>(p.batch) * (p.num_heads_kv / p.head_lanes) * p.row_blocks;
  if (8 * most_output_tiles < 7ll * partition.blocks) return false;  // too few for the blocks
  if (partition.blocks > Config::kThreads) return false;             // not in one round
  const int block = threadIdx.x, to_next = block < partition.blocks ? tiles_to_next(range) : 0;
  shared.to_next[block] = to_next;
  __syncthreads();
  const int next_to_next = block + 1 < partition.blocks ? shared.to_next[block + 1] : 0;
  const long long cut = partition.num_tiles(0), most = cut + min(cut / 8, 8ll);
  return __syncthreads_or(range.tiles_left + next_to_next - to_next > most) == 0;
}

}  // namespace attune::scheduler

extern "C" __global__ void __launch_bounds__(attune::scheduler::Config::kThreads)
    attune_schedule_decode(const __grid_constant__ attune::kernels::AttentionParams p) {
  using namespace attune;
  using scheduler::Config;
  __shared__ scheduler::SharedStorage shared;
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernels();
  const int run = (p.batch + Config::kThreads - 1) / Config::kThreads;
  if (threadIdx.x == 0) shared.stamp = 0;
  __syncthreads();
  common::add_stamps(p, threadIdx.x, Config::kThreads, &shared.stamp);
  scheduler::scan_tiles(p, run, shared);  // synchronises
  const long long total = shared.end[Config::kThreads - 1];
  const int most = scheduler::blocks_to_use(p, total);
  const scheduler::StreamKPartition partition(most, total);
  scheduler::StreamKRange range = scheduler::find_range(p, run, shared, partition, threadIdx.x);
  const bool whole = p.no_splits != 0 || scheduler::fits_whole(p, partition, range, shared);
  for (int block = threadIdx.x; block < p.blocks; block += Config::kThreads) {
    if (block >= Config::kThreads) range = scheduler::find_range(p, run, shared, partition, block);
    if (whole && range.tiles_left > 0) {
      const int skipped = scheduler::tiles_to_next(range);
      range.next_tile += skipped, range.tiles_left -= skipped, range.tile_in_sequence += skipped;
    }
    range.whole = whole ? 1 : 0, range.blocks = most, range.stamp = shared.stamp;
    scheduler::start<Config::kTileKeys, Config::kBlockRows>(p, range);
    p.stream_k[block] = range;
  }
  for (int block = threadIdx.x; block < p.blocks * p.head_lanes; block += Config::kThreads) p.arrivals[block] = 0;
  if (p.tiles_done != nullptr) {
    const int count = p.batch / p.beam_width * p.num_heads_kv;
    for (int i = threadIdx.x; i < count; i += Config::kThreads) p.tiles_done[i] = 0;
  }
}
