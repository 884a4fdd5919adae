// SPDX-License-Identifier: Apache-2.0
// The mainloop of the two consumer warpgroups: 64 rows against the tiles that the producers bring. A tile is K and,
// without the rope channels, also V. Tiles come in pairs A, B; the last tile of a work tile may have no partner.
//
//   S_A = Q A^T by WG0, S_B = Q B^T by WG1;  P = 2^(c (S - r)), c = scale log2 e, r = row_max_ref
//   WG g has half g of O's channels:  O = O 2^(c (r - r_A)) + P_A A, then O = O 2^(c (r_A - r_B)) + P_B B
//
//   WG0:  S_A   softmax  P_A A |         (P_B) P_B B | S_A' ..
//   WG1:        S_B (P_A) P_A A  softmax       P_B B |      S_B' ..
//
// Dequantized keys arrive later than the other warpgroup's P, so WG1 then has P_A A before S_B.
//
// Each thread publishes its P through shared memory to the same thread of the other warpgroup, which has the same rows
// and keys: the accumulator layout of S is the A operand layout of the PV GEMM. The rescale is deferred: row_max_ref is
// raised only when row_max is far above it, so O is rarely rescaled after the first tile. The softmax is in
// mla/m64/softmax.cuh.
#pragma once

#include "mla/m64/softmax.cuh"

namespace attune::mla {

template <int kWarpgroup>
class Mainloop {
 public:
  using Softmax = mla::Softmax<kWarpgroup>;
  using QkWgmma = ptx::Wgmma<Config::kBlockN, Config::kMmaType>;
  // The accumulator of a wgmma may not have more registers than a thread has when the kernel starts.
  static constexpr int kColumns = Config::kThreads > 384 ? Config::kChannels / 2 : Config::kChannels;
  using PvWgmma = ptx::Wgmma<kColumns, Config::kMmaType>;
  // WG0 issues the QK GEMM of its next tile after its last PV GEMM. Dequantized keys arrive too late for that.
  static constexpr bool kOverlapNextQK = kWarpgroup == 0 && Config::kOverlapNextQK;
  // WG1 waits for its PV GEMM of P_A before it publishes P_B, because there are too few registers for both.
  static constexpr bool kPvBeforePublish = !Config::kPublishPEarly && !Config::kDequant;

  __device__ __forceinline__ Mainloop(const WorkTileParams& p, const Smem& smem) : smem_(smem), c_(p.scale * kLog2e) {}

  // Runs all tiles of a work tile, from the last to the first.
  __device__ __forceinline__ void run(const WorkTile& work, const Rows& rows, TileCounts& counts, Accumulators& a) {
    // WG1 reads the row limits only after it has waited for P_A, so no other barrier is needed.
    if (kWarpgroup == 0) rows.store_row_limits(smem_), __syncwarp();
    int left = __shfl_sync(0xffffffffu, work.tile_end - work.tile_begin, 0);
    a.row_max[0] = a.row_max[1] = a.row_max_ref[0] = a.row_max_ref[1] = -ptx::infinity();
    // Each warpgroup has the row sum of its tiles.
    a.row_sum[0] = a.row_sum[1] = smem_.first_sum();
    ptx::wait_phase(smem_.q_full(), counts.work_tiles() % 2);
    accumulate_ = 0;
    float s[Config::kBlockN / 2];  // S of WG0's tile
    if (kOverlapNextQK && left > 0) {
      qk_gemm(counts.pipe(0), s, [] {});
      ptx::wgmma_wait<0>();
      ptx::fence_operand(s);
    }
    for (; left > 1; left -= 2) {
      const PipelineState first = counts.pipe(0), second = counts.pipe(1);
      counts.advance(2);
      if constexpr (kWarpgroup == 0) {
        wg0_local(first, left == 2, rows, s, a);
        wg0_remote(second, counts.pipe(0), left > 2, s, a);
      } else {
        wg1_both(first, second, left <= 3, rows, a);
      }
    }
    if (left == 1) {
      const PipelineState first = counts.pipe(0);
      counts.advance(1);
      if constexpr (kWarpgroup == 0) {
        wg0_local(first, true, rows, s, a);
      } else {
        if (accumulate_ == 0) {  // there was no pair
          __syncwarp();          // all lanes have seen q_full, whose next phase would hide this one
          release_q();
        }
        wait_v(first);
        pv_gemm_p0(v_descriptor(first), a);
        ptx::wgmma_wait<0>();
        ptx::fence_operand(a.o);
        release(first, 2);
      }
    }
  }

