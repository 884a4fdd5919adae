// SPDX-License-Identifier: Apache-2.0
// Decode attention: a few query rows a sequence over a paged or contiguous cache, bound by memory bandwidth.
//
// Maths, for the packed rows r (queries of a sequence times the query heads of one KV head) and keys j of a split:
//   s_rj = factor_r <q_r, k_j> [softcap, ALiBi], in base 2;  -inf where r may not see j
//   m' = max(m, max_j s_rj);  p_rj = 2^(s_rj - m');  l = l 2^(m - m') + sum_j p_rj;  o = o 2^(m - m') + sum_j p_rj v_j
// Each warp has (m, l, o) of its own keys. The epilogue of a split merges the warps of the block:
//   M = max_w m_w;  L = sum_w l_w 2^(m_w - M);  O = sum_w o_w 2^(m_w - M)
// It stores O / L if the block had the whole output tile (sequence, KV head, block of rows). Otherwise it stores (M, L,
// O), and the last block to arrive combines the splits, always in the order of the keys, so the bits are the same in
// every run. A row that sees no key has m = -inf, l = 0 and P = 0; its output is 0.
//
// Tiles: kWarps x 16 keys; 8, 16 or 32 rows; the whole head dim. Registers hold O (head_dim_v / 16 x rows / 8 x 4
// floats) and Q. Every warp is its own producer and consumer: it has a private ring of stages of 16 keys, K then V.
//
//   copies:  | 0 | 1 | 2 |   3   |   4   |        tile i + kStages - 1 is issued before tile i is read, into the stage
//   mma:                 | 0     | 1     | 2      of tile i - 1; one __syncwarp lies between.
//
// Grid: persistent blocks, no clusters. Stream-K (scheduler/stream_k*) gives each block an equal range of the key tiles
// of all output tiles. The producer runs ahead into the next split during the epilogue, so that memory stays busy; the
// block's own walk to it is done before the mainloop.
//
// Producer: producer.cuh; mainloop: mainloop.cuh; softmax: softmax.cuh; masks: mask.cuh; epilogue: epilogue.cuh
// and combine.cuh; one split in order: block.cuh.
#include "decode/block.cuh"
#include "ptx/grid.cuh"

namespace attune::decode {

// Loads the block's stream-K range: one copy for the block and one for each warp. Returns false if it is empty.
__device__ __forceinline__ bool fetch_range(const AttentionParams& p, SharedStorage& shared) {
  static_assert(sizeof(kernels::StreamKRange) % 16 == 0, "copied in vectors of 16 bytes");
  constexpr int kVectors = sizeof(kernels::StreamKRange) / 16;
  kernels::StreamKRange* const stream_k = shared.stream_k;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto* from = reinterpret_cast<const uint4*>(p.stream_k + blockIdx.x / static_cast<unsigned>(p.head_lanes));
  if (lane < kVectors) {
    const uint4 x = from[lane];
    reinterpret_cast<uint4*>(stream_k + 2 + warp)[lane] = x;
    if (warp == 0) reinterpret_cast<uint4*>(stream_k)[lane] = x;
  }
  __syncwarp();
  if (lane == 0) {
    stream_k[2 + warp].split.head += scheduler::head_lane(p);
    if (warp == 0) stream_k[0].split.head += scheduler::head_lane(p);
    if (warp == 0) shared.stamp = p.checks_stamp != 0 ? 0 : stream_k[0].stamp;
  }
  __syncthreads();
  return stream_k[0].live != 0;
}

}  // namespace attune::decode

extern "C" __global__ void __launch_bounds__(attune::decode::Config::kThreads, attune::decode::Config::kBlocksPerSm)
    attune_decode(const __grid_constant__ attune::kernels::AttentionParams p) {
  using namespace attune;
  using namespace attune::decode;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());

  if constexpr (Config::kPadded) clear_stages(shared);
  ptx::wait_for_previous_kernels();
  // Tells the prefill kernel beside this one that the previous kernels' writes are visible (prefill/block.cuh).
  if (p.decode_begun != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    ptx::store_release(p.decode_begun, *p.decode_begun + 1);
  ptx::allow_next_kernel();

  if (!fetch_range(p, shared)) return;
  Block block(p, shared.stream_k[2 + threadIdx.x / 32], shared);
  for (int current = 0; block.stream_k[current].live; current ^= 1) {
    kernels::StreamKRange& range = block.stream_k[current];
    const Split& split = range.split;
    Block::Inputs inputs;
    block.attend_split(p, range, &block.stream_k[current ^ 1], inputs, shared);
    const bool whole = split.is_first && split.is_last;
    const PartialAddress partial =
        whole ? PartialAddress{} : GlobalPartials::address(p, split.is_first, range_of_block(p));
    epilogue(p, split, range.sequence.q_begin, partial, block.state, shared);
    if (!whole) combine_if_last(p, split, range.sequence.q_begin, range, shared.is_last);
    __syncthreads();
    if constexpr (Config::kNewTokens) {
      if (p.tiles_done != nullptr) append_last(p, split, range.sequence, shared);
    }
  }
}
