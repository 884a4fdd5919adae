// SPDX-License-Identifier: Apache-2.0
// The gradients of attention over dense keys by mma.sync: for fp32, and for 16 bits on GPUs where gradients.cu does not
// run. A launch computes dq by blocks of resident queries, which stream tiles of keys; or dk and dv, or one of them, by
// blocks of resident keys, which stream tiles of queries of all query heads of their KV head. No sum crosses a block,
// and each has a fixed order: the bits are the same in every run, whatever the batch is.
//
//   S = resident qk * tile qk^T    dP = resident vdo * tile vdo^T    P = 2^(S scale - lse2)    dS = P (dP - delta)
//   dqk += dS * tile qk            dv += P * tile vdo (resident keys)
//
// A warp has 16 resident rows, and all rows of a tile or half of them at a time. S and dP, then P and dS stay in its
// registers, in the layout of the next GEMM's left operand. The warps of a block synchronise twice a tile:
//
//   copy tile | barrier: it has arrived | S | dP | P, dS | dv | dqk | barrier: all have read | copy next tile
//
// Blocks are small, so that another block of the multiprocessor computes while one waits for its copies. All warps are
// producers and consumers: producer mma/producer.cuh, GEMMs mma/gemms.cuh, P and dS mma/softmax.cuh; the loop over
// tiles is run_mainloop() below.
//
// A NaN or infinity of the sequence can reach the gradient of a row that does not see it as 0 * NaN, so recompute.cu
// examines all rows.
#include "backward/mma/producer.cuh"
#include "backward/mma/softmax.cuh"
#include "ptx/grid.cuh"

namespace attune::backward::mma {

template <int kLines>
__device__ __forceinline__ void clear(Sums<kLines>& x) {
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
#pragma unroll
    for (int j = 0; j < 16; ++j) x[line][j / 4][j % 4] = 0;
  }
}

// Stores four channels of the row that begins at `first`, or as many as there are.
template <int kHeadDim>
__device__ __forceinline__ void store_four(const GradientRows& to, bool vectors, long long first, int channel,
                                           const float (&x)[4]) {
  if (vectors && channel + 4 <= kHeadDim) {
    *reinterpret_cast<float4*>(to.data + 4 * (first + channel)) = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (channel + i < kHeadDim) common::store_element(to.dtype, to.data, first + (channel + i) * to.dim_stride, x[i]);
  }
}

// Stores this thread's channels of its two resident rows.
template <int kHeadDim, int kLines>
__device__ __forceinline__ void store(const BackwardParams& p, const WorkTile& w, const GradientRows& to,
                                      const Sums<kLines>& x, float factor) {
  if (to.data == nullptr) return;
  const bool vectors = to.dtype == common::kFloat32 && to.dim_stride == 1 &&
                       (to.row_stride | to.head_stride | to.batch_stride) % 4 == 0 &&
                       reinterpret_cast<unsigned long long>(to.data) % 16 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = resident_row(w) + 8 * h;
    if (row >= w.end) continue;
    const long long first =
        Config::kOfQueries ? query_offset(p, w.s, w.batch, to, row, w.head) : key_offset(w.s, w.batch, to, row, w.head);
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = factor * x[line][i][2 * h + e];
        store_four<kHeadDim>(to, vectors, first, 32 * line + static_cast<int>(threadIdx.x) % 4 * 8 + 4 * e, four);
      }
    }
  }
}

__device__ __forceinline__ void run_mainloop(const BackwardParams& p, const Smem& smem) {
  const WorkTile& work = smem.work();
  const unsigned warp = threadIdx.x / 32;
  Sums<Config::kLinesQk> dqk;  // registers only for what the launch computes
  Sums<Config::kLinesV> dv;
  clear(dqk), clear(dv);
  const int first_head = Config::kOfQueries ? work.head : work.head * p.group;  // of q
  if (work.first < work.last) copy_resident(p, smem);
  for (int i = 0; i < (Config::kOfQueries ? 1 : p.group); ++i) {
    const int head = first_head + i;
    for (int row = work.first; row < work.last; row += Config::kTile) {
      __syncthreads();  // all warps have read the previous tile
      copy_tile(p, smem, head, row);
      ptx::commit_copies();
      ptx::wait_copies<0>();
      __syncthreads();  // the tile has arrived
#pragma unroll 1
      for (int step = 0; step < Config::kTile; step += Config::kStep) {
        const unsigned pairs = visible_pairs(p, work, head, row + step);
        if (__any_sync(0xffffffffu, pairs != 0) == 0) continue;
        const unsigned qk = smem.qk() + step * LayoutQk::kPitch, vdo = smem.vdo() + step * LayoutVdo::kPitch;
        Scores s, d = {};
        multiply<Config::kLinesQk>(smem.resident_qk() + 16 * warp * LayoutQk::kPitch, qk, s);
        if constexpr (Config::kWithDqk)
          multiply<Config::kLinesV>(smem.resident_vdo() + 16 * warp * LayoutVdo::kPitch, vdo, d);
        make_p_and_ds(p, work, smem.stats(Config::kOfQueries ? 0 : step), pairs, head, row + step, s, d);
        if constexpr (Config::kWithDv) accumulate<Config::kLinesV>(s, vdo, row, dv);
        if constexpr (Config::kWithDqk) accumulate<Config::kLinesQk>(d, qk, head, dqk);
      }
    }
  }
  if constexpr (Config::kWithDqk)
    store<Config::kHeadDimQk, Config::kLinesQk>(p, work, Config::kOfQueries ? p.dq : p.dk, dqk, p.scale);
  if constexpr (Config::kWithDv) store<Config::kHeadDimV, Config::kLinesV>(p, work, p.dv, dv, 1.0f);
}

}  // namespace attune::backward::mma

extern "C" __global__ void __launch_bounds__(attune::backward::mma::Config::kThreads, ATTUNE_BLOCKS_PER_SM)
    attune_backward_gradients_mma(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  using mma::Config;
  ptx::wait_for_previous_kernels();
  BackwardList* const list = Config::kOfQueries ? p.q_list : p.kv_list;
  const int heads = Config::kOfQueries ? p.num_heads_q : p.num_heads_kv;
  const int slice = static_cast<int>(blockIdx.x) % Config::kBlocksOfTile,
            work_tile_idx = static_cast<int>(blockIdx.x) / Config::kBlocksOfTile;
  if (work_tile_idx / heads >= list->num_tiles) return;
  const mma::Smem smem(ptx::dynamic_shared());
  if (threadIdx.x == 0)
    smem.work() = mma::work_tile_of(p, tiles_of(list)[work_tile_idx / heads], slice, work_tile_idx % heads);
  __syncthreads();
  if (smem.work().begin < smem.work().end) mma::run_mainloop(p, smem);
}
