// SPDX-License-Identifier: Apache-2.0
// Scores of the indexer on tensor cores, for keys and queries of 8 and 16 bits.
//
//   S = K Q^T;  score(row, key) = k_scale(key) * sum over h of w(row, h) * max(S(key, h), 0),  w = weights * q_scale
//
// Keys are the M rows of wgmma and stay in registers; the heads of one query row are its N columns. So a sum over heads
// is a sum within a thread and over the four lanes of a quad. 8-bit elements become fp16 (or bf16, if the other side is
// bf16), which holds them exactly, because wgmma adds products of e4m3 with fewer bits than fp32 has.
//
// Grid: persistent. Each block takes work tiles (tile_scheduler.cuh): kKeys keys against up to 32 rows of their
// sequence. Warps 0 to 3 are producers (producer.cuh): they load queries to a ring of stages in shared memory, one
// stage for each row (or 64 heads of it). Warpgroups 1 and 2 are consumers (class Consumer below is the mainloop) and
// have 64 kTiles keys each:
//
//   producers:    work tiles ..  Q0 Q1 Q2 Q3 ..
//   consumers 1:  K(u) to registers | S0 sum0 store | S1 sum1 store | ..   keys of u + kKeyStages in flight
//   consumers 2:  the same with the other half of the keys; the two warpgroups are not synchronised
//
// mbarriers: full and empty for each stage of queries and for each slot of work tiles. Keys need none (keys.cuh).
#include "indexer/keys.cuh"
#include "indexer/producer.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::indexer {

class Consumer {
 public:
  using Wgmma =
      ptx::WgmmaBKMajor<Config::kN, Config::kBf16 ? ptx::Type::kBf16 : ptx::Type::kF16>;
  using Accumulator = float[Config::kN / 2];

  __device__ __forceinline__ Consumer(const IndexScoresParams& p, SharedStorage& shared)
      : p_(p), shared_(shared), keys_(p, shared) {}

  __device__ __forceinline__ void run() {
    keys_.start();
    for (;;) {
      ptx::wait_phase(address(shared_.work_full[work_pipe_.stage]), work_pipe_.phase);
      const WorkTile work = shared_.work_tiles[work_pipe_.stage];
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::arrive(address(shared_.work_empty[work_pipe_.stage]));
      work_pipe_.next<Config::kWorkSlots>();
      if (work.mask == 0) return;
      unsigned a[Config::kTiles][4 * Config::kSteps];
      keys_.load_fragments(work, a);
      const int key = work.key + keys_.key_of(keys_.own_key());
      for (unsigned left = work.mask; left != 0; left &= left - 1) score_row(work, work.row + __ffs(left) - 1, key, a);
    }
  }

 private:
  __device__ __forceinline__ void score_row(const WorkTile& work, long long row, int key,
                                            unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
    float sum[Config::kTiles][2] = {};
    KeyRange range;
    for (int pass = 0; pass < Config::kPasses; ++pass) {
      ptx::wait_phase(address(shared_.query_full[query_pipe_.stage]), query_pipe_.phase);
      range = shared_.ranges[query_pipe_.stage];
      const bool scored = range.begin < work.key + Config::kKeys && range.end > work.key && range.begin < range.end;
      if (__shfl_sync(0xffffffffu, scored ? 1 : 0, 0) != 0) qk_gemm(pass, a, sum);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::arrive(address(shared_.query_empty[query_pipe_.stage]));
      query_pipe_.next<Config::kQueryStages>();
    }
    const float score = sum_of_quad(sum) * keys_.scale();
    if (threadIdx.x % 4 >= 2 * Config::kTiles) return;  // another lane writes the score
    float* const to = reinterpret_cast<float*>(indexer::score_row(p_.rows, p_.scores, row) +
                                               key * p_.scores.column_stride);
    if (key >= range.begin && key < range.end) {
      *to = keys_.masked() ? -ptx::infinity() : score;
    } else if (p_.clear && key < p_.num_columns) {
      *to = -ptx::infinity();
    }
  }

