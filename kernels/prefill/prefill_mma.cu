// SPDX-License-Identifier: Apache-2.0
// Prefill attention by mma.sync and cp.async, for GPUs without wgmma: 16-bit rows over dense keys, a cache, or both.
//
// Maths, for the tokens r of a block (one query head) and the keys j that they see:
//   s_rj = factor <q_r, k_j> [softcap, ALiBi, biases], in base 2;  -inf where r does not see j
//   m' = max(m, max_j s_rj);  p_rj = 2^(s_rj - m');  l = l 2^(m - m') + sum_j p_rj;  o = o 2^(m - m') + sum_j p_rj v_j
// A row that sees no key has m = -inf, l = 0 and P = 0; its output is 0.
//
// Tiles: 4 warps of kRowTiles x 16 rows each, 64 keys. Registers hold S, P and O; shared memory Q, one tile of K and
// one of V, so that two blocks fit a multiprocessor of an A100.
//
//   copies:  | K 0 | V 0     | K 1     | V 1     | K 2      each issued behind the barrier that ends its buffer's use
//   mma:           | Q K^T 0 | P V 0   | Q K^T 1 | P V 1
//
// Blocks: one for each row block, query head and sequence, those of the last rows first: causal ones see most keys.
#include "prefill/mma/mainloop.cuh"
#include "prefill/mma/producer.cuh"
#include "ptx/grid.cuh"

namespace attune::prefill_mma {

using Tiles = scheduler::KeyTiles<Config::kKeys, Config::kCached>;

// Stores two channels of the row whose first element is `at`.
__device__ __forceinline__ void store_pair(const WorkTileParams& p, long long at, int channel, float x, float y) {
  if (channel >= Config::kHeadDimV) return;  // a multiple of 8
  if constexpr (common::is_16_bit(Config::kOutType)) {
    if (p.store_vectors != 0) {
      *reinterpret_cast<unsigned*>(p.out + (at + channel) * 2) = common::pack<Config::kOutType>(x, y);
      return;
    }
  }
  common::store_element(Config::kOutType, p.out, at + channel * p.out_dim_stride, x);
  common::store_element(Config::kOutType, p.out, at + (channel + 1) * p.out_dim_stride, y);
}

__device__ __forceinline__ void epilogue(const WorkTileParams& p, const WorkTile& t, int head, const State& state) {
  constexpr float kUndoMaxOffset = 1.0f / (1 << Config::kMaxOffset);
  const int pair = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_sum = kUndoMaxOffset * sum_of_row(state.row_sum[m][h]);
      const int row = Rows::row(m, h), token = t.token_begin + row;
      if (row >= t.num_tokens) continue;
      const float factor = kUndoMaxOffset * common::finish_row(p, t.batch, t.q_begin, token, head,
                                                               state.row_max[m][h], row_sum, pair == 0);
      const long long at = common::out_at(p, t, token, head);
#pragma unroll
      for (int c = 0; c < 2 * Config::kBlocksV; ++c)
        store_pair(p, at, 8 * c + pair, state.o[m][c][2 * h] * factor, state.o[m][c][2 * h + 1] * factor);
    }
  }
}

__device__ __forceinline__ void attend(const WorkTileParams& p, int head, SharedStorage& shared) {
  const WorkTile& t = shared.work;
  const unsigned q = ptx::shared_address(shared.q), k = ptx::shared_address(shared.k),
                 v = ptx::shared_address(shared.v);
  const int kv_head = kernels::divide(head, p.by_group);
  const Rows rows(p, t, head);
  const Tiles tiles(t.num_cached, t.first_key, t.end_key);
  State state;
  state.clear();
  const auto issue_keys = [&](int i) {
    const Tile tile = scheduler::tile_at(t, tiles, i);
    copy_tile<false>(p, t, tile, kv_head, k);
    find_keys(p, t, tile, kv_head, shared);
    ptx::commit_copies();
  };
  if (tiles.num_tiles > 0) {
    copy_queries(p, t, head, q);
    issue_keys(0);
  }
  for (int i = 0; i < tiles.num_tiles; ++i) {
    const Tile tile = scheduler::tile_at(t, tiles, i);
    ptx::wait_copies<0>();
    __syncthreads();  // K is there, and all have read the last V
    copy_tile<true>(p, t, tile, kv_head, v);
    ptx::commit_copies();
    const unsigned found[2] = {shared.found[0], shared.found[1]};
    const bool masked = (found[0] & found[1]) != 0xffffffffu || !rows.all_see(p, t, tile);
    Scores s;
    Weights weights;
    multiply_qk(q, k, s);
    score_tile(p, t, tile, rows, masked, found, s);
    softmax(s, weights, state);
    ptx::wait_copies<0>();
    __syncthreads();  // V is there, and all have read K
    if (masked) take_special_values(p, t, tile, rows, v, shared, state);
    if (i + 1 < tiles.num_tiles) issue_keys(i + 1);
    multiply_pv(v, weights, state);
  }
  epilogue(p, t, head, state);
  __syncthreads();  // the next row block may overwrite shared memory
}

}  // namespace attune::prefill_mma

extern "C" __global__ void __launch_bounds__(attune::prefill_mma::Config::kThreads, ATTUNE_BLOCKS_PER_SM)
    attune_prefill_mma(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  using namespace attune::prefill_mma;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  const int head = static_cast<int>(blockIdx.y), blocks = static_cast<int>(gridDim.x);
  for (int b = static_cast<int>(blockIdx.z); b < p.batch; b += static_cast<int>(gridDim.z)) {
    const scheduler::SequenceInfo s = scheduler::read_sequence(p, b);
    for (int block = blocks - 1 - static_cast<int>(blockIdx.x); block < s.row_blocks; block += blocks) {
      const WorkTile work = scheduler::block_work<Config::kKeys>(p, s, b, block);
      if (threadIdx.x == 0) shared.work = work;
      __syncthreads();
      attend(p, head, shared);
    }
  }
}
