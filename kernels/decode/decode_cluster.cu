// SPDX-License-Identifier: Apache-2.0
// Decode attention for few and short sequences, where latency counts: one launch, no schedule, and no partial results
// in global memory.
//
// Grid: (rank in the cluster inside blocks of rows; KV heads; sequences). A cluster takes one output tile (sequence, KV
// head, block of rows), and each of its blocks one split of it, an equal run of the key tiles. Maths, tiles and files
// are those of decode.cu, except that the splits are combined through DSMEM (cluster_epilogue.cuh):
//
//   each block:  issue loads of length, page table, rows of q, k, v -> page ids -> issue keys and values -> prologue ->
//   mainloop   | cluster barrier |   send rows to the block that combines them (cluster_epilogue.cuh)
#define ATTUNE_CLUSTER 1
#include "decode/block.cuh"
#include "decode/cluster_epilogue.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"

namespace attune::decode {

// The split as far as the grid defines it, before the length is known.
__device__ __forceinline__ Split split_of_block(const AttentionParams& p, int rank, int size) {
  Split split{};
  split.batch = static_cast<int>(blockIdx.z), split.head = static_cast<int>(blockIdx.y);
  split.row_begin = (static_cast<int>(blockIdx.x) >> (__ffs(size) - 1)) * Config::kRows;  // size: a power of two
  split.num_rows = min(Config::kRows, p.fixed_q * p.group - split.row_begin);
  split.is_first = rank == 0 ? 1 : 0, split.is_last = rank == size - 1 ? 1 : 0;
  return split;
}

// Prefetches the page table to L1 while the length is in flight: each lane copies a line to shared memory, which nobody
// reads.
__device__ __forceinline__ void fetch_table(const AttentionParams& p, int batch, kernels::StreamKRange* unread) {
  constexpr int kLine = 32;  // entries of a cache line
  static_assert(sizeof(kernels::StreamKRange) >= 32 * 4, "an int of each lane");
  const int lane = static_cast<int>(threadIdx.x % 32), entry = lane * kLine;
  if (p.paged == 0 || p.page_shift < 0 || entry > (p.capacity - 1) >> p.page_shift) return;
  ptx::copy_async<4>(ptx::shared_address(unread) + lane * 4,
                     p.page_table.data + batch * p.page_table.row_stride + entry * p.page_table.column_stride, 4);
}

// This block's split as a range. live is 0 in all blocks of the cluster if there are no queries. A block without keys
// gets an empty run of tiles.
__device__ __forceinline__ kernels::StreamKRange range_of_cluster(const Split& split, const Sequence& sequence,
                                                                  int rank, int size) {
  kernels::StreamKRange s{};
  s.batch = split.batch, s.sequence = sequence, s.split = split;
  s.live = split.row_begin < sequence.row_blocks * Config::kRows ? 1 : 0;
  const int tiles = sequence.num_tiles, shift = __ffs(size) - 1;  // a few hundred: nothing overflows
  s.split.first_tile = sequence.first_tile + (tiles * rank >> shift);
  s.split.end_tile = sequence.first_tile + (tiles * (rank + 1) >> shift);
  return s;
}

}  // namespace attune::decode

extern "C" __global__ void __launch_bounds__(attune::decode::Config::kThreads, attune::decode::Config::kBlocksPerSm)
    attune_decode_cluster(const __grid_constant__ attune::kernels::AttentionParams p) {
  using namespace attune;
  using namespace attune::decode;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());

  if constexpr (Config::kPadded) clear_stages(shared);
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const Split place = split_of_block(p, rank, size);
  const ClusterEpilogue cluster_epilogue(shared, rank, size);
  if (threadIdx.x == 0) cluster_epilogue.start();
  __syncwarp();
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  // Issues the loads that do not depend on the length before waiting for it.
  kernels::StreamKRange* stream_k = shared.stream_k;
  const int used = common::int_at(p.seqused_kv, place.batch);
  fetch_table(p, place.batch, stream_k);
  __syncwarp();  // keeps the compiler from moving both loads down to their uses
  Block::Inputs inputs;
  Block::request_rows(p, place, shared, inputs);
  const bool finished = scheduler::is_finished(p, place.batch);
  Sequence sequence{};
  sequence.num_q = p.fixed_q;
  scheduler::complete_sequence<Config::kTileKeys, Config::kRows>(p, place.batch, used, finished, sequence);
  const kernels::StreamKRange range = range_of_cluster(place, sequence, rank, size);
  if (!range.live) {
    ptx::wait_copies<0>();  // fetch_table()
    return;
  }
  // For functions that are not inlined.
  if (threadIdx.x % 32 == 0) stream_k[2 + threadIdx.x / 32].sequence = sequence;
  __syncwarp();

  Block block(p, range, shared);
  block.attend_split(p, range, nullptr, inputs, shared);
  const Split& split = range.split;
  cluster_epilogue.arrive(split.num_rows);
  cluster_epilogue.send(p, split, block.state, shared);
  block.append_late(p, range, inputs, shared);
  cluster_epilogue.combine(p, split);
  if constexpr (Config::kNewTokens) {
    // All blocks have arrived, so all slots have been read.
    if (p.tiles_done != nullptr && rank == 0)
      append_sequence(p, split.batch, split.head, block.sequence_in_shared(range), shared);
  }
}
