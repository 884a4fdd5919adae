// SPDX-License-Identifier: Apache-2.0
// Lists the blocks of rows of the backward, from the lengths on the device. Grid: block 0 lists those of queries, block
// 1 those of keys. A sequence is cut into series of adjacent blocks. Series that see most rows come first, by a
// counting sort. Series of a sequence keep their order, as the sums of dq need them; sequences come in any order.
#include "backward/rows.cuh"
#include "ptx/grid.cuh"
#include "scheduler/scan.cuh"

namespace attune::backward {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kBuckets = 1024;

// The number of rows that a block of rows sees, by which the list is sorted; ranges are not counted. For blocks of keys
// it never grows along a sequence. So the sort keeps the series of a sequence in order, and no block waits for one that
// is later in the list.
__device__ __forceinline__ int rows_seen(const BackwardParams& p, const SequenceInfo& s, bool of_keys, int begin,
                                         int end) {
  if (of_keys) {
    if (begin >= s.num_keys) return 0;
    const int below = s.num_q - queries_of_key(p, s, begin).begin;
    const int right = p.causal ? 0 : static_cast<int>(p.window_right);
    if (p.window_left < 0 || right < 0) return below;
    return static_cast<int>(min(static_cast<long long>(below), p.window_left + right + kBackwardRows));
  }
  return max(keys_of_query(p, s, end - 1).end - keys_of_query(p, s, begin).begin, 0);
}

// Each warp takes a sequence, and its lanes call body together. In large batches each thread takes one.
__device__ __forceinline__ bool has_warps(const BackwardParams& p) { return p.batch < kThreads; }

// Calls body(b, first row, rows seen) for all blocks of rows: of a sequence series after series, of a series in the
// order in which they add to dq. Rows seen are those of the series' lowest block; -1 for a lane without a block.
template <class Body>
__device__ __forceinline__ void for_each_block(const BackwardParams& p, bool of_keys, const Body& body) {
  const bool in_turn = of_keys && takes_turns(p);
  const int series = in_turn ? kSeriesInTurn : kSeries;
  const int lanes = has_warps(p) ? 32 : 1, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int b = threadIdx.x / lanes; b < p.batch; b += kThreads / lanes) {
    const SequenceInfo s = read_sequence(p, b);
    const int rows = of_keys ? key_extent(p, b) : s.num_q;
    for (int first = 0; first < rows; first += lanes * kBackwardRows) {
      const int at = first / kBackwardRows + lane, lowest = at / series * series;
      const int highest = min(lowest + series, (rows + kBackwardRows - 1) / kBackwardRows) - 1;
      const int row = lowest * kBackwardRows;
      const int seen = at <= highest ? rows_seen(p, s, of_keys, row, min(row + kBackwardRows, rows)) : -1;
      body(b, (in_turn ? highest - (at - lowest) : at) * kBackwardRows, seen);
    }
  }
}

// Takes the next position in a bucket; bucket -1: takes none. of_warp: all lanes call it together; one lane adds for
// all lanes with the same bucket, and they get positions in the order of the lanes.
__device__ __forceinline__ int take_position(bool of_warp, int bucket, int* first) {
  if (!of_warp) return atomicAdd(&first[bucket], 1);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned same = __match_any_sync(0xffffffffu, bucket);
  const int leader = __ffs(static_cast<int>(same)) - 1;
  int at = 0;
  if (lane == leader && bucket >= 0) at = atomicAdd(&first[bucket], __popc(same));
  return __shfl_sync(0xffffffffu, at, leader) + __popc(same & ((1u << lane) - 1));
}

// Blocks that see most are in bucket 0. shift: reduces the count to the number of buckets.
__device__ __forceinline__ int bucket_of(int seen, int shift) { return kBuckets - 1 - (seen >> shift); }

__device__ __forceinline__ void list_blocks(const BackwardParams& p, bool of_keys, BackwardList* list) {
  __shared__ int first[kBuckets], of_warp[kWarps], most;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  first[thread] = 0;
  if (thread == 0) most = 0;
  __syncthreads();
  int mine = 0;
  for_each_block(p, of_keys, [&](int, int, int seen) { mine = max(mine, seen); });
  atomicMax(&most, mine);
  __syncthreads();
  int shift = 0;
  while (most >> shift >= kBuckets) ++shift;
  for_each_block(p, of_keys, [&](int, int, int seen) {
    if (seen >= 0) atomicAdd(&first[bucket_of(seen, shift)], 1);
  });
  __syncthreads();
  // Replaces the counts by the positions at which buckets begin.
  const int count = first[thread];
  const int upto = static_cast<int>(scheduler::inclusive_sum_of_warp(count));
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  int before = 0;
  long long all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warp[w];
    all += of_warp[w];
  }
  first[thread] = before + upto - count;
  // If sequences overlap (a wrong cu_seqlens), there may be more blocks than the list has room for. Then the rest is
  // left out, or all blocks if they cannot be counted.
  const int most_tiles = of_keys ? p.max_kv_tiles : p.max_q_tiles;
  if (thread == 0) {
    list->num_tiles = all > 0x7fffffff ? 0 : min(static_cast<int>(all), most_tiles);
    list->next = 0;
  }
  __syncthreads();
  for_each_block(p, of_keys, [&](int b, int begin, int seen) {
    const int at = take_position(has_warps(p), seen >= 0 ? bucket_of(seen, shift) : -1, first);
    if (seen >= 0 && static_cast<unsigned>(at) < static_cast<unsigned>(most_tiles)) tiles_of(list)[at] = {b, begin};
  });
}

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(1024)
    attune_backward_schedule(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  ptx::wait_for_previous_kernels();
  const bool of_keys = blockIdx.x == 1;
  backward::list_blocks(p, of_keys, of_keys ? p.kv_list : p.q_list);
}
