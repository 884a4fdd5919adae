// SPDX-License-Identifier: Apache-2.0
// Prefill attention by mma.sync and cp.async, for GPUs without wgmma: 16-bit rows over dense keys, a cache, or both.
// The cache may have 8 bits (mma/dequant.cuh).
//
// Maths, for the tokens r of a block (one query head) and the keys j that they see:
//   s_rj = factor <q_r, k_j> [softcap, ALiBi, biases], in base 2;  -inf where r does not see j
//   m' = max(m, max_j s_rj);  p_rj = 2^(s_rj - m');  l = l 2^(m - m') + sum_j p_rj;  o = o 2^(m - m') + sum_j p_rj v_j
// m is row_max_ref, which is raised only when the max is far above it. A row that sees no key has m = -inf, l = 0 and P
// = 0; its output is 0.
//
// Grid: (query heads; sequences; row blocks, the last rows first, because causal ones see most keys). Heads are the
// fastest axis, so that blocks of one KV head run at the same time. Tiles: 4 warps of kRowTiles x 16 rows each, 64
// keys. Registers hold S, P and O; shared memory Q, one tile of K and one of V, so that two blocks fit a multiprocessor
// of an A100. All warps are producers and consumers: producer mma/producer.cuh, GEMMs and softmax mma/mainloop.cuh and
// mma/softmax.cuh, epilogue mma/epilogue.cuh; the loop over tiles is below.
//
//   copies:  | K 0 | V 0     | K 1     | V 1     | K 2      each issued after the barrier that frees its buffer
//   mma:           | Q K^T 0 | P V 0   | Q K^T 1 | P V 1
#include "prefill/mma/dequant.cuh"
#include "prefill/mma/epilogue.cuh"
#include "prefill/mma/mainloop.cuh"
#include "prefill/mma/producer.cuh"
#include "prefill/mma/row_blocks.cuh"
#include "ptx/grid.cuh"

