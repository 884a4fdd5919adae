// SPDX-License-Identifier: Apache-2.0
// The math of the two groups: 64 rows against the tiles that the loaders bring, which are K and, without what only K
// has, V. Tiles go by in pairs A, B.
//
//   S_A = Q A^T by group 0, S_B = Q B^T by group 1;  P = 2^(c (S - r)), c = scale log2 e, r a reference for each row
//   group g has half g of O's channels:  O = O 2^(c (r - r_A)) + P_A A, then O = O 2^(c (r_A - r_B)) + P_B B
//
//   group 0:  S_A   softmax  P_A A |         (P_B) P_B B | S_A' ..
//   group 1:        S_B (P_A) P_A A  softmax       P_B B |      S_B' ..
//
// Keys that are decoded come later than the other group's weights: then group 1 has P_A A before S_B.
//
// A group hands its weights to the other through shared memory, each thread to its twin, who holds the same rows and
// keys: the layout of S is that of the left operand of the next product. The reference follows the maximum only when
// that is far ahead, so O is hardly ever multiplied after the first tile.
#pragma once

#include "mla/m64/softmax.cuh"

namespace attune::mla {

template <int kWarpgroup>
class Mainloop {
 public:
  using Softmax = mla::Softmax<kWarpgroup>;
  using QkProduct = ptx::Product<Config::kBlockN, Config::kProduct>;
  // An instruction may take no more registers than threads begin with.
  static constexpr int kColumns = Config::kThreads > 384 ? Config::kChannels / 2 : Config::kChannels;
  using PvProduct = ptx::Product<kColumns, Config::kProduct>;
  // Group 0 has S of its next tile computed while its last product runs; keys that are decoded come too late for that.
  static constexpr bool kOverlapNextQK = kWarpgroup == 0 && Config::kOverlapNextQK;
  // Group 1 waits for the product of group 0's weights before it hands over its own, for lack of registers.
  static constexpr bool kPvBeforePublish = !Config::kPublishPEarly && !Config::kDequant;

  __device__ __forceinline__ Mainloop(const PrefillParams& p, const Smem& smem) : smem_(smem), c_(p.scale * kLog2e) {}

  // All tiles of a work tile, from the last to the first.
  __device__ __forceinline__ void run(const WorkTile& work, const Rows& rows, TileCounts& counts, Accumulators& a) {
    if (kWarpgroup == 0)
      rows.store_row_limits(smem_), __syncwarp();  // the other group waits for this one's weights first
    int left = __shfl_sync(0xffffffffu, work.tile_end - work.tile_begin, 0);
    a.row_max[0] = a.row_max[1] = a.row_max_ref[0] = a.row_max_ref[1] = -ptx::infinity();
    // A row has a sum in each group.
    a.row_sum[0] = a.row_sum[1] = smem_.first_sum();
    ptx::wait_phase(smem_.q_full(), counts.work_tiles() % 2);
    accumulate_ = 0;
    float s[Config::kBlockN / 2];  // of group 0
    if (kOverlapNextQK && left > 0) {
      qk_gemm(counts.pipe(0), s, [] {});
      ptx::wait_products<0>();
      ptx::pin(s);
    }
    for (; left > 1; left -= 2) {
      const PipelineState first = counts.pipe(0), second = counts.pipe(1);
      counts.advance(2);
      if constexpr (kWarpgroup == 0) {
        wg0_local(first, left == 2, s, a);
        wg0_remote(second, counts.pipe(0), left > 2, s, a);
      } else {
        wg1_both(first, second, left <= 3, a);
      }
    }
    if (left == 1) {
      const PipelineState first = counts.pipe(0);
      counts.advance(1);
      if constexpr (kWarpgroup == 0) {
        wg0_local(first, true, s, a);
      } else {
        if (accumulate_ == 0) {  // there was no pair
          __syncwarp();          // all lanes have seen that q is there: the next one's phase would hide it
          release_q();
        }
        wait_v(first);
        pv_gemm_p0(v_descriptor(first), a);
        ptx::wait_products<0>();
        ptx::pin(a.o);
        release(first, 2);
      }
    }
  }

