// SPDX-License-Identifier: Apache-2.0
// Prefill attention by mma.sync and cp.async, for GPUs without wgmma: 16-bit rows over dense keys, a cache, or both.
//
// Maths, for the tokens r of a block (one query head) and the keys j that they see:
//   s_rj = factor <q_r, k_j> [softcap, ALiBi, biases], in base 2;  -inf where r does not see j
//   m' = max(m, max_j s_rj);  p_rj = 2^(s_rj - m');  l = l 2^(m - m') + sum_j p_rj;  o = o 2^(m - m') + sum_j p_rj v_j
// where m, row_max_ref, follows the max only when that is far above it. A row that sees no key has m = -inf, l = 0 and
// P = 0; its output is 0.
//
// Tiles: 4 warps of kRowTiles x 16 rows each, 64 keys. Registers hold S, P and O; shared memory Q, one tile of K and
// one of V, so that two blocks fit a multiprocessor of an A100.
//
//   copies:  | K 0 | V 0     | K 1     | V 1     | K 2      each issued behind the barrier that ends its buffer's use
//   mma:           | Q K^T 0 | P V 0   | Q K^T 1 | P V 1
//
// Blocks: one for each row block, query head and sequence, those of the last rows first: causal ones see most keys.
// Heads are the fastest axis, so that blocks of one KV head run at a time.
#include "common/quad.cuh"
#include "prefill/mma/mainloop.cuh"
#include "prefill/mma/producer.cuh"
#include "ptx/grid.cuh"

namespace attune::prefill_mma {

using Tiles = scheduler::KeyTiles<Config::kKeys, Config::kCached>;

// Whether store_row() may store a row.
constexpr bool kStoresVectors = common::is_16_bit(Config::kOutType) && Config::kBlocksV % 2 == 0;

// Stores two channels of the row whose first element is `at`.
__device__ __forceinline__ void store_pair(const WorkTileParams& p, long long at, int channel, float x, float y) {
  if (channel >= Config::kHeadDimV) return;  // a multiple of 8
  if constexpr (common::is_16_bit(Config::kOutType)) {
    if (!kStoresVectors && p.store_vectors != 0) {
      *reinterpret_cast<unsigned*>(p.out + (at + channel) * 2) = common::pack<Config::kOutType>(x, y);
      return;
    }
  }
  common::store_element(Config::kOutType, p.out, at + channel * p.out_dim_stride, x);
  common::store_element(Config::kOutType, p.out, at + (channel + 1) * p.out_dim_stride, y);
}

// Stores row h of a row tile, 16 bytes a lane: the four lanes that hold it exchange what they have of 32 channels.
// Called by all lanes of the warp; at: below 0 where the row is not stored.
__device__ __forceinline__ void store_row(const WorkTileParams& p, long long at, int h,
                                          const float (&o)[2 * Config::kBlocksV][4], float factor) {
#pragma unroll
  for (int c = 0; c < 2 * Config::kBlocksV; c += 4) {
    unsigned r[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      r[j] = common::pack<Config::kOutType>(o[c + j][2 * h] * factor, o[c + j][2 * h + 1] * factor);
    common::transpose_quad(r);
    const int channel = 8 * (c + static_cast<int>(threadIdx.x % 4));
    if (at >= 0 && channel < Config::kHeadDimV)
      *reinterpret_cast<uint4*>(p.out + (at + channel) * 2) = make_uint4(r[0], r[1], r[2], r[3]);
  }
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
      const bool is_there = row < t.num_tokens;
      float factor = 0;
      if (is_there)
        factor = kUndoMaxOffset *
                 common::finish_row(p, t.batch, t.q_begin, token, head, state.row_max_ref[m][h], row_sum, pair == 0);
      const long long at = is_there ? common::out_at(p, t, token, head) : -1;
      __syncwarp();
      if (kStoresVectors && p.store_vectors != 0) {
        store_row(p, at, h, state.o[m], factor);
        continue;
      }
      if (!is_there) continue;
#pragma unroll
      for (int c = 0; c < 2 * Config::kBlocksV; ++c)
        store_pair(p, at, 8 * c + pair, state.o[m][c][2 * h] * factor, state.o[m][c][2 * h + 1] * factor);
    }
  }
}

// A bit for each key of half a tile: whether it is there. Where rows see one range of keys, that is within the tile's.
__device__ __forceinline__ unsigned found_keys(const SharedStorage& shared, const Tile& tile, int half) {
  if constexpr (Config::kCached) return shared.found[half];
  if constexpr (Rows::kOneRange) return kAllKeys;
  const int begin = tile.low - tile.start - 32 * half, end = tile.high - tile.start - 32 * half;
  return bits_below(end) & ~bits_below(begin);
}

__device__ __forceinline__ void attend(const WorkTileParams& p, SharedStorage& shared) {
  const WorkTile& t = shared.work;
  const unsigned q = ptx::shared_address(shared.q), k = ptx::shared_address(shared.k),
                 v = ptx::shared_address(shared.v);
  const auto tile_at = [&](int i) {
    return scheduler::tile_at(t, Tiles(t.num_cached, t.first_key, t.end_key), i);
  };
  State state;
  state.clear();
  const auto issue_keys = [&](int i) {
    const Tile tile = tile_at(i);
    copy_tile<false>(p, t, tile, shared.kv_head, k);
    if (Config::kCached) find_keys(p, t, tile, shared.kv_head, shared);
    ptx::commit_copies();
  };
  const int num_tiles = Tiles(t.num_cached, t.first_key, t.end_key).num_tiles;
  if (num_tiles > 0) {
    copy_queries(p, t, shared.head, q);
    issue_keys(0);
  }
  for (int i = 0; i < num_tiles; ++i) {
    ptx::wait_copies<0>();
    __syncthreads();  // K is there, and all have read the last V
    const Tile tile = tile_at(i);
    const Rows rows(p, t, shared.head);
    copy_tile<true>(p, t, tile, shared.kv_head, v);
    ptx::commit_copies();
    const unsigned found[2] = {found_keys(shared, tile, 0), found_keys(shared, tile, 1)};
    const bool masked = (found[0] & found[1]) != kAllKeys || !rows.all_see(p, t, tile);
    Scores s;
    Weights weights;
    multiply_qk(q, k, s);
    ptx::wait_copies<0>();
    __syncthreads();  // V is there, and all have read K
    if (i + 1 < num_tiles) issue_keys(i + 1);
    score_tile(p, t, tile, rows, masked, found, s);
    // max_logits are row_max_ref.
    softmax(rows.scale(), p.max_logits != nullptr ? 0.0f : Config::kRescaleThreshold, s, weights, state);
    if (masked) take_special_values(p, t, tile, rows, found, v, shared, state);
    multiply_pv(v, weights, state);
  }
  epilogue(p, t, shared.head, state);
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
  const int blocks = static_cast<int>(gridDim.z);
  for (int b = static_cast<int>(blockIdx.y); b < p.batch; b += static_cast<int>(gridDim.y)) {
    for (int block = blocks - 1 - static_cast<int>(blockIdx.z);; block += blocks) {
      const scheduler::SequenceInfo s = scheduler::read_sequence(p, b);  // again: kept, it would take registers
      if (block >= s.row_blocks) break;
      const WorkTile work = scheduler::block_work<Config::kKeys>(p, s, b, block);
      if (threadIdx.x == 0) {
        shared.work = work;
        shared.head = static_cast<int>(blockIdx.x), shared.kv_head = kernels::divide(shared.head, p.by_group);
      }
      __syncthreads();
      attend(p, shared);
    }
  }
}
