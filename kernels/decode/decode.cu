// SPDX-License-Identifier: Apache-2.0
// Decode attention: a few query rows a sequence over a paged or contiguous cache, at the speed of memory.
//
// Maths, for the packed rows r (queries of a sequence times the query heads of one KV head) and keys j of a piece:
//   s_rj = factor_r <q_r, k_j> [softcap, ALiBi], in base 2;  -inf where r may not see j
//   m' = max(m, max_j s_rj);  p_rj = 2^(s_rj - m');  l = l 2^(m - m') + sum_j p_rj;  o = o 2^(m - m') + sum_j p_rj v_j
// Each warp keeps its own (m, l, o) over its keys; a block merges its warps' at the end of a piece:
//   M = max_w m_w;  L = sum_w l_w 2^(m_w - M);  O = sum_w o_w 2^(m_w - M)
// and stores O / L where it had the whole pair (sequence, KV head, block of rows). Otherwise it stores (M, L, O), and
// the block that comes last to a pair merges the parts, always in the order of the keys, so the same bits every time.
// A row that sees nothing has m = -inf, l = 0 and weight 0 everywhere; its output is 0.
//
// Tiles: kWarps x 16 keys; 8, 16 or 32 rows; the whole head dim. Registers hold o (head_dim_v / 16 x rows / 8 x 4
// floats) and the queries. Pipeline, of each warp by itself; stages of 16 keys, K then V:
//
//   copies:  | 0 | 1 | 2 |   3   |   4   |        tile i + kStages - 1 is requested when tile i is about to be read,
//   reads:               | 0     | 1     | 2      into the stage that tile i - 1 has left: one __syncwarp lies between.
//
// The copies run on into the next piece while the warps merge the last one, so the memory system sees no gap.
#include "decode/block.cuh"
#include "ptx/grid.cuh"

namespace attune::decode {

// Copies the block's share, once for the block and once for each warp. False if it is empty.
__device__ __forceinline__ bool fetch_share(const DecodeParams& p, SharedStorage& shared) {
  static_assert(sizeof(kernels::Share) % 16 == 0, "copied in vectors of 16 bytes");
  constexpr int kVectors = sizeof(kernels::Share) / 16;
  kernels::Share* const shares = shared.shares;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto* from = reinterpret_cast<const uint4*>(p.shares + blockIdx.x / static_cast<unsigned>(p.head_lanes));
  if (lane < kVectors) {
    const uint4 x = from[lane];
    reinterpret_cast<uint4*>(shares + 1 + warp)[lane] = x;
    if (warp == 0) reinterpret_cast<uint4*>(shares)[lane] = x;
  }
  __syncwarp();
  if (lane == 0) {
    shares[1 + warp].piece.head += schedule::head_lane(p);
    if (warp == 0) shares[0].piece.head += schedule::head_lane(p);
    if (warp == 0) shared.stamp = p.checks_stamp != 0 ? 0 : shares[0].stamp;
  }
  __syncthreads();
  return shares[0].live != 0;
}

}  // namespace attune::decode

extern "C" __global__ void __launch_bounds__(attune::decode::Config::kThreads, attune::decode::Config::kBlocksPerSm)
    attune_decode(const __grid_constant__ attune::kernels::DecodeParams p) {
  using namespace attune;
  using namespace attune::decode;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());

  if constexpr (Config::kPadded) clear_stages(shared);
  ptx::wait_for_previous_kernels();
  // A kernel that runs beside this one sees what those before have written (prefill/block.cuh).
  if (p.few_begun != nullptr && blockIdx.x == 0 && threadIdx.x == 0) ptx::store_release(p.few_begun, *p.few_begun + 1);
  ptx::allow_next_kernel();

  if (!fetch_share(p, shared)) return;
  Block block(p, shared.shares[1 + threadIdx.x / 32], shared);
  kernels::Share& share = block.shares[0];
  while (share.live) {
    const Piece& piece = share.piece;
    Block::Inputs inputs;
    block.attend_to_piece(p, share, inputs, shared);
    const bool whole = piece.starts && piece.ends;
    const PartPlace part = whole ? PartPlace{} : GlobalParts::place(p, piece.starts, share_of_block(p));
    merge_warps(p, piece, share.sequence.q_begin, part, block.state, shared);
    if (!whole) combine_last(p, piece, share.sequence.q_begin, share, shared.is_last);
    __syncthreads();
    if constexpr (Config::kNewTokens) {
      if (p.tiles_done != nullptr) append_last(p, piece, share.sequence, shared);
    }
    if (threadIdx.x == 0) schedule::step_in_place<Config::kTileKeys, Config::kRows>(p, share);
    __syncthreads();
  }
}
