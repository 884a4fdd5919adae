// SPDX-License-Identifier: Apache-2.0
// Lists the blocks of rows of the backward from the lengths on the device: block 0 those of queries, block 1 those of
// keys. Those that see most come first, so that no long one begins last: a counting sort by the rows that they see.
// Equal ones come in any order.
#include "backward/rows.cuh"
#include "ptx/grid.cuh"
#include "scheduler/scan.cuh"

namespace attune::backward {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kBuckets = 1024;

// Calls body(b, first row, rows that it sees) for every block of rows. A warp, or a thread, has a sequence.
template <class Body>
__device__ __forceinline__ void for_each_block(const BackwardParams& p, bool of_keys, const Body& body) {
  const int lanes = p.batch >= kThreads ? 1 : 32;
  for (int b = threadIdx.x / lanes; b < p.batch; b += kThreads / lanes) {
    const SequenceInfo s = read_sequence(p, b);
    const int rows = of_keys ? key_extent(p, b) : s.num_q;
    for (int begin = threadIdx.x % lanes * kBackwardRows; begin < rows; begin += lanes * kBackwardRows) {
      const int last = min(begin + kBackwardRows, of_keys ? s.num_keys : rows) - 1;
      Span seen{0, 0};
      if (last >= begin) {
        seen = of_keys ? Span{queries_of_key(p, s, begin).begin, queries_of_key(p, s, last).end}
                       : Span{keys_of_query(p, s, begin).begin, keys_of_query(p, s, last).end};
      }
      body(b, begin, max(seen.end - seen.begin, 0));
    }
  }
}

// Bucket 0 has the blocks that see most. shift: so that all fit.
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
  for_each_block(p, of_keys, [&](int, int, int seen) { atomicAdd(&first[bucket_of(seen, shift)], 1); });
  __syncthreads();
  // The counts become where each bucket begins.
  const int count = first[thread];
  const int upto = static_cast<int>(scheduler::inclusive_sum_of_warp(count));
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warp[w];
    all += of_warp[w];
  }
  first[thread] = before + upto - count;
  // More than all sequences can have, where their offsets overlap: these are left out.
  const int most_tiles = of_keys ? p.max_kv_tiles : p.max_q_tiles;
  if (thread == 0) list->num_tiles = min(all, most_tiles);
  __syncthreads();
  for_each_block(p, of_keys, [&](int b, int begin, int seen) {
    const int at = atomicAdd(&first[bucket_of(seen, shift)], 1);
    if (at < most_tiles) tiles_of(list)[at] = {b, begin};
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
