// SPDX-License-Identifier: Apache-2.0
// The mainloop of a consumer warpgroup: 64 rows of the block against the tiles that the producer loads.
//
//   S_i = Q K_i^T;  m' = max(m, rowmax S_i);  P_i = 2^(c (S_i - m'));  l = l 2^(c (m - m')) + rowsum P_i;
//   O = (O 2^(c (m - m'))) + P_i V_i;   c = scale log2 e
//
// QK GEMM i+1 and PV GEMM i are issued together. Softmax i+1 waits for the QK GEMM only, so O is rescaled one tile
// late. The two warpgroups alternate (FA3's ping-pong): while one computes exponentials, the tensor cores run the
// other's GEMMs. run() calls run_tiles(), which has the loop: run_first_tile(), then run_next_tile(). Their softmax is
// in softmax.cuh; the loops of a softcap are in mainloop_softcap.cuh.
#pragma once

#include "prefill/fp16_queries.cuh"
#include "prefill/qk_gemm.cuh"
#include "prefill/softmax.cuh"
#include "ptx/wgmma.cuh"

namespace attune::prefill {

// What the faster loops of a softcap (mainloop_softcap.cuh) leave to the common one.
struct SoftcapState {
  int retry_end = 0;          // rows that did not start with small products within three tiles hardly will
  bool may_run_small = true;  // until run_softcap_small() has failed once
  // Redo the tile: its softmax was discarded. It keeps its stage, phase and warp scheduler barrier.
  bool redo = false;
  bool holds_barrier = false;  // this warpgroup has passed its warp scheduler barrier already
  __device__ __forceinline__ bool may_try(int i) const { return i >= retry_end && !redo && !holds_barrier; }
};

class Mainloop : Softmax {
 public:
  // kCacheForm: the tile was dequantized or is x-packed.
  template <bool kCacheForm>
  using QkMma = ptx::Wgmma<Config::kKeys, Config::kQkMmaType<kCacheForm>>;
  template <bool kCacheForm>
  using PvMma = typename Conditional<(Config::kXpacked && kCacheForm),
                                ptx::WgmmaBKMajor<Config::kChannels, Config::kPvMmaType<kCacheForm>>,
                                ptx::Wgmma<Config::kChannels, Config::kPvMmaType<kCacheForm>>>::Type;
  template <bool kCacheForm>
  using KDescriptor = typename Conditional<(Config::kXpackedK && kCacheForm),
                                      ptx::NoSwizzleDescriptor<8 * Config::kXpackedKBytes>, ptx::Descriptor>::Type;
  template <bool kCacheForm>
  using VDescriptor =
      typename Conditional<(Config::kXpacked && kCacheForm), ptx::Swizzle32Descriptor, ptx::Descriptor>::Type;

  __device__ __forceinline__ Mainloop(const WorkTileParams& p, const Smem& smem, int group)
      : Softmax(p, smem), group_(group) {
    q_ = q_descriptor(0);
  }

  // Issues the first QK GEMM of a work tile, unless both dense and cache-form tiles may come (see run()).
  __device__ __forceinline__ void start_first_qk(const WorkTile& work, int kv_head, float (&s)[Config::kKeys / 2]) {
    if constexpr (kTwoForms) {
      factor_[0] = factor_[1] = c_;
      ptx::wait_phase(smem_.q_full(), q_pipe_.phase);
    } else {
      if constexpr (Config::kQuantized) {
        ptx::wait_phase(smem_.q_full(), q_pipe_.phase);
        convert_q_to_fp16(work, kv_head);
      }
      const KDescriptor<kSingleForm> k = k_descriptor<kSingleForm>();
      ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
      if constexpr (!Config::kQuantized) ptx::wait_phase(smem_.q_full(), q_pipe_.phase);
      qk_gemm<QkMma<kSingleForm>>(q_, k, s);
    }
    q_pipe_.next<1>();
  }