namespace attune::prefill_mma {

// A bit for each of 32 keys of a tile: whether it is valid. If rows see one range of keys, that range is within the
// tile's.
template <class FindTile>
__device__ __forceinline__ unsigned valid_keys_of_word(const SharedStorage& shared, bool steady,
                                                       const FindTile& tile_at, int i, int half) {
  if (half == Config::kKeyWords) return kAllKeys;
  if constexpr (Config::kCached) return shared.valid_keys[half];
  if (Rows::kOneRange || steady) return kAllKeys;
  const Tile tile = tile_at(i);
  const int begin = tile.low - tile.start - 32 * half, end = tile.high - tile.start - 32 * half;
  return bits_below(end) & ~bits_below(begin);
}

// Whether some row of the block does not see some key of tile i.
template <class FindTile>
__device__ __forceinline__ bool is_masked(const WorkTileParams& p, const SharedStorage& shared, bool steady,
                                          const FindTile& tile_at, int i) {
  const ValidKeys valid_keys = {valid_keys_of_word(shared, steady, tile_at, i, 0),
                                valid_keys_of_word(shared, steady, tile_at, i, 1)};
  if (shared.steady.seen.has(i)) return !all_valid(valid_keys);
  return steady || !all_valid(valid_keys) || !Rows(p, shared.work, shared.head).all_see(p, shared.work, tile_at(i));
}

template <class Storage>
__device__ __forceinline__ void run_mainloop(const WorkTileParams& p, Storage& shared) {
  const WorkTile& t = shared.work;
  const unsigned q = ptx::shared_address(shared.q), k = ptx::shared_address(shared.k),
                 v = ptx::shared_address(shared.v);
  const auto tile_at = [&](int i) { return scheduler::tile_at(t, shared.tiles, i); };
  State state;
  state.clear();
  const auto is_steady = [&](int i) { return shared.steady.all.has(i); };
  // Whether the next tile's flags stay in registers over an iteration. If S and O leave no registers for them, they are
  // read from shared memory again: the load of a spilled value would wait until the copies are issued.
  constexpr bool kHoldsNext = kM * (4 * kKeyTiles8 + 8 * Config::kBlocksV) < 192;
  const int num_tiles = shared.tiles.num_tiles;
  bool has_tile = num_tiles > 0, prefetched_steady = is_steady(0);
  const auto issue_keys = [&](int i, bool steady) {
    copy_tile<false>(p, t, i, steady, tile_at, shared.kv_head, shared, k);
    if constexpr (Config::kCached) find_valid_keys(p, t, i, steady, tile_at, shared);
    ptx::commit_copies();
  };
  if (has_tile) {
    if constexpr (Config::kCached) fetch_pages(p, t, 0, is_steady(0), tile_at, shared);
    ptx::commit_copies();
    copy_queries(p, t, shared.head, q);
    if constexpr (Config::kCached) {
      ptx::commit_copies();
      ptx::wait_copies<1>();
      __syncwarp();  // the warp's page ids have arrived
    }
    issue_keys(0, is_steady(0));
  }
  for (int i = 0; has_tile; ++i) {
    ptx::wait_copies<0>();
    __syncthreads();  // K has arrived, and all warps have read the last V
    // What is read from shared memory comes before the copies: a load would wait until they are issued.
    const bool has_next = i + 1 < (kHoldsNext ? num_tiles : shared.tiles.num_tiles),
               steady = kHoldsNext ? prefetched_steady : is_steady(i), next_steady = is_steady(i + 1),
               masked = is_masked(p, shared, steady, tile_at, i);
    copy_tile<true>(p, t, i, steady, tile_at, shared.kv_head, shared, v);
    if (Config::kCached && has_next) fetch_pages(p, t, i + 1, next_steady, tile_at, shared);
    ptx::commit_copies();
    Scores s;
    PFragments p_regs;
    qk_gemm(q, {}, k, s);
    const ValidKeys valid_keys = {masked ? valid_keys_of_word(shared, steady, tile_at, i, 0) : kAllKeys,
                                  masked ? valid_keys_of_word(shared, steady, tile_at, i, 1) : kAllKeys};
    ptx::wait_copies<0>();
    __syncthreads();  // V and the next page ids have arrived, and all warps have read K
    if (has_next) issue_keys(i + 1, next_steady);
    const Rows rows(p, t, shared.head);
    score_tile(p, t, i, tile_at, rows, masked, valid_keys, s);
    // max_logits are read from row_max_ref, so it must then be the exact max.
    softmax(rows.scale(), p.max_logits != nullptr ? 0.0f : Config::kRescaleThreshold, s, p_regs, state);
    const auto multiply = [&]<bool kByChannels>() {
      if (masked) extract_nonfinite_v<Config::kType, kByChannels>(p, t, tile_at(i), rows, valid_keys, v, shared, state);
      pv_gemm<Config::kType, 1, kByChannels>(v, p_regs, state);
    };
    if (Config::kXpacked && (!Config::kDense || shared.tiles.is_cached(i))) {
      multiply.template operator()<Config::kXpacked>();
    } else {
      multiply.template operator()<false>();
    }
    has_tile = has_next, prefetched_steady = next_steady;
  }
  epilogue(p, t, shared.head, state);
}

// The mainloop for a cache of 8 bits.
template <class Storage>
__device__ __forceinline__ void run_mainloop_quantized(const WorkTileParams& p, Storage& shared) {
  using DequantK = DequantTile<false>;
  using DequantV = DequantTile<true>;
  const WorkTile& t = shared.work;
  const unsigned k = ptx::shared_address(shared.k), v = ptx::shared_address(shared.v),
                 codes_k = ptx::shared_address(shared.codes_k), codes_v = ptx::shared_address(shared.codes_v);
  const unsigned q = q_address(shared);
  const auto tile_at = [&](int i) { return scheduler::tile_at(t, shared.tiles, i); };
  const int num_tiles = shared.tiles.num_tiles;
  const auto is_cached = [&](int i) { return i < num_tiles && (!Config::kDense || shared.tiles.is_cached(i)); };
  // Without dense keys all tiles are cached. What is converted after the last tile is not read.
  const auto converts = [&](bool cached) { return !Config::kDense || cached; };
  bool steady = shared.steady.all.has(0);
  const auto issue_codes_k = [&](int i, bool is_steady) {
    if (is_cached(i)) DequantK::copy(p, t, i, is_steady, tile_at, shared.kv_head, shared, codes_k);
  };
  const auto issue_codes_v = [&](int i, bool is_steady) {
    if (is_cached(i)) DequantV::copy(p, t, i, is_steady, tile_at, shared.kv_head, shared, codes_v);
  };
  // Issues what tile i needs besides its codes, and K of dense keys. Then the next tile's page ids may overwrite tile
  // i's.
  const auto issue_keys = [&](int i, bool is_steady) {
    if (Config::kDense && !is_cached(i)) copy_tile<false>(p, t, i, false, tile_at, shared.kv_head, shared, k);
    if constexpr (Config::kTokenScales) copy_scales(p, t, i, is_steady, tile_at, shared.kv_head, shared);
    find_valid_keys(p, t, i, is_steady, tile_at, shared);
    if (is_cached(i + 1)) fetch_pages(p, t, i + 1, shared.steady.all.has(i + 1), tile_at, shared);
    ptx::commit_copies();
  };
  State state;
  state.clear();
  QFragments q_regs;
  if (num_tiles > 0) {
    fetch_pages(p, t, 0, steady, tile_at, shared);
    ptx::commit_copies();
    copy_queries(p, t, shared.head, q);
    ptx::commit_copies();
    ptx::wait_copies<1>();
    __syncwarp();  // the warp's page ids have arrived
    issue_codes_k(0, steady);
    issue_codes_v(0, steady);
    ptx::commit_copies();
    ptx::wait_copies<0>();
    if constexpr (Config::kQInRegisters) {
      __syncthreads();
      load_q_fragments(q, q_regs);
      __syncthreads();  // Q overlays K
    }
    if (is_cached(0)) DequantK::convert(codes_k, k);
    issue_keys(0, steady);
  }
  for (int i = 0; i < num_tiles; ++i) {
    ptx::wait_copies<0>();
    __syncthreads();  // K and the next page ids have arrived, and all warps have read the last V
    const bool cached = is_cached(i), next_steady = shared.steady.all.has(i + 1),
               masked = is_masked(p, shared, steady, tile_at, i);
    if (Config::kDense && !cached) copy_tile<true>(p, t, i, false, tile_at, shared.kv_head, shared, v);
    issue_codes_k(i + 1, next_steady);
    ptx::commit_copies();
    Scores s;
    PFragments p_regs;
    typename DequantV::Conversion values{warp_rows(), {}};
    qk_gemm(q, q_regs, k, s, [&](int step) {
      if (converts(cached)) values.template overlap<kQkOverlapSteps>(step, codes_v, v);
    });
    issue_codes_v(i + 1, next_steady);
    ptx::commit_copies();
    const ValidKeys valid_keys = {masked ? valid_keys_of_word(shared, steady, tile_at, i, 0) : kAllKeys,
                                  masked ? valid_keys_of_word(shared, steady, tile_at, i, 1) : kAllKeys};
    ptx::wait_copies<1>();
    if constexpr (Config::kTokenScales) scale_columns(ptx::shared_address(shared.k_scales), s);
    const bool any_nonfinite_scale = sync_any_nonfinite_scale(shared, cached, i % 2);  // V has arrived; all have read K
    if (i + 1 < num_tiles) issue_keys(i + 1, next_steady);
    Rows rows(p, t, shared.head);
    if constexpr (!Config::kTokenScales) {
      if (cached) rows.factor *= shared.k_scale;
    }
    score_tile(p, t, i, tile_at, rows, masked, valid_keys, s);
    const unsigned v_scales = v_scales_of(shared, i % 2);
    softmax(rows.scale(), shared.threshold, s, p_regs, state, v_scales, cached);
    if (any_nonfinite_scale) apply_nonfinite_scales(p, t, tile_at(i), shared.kv_head, v);
    // The second part of P may be 0 or negative, and must not be multiplied by an infinity.
    const bool may_have_infinite_v =
        Config::kPParts == 2 && (any_nonfinite_scale || Config::kCacheType == common::kE5m2);
    const auto multiply = [&]<int kType, int kParts, bool kByChannels>() {
      if (masked || may_have_infinite_v)
        extract_nonfinite_v<kType, kByChannels>(p, t, tile_at(i), rows, valid_keys, v, shared, state, v_scales);
      typename DequantK::Conversion keys{warp_rows(), {}};
      pv_gemm<kType, kParts, kByChannels>(v, p_regs, state, [&](int step) {
        if (converts(is_cached(i + 1))) keys.template overlap<kPvOverlapSteps>(step, codes_k, k);
      });
    };
    if ((Config::kPParts == 1 && !Config::kXpacked) || converts(cached)) {
      multiply.template operator()<Config::kCodeTypeV, Config::kPParts, Config::kXpacked>();
    } else {
      multiply.template operator()<Config::kType, 1, false>();
    }
    if constexpr (!Config::kTokenScales) {
      if (cached && !is_cached(i + 1)) scale_o(shared.v_scale, state);
    }
    steady = next_steady;
  }
  ptx::wait_copies<0>();
  epilogue(p, t, shared.head, state);
}

}  // namespace attune::prefill_mma

extern "C" __global__ void __launch_bounds__(attune::prefill_mma::Config::kThreads, ATTUNE_BLOCKS_PER_SM)
    attune_prefill_mma(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  using namespace attune::prefill_mma;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  for_row_blocks(
      p, shared, [&](const WorkTile& work) { store_constants(p, work, shared); },
      [&] {
        if constexpr (Config::kQuantized) {
          run_mainloop_quantized(p, shared);
        } else {
          run_mainloop(p, shared);
        }
      });
}
