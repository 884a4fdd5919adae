// SPDX-License-Identifier: Apache-2.0
// Decode attention for few and short sequences, where latency is all: one launch and nothing in global memory but
// inputs and outputs.
//
// A cluster takes one pair (sequence, KV head, block of rows); each of its blocks an equal run of the key tiles, by the
// arithmetic of decode.cu. The parts (M, L, O) go to the blocks' shared memory, over the stages that are no longer
// needed:
//
//   every block:  length, table, rows of q, k and v requested -> page ids -> keys and values requested -> prologue ->
//   part   | all have read their keys |   rows sent to the block that combines them (cluster_merge.cuh)
#define ATTUNE_CLUSTER 1
#include "decode/block.cuh"
#include "decode/cluster_merge.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"

namespace attune::decode {

// What the grid says: its axes are ranks of the cluster inside blocks of rows, KV heads, and sequences. starts and ends
// as if there were keys for all.
__device__ __forceinline__ Piece piece_of_block(const DecodeParams& p, int rank, int size) {
  Piece piece{};
  piece.batch = static_cast<int>(blockIdx.z), piece.head = static_cast<int>(blockIdx.y);
  piece.row_begin = (static_cast<int>(blockIdx.x) >> (__ffs(size) - 1)) * Config::kRows;  // size: a power of two
  piece.num_rows = min(Config::kRows, p.fixed_q * p.group - piece.row_begin);
  piece.starts = rank == 0 ? 1 : 0, piece.ends = rank == size - 1 ? 1 : 0;
  return piece;
}

// Has L1 fetch what this block may need of the page table while the sequence's length, which says what that is, is on
// its way: a line a lane, to shared memory that nobody reads.
__device__ __forceinline__ void fetch_table(const DecodeParams& p, int batch, kernels::Share* unread) {
  constexpr int kLine = 32;  // entries
  static_assert(sizeof(kernels::Share) >= 32 * 4, "a number of each lane");
  const int lane = static_cast<int>(threadIdx.x % 32), entry = lane * kLine;
  if (p.paged == 0 || p.page_shift < 0 || entry > (p.capacity - 1) >> p.page_shift) return;
  ptx::copy_async<4>(ptx::shared_address(unread) + lane * 4,
                     p.page_table.data + batch * p.page_table.row_stride + entry * p.page_table.col_stride, 4);
}

// This block's run of the pair of its cluster. Without queries to do, live is 0 in all blocks of the cluster; blocks
// that only have no keys are told by an empty run.
__device__ __forceinline__ kernels::Share share_of_cluster(const Piece& piece, const Sequence& sequence, int rank,
                                                           int size) {
  kernels::Share s{};
  s.batch = piece.batch, s.sequence = sequence, s.piece = piece;
  s.live = piece.row_begin < sequence.row_blocks * Config::kRows ? 1 : 0;
  const int tiles = sequence.num_tiles, shift = __ffs(size) - 1;  // a few hundred: nothing overflows
  s.piece.first_tile = sequence.first_tile + (tiles * rank >> shift);
  s.piece.end_tile = sequence.first_tile + (tiles * (rank + 1) >> shift);
  return s;
}

}  // namespace attune::decode

extern "C" __global__ void __launch_bounds__(attune::decode::Config::kThreads, attune::decode::Config::kBlocksPerSm)
    attune_decode_cluster(const __grid_constant__ attune::kernels::DecodeParams p) {
  using namespace attune;
  using namespace attune::decode;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());

  if constexpr (Config::kPadded) clear_stages(shared);
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const Piece place = piece_of_block(p, rank, size);
  const ClusterMerge merge(shared, rank, size);
  if (threadIdx.x == 0) merge.start();
  __syncwarp();
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  // All that does not need the length is requested before it is looked at.
  kernels::Share* shares = shared.shares;
  const int used = schedule::int_at(p.seqused_kv, place.batch);
  fetch_table(p, place.batch, shares);
  __syncwarp();  // the compiler would move both to where they are needed
  Block::Inputs inputs;
  Block::request_rows(p, place, shared, inputs);
  const bool finished = p.finished != nullptr && p.finished[place.batch * p.finished_stride] != 0;
  Sequence sequence{};
  sequence.num_q = p.fixed_q;
  schedule::complete_sequence<Config::kTileKeys, Config::kRows>(p, place.batch, used, finished, sequence);
  const kernels::Share share = share_of_cluster(place, sequence, rank, size);
  if (!share.live) {
    ptx::wait_copies<0>();  // fetch_table()
    return;
  }
  // For functions that are not inlined.
  if (threadIdx.x % 32 == 0) shares[1 + threadIdx.x / 32].sequence = sequence;
  __syncwarp();

  Block block(p, share, shared);
  block.attend_to_piece(p, share, inputs, shared);
  const Piece& piece = share.piece;
  merge.arrive(piece.num_rows);
  merge.send(p, piece, block.state, shared);
  block.append_late(p, share, inputs, shared);
  merge.combine(p, piece);
  if constexpr (Config::kNewTokens) {
    // All blocks have arrived: the slots have been read.
    if (p.tiles_done != nullptr && rank == 0)
      append_sequence(p, piece.batch, piece.head, block.far_sequence(share), shared);
  }
}
