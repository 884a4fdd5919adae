// SPDX-License-Identifier: Apache-2.0
// Decode attention for few and short sequences, where latency is all: one launch and nothing in global memory but
// inputs and outputs.
//
// A cluster takes one pair (sequence, KV head, block of rows); each of its blocks an equal run of the key tiles, by the
// arithmetic of decode.cu. The parts (M, L, O) stay in the blocks' shared memory, over the stages that are no longer
// needed:
//
//   every block:  read length -> tables -> keys and values -> part   | barrier of the cluster |   rows, rank by rank:
//   merge   | barrier
//
// The second barrier keeps a block's shared memory alive while others read it.
#include "decode/block.cuh"
#include "ptx/grid.cuh"

namespace attune::decode {

// This block's run of the pair of its cluster, as a share of one piece. Without queries to do, live is 0 in all blocks
// of the cluster; blocks that only have no keys are told by an empty run.
__device__ __forceinline__ kernels::Share share_of_cluster(const DecodeParams& p, int rank, int size) {
  const int pair = static_cast<int>(blockIdx.x) / size, of_sequence = p.num_heads_kv * p.row_blocks;
  const int batch = pair / of_sequence, in_sequence = pair - batch * of_sequence;
  kernels::Share s{};
  s.batch = batch;
  s.sequence = schedule::read_sequence<Config::kTileKeys, Config::kRows>(p, batch);
  const int head = in_sequence / p.row_blocks, row_block = in_sequence - head * p.row_blocks;
  if (row_block >= s.sequence.row_blocks) return s;
  s.live = 1;
  s.piece.batch = batch;
  s.piece.head = head;
  s.piece.row_begin = row_block * Config::kRows;
  s.piece.num_rows = min(Config::kRows, s.sequence.num_q * p.group - s.piece.row_begin);
  const int tiles = s.sequence.num_tiles;  // a few hundred: nothing overflows
  s.piece.first_tile = s.sequence.first_tile + tiles * rank / size;
  s.piece.end_tile = s.sequence.first_tile + tiles * (rank + 1) / size;
  s.piece.starts = rank == 0 ? 1 : 0, s.piece.ends = rank == size - 1 ? 1 : 0;
  return s;
}

}  // namespace attune::decode

extern "C" __global__ void __launch_bounds__(attune::decode::Config::kThreads, attune::decode::Config::kBlocksPerSm)
    attune_decode_cluster(const __grid_constant__ attune::kernels::DecodeParams p) {
  using namespace attune;
  using namespace attune::decode;
  unsigned char* const shared = ptx::dynamic_shared();
  constexpr int kPartFloats = Config::kRows * Config::kHeadDimV;
  static_assert(4 * (kPartFloats + 2 * Config::kRows) <= Config::kShared.queries, "a part fits over the stages");

  if constexpr (Config::kPadded) clear_stages(shared);
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  kernels::Share* shares = Block::shares_in(shared);
  if (threadIdx.x % 32 == 0) {
    const kernels::Share mine = share_of_cluster(p, rank, size);
    shares[1 + threadIdx.x / 32] = mine;
    if (threadIdx.x == 0) shares[0] = mine;
  }
  __syncthreads();
  if (!shares[0].live) return;

  Block block(p, shared);
  block.attend_to_piece(p, shared);
  const Piece& piece = shares[0].piece;
  const PartPlace part{reinterpret_cast<float*>(shared), reinterpret_cast<float*>(shared) + kPartFloats};
  merge_warps(p, piece, shares[0].sequence.q_begin, part, block.state, shared);
  ptx::cluster_barrier();
  const ClusterParts parts{part, size};
  for (int row = rank + size * (threadIdx.x / 32); row < piece.num_rows; row += size * Config::kWarps) {
    combine_row(p, piece, shares[0].sequence.q_begin, parts, row);
  }
  if constexpr (Config::kNewTokens) {
    if (p.tiles_done != nullptr && rank == 0) append_sequence(p, piece.batch, piece.head, shares[0].sequence, shared);
  }
  ptx::cluster_barrier();
}