 private:
  // WG0: softmax and PV GEMM of tile A, whose S it has computed.
  __device__ __forceinline__ void wg0_local(PipelineState pipe, bool last, const Rows& rows,
                                            float (&s)[Config::kBlockN / 2], Accumulators& a) {
    float rescale[2];
    if constexpr (!kOverlapNextQK) qk_gemm(pipe, s, [] {});
    const ptx::Descriptor v = v_descriptor(pipe);
    if constexpr (!kOverlapNextQK) {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(s);
    }
    if (last) release_q();
    Softmax::softmax(smem_, c_, TileMask(smem_, pipe.stage), rows, s, rescale, a);
    release(pipe, kKOnly);
    Softmax::accumulate_row_sum(rescale, s, a);
    Softmax::convert_p(s, p_regs_);
    publish_p(p_regs_, a);
    ptx::named_barrier_arrive(p0_ready(), 64);
    rescale_o(rescale, a);
    pv_gemm(p_regs_, v, a);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(a.o);
    release(pipe, 1);
  }
  // WG0: PV GEMM of tile B with WG1's P; and the QK GEMM of the next tile A, if there is one.
  __device__ __forceinline__ void wg0_remote(PipelineState pipe, PipelineState next, bool more,
                                             float (&s)[Config::kBlockN / 2], Accumulators& a) {
    wait_v(pipe);
    const ptx::Descriptor v = v_descriptor(pipe);
    ptx::named_barrier_sync(p1_ready(), 64);
    receive_p(p_regs_, a);
    pv_gemm(p_regs_, v, a);
    if (kOverlapNextQK && more) {
      qk_gemm(next, s, [&] {
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::fence_operand(a.o);
        release(pipe, 1);
      });
      ptx::wgmma_wait<0>();
      ptx::fence_operand(s);
    } else {
      ptx::wgmma_wait<0>();
      ptx::fence_operand(a.o);
      release(pipe, 1);
    }
  }

  // WG1: both tiles, A with WG0's P and B.
  __device__ __forceinline__ void wg1_both(PipelineState first, PipelineState second, bool last, const Rows& rows,
                                           Accumulators& a) {
    float s[Config::kBlockN / 2], rescale[2];
    unsigned p_regs[Softmax::kPRegs];
    wait_v(first);
    const ptx::Descriptor v0 = v_descriptor(first);
    // Dequantized keys arrive late: by then the PV GEMM of tile A is done, and its V is released.
    if constexpr (Config::kDequant) {
      pv_gemm_p0(v0, a);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(a.o);
      release(first, 2);
      qk_gemm(second, s, [] {});
    } else {
      qk_gemm(second, s, [] {});
      // This wait passes at once, because fewer groups are pending. Without it, ptxas adds a wait (C7517) in the branch
      // that rescales O while S is computed, which only some warps of the warpgroup would reach.
      ptx::wgmma_wait<kSlices>();
      ptx::fence_operand(a.o);
      pv_gemm_p0(v0, a);
    }
    const TileMask mask(smem_, second.stage);
    ptx::wgmma_wait<Config::kDequant ? 0 : 1>();
    ptx::fence_operand(s);
    if (last) release_q();
    Softmax::softmax(smem_, c_, mask, rows, s, rescale, a);
    release(second, kKOnly);
    Softmax::accumulate_row_sum(rescale, s, a);  // before S becomes P: registers are scarce while a GEMM runs
    if constexpr (kPvBeforePublish) {
      ptx::fence_operand(s);
      finish_pv_p0(first, a);
    }
    Softmax::convert_p(s, p_regs);
    publish_p(p_regs, a);
    ptx::named_barrier_arrive(p1_ready(), 64);
    if constexpr (!kPvBeforePublish && !Config::kDequant) finish_pv_p0(first, a);
    const ptx::Descriptor v1 = v_descriptor(second);
    rescale_o(rescale, a);
    pv_gemm(p_regs, v1, a);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(a.o);
    release(second, 2);
  }
  // WG1: waits for the PV GEMM of P_A and releases V of tile A.
  __device__ __forceinline__ void finish_pv_p0(PipelineState first, Accumulators& a) const {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(a.o);
    release(first, 2);
  }
  // WG1: issues the PV GEMM of P_A.
  __device__ __forceinline__ void pv_gemm_p0(ptx::Descriptor v, Accumulators& a) {
    ptx::named_barrier_sync(p0_ready(), 64);
    receive_p(p_regs_, a);
    pv_gemm(p_regs_, v, a);
  }