 private:
  // Group 0: its tile.
  __device__ __forceinline__ void wg0_local(PipelineState pipe, bool last, float (&s)[Config::kBlockN / 2],
                                            Accumulators& a) {
    float rescale[2];
    if constexpr (!kOverlapNextQK) qk_gemm(pipe, s, [] {});
    const ptx::Descriptor v = v_descriptor(pipe);
    if constexpr (!kOverlapNextQK) {
      ptx::wait_products<0>();
      ptx::pin(s);
    }
    if (last) release_q();
    Softmax::softmax(smem_, c_, TileMask(smem_, pipe.stage), s, rescale, a);
    release(pipe, kKOnly);
    Softmax::accumulate_row_sum(rescale, s, a);
    Softmax::convert_p(s, p_regs_);
    publish_p(p_regs_, a);
    ptx::arrive_some(p0_ready(), 64);
    rescale_o(rescale, a);
    pv_gemm(p_regs_, v, a);
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release(pipe, 1);
  }
  // Group 0, the tile of group 1; and S of its next one, if there are more.
  __device__ __forceinline__ void wg0_remote(PipelineState pipe, PipelineState next, bool more,
                                             float (&s)[Config::kBlockN / 2], Accumulators& a) {
    wait_v(pipe);
    const ptx::Descriptor v = v_descriptor(pipe);
    ptx::sync_some(p1_ready(), 64);
    receive_p(p_regs_, a);
    pv_gemm(p_regs_, v, a);
    if (kOverlapNextQK && more) {
      qk_gemm(next, s, [&] {
        ptx::commit_products();
        ptx::wait_products<1>();
        ptx::pin(a.o);
        release(pipe, 1);
      });
      ptx::wait_products<0>();
      ptx::pin(s);
    } else {
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release(pipe, 1);
    }
  }

  // Group 1: both tiles.
  __device__ __forceinline__ void wg1_both(PipelineState first, PipelineState second, bool last, Accumulators& a) {
    float s[Config::kBlockN / 2], rescale[2];
    unsigned p_regs[Softmax::kPRegs];
    wait_v(first);
    const ptx::Descriptor v0 = v_descriptor(first);
    // Keys that are decoded come late: the product of group 0's weights is done by then, and its values are released.
    if constexpr (Config::kDequant) {
      pv_gemm_p0(v0, a);
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release(first, 2);
      qk_gemm(second, s, [] {});
    } else {
      qk_gemm(second, s, [] {});
      // Nothing to wait for, which ptxas must be told: it else puts a wait where O is multiplied beside S (C7517), to
      // which some warps of the group would come, and others not. It counts the products of each part.
      ptx::wait_products<kSlices>();
      ptx::pin(a.o);
      pv_gemm_p0(v0, a);
    }
    const TileMask mask(smem_, second.stage);
    ptx::wait_products<Config::kDequant ? 0 : 1>();
    ptx::pin(s);
    if (last) release_q();
    Softmax::softmax(smem_, c_, mask, s, rescale, a);
    release(second, kKOnly);
    Softmax::accumulate_row_sum(rescale, s, a);  // before they are packed: registers are scarce while a product runs
    if constexpr (kPvBeforePublish) {
      ptx::pin(s);
      finish_pv_p0(first, a);
    }
    Softmax::convert_p(s, p_regs);
    publish_p(p_regs, a);
    ptx::arrive_some(p1_ready(), 64);
    if constexpr (!kPvBeforePublish && !Config::kDequant) finish_pv_p0(first, a);
    const ptx::Descriptor v1 = v_descriptor(second);
    rescale_o(rescale, a);
    pv_gemm(p_regs, v1, a);
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release(second, 2);
  }
  // Group 1: the product of group 0's weights is done.
  __device__ __forceinline__ void finish_pv_p0(PipelineState first, Accumulators& a) const {
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release(first, 2);
  }
  // Group 1: the product of group 0's weights, which runs on.
  __device__ __forceinline__ void pv_gemm_p0(ptx::Descriptor v, Accumulators& a) {
    ptx::sync_some(p0_ready(), 64);
    receive_p(p_regs_, a);
    pv_gemm(p_regs_, v, a);
  }

  // between: when the products of the first half of the channels have been issued.
  template <class Between>
  __device__ __forceinline__ void qk_gemm(PipelineState pipe, float (&s)[Config::kBlockN / 2],
                                          Between&& between) const {
    const ptx::Descriptor q = ptx::uniform(ptx::descriptor_k_major(smem_.q())),
                          k = ptx::uniform(ptx::descriptor_k_major(smem_.k(pipe.stage)));
    ptx::pin(s);
    int accumulate = 0;
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
      const int slice = slice_in_order(j, kWarpgroup == 1);
      if (slice_at(slice).count == 0) continue;
      if (has_full_barrier(slice)) {
        ptx::wait_phase(smem_.k_full(pipe.stage, barrier_of(slice)), pipe.phase);
        if (Config::kConsumerFence) ptx::fence_async_proxy();
        ptx::fence_products();
      }
#pragma unroll
      for (int i = 0; i < 4 * slice_at(slice).count; ++i) {
        const int chunk = slice_at(slice).chunk + i / 4, at = chunk * (Config::kChunkBytes >> 4) + i % 4 * ptx::kStepK;
        QkProduct::shared(s, q + at, k + at, accumulate);
        accumulate = 1;
      }
      if (j == 2) between();
    }
    ptx::commit_products();
  }

