// SPDX-License-Identifier: Apache-2.0
// Lists the tasks of a batch from the lengths on the device, those with most tiles first, and cuts blocks of rows into
// parts where there are too few of them to fill the grid, or where one alone would take longer than all others.
//
//   blocks of rows of sequence b: ceil(num_q / tokens_of_tile);  cost of a block: its tiles of keys;
//   C = all tiles times head tiles;  ideal = C / blocks of the grid, which no schedule beats
//
// One thread block. Threads sum runs of sequences and a scan places them; then each thread finds the sequences of its
// blocks of rows by bisection. Tasks are sorted by counting: their order within a cost differs from run to run, which no
// result depends on. One schedule serves every layer with the same lengths.
#include "prefill/tiles.cuh"
#include "ptx/grid.cuh"
#include "schedule/scan.cuh"

namespace attune::prefill {

using schedule::inclusive_sum_of_warp;

constexpr int kKeys = ATTUNE_KEYS, kThreads = 1024, kWarps = kThreads / 32;
constexpr int kFewestTiles = 4;  // of a part: less would not pay for the merge
constexpr long long kL2Bytes = 32ll << 20;  // that keys may take of it

struct SharedStorage {
  int end[kThreads];      // of each thread's run of sequences, in blocks of rows
  int bucket[kThreads];   // tasks of a cost, then where the next one goes
  long long warp[kWarps];
  long long total_cost, total_keys;
  int max_cost, num_split, num_parts;
};

// Over all threads; also where this one begins.
__device__ __forceinline__ long long sum_of_block(long long x, SharedStorage& shared, long long& before) {
  const long long inclusive = inclusive_sum_of_warp(x);
  if (threadIdx.x % 32 == 31) shared.warp[threadIdx.x / 32] = inclusive;
  __syncthreads();
  if (threadIdx.x < 32) {
    const long long all = inclusive_sum_of_warp(shared.warp[threadIdx.x]);
    shared.warp[threadIdx.x] = all;
  }
  __syncthreads();
  before = inclusive - x + (threadIdx.x < 32 ? 0 : shared.warp[threadIdx.x / 32 - 1]);
  const long long total = shared.warp[kWarps - 1];
  __syncthreads();
  return total;
}

// Sequence b's first block of rows, for all sequences. Returns how many blocks there are.
__device__ __forceinline__ int place_sequences(const PrefillParams& p, int run, SharedStorage& shared) {
  const int begin = min(p.batch, static_cast<int>(threadIdx.x) * run), end = min(p.batch, begin + run);
  int blocks = 0;
  long long keys = 0;
  for (int b = begin; b < end; ++b) {
    const SequenceInfo s = read_sequence(p, b);
    blocks += s.row_blocks;
    keys += s.num_keys;
  }
  long long before, unused;
  const int total = static_cast<int>(sum_of_block(blocks, shared, before));
  shared.end[threadIdx.x] = static_cast<int>(before) + blocks;
  const long long total_keys = sum_of_block(keys, shared, unused);
  if (threadIdx.x == 0) shared.total_keys = total_keys;
  int at = static_cast<int>(before);
  for (int b = begin; b < end; ++b) {
    p.block_begin[b] = at;
    at += read_sequence(p, b).row_blocks;
  }
  __syncthreads();
  return total;
}

// Block of rows i as a task.
__device__ __forceinline__ Task find_block(const PrefillParams& p, int run, const SharedStorage& shared, int i) {
  int low = 0, high = kThreads - 1;  // the first run that ends beyond it
  while (low < high) {
    const int middle = (low + high) / 2;
    if (shared.end[middle] > i) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  int b = low * run;
  const int last = min(p.batch, b + run) - 1;
  while (b < last && p.block_begin[b + 1] <= i) ++b;
  return block_task<kKeys>(p, read_sequence(p, b), b, i - p.block_begin[b]);
}

__device__ __forceinline__ int parts_of(int cost, int piece) { return cost > piece ? (cost + piece - 1) / piece : 1; }

// Most tiles of a part.
__device__ __forceinline__ int choose_piece(const PrefillParams& p, int run, int num_blocks, SharedStorage& shared) {
  constexpr int kUnlimited = 0x7fffffff;
  const long long cost = shared.total_cost * p.num_head_tiles;
  const int ideal = static_cast<int>(max((cost + p.num_blocks - 1) / p.num_blocks, static_cast<long long>(kFewestTiles)));
  if (p.whole_pairs || shared.max_cost <= ideal) return kUnlimited;
  if (static_cast<long long>(num_blocks) * p.num_head_tiles >= p.num_blocks) return ideal;
  // So few that a thread can look at all: the smallest part for which the grid takes all parts at a time.
  const int step = (shared.max_cost - ideal + kThreads - 2) / (kThreads - 1);
  const int piece = ideal + static_cast<int>(threadIdx.x) * step;
  if (threadIdx.x == 0) shared.num_parts = shared.max_cost;
  __syncthreads();
  int parts = 0;
  for (int i = 0; i < num_blocks; ++i) {
    const Task t = find_block(p, run, shared, i);
    parts += parts_of(t.tile_end, piece);
  }
  if (static_cast<long long>(parts) * p.num_head_tiles <= p.num_blocks) atomicMin(&shared.num_parts, piece);
  __syncthreads();
  const int best = shared.num_parts;
  __syncthreads();
  return best;
}

__device__ __forceinline__ int bucket_of(int cost, int most) {
  // Long ones first; costs beyond the buckets share them.
  const long long scaled = most < kThreads ? cost : static_cast<long long>(cost) * (kThreads - 1) / most;
  return kThreads - 1 - static_cast<int>(scaled);
}

// Calls body(task) for each part of each block of rows.
template <class Body>
__device__ __forceinline__ void for_each_part(const PrefillParams& p, int run, int num_blocks, int piece,
                                              SharedStorage& shared, Body&& body) {
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) {
    Task t = find_block(p, run, shared, i);
    const int cost = t.tile_end, parts = parts_of(cost, piece);
    body(t, cost, parts);
  }
  __syncthreads();
}

}  // namespace attune::prefill