  // overlap: called once the GEMMs of the first half of the channels are issued.
  template <class Overlap>
  __device__ __forceinline__ void qk_gemm(PipelineState pipe, float (&s)[Config::kBlockN / 2],
                                          Overlap&& overlap) const {
    const ptx::Descriptor q = ptx::uniform(ptx::descriptor_k_major(smem_.q())),
                          k = ptx::uniform(ptx::descriptor_k_major(smem_.k(pipe.stage)));
    ptx::fence_operand(s);
    int accumulate = 0;
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
      const int slice = slice_in_order(j, kWarpgroup == 1);
      if (slice_at(slice).count == 0) continue;
      if (has_full_barrier(slice)) {
        ptx::wait_phase(smem_.k_full(pipe.stage, barrier_of(slice)), pipe.phase);
        if (Config::kConsumerFence) ptx::fence_async_proxy();
        ptx::wgmma_fence();
      }
#pragma unroll
      for (int i = 0; i < 4 * slice_at(slice).count; ++i) {
        const int chunk = slice_at(slice).chunk + i / 4, at = chunk * (Config::kChunkBytes >> 4) + i % 4 * ptx::kStepK;
        QkWgmma::ss(s, q + at, k + at, accumulate);
        accumulate = 1;
      }
      if (j == 2) overlap();
    }
    ptx::wgmma_commit();
  }

  // This warpgroup's half of V of a tile.
  __device__ __forceinline__ ptx::Descriptor v_descriptor(PipelineState pipe) const {
    return ptx::uniform(ptx::descriptor_mn_major(
        smem_.k(pipe.stage) + kWarpgroup * (Config::kChunksV / 2) * Config::kChunkBytes, Config::kChunkBytes));
  }
  __device__ __forceinline__ void pv_gemm(unsigned (&p_regs)[Softmax::kPRegs], ptx::Descriptor v, Accumulators& a) {
    ptx::fence_operand(a.o);
    ptx::fence_operand(p_regs);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kChannels / kColumns; ++j) {
        PvWgmma::rs(reinterpret_cast<float(&)[kColumns / 2]>(a.o[j * kColumns / 2]), p_regs + 4 * i,
                    v + (i * 2048 + j * kColumns / 64 * Config::kChunkBytes >> 4), i == 0 ? accumulate_ : 1);
      }
    }
    ptx::wgmma_commit();
    accumulate_ = 1;
  }
  // Waits for V of the other warpgroup's tile. For its own tile the QK GEMM has waited already.
  __device__ __forceinline__ void wait_v(PipelineState pipe) const {
    if (!kSignalByHalf) ptx::wait_phase(smem_.k_full(pipe.stage, 1 + 2 * kWarpgroup), pipe.phase);
    ptx::wait_phase(smem_.k_full(pipe.stage, 2 + 2 * kWarpgroup), pipe.phase);
    if (Config::kConsumerFence) ptx::fence_async_proxy();
  }

  // racecheck reports these stores with receive_p()'s loads: it does not model bar.arrive.
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
  // Loads the other warpgroup's P of a tile and its row_max_ref, and rescales O and row_sum to that.
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
    if (half == kKOnly) __syncwarp();  // all lanes have read the mask
    const unsigned barrier = smem_.k_empty(pipe.stage, half);
    if constexpr (Config::kCluster == 1) {
      if (threadIdx.x % 32 == 0) ptx::arrive(barrier);
    } else {  // both blocks write to the stages of both
      if (threadIdx.x % 32 < Config::kCluster) ptx::arrive_in_cluster(ptx::shared_in_block(barrier, threadIdx.x % 32));
    }
  }
  __device__ __forceinline__ void release_q() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty());
  }

  const Smem& smem_;
  const float c_;
  unsigned p_regs_[Softmax::kPRegs];  // P of tile A
  int accumulate_ = 0;
};

}  // namespace attune::mla
