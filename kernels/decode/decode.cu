// SPDX-License-Identifier: Apache-2.0
// Decode attention: a few query rows a sequence over a paged or contiguous cache, at the speed of memory.
//
// Maths, for the packed rows r (queries of a sequence times the query heads of one KV head) and keys j of a piece:
//   s_rj = factor_r <q_r, k_j> [softcap, ALiBi], in base 2;  -inf where r may not see j
//   m' = max(m, max_j s_rj);  p_rj = 2^(s_rj - m');  l = l 2^(m - m') + sum_j p_rj;  o = o 2^(m - m') + sum_j p_rj v_j
// Each warp keeps its own (m, l, o) over its keys; a block merges its warps' at the end of a piece:
//   M = max_w m_w;  L = sum_w l_w 2^(m_w - M);  O = sum_w o_w 2^(m_w - M)
// and stores O / L where it had the whole pair (sequence, KV head, block of rows). Otherwise it stores (M, L, O), and the block that comes
// last to a pair merges the parts, always in the order of the keys, so the same bits every time.
// A row that sees nothing has m = -inf, l = 0 and weight 0 everywhere; its output is 0.
//
// Tiles: kWarps x 16 keys; 8, 16 or 32 rows; the whole head dim. Registers hold o (head_dim_v / 16 x rows / 8 x 4 floats) and the queries.
// Pipeline, of each warp by itself; stages of 16 keys, K then V:
//
//   copies:  | 0 | 1 | 2 |   3   |   4   |        tile i + kStages - 1 is requested when tile i is about to be read,
//   reads:               | 0     | 1     | 2      into the stage that tile i - 1 has left: one __syncwarp lies between.
//
// The copies run on into the next piece while the warps merge the last one, so the memory system sees no gap.
#include "decode/attend.cuh"
#include "decode/loader.cuh"
#include "decode/store.cuh"
#include "ptx/grid.cuh"

namespace attune::decode {

// Copies the block's share, once for the block and once for each warp. False if it is empty.
__device__ __forceinline__ bool fetch_share(const DecodeParams& p, kernels::Share* shares) {
  static_assert(sizeof(kernels::Share) % 16 == 0, "copied in vectors of 16 bytes");
  constexpr int kVectors = sizeof(kernels::Share) / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto* from = reinterpret_cast<const uint4*>(p.shares + blockIdx.x);
  if (lane < kVectors) {
    const uint4 x = from[lane];
    reinterpret_cast<uint4*>(shares + 1 + warp)[lane] = x;
    if (warp == 0) reinterpret_cast<uint4*>(shares)[lane] = x;
  }
  __syncthreads();
  return shares[0].live != 0;
}

__device__ __forceinline__ void clear_stages(unsigned char* shared) {
  auto* words = reinterpret_cast<uint4*>(shared);
  for (int i = threadIdx.x; i < Config::kShared.queries / 16; i += Config::kThreads) words[i] = uint4{0, 0, 0, 0};
  __syncthreads();
}

// This warp's tiles of a piece.
__device__ __forceinline__ void attend_piece(const DecodeParams& p, const Piece& piece, const Rows& rows, const QueryOperand& queries,
                                             const Attend& attend, Loader& loader, int& stage, State& state) {
  const int end_tile = piece.end_tile;
  for (int tile = piece.first_tile; tile < end_tile; ++tile) {
    ptx::wait_copies<Config::kStages - 2>();
    __syncwarp();
    const unsigned there = loader.notes[stage];
    loader.issue(p);
    if (there != 0) {
      const int first_token = tile * Config::kTileKeys + loader.warp * kernels::kKeysOfWarp;
      attend(p, piece, rows, queries, loader.ring + stage * Config::kStageBytes, first_token, there, state);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
}

}  // namespace attune::decode

extern "C" __global__ void __launch_bounds__(attune::decode::Config::kThreads, attune::decode::Config::kBlocksPerSm)
    attune_decode(const __grid_constant__ attune::kernels::DecodeParams p) {
  using namespace attune;
  using namespace attune::decode;
  extern __shared__ __align__(128) unsigned char shared[];

  if constexpr (Config::kPadded) clear_stages(shared);
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();

  auto* shares = reinterpret_cast<kernels::Share*>(shared + Config::kShared.walks);  // one of the block, one of each warp's loader
  if (!fetch_share(p, shares)) return;
  kernels::Share& share = shares[0];

  Loader loader(p, shares, shared);
  for (int i = 0; i < Config::kStages - 1; ++i) loader.issue(p);

  const Attend attend(threadIdx.x % 32);
  QueryOperand queries(shared + Config::kShared.queries);
  auto* query_scales = reinterpret_cast<float*>(shared + Config::kShared.stats) + 3 * Config::kWarps * Config::kRows;
  Rows rows;
  State state;
  int stage = 0;
  while (share.live) {
    store_queries(p, share.piece, share.sequence.q_begin, shared + Config::kShared.queries, query_scales);
    __syncthreads();
    queries.load();
    rows.start(p, share.piece, share.sequence, query_scales);
    state.clear();
    attend_piece(p, share.piece, rows, queries, attend, loader, stage, state);
    store_piece(p, share.piece, share.sequence.q_begin, share.total, state, shared);
    __syncthreads();
    if (threadIdx.x == 0) schedule::step_in_place<Config::kTileKeys, Config::kRows>(p, share);
    __syncthreads();
  }
}
