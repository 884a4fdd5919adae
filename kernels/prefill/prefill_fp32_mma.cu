// SPDX-License-Identifier: Apache-2.0
// Prefill attention on fp32 rows by mma.sync, for GPUs without wgmma. Each number enters the tensor cores as the sum of
// three bf16 numbers (bf16x3); the error is below 2^-24 of a product. TF32 is not used.
//
// Maths, masks, row blocks and the grid are those of prefill_mma.cu. The mainloop is in this file; GEMMs and softmax
// are in mma/fp32_mainloop.cuh.
//
// Tiles: 4 warps of 16 rows each and 32 keys; with head dims above 128, where shared memory is short, 16 keys or 2
// warps. All threads load rows and split them, once for the block (mma/fp32_producer.cuh). Up to 128 channels, two
// parts of Q stay in registers.
//
//   loads:   | K 0 | V 0           | K 1         | V 1           | K 2    each after the barrier that frees its buffer
//   mma:                 | Q K^T 0       | P V 0       | Q K^T 1       | P V 1
//
// A warp loads and then multiplies; meanwhile other blocks of the multiprocessor keep the tensor cores busy.
#include "prefill/mma/epilogue.cuh"
#include "prefill/mma/fp32_mainloop.cuh"
#include "prefill/mma/fp32_producer.cuh"
#include "prefill/mma/fp32_recompute.cuh"
#include "prefill/mma/row_blocks.cuh"
#include "ptx/grid.cuh"

namespace attune::prefill_mma {

using Tiles = scheduler::KeyTiles<Config::kKeys, Config::kCached>;

__device__ __forceinline__ void run_mainloop(const WorkTileParams& p, const Fp32Rows& vec4, Fp32Storage& shared) {
  const WorkTile& t = shared.work;
  const unsigned q = shared.q(), k = shared.k(), v = shared.v();
  const auto tile_at = [&](int i) { return scheduler::tile_at(t, Tiles(t.num_cached, t.first_key, t.end_key), i); };
  const int num_tiles = Tiles(t.num_cached, t.first_key, t.end_key).num_tiles;
  const auto load_keys = [&](int i) {
    const Tile tile = tile_at(i);
    load_tile<false>(p, t, tile, shared.kv_head, vec4, k);
    if (threadIdx.x < 32) find_valid_keys(p, t, tile, shared);
  };
  State state;
  state.clear();
  QFragments q_regs;
  if (num_tiles > 0) {
    load_queries(p, t, shared.head, vec4, q);
    if constexpr (Config::kQPartsInRegisters) {
      __syncthreads();
      load_q_fragments(q, q_regs);
      __syncthreads();  // Q overlays K and V
    }
    load_keys(0);
  }
  for (int i = 0; i < num_tiles; ++i) {
    __syncthreads();  // K has arrived, and all warps have read the last V
    const Tile tile = tile_at(i);
    load_tile<true>(p, t, tile, shared.kv_head, vec4, v);
    const ValidKeys valid_keys = {shared.valid_keys, kAllKeys};
    Scores s;
    qk_gemm_bf16x3(q, q_regs, k, s);
    __syncthreads();  // V has arrived, and all warps have read K
    if (i + 1 < num_tiles) load_keys(i + 1);
    const Rows rows(p, t, shared.head);
    score_tile(p, t, i, tile_at, rows, !all_valid(valid_keys) || !rows.all_see(p, t, tile), valid_keys, s);
    // max_logits are read from row_max_ref, so it must then be the exact max.
    softmax_in_place(rows.scale(), p.max_logits != nullptr ? 0.0f : Config::kRescaleThreshold, s, state);
    pv_gemm_bf16x3(v, s, state);
  }
  epilogue(p, t, shared.head, state);
  recompute_rows(p, t, shared.head, shared.kv_head, state);
}

}  // namespace attune::prefill_mma

extern "C" __global__ void __launch_bounds__(attune::prefill_mma::Config::kThreads, ATTUNE_BLOCKS_PER_SM)
    attune_prefill_fp32_mma(const __grid_constant__ attune::kernels::WorkTileParams p,
                            const __grid_constant__ attune::kernels::Fp32Rows vec4) {
  using namespace attune;
  using namespace attune::prefill_mma;
  Fp32Storage& shared = *reinterpret_cast<Fp32Storage*>(ptx::dynamic_shared());
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  for_row_blocks(p, shared, [](const WorkTile&) {}, [&] { run_mainloop(p, vec4, shared); });
}