  // The group's half of a tile's values.
  __device__ __forceinline__ ptx::Descriptor v_descriptor(PipelineState pipe) const {
    return ptx::uniform(ptx::descriptor_mn_major(
        smem_.k(pipe.stage) + kWarpgroup * (Config::kChunksV / 2) * Config::kChunkBytes, Config::kChunkBytes));
  }
  __device__ __forceinline__ void pv_gemm(unsigned (&p_regs)[Softmax::kPRegs], ptx::Descriptor v, Accumulators& a) {
    ptx::pin(a.o);
    ptx::pin(p_regs);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kChannels / kColumns; ++j) {
        PvProduct::registers(reinterpret_cast<float(&)[kColumns / 2]>(a.o[j * kColumns / 2]), p_regs + 4 * i,
                             v + (i * 2048 + j * kColumns / 64 * Config::kChunkBytes >> 4), i == 0 ? accumulate_ : 1);
      }
    }
    ptx::commit_products();
    accumulate_ = 1;
  }
  // Of the other group's tile: that group has waited, not this one.
  __device__ __forceinline__ void wait_v(PipelineState pipe) const {
    if (!kSignalByHalf) ptx::wait_phase(smem_.k_full(pipe.stage, 1 + 2 * kWarpgroup), pipe.phase);
    ptx::wait_phase(smem_.k_full(pipe.stage, 2 + 2 * kWarpgroup), pipe.phase);
    if (Config::kConsumerFence) ptx::fence_async_proxy();
  }

  // racecheck reports these stores beside receive()'s loads: it does not follow bar.arrive, for which the twin waits.
  __device__ __forceinline__ void publish_p(const unsigned (&p_regs)[Softmax::kPRegs], const Accumulators& a) const {
    const int thread = threadIdx.x % 128;
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        ptx::store_shared_u32(smem_.row_max_ref(kWarpgroup, row_of_thread() + 8 * h),
                              __float_as_uint(a.row_max_ref[h]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared_four(smem_.p(thread, i), p_regs + 4 * i);
  }
  // The twin's weights for a tile, and its reference; o and sum are then against that.
  __device__ __forceinline__ void receive_p(unsigned (&p_regs)[Softmax::kPRegs], Accumulators& a) const {
    const int thread = threadIdx.x % 128;
    float row_max_ref[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      row_max_ref[h] = ptx::load_shared(smem_.row_max_ref(1 - kWarpgroup, row_of_thread() + 8 * h));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned four[4];
      ptx::load_shared_four(smem_.p(thread, i), four);
#pragma unroll
      for (int j = 0; j < 4; ++j) p_regs[4 * i + j] = four[j];
    }
    if (__any_sync(0xffffffffu, row_max_ref[0] != a.row_max_ref[0] || row_max_ref[1] != a.row_max_ref[1]))
        [[unlikely]] {
      float rescale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rescale[h] =
            row_max_ref[h] == a.row_max_ref[h] ? 1.0f : ptx::exp2_approx((a.row_max_ref[h] - row_max_ref[h]) * c_);
        a.row_max_ref[h] = row_max_ref[h];
        a.row_sum[h] *= rescale[h];
      }
      rescale_o(rescale, a);
    }
  }

  __device__ __forceinline__ void release(PipelineState pipe, int half) const {
    if (half == kKOnly) __syncwarp();  // all lanes have read what lies beside the keys
    const unsigned barrier = smem_.k_empty(pipe.stage, half);
    if constexpr (Config::kCluster == 1) {
      if (threadIdx.x % 32 == 0) ptx::arrive(barrier);
    } else {  // both blocks write to the buffers of both
      if (threadIdx.x % 32 < Config::kCluster) ptx::arrive_in_cluster(ptx::shared_in_block(barrier, threadIdx.x % 32));
    }
  }
  __device__ __forceinline__ void release_q() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty());
  }

  const Smem& smem_;
  const float c_;
  unsigned p_regs_[Softmax::kPRegs];  // of the first tile of a pair
  int accumulate_ = 0;
};

}  // namespace attune::mla