  // Issues the first QK GEMM of the next work tile while the last PV GEMM of this one runs. If there is no next work
  // tile (any is false), it multiplies stale shared memory and nobody reads the result: wgmma in a conditional branch
  // makes the compiler serialize all products.
  __device__ __forceinline__ void start_next_qk(bool any, float (&s)[Config::kKeys / 2]) {
    const KDescriptor<kSingleForm> k = k_descriptor<kSingleForm>();
    const unsigned past = any ? 0 : 1;  // a phase that has completed
    q_ = q_descriptor(q_pipe_.stage);
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase ^ past);  // its bytes include those of q
    qk_gemm<QkMma<kSingleForm>>(q_, k, s);
    q_pipe_.next<Config::kQueryStages>();
  }

  // This warp's rows of the work tile's q, in the stage before the latest one. Outputs may be staged there.
  __device__ __forceinline__ unsigned old_q() const {
    return smem_.q(q_pipe_.stage) + consumer_thread() / 32 * 16 * 128;
  }
  __device__ __forceinline__ void release_old_q() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty(q_pipe_.stage));
  }

  // Runs all tiles of the work tile whose first QK GEMM has been issued. Warp scheduler barriers alternate across work
  // tiles. overlap() runs during the last PV GEMM.
  template <class Overlap>
  __device__ __forceinline__ void run(const WorkTile& work, int kv_head, const Rows& rows,
                                      float (&s)[Config::kKeys / 2], Accumulators& a, const Overlap& overlap) {
    const Tiles tiles(work.num_cached, work.first_key, work.end_key);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.row_max[h] = -ptx::infinity();
      a.row_max_ref[h] =
          Config::kDeferredMax && rows.token[h] < 0 ? 0.0f : -ptx::infinity();  // padding rows need no max
    }
    a.row_sum[0] = a.row_sum[1] = smem_.first_sum();
    needs_row_max_ = true;
    if constexpr (Rows::kCapped) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a.row_max_limit[h] = rows.token[h] < 0 ? __uint_as_float(0x7fffffffu) : -ptx::infinity();
    }
    float v_scale = 1.0f, first_row_max[2] = {-ptx::infinity(), -ptx::infinity()};  // row_max of the dense tiles
    if constexpr (!kTwoForms) {
      const int begin = work.tile_begin, end = work.tile_end;
      if (Config::kFp16P) v_scale = scale_of(p_, work, kv_head, 0, true).all;
      run_tiles<kSingleForm, true>(work, rows, tiles, begin, end, 0, s, a, overlap);
    } else {
      const int begin = work.tile_begin, end = work.tile_end, middle = max(begin, min(tiles.num_cached_tiles, end));
      if (middle < end) {
        issue_qk<false>(s);
        run_tiles<false, true>(work, rows, tiles, middle, end, 0, s, a, overlap);
      }
      if (begin < middle) {
        if (Config::kFp16P) v_scale = scale_of(p_, work, kv_head, 0, true).all;
        if constexpr (Config::kQuantized) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (kThreadRowMax) a.row_max[h] = quad_max(a.row_max[h]);
            if (middle < end && a.row_max[h] != -ptx::infinity()) first_row_max[h] = scaled_score(a.row_max[h], h);
            a.row_max[h] = -ptx::infinity();
          }
          ptx::named_barrier_sync(kGroupBarriers + group_, 128);  // all warps have read q in its first type
          convert_q_to_fp16(work, kv_head);
        }
        if (Config::kFp16P && middle < end) divide_o_by_v_scale(v_scale, a);
        issue_qk<true>(s);
        run_tiles<true, false>(work, rows, tiles, begin, middle, middle < end ? 1 : 0, s, a, overlap);
      }
    }
    if constexpr (!Config::kOverlapNextQK) {
      reduce_row_sum(a);
      finalize(a, v_scale, first_row_max);
    }
  }

  // Sums row_sum over the quad of lanes that share a row.
  __device__ __forceinline__ static void reduce_row_sum(Accumulators& a) {
#pragma unroll
    for (float& row_sum : a.row_sum) row_sum = quad_sum(row_sum);
  }
  // Makes row_max a score in base 2, row_sum relative to it, and sets o_scale. O itself is only multiplied by v_scale,
  // if there is one.
  __device__ __forceinline__ void finalize(Accumulators& a, float v_scale = 1.0f,
                                           const float* first_row_max = nullptr) const {
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if ((Config::kDeferredMax || Config::kDeferredMaxSoftcap) && p_.max_logits == nullptr) {
        a.row_max[h] = a.row_max_ref[h];
      } else {
        if (kThreadRowMax) a.row_max[h] = quad_max(a.row_max[h]);
        if (a.row_max[h] != -ptx::infinity()) a.row_max[h] = scaled_score(a.row_max[h], h);
      }
      if constexpr (kTwoForms && Config::kQuantized) a.row_max[h] = fmaxf(a.row_max[h], first_row_max[h]);
      rescale[h] = a.row_max[h] == a.row_max_ref[h] ? 1.0f : ptx::exp2_approx(a.row_max_ref[h] - a.row_max[h]);
      a.o_scale[h] = Config::kFp16P ? 1.0f : rescale[h];
      a.row_sum[h] *= rescale[h];
    }
    if constexpr (Config::kFp16P) {
      const float with_scale[2] = {rescale[0] * v_scale, rescale[1] * v_scale};
      rescale_o(with_scale, a.o);
    }
  }

 private:
  __device__ __forceinline__ ptx::Descriptor q_descriptor(int stage) const {
    return ptx::uniform(ptx::descriptor_k_major(smem_.q(stage) + group_ * 64 * 128));
  }

  // If the first tile has at most half of its keys, only the first half of the S registers is used.
  static constexpr bool kHalfFirstTile = Config::kPrecomputeMask;
  static constexpr int kHalf = Config::kKeys / (kHalfFirstTile ? 4 : 2);  // registers
  // Whether the last tile before `end` has no key in its second half.
  __device__ __forceinline__ static bool ends_in_half(const WorkTile& work, int end) {
    const int keys = work.end_key - work.first_key - (end - 1) * Config::kKeys;
    return __shfl_sync(0xffffffffu, keys, 0) <= Config::kKeys / 2;
  }

  // all tiles have this form, unless kTwoForms
  static constexpr bool kSingleForm = Config::kQuantized || Config::kXpacked;

  // What the tiles of one call of run_tiles() share.
  struct TileLoop {
    const WorkTile& work;
    const Rows& rows;
    const Tiles& tiles;
    const TileSpan whole;  // tiles without a mask
    unsigned (&p_regs)[Config::kPRegs];
    float (&s)[Config::kKeys / 2];
    Accumulators& a;
    int accumulate;  // 0: O is empty
    int begin, end;
    bool last_use;  // of q
    __device__ __forceinline__ TileSpan unmasked() const {
      return kManyRegisters ? whole : rows.whole_tiles(work, tiles);
    }
  };

  // Runs tiles [first, tile_end), the last tile first. kCacheForm: they were dequantized or are x-packed. kFirst: O is
  // empty; otherwise `accumulate` says whether it is.
  template <bool kCacheForm, bool kFirst, class Overlap>
  __device__ __forceinline__ void run_tiles(const WorkTile& work, const Rows& rows, const Tiles& tiles, int first,
                                            int tile_end, int accumulate, float (&s)[Config::kKeys / 2],
                                            Accumulators& a, const Overlap& overlap) {
    unsigned p_regs[Config::kPRegs];
    TileLoop t{work, rows, tiles, rows.whole_tiles(work, tiles), p_regs, s, a, accumulate, 0, 0, false};
    run_first_tile<kCacheForm, kFirst>(first, tile_end, t);
    if constexpr (Config::kDeferredMaxSoftcap) {
      run_softcap_tiles<kCacheForm>(t);
    } else {
      for (int i = t.end - 2; i >= t.begin; --i) run_next_tile<kCacheForm>(i, t);
    }
    const VDescriptor<kCacheForm> v = v_descriptor<kCacheForm>();
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    pv_gemm<kCacheForm>(p_regs, v, t.accumulate, a.o);
    if (t.last_use) overlap();
    ptx::wgmma_wait<Config::kOverlapNextQK ? 1 : 0>();  // overlap() may have issued a QK GEMM, which keeps running
    ptx::fence_operand(a.o);
    release_v();
  }

  // The softmax of tile tile_end - 1, whose QK GEMM has been issued.
  template <bool kCacheForm, bool kFirst>
  __device__ __forceinline__ void run_first_tile(int first, int tile_end, TileLoop& t) {
    Accumulators& a = t.a;
    auto& s = t.s;
    auto& p_regs = t.p_regs;
    float rescale[2];
    // Most first tiles are at an edge. Their mask is computed during the QK GEMM.
    const Rows::VisibleKeys mask =
        Config::kPrecomputeMask ? t.rows.visible_keys(p_, tile_at(t.work, t.tiles, tile_end - 1)) : Rows::VisibleKeys{};
    t.begin = __shfl_sync(0xffffffffu, first, 0), t.end = __shfl_sync(0xffffffffu, tile_end, 0);
    const bool half = kHalfFirstTile && ends_in_half(t.work, t.end);
    const int last = t.end - 1;
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
    // Warp-uniform values go to uniform registers. With two forms of tiles the compiler does not see that they are
    // uniform.
    if constexpr (!kTwoForms) k_pipe_ = uniform(k_pipe_), v_pipe_ = uniform(v_pipe_);
    if constexpr (Config::kDeferredMaxSoftcap) q_pipe_ = uniform(q_pipe_);
    t.last_use = !kTwoForms || kCacheForm || t.begin == __shfl_sync(0xffffffffu, t.work.tile_begin, 0);
    if (t.end - t.begin == 1 && t.last_use) release_q();
    if (!Config::kCached) release_k();
    if constexpr (kHalfFirstTile) {
      if (half) {
        online_softmax<kCacheForm, kHalf, true>(t.rows, t.work, t.tiles, last, t.whole, false, s, rescale, a, &mask);
        reduce_p(kReduceTail<kHalf>, kHalf, s, a);
        pack_p<kCacheForm, 0, kHalf>(s, p_regs);
#pragma unroll
        for (int j = kHalf / 2; j < Config::kKeys / 4; ++j) p_regs[j] = 0;
      } else {
        online_softmax<kCacheForm, kScores, true>(t.rows, t.work, t.tiles, last, t.whole, false, s, rescale, a, &mask);
        reduce_p(kReduceTail<kScores>, kScores, s, a);
        pack_p<kCacheForm>(s, p_regs);
      }
    } else {
      const bool rescales = online_softmax<kCacheForm>(t.rows, t.work, t.tiles, last, t.unmasked(),
                                                       all_nonnegative(a.row_max), s, rescale, a);
      if (!kFirst && rescales) rescale_o(rescale, a.o);
      reduce_p(kReduceTail<kScores>, kScores, s, a);
      scale_p<kCacheForm>(t.tiles.is_cached(last), s);
      pack_p<kCacheForm>(s, p_regs);
    }
    if (kReleaseKAfterPack<kCacheForm>) release_k();
  }

  // QK GEMM and softmax of tile i, beside the PV GEMM of tile i + 1.
  template <bool kCacheForm>
  __device__ __forceinline__ void run_next_tile(int i, TileLoop& t, SoftcapState softcap = {}) {
    Accumulators& a = t.a;
    auto& s = t.s;
    auto& p_regs = t.p_regs;
    float rescale[2];
    const KDescriptor<kCacheForm> k = k_descriptor<kCacheForm>();
    const VDescriptor<kCacheForm> v = v_descriptor<kCacheForm>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    if (!softcap.redo && !softcap.holds_barrier) warp_scheduler_sync(group_);
    qk_gemm<QkMma<kCacheForm>>(q_, k, s);
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    pv_gemm<kCacheForm>(p_regs, v, t.accumulate, a.o);
    t.accumulate = 1;
    if (!softcap.redo) warp_scheduler_arrive(group_);
    const bool nonnegative = !Config::kDeferredMax && all_nonnegative(a.row_max);
    ptx::wgmma_wait<1>();
    ptx::fence_operand(s);
    if (i == t.begin && t.last_use) release_q();
    if (!Config::kCached) release_k();
    const TileSpan unmasked = t.unmasked();
    if constexpr (Config::kDeferredMax) {
      const auto last = [&] {
        ptx::wgmma_wait<0>();
        ptx::fence_operand(a.o);
        release_v();
      };
      const bool rescales =
          online_softmax<kCacheForm>(t.rows, t.work, t.tiles, i, unmasked, nonnegative, s, rescale, a, nullptr, last,
                                     [&] { pack_p<kCacheForm, 0, kLastGroup>(s, p_regs); });
      reduce_p<true>(kLastGroup, kScores, s, a);
      pack_p<kCacheForm, kLastGroup>(s, p_regs);
      if (__any_sync(0xffffffffu, p_max_bits_ > bits_of(kMaxP)) || rescales) {
        raise_row_max_ref<kCacheForm>(s, rescale, a, p_regs);
        rescale_o(rescale, a.o);
      }
    } else {
      const bool rescales =
          online_softmax<kCacheForm>(t.rows, t.work, t.tiles, i, unmasked, nonnegative, s, rescale, a);
      ptx::wgmma_wait<0>();  // not in the branch, because a wait for wgmma is for the whole warpgroup
      ptx::fence_operand(a.o);
      if (rescales) rescale_o(rescale, a.o);
      if (!softcap.redo) release_v();
      reduce_p(kReduceTail<kScores>, kScores, s, a);
      scale_p<kCacheForm>(t.tiles.is_cached(i), s);
      pack_p<kCacheForm>(s, p_regs);
    }
    if (kReleaseKAfterPack<kCacheForm>) release_k();
  }

  // The loop of a softcap: tiles in one of the faster loops while these take them, else by run_next_tile().
  template <bool kCacheForm>
  __device__ __forceinline__ void run_softcap_tiles(TileLoop& t);
  // Runs tiles from i on in one of the faster loops, where one takes them. Returns the tile that is next.
  template <bool kCacheForm>
  __device__ __forceinline__ int run_softcap(int i, TileLoop& t, SoftcapState& state);
  // Runs tiles from i on with softmax_softcap_deferred() while their scores stay in its range. Returns begin - 1; or
  // sets `redo` and returns the tile whose softmax was discarded.
  template <bool kCacheForm>
  __device__ __forceinline__ int run_softcap_deferred(int i, TileLoop& t, bool& redo);
  // The same with softmax_softcap_small(), for unmasked tiles from i down to `least`. Tests whether a tile's scores
  // were in range after it has issued the next QK GEMM, when the warp scheduler barrier has synchronised the warpgroup
  // anyway. If a test fails it sets `holds_barrier`.
  template <bool kCacheForm>
  __device__ __forceinline__ int run_softcap_small(int least, int i, const int (&limit)[2], TileLoop& t, bool& redo,
                                                   bool& holds_barrier);

  __device__ __forceinline__ bool any_of_group(bool x) const {
    return __any_sync(0xffffffffu,
                      ptx::named_barrier_any(kGroupBarriers + group_, 128, x));  // warp-uniform for the compiler
  }

  __device__ __forceinline__ static PipelineState uniform(PipelineState x) {
    return {__shfl_sync(0xffffffffu, x.stage, 0), __shfl_sync(0xffffffffu, x.phase, 0)};
  }
  template <bool kCacheForm>
  __device__ __forceinline__ void issue_qk(float (&s)[Config::kKeys / 2]) {
    const KDescriptor<kCacheForm> k = k_descriptor<kCacheForm>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    qk_gemm<QkMma<kCacheForm>>(q_, k, s);
  }

  // Converts q to fp16, which changes the scale of the scores.
  __device__ __forceinline__ void convert_q_to_fp16(const WorkTile& work, int kv_head) {
    const float k_scale = Config::kFp16P ? scale_of(p_, work, kv_head, 0, false).all : 1.0f;
    Fp16Queries::convert(smem_, group_, k_scale, factor_);
    if constexpr (Rows::kPlain) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor_[h] *= c_;
        if (factor_[h] == 0.0f) factor_[h] = __uint_as_float(1);  // avoids 0 * -inf; products are below 2^41
      }
    }
  }
  // Divides O by v_scale, because dequantized tiles come next: their P is fp16, and the sum is multiplied by v_scale at
  // the end. A scale without an inverse gives NaN, and the row is recomputed (recompute.cuh).
  __device__ __forceinline__ static void divide_o_by_v_scale(float v_scale, Accumulators& a) {
    constexpr float kUp = static_cast<float>(1 << static_cast<int>(kMaxOffset<true>));
    const float size = fabsf(v_scale);
    const float over =
        size >= 0x1p-64f && size <= 0x1p64f ? kUp * ptx::reciprocal_approx(v_scale) : __uint_as_float(0x7fffffffu);
    rescale_o({over, over}, a.o);
#pragma unroll
    for (int h = 0; h < 2; ++h) a.row_sum[h] *= kUp, a.row_max_ref[h] -= kMaxOffset<true>;
  }

  // Descriptors of the next tile. They are made well before their use, because the shuffle has latency.
  template <bool kCacheForm>
  __device__ __forceinline__ KDescriptor<kCacheForm> k_descriptor() const {
    if constexpr (Config::kXpackedK && kCacheForm) {
      return ptx::uniform(ptx::descriptor_no_swizzle<8 * Config::kXpackedKBytes>(smem_.k(k_pipe_.stage)));
    } else {
      return ptx::uniform(ptx::descriptor_k_major(smem_.k(k_pipe_.stage)));
    }
  }
  template <bool kCacheForm>
  __device__ __forceinline__ VDescriptor<kCacheForm> v_descriptor() const {
    if constexpr (Config::kXpacked && kCacheForm) {
      return ptx::uniform(ptx::descriptor_swizzle_32b(smem_.v(v_pipe_.stage)));
    } else {
      return ptx::uniform(ptx::descriptor_mn_major(smem_.v(v_pipe_.stage), Config::kKeys * 128));
    }
  }

  template <bool kCacheForm>
  __device__ __forceinline__ void pv_gemm(unsigned (&p_regs)[Config::kPRegs], VDescriptor<kCacheForm> v, int accumulate,
                                          float (&o)[Config::kChannels / 2]) const {
    constexpr int kNumParts = kCacheForm ? Config::kPParts : 1;
    constexpr int kStep = Config::kXpacked && kCacheForm ? 16 * Config::kXpackedVBytes : 16 * 128;
    ptx::fence_operand(o);
    ptx::fence_operand(p_regs);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kNumParts * Config::kPvSteps; ++i)
      PvMma<kCacheForm>::rs(o, p_regs + i % kNumParts * (Config::kKeys / 4) + i / kNumParts * 4,
                            v + i / kNumParts * (kStep >> 4), i == 0 ? accumulate : 1);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void release_q() const {
    if (Config::kStoreOutThroughQ) return;  // released after the epilogue's stores
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty(Config::kOverlapNextQK ? q_pipe_.stage ^ 1 : 0));
  }
  __device__ __forceinline__ void release_v() {
    release_stage(smem_.v_empty(v_pipe_.stage));
    v_pipe_.next<Config::kValueStages>();
  }

  const int group_;
  ptx::Descriptor q_;
  PipelineState q_pipe_, v_pipe_;
};

}  // namespace attune::prefill