  __device__ __forceinline__ void qk_gemm(int pass, unsigned (&a)[Config::kTiles][4 * Config::kSteps],
                                          float (&sum)[Config::kTiles][2]) {
    Accumulator s[Config::kTiles];
    const ptx::Descriptor q =
        ptx::uniform(ptx::descriptor_k_major(ptx::shared_address(shared_.queries[query_pipe_.stage].panels)));
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      ptx::fence_operand(s[tile]);
      ptx::fence_operand(a[tile]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < Config::kSteps; ++i) {
        Wgmma::rs(s[tile], a[tile] + 4 * i, q + (i / 4 * (Config::kPanelBytes >> 4) + i % 4 * ptx::kStepK),
                          i == 0 ? 0 : 1);
      }
      ptx::wgmma_commit();
    }
    if constexpr (Config::kTiles == 2) {
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s[0]);
      add_heads(pass, s[0], sum[0]);
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s[Config::kTiles - 1]);
    add_heads(pass, s[Config::kTiles - 1], sum[Config::kTiles - 1]);
  }

  // Adds the thread's heads, in their order.
  __device__ __forceinline__ void add_heads(int pass, const Accumulator& s, float (&sum)[2]) const {
    const float* const weights = shared_.weights[query_pipe_.stage] + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < Config::kN / 8; ++i) {
      const float2 w = *reinterpret_cast<const float2*>(weights + 8 * i);
      const int head = pass * Config::kN + 8 * i + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (Config::kHeads % Config::kN == 0 || head < Config::kHeads)
          sum[h] = fmaf(w.x, ptx::max_or_nan(s[4 * i + 2 * h], 0.0f), sum[h]);
        if (Config::kHeads % Config::kN == 0 || head + 1 < Config::kHeads)
          sum[h] = fmaf(w.y, ptx::max_or_nan(s[4 * i + 2 * h + 1], 0.0f), sum[h]);
      }
    }
  }

  // Sums over the lanes of a quad, for the key that this lane writes. The order is the same for every key.
  __device__ __forceinline__ static float sum_of_quad(const float (&sum)[Config::kTiles][2]) {
    const bool lower = threadIdx.x % 2 != 0;
    float half[2];
    if constexpr (Config::kTiles == 2) {
      const bool second = threadIdx.x % 4 >= 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float other = __shfl_xor_sync(0xffffffffu, second ? sum[0][h] : sum[1][h], 2);
        half[h] = (second ? sum[1][h] : sum[0][h]) + other;
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) half[h] = sum[0][h] + __shfl_xor_sync(0xffffffffu, sum[0][h], 2);
    }
    const float other = __shfl_xor_sync(0xffffffffu, lower ? half[0] : half[1], 1);
    return (lower ? half[1] : half[0]) + other;
  }

  const IndexScoresParams& p_;
  SharedStorage& shared_;
  Keys keys_;
  common::PipelineState work_pipe_, query_pipe_;
};

__device__ __forceinline__ void init_barriers(SharedStorage& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kQueryStages; ++i) {
      ptx::init_barrier(address(shared.query_full[i]), 128);
      ptx::init_barrier(address(shared.query_empty[i]), Config::kConsumerWarps);
    }
    for (int i = 0; i < Config::kWorkSlots; ++i) {
      ptx::init_barrier(address(shared.work_full[i]), 1);
      ptx::init_barrier(address(shared.work_empty[i]), Config::kConsumerWarps + 4);
    }
    ptx::publish_barriers();
  }
  __syncthreads();
}

}  // namespace attune::indexer

extern "C" __global__ void __launch_bounds__(attune::indexer::Config::kThreads, 1)
    attune_index_scores(const __grid_constant__ attune::kernels::IndexScoresParams p) {
  using namespace attune;
  using namespace attune::indexer;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  init_barriers(shared);
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  if (threadIdx.x < 128) {
    ptx::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    Producer producer(p, shared);
    producer.run();
  } else {
    ptx::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer consumer(p, shared);
    consumer.run();
  }
}