extern "C" __global__ void __launch_bounds__(1024)
    attune_schedule_prefill(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  using namespace attune::prefill;
  __shared__ SharedStorage shared;
  ptx::allow_next_kernel();
  ptx::wait_for_previous_kernels();
  const int run = (p.batch + kThreads - 1) / kThreads, thread = static_cast<int>(threadIdx.x);
  if (thread == 0) shared.total_cost = 0, shared.max_cost = 0, shared.num_split = 0, shared.num_parts = 0;
  const int num_blocks = place_sequences(p, run, shared);

  long long cost = 0, unused;
  int max_cost = 0;
  for (int i = thread; i < num_blocks; i += kThreads) {
    const int tiles = find_block(p, run, shared, i).tile_end;
    cost += tiles;
    max_cost = max(max_cost, tiles);
  }
  const long long total_cost = sum_of_block(cost, shared, unused);
  if (thread == 0) shared.total_cost = total_cost;
  atomicMax(&shared.max_cost, max_cost);
  shared.bucket[thread] = 0;
  __syncthreads();
  const int piece = choose_piece(p, run, num_blocks, shared);
  const int most = min(shared.max_cost, piece);
  if (thread == 0) shared.num_parts = 0;
  __syncthreads();

  // Parts of a block are of equal size, as far as possible.
  const auto part_begin = [](int tiles, int parts, int i) { return static_cast<int>(static_cast<long long>(tiles) * i / parts); };
  for_each_part(p, run, num_blocks, piece, shared, [&](const Task&, int tiles, int parts) {
    for (int i = 0; i < parts; ++i)
      atomicAdd(&shared.bucket[bucket_of(part_begin(tiles, parts, i + 1) - part_begin(tiles, parts, i), most)], 1);
  });
  long long before;
  const int num_tasks = static_cast<int>(sum_of_block(shared.bucket[thread], shared, before));
  shared.bucket[thread] = static_cast<int>(before);
  __syncthreads();
  for_each_part(p, run, num_blocks, piece, shared, [&](Task& t, int tiles, int parts) {
    t.num_parts = parts;
    if (parts > 1) {
      t.split = atomicAdd(&shared.num_split, 1);
      t.first_part = atomicAdd(&shared.num_parts, parts);
    }
    for (int i = 0; i < parts; ++i) {
      t.part = i, t.tile_begin = part_begin(tiles, parts, i), t.tile_end = part_begin(tiles, parts, i + 1);
      const int at = atomicAdd(&shared.bucket[bucket_of(t.tile_end - t.tile_begin, most)], 1);
      if (at < p.max_tasks) p.tasks[at] = t;
    }
  });
  for (int i = thread; i < shared.num_split * p.num_head_tiles; i += kThreads) p.parts_done[i] = 0;
  if (thread == 0) {
    const long long bytes = max(shared.total_keys * p.bytes_of_key, 1ll);
    p.list->num_tasks = min(num_tasks, p.max_tasks);
    p.list->heads_at_a_time = clamp_int(kL2Bytes / bytes, 1, p.num_head_tiles);
    p.list->next_item = 0;
  }
}
