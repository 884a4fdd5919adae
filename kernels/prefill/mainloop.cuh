// SPDX-License-Identifier: Apache-2.0
// The math of a warpgroup: 64 rows of the block against the tiles that the producer brings.
//
//   S_i = Q K_i^T;  m' = max(m, rowmax S_i);  P_i = 2^(c (S_i - m'));  l = l 2^(c (m - m')) + rowsum P_i;
//   O = (O 2^(c (m - m'))) + P_i V_i;   c = scale log2 e
//
// The products of S_i+1 and of P_i V_i run while the softmax of S_i+1 waits for the former only, so O is rescaled one
// tile late. The two groups take turns at issuing products: while one computes exponentials the tensor cores have the
// other's.
#pragma once

#include "prefill/fp16_queries.cuh"
#include "prefill/qk_gemm.cuh"
#include "prefill/softmax.cuh"
#include "ptx/wgmma_along_k.cuh"

namespace attune::prefill {

class Mainloop : Softmax {
 public:
  // kCodes: of tiles that were codes, or are x-packed.
  template <bool kCodes>
  using KeysProduct = ptx::Product<Config::kKeys, Config::kKeysProduct<kCodes>>;
  template <bool kCodes>
  using ValuesProduct =
      typename Choice<(Config::kXpacked && kCodes),
                      ptx::ProductAlongK<Config::kChannels, Config::kValuesProduct<kCodes>>,
                      ptx::Product<Config::kChannels, Config::kValuesProduct<kCodes>>>::Type;
  template <bool kCodes>
  using Keys = typename Choice<(Config::kXpackedK && kCodes), ptx::PieceDescriptor<8 * Config::kXpackedKBytes>,
                               ptx::Descriptor>::Type;
  template <bool kCodes>
  using Values = typename Choice<(Config::kXpacked && kCodes), ptx::NarrowDescriptor, ptx::Descriptor>::Type;

  __device__ __forceinline__ Mainloop(const PrefillParams& p, const Smem& smem, int group)
      : Softmax(p, smem), group_(group) {
    q_ = queries(0);
  }

  // Issues the first product of a work tile, unless tiles of codes may come after others: those begin by themselves.
  __device__ __forceinline__ void start(const WorkTile& work, int kv_head, float (&s)[Config::kKeys / 2]) {
    if constexpr (kTwoKinds) {
      factor_[0] = factor_[1] = c_;
      ptx::wait_phase(smem_.q_full(), q_pipe_.phase);
    } else {
      if constexpr (Config::kConverts) {
        ptx::wait_phase(smem_.q_full(), q_pipe_.phase);
        halve_queries(work, kv_head);
      }
      const Keys<kOwnForm> k = keys<kOwnForm>();
      ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
      if constexpr (!Config::kConverts) ptx::wait_phase(smem_.q_full(), q_pipe_.phase);
      multiply_keys<KeysProduct<kOwnForm>>(q_, k, s);
    }
    q_pipe_.next<1>();
  }

  // The same beside the last product of the work tile before. Without another one what lies in shared memory is
  // multiplied, unseen: the compiler waits for every product that only some ways through a loop issue.
  __device__ __forceinline__ void start_early(bool any, float (&s)[Config::kKeys / 2]) {
    const Keys<kOwnForm> k = keys<kOwnForm>();
    const unsigned past = any ? 0 : 1;  // a phase that has ended
    q_ = queries(q_pipe_.stage);
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase ^ past);  // q's, too
    multiply_keys<KeysProduct<kOwnForm>>(q_, k, s);
    q_pipe_.next<Config::kQueryStages>();
  }

  // Of the work tile before the one that was started last: this warp's rows of q, in whose place outputs may be.
  __device__ __forceinline__ unsigned old_queries() const {
    return smem_.q(q_pipe_.stage) + math_thread() / 32 * 16 * 128;
  }
  __device__ __forceinline__ void release_old_queries() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty(q_pipe_.stage));
  }

  // All tiles of the work tile that has been started. Turns count tiles over all work tiles. beside() runs beside the
  // last product.
  template <class Beside>
  __device__ __forceinline__ void run(const WorkTile& work, int kv_head, const Rows& rows,
                                      float (&s)[Config::kKeys / 2], Accumulators& a, const Beside& beside) {
    const Line line(work.num_cached, work.first_key, work.end_key);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.max[h] = -ptx::infinity();
      a.reference[h] = Config::kLate && rows.token[h] < 0 ? 0.0f : -ptx::infinity();  // absent ones wait for nothing
    }
    a.sum[0] = a.sum[1] = smem_.first_sum();
    takes_maxima_ = true;
    if constexpr (Rows::kCapped) {
#pragma unroll
      for (int h = 0; h < 2; ++h) a.limit[h] = rows.token[h] < 0 ? __uint_as_float(0x7fffffffu) : -ptx::infinity();
    }
    float v_scale = 1.0f, highest[2] = {-ptx::infinity(), -ptx::infinity()};  // of the first kind of tiles
    if constexpr (!kTwoKinds) {
      const int begin = work.tile_begin, end = work.tile_end;
      if (Config::kHalfWeights) v_scale = scale_of(p_, work, kv_head, 0, true);
      run_tiles<kOwnForm, true>(work, rows, line, begin, end, 0, s, a, beside);
    } else {
      const int begin = work.tile_begin, end = work.tile_end, middle = max(begin, min(line.num_cached_tiles, end));
      if (middle < end) {
        start_keys<false>(s);
        run_tiles<false, true>(work, rows, line, middle, end, 0, s, a, beside);
      }
      if (begin < middle) {
        if (Config::kHalfWeights) v_scale = scale_of(p_, work, kv_head, 0, true);
        if constexpr (Config::kConverts) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (kOwnMaxima) a.max[h] = max_of_row(a.max[h]);
            if (middle < end && a.max[h] != -ptx::infinity()) highest[h] = level_of(a.max[h], h);
            a.max[h] = -ptx::infinity();
          }
          ptx::sync_some(kGroupBarrier + group_, 128);  // all warps are done with q as it was
          halve_queries(work, kv_head);
        }
        if (Config::kHalfWeights && middle < end) divide_values(v_scale, a);
        start_keys<true>(s);
        run_tiles<true, false>(work, rows, line, begin, middle, middle < end ? 1 : 0, s, a, beside);
      }
    }
    if constexpr (!Config::kEarly) {
      add_lanes(a);
      conclude(a, v_scale, highest);
    }
  }

  // Sums of whole rows.
  __device__ __forceinline__ static void add_lanes(Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 1);
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 2);
    }
  }
  // Maxima in base 2, sums against them, and what O is to be multiplied with: nothing of O, but for its scale.
  __device__ __forceinline__ void conclude(Accumulators& a, float v_scale = 1.0f,
                                           const float* highest = nullptr) const {
    float lowered[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if ((Config::kLate || Config::kLateCaps) && p_.max_logits == nullptr) {
        a.max[h] = a.reference[h];
      } else {
        if (kOwnMaxima) a.max[h] = max_of_row(a.max[h]);
        if (a.max[h] != -ptx::infinity()) a.max[h] = level_of(a.max[h], h);
      }
      if constexpr (kTwoKinds && Config::kConverts) a.max[h] = fmaxf(a.max[h], highest[h]);
      lowered[h] = a.max[h] == a.reference[h] ? 1.0f : ptx::exp2_approx(a.reference[h] - a.max[h]);
      a.factor[h] = Config::kHalfWeights ? 1.0f : lowered[h];
      a.sum[h] *= lowered[h];
    }
    if constexpr (Config::kHalfWeights) {
      const float with_scale[2] = {lowered[0] * v_scale, lowered[1] * v_scale};
      rescale(with_scale, a.o);
    }
  }

 private:
  __device__ __forceinline__ ptx::Descriptor queries(int stage) const {
    return ptx::uniform(ptx::descriptor_k_major(smem_.q(stage) + group_ * 64 * 128));
  }

  // The first tile may have so few keys that the first half of the registers has all products that count.
  static constexpr bool kHalves = Config::kFarsighted;
  static constexpr int kHalf = Config::kKeys / (kHalves ? 4 : 2);  // registers
  // Whether the tile before tile `end` has no key in its second half.
  __device__ __forceinline__ static bool ends_in_half(const WorkTile& work, int end) {
    const int keys = work.end_key - work.first_key - (end - 1) * Config::kKeys;
    return __shfl_sync(0xffffffffu, keys, 0) <= Config::kKeys / 2;
  }

  static constexpr bool kOwnForm = Config::kConverts || Config::kXpacked;  // of the tiles, where there is one kind

  // Tiles [first, behind), the last first. kCodes: they were codes, or are x-packed. kFirst: nothing came before; else
  // `accumulate` says so.
  template <bool kCodes, bool kFirst, class Beside>
  __device__ __forceinline__ void run_tiles(const WorkTile& work, const Rows& rows, const Line& line,
                                            int first, int behind, int accumulate, float (&s)[Config::kKeys / 2],
                                            Accumulators& a, const Beside& beside) {
    const Run whole = rows.whole_tiles(work, line);
    unsigned weights[Config::kWeights];
    float lowered[2];
    bool lowers = false;

    // Most first tiles are edges; what is computed here the product hides.
    const Rows::View early = Config::kFarsighted ? rows.view(p_, tile_at(work, line, behind - 1)) : Rows::View{};
    const int begin = __shfl_sync(0xffffffffu, first, 0), end = __shfl_sync(0xffffffffu, behind, 0);
    const bool half = kHalves && ends_in_half(work, end);
    ptx::wait_products<0>();
    ptx::pin(s);
    // What the compiler knows to be a warp's takes no registers of lanes; two kinds of tiles keep it from that.
    if constexpr (!kTwoKinds) k_pipe_ = uniform(k_pipe_), v_pipe_ = uniform(v_pipe_);
    if constexpr (Config::kLateCaps) q_pipe_ = uniform(q_pipe_);
    const bool last_use = !kTwoKinds || kCodes || begin == __shfl_sync(0xffffffffu, work.tile_begin, 0);  // of q
    if (end - begin == 1 && last_use) release_queries();
    if (!Config::kCached) release_keys();
    if constexpr (kHalves) {
      if (half) {
        weigh<kCodes, kHalf, true>(rows, work, line, end - 1, whole, false, s, lowered, a, &early);
        take(kTakenLast<kHalf>, kHalf, s, a);
        pack<kCodes, 0, kHalf>(s, weights);
#pragma unroll
        for (int j = kHalf / 2; j < Config::kKeys / 4; ++j) weights[j] = 0;
      } else {
        weigh<kCodes, kKeysOfThread, true>(rows, work, line, end - 1, whole, false, s, lowered, a, &early);
        take(kTakenLast<kKeysOfThread>, kKeysOfThread, s, a);
        pack<kCodes>(s, weights);
      }
    } else {
      lowers = weigh<kCodes>(rows, work, line, end - 1, kManyRegisters ? whole : rows.whole_tiles(work, line),
                             all_high(a.max), s, lowered, a);
    }
    if (!kFirst && lowers) rescale(lowered, a.o);
    if constexpr (!kHalves) {
      take(kTakenLast<kKeysOfThread>, kKeysOfThread, s, a);
      scale_weights<kCodes>(s);
      pack<kCodes>(s, weights);
    }
    if (kReleasesLate<kCodes>) release_keys();

    int patience = end - 4;  // what does not show in three tiles hardly will
    bool small = true;       // run_small_caps() has not been left
    bool again = false;  // the tile before is the next one again: it weighed nothing, and keeps its stages and its turn
    bool held = false;   // the turn of the one after it has begun
    for (int i = end - 2; i >= begin; --i) {
      if constexpr (Config::kLateCaps) {
        // All warps of the group, or none: they multiply together.
        if (i >= patience && !again && !held && p_.max_logits == nullptr) {
          int limit[2];
          find_limits(a, limit);
          // What decides is the warp's for the compiler, or each border of a group of exponentials costs 40 clocks.
          const Run seen = {__shfl_sync(0xffffffffu, whole.begin, 0), __shfl_sync(0xffffffffu, whole.end, 0)};
          if (math_thread() % 128 == 0) ptx::store_shared_two(smem_.over_cap(group_, 0), 0, 0);
          if (small && seen.has(i) && !any_of_group(limit[0] < 0 || limit[1] < 0)) {
            i = run_small_caps<kCodes>(max(begin, seen.begin), i, begin, last_use, limit, accumulate, again, held,
                                       weights, s, a);
            i = __shfl_sync(0xffffffffu, i, 0);
            again = __any_sync(0xffffffffu, again), held = __any_sync(0xffffffffu, held);
            small = false, patience = i - 3;
          } else if (!any_of_group(!may_be_late(a))) {
            i = run_late_caps<kCodes>(work, rows, line, whole, i, begin, last_use, accumulate, again, weights, s, a);
          }
          if (i < begin) break;
        }
      }
      const Keys<kCodes> k = keys<kCodes>();
      const Values<kCodes> v = values<kCodes>();
      ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
      if (!Config::kLateCaps || !(again || held)) ptx::sync_some(kWarpSchedulerBarrier + group_, Config::kMathThreads);
      multiply_keys<KeysProduct<kCodes>>(q_, k, s);
      ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
      multiply_values<kCodes>(weights, v, accumulate, a.o);
      accumulate = 1;
      if (!Config::kLateCaps || !again)
        ptx::arrive_some(kWarpSchedulerBarrier + 1 - group_, Config::kMathThreads), held = false;
      const bool high = !Config::kLate && all_high(a.max);
      ptx::wait_products<1>();
      ptx::pin(s);
      if (i == begin && last_use) release_queries();
      if (!Config::kCached) release_keys();
      const Run& unmasked = kManyRegisters ? whole : rows.whole_tiles(work, line);
      if constexpr (Config::kLate) {
        const auto last = [&] {
          ptx::wait_products<0>();
          ptx::pin(a.o);
          release_values();
        };
        lowers = weigh<kCodes>(rows, work, line, i, unmasked, high, s, lowered, a, nullptr, last,
                               [&] { pack<kCodes, 0, kBeforeLast>(s, weights); });
        take<true>(kBeforeLast, kKeysOfThread, s, a);
        pack<kCodes, kBeforeLast>(s, weights);
        if (__any_sync(0xffffffffu, top_ > bits_of(kLargest)) || lowers) {
          lower<kCodes>(s, lowered, a, weights);
          rescale(lowered, a.o);
        }
      } else {
        const bool rises = weigh<kCodes>(rows, work, line, i, unmasked, high, s, lowered, a);
        ptx::wait_products<0>();  // by all warps in one place: each may lower or not
        ptx::pin(a.o);
        if (rises) rescale(lowered, a.o);
        if (!Config::kLateCaps || !again) release_values();
        again = false;
        take(kTakenLast<kKeysOfThread>, kKeysOfThread, s, a);
        scale_weights<kCodes>(s);
        pack<kCodes>(s, weights);
      }
      if (kReleasesLate<kCodes>) release_keys();
    }
    const Values<kCodes> v = values<kCodes>();
    ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
    multiply_values<kCodes>(weights, v, accumulate, a.o);
    if (last_use) beside();
    ptx::wait_products<Config::kEarly ? 1 : 0>();  // what beside() has issued runs on
    ptx::pin(a.o);
    release_values();
  }

  // Tiles from i on while weigh_late_caps() may have them. Returns that which it may not: it has weighed nothing, and
  // is to be multiplied again (`again`); or begin - 1.
  template <bool kCodes>
  __device__ __forceinline__ int run_late_caps(const WorkTile& work, const Rows& rows, const Line& line,
                                               const Run& whole, int i, int begin, bool last_use, int& accumulate,
                                               bool& again, unsigned (&weights)[Config::kWeights],
                                               float (&s)[Config::kKeys / 2], Accumulators& a) {
    const float edge = Rows::score_of(p_, p_.cap_short.high, {}, 0, 0.0f);
    for (; i >= begin; --i) {
      const Keys<kCodes> k = keys<kCodes>();
      const Values<kCodes> v = values<kCodes>();
      ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
      ptx::sync_some(kWarpSchedulerBarrier + group_, Config::kMathThreads);
      multiply_keys<KeysProduct<kCodes>>(q_, k, s);
      ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
      multiply_values<kCodes>(weights, v, accumulate, a.o);
      accumulate = 1;
      ptx::arrive_some(kWarpSchedulerBarrier + 1 - group_, Config::kMathThreads);
      ptx::wait_products<1>();
      ptx::pin(s);
      hide_edge(rows, work, line, i, whole, s);
      const float sum[2] = {a.sum[0], a.sum[1]};
      const auto last = [&] {
        ptx::wait_products<0>();
        ptx::pin(a.o);
        release_values();
      };
      weigh_late_caps(i, s, a, last, [&] { pack<kCodes, 0, kBeforeLast>(s, weights); });
      add_up<true>(kKeysOfThread - kLag, kKeysOfThread, s, a);
      pack<kCodes, kBeforeLast>(s, weights);
      const float added[2] = {a.sum[0] - sum[0], a.sum[1] - sum[1]};
      ptx::pin(weights);  // else they are packed behind the vote
      again = any_of_group(may_be_beyond(added, edge, a));
      if (again) {
        a.sum[0] = sum[0], a.sum[1] = sum[1];
#pragma unroll
        for (int j = 0; j < Config::kKeys / 4; ++j) weights[j] = ptx::kept(0);
        break;
      }
      if (__any_sync(0xffffffffu, added[0] > kLargest || added[1] > kLargest)) {
        float lowered[2] = {1.0f, 1.0f};
        lower<kCodes>(s, lowered, a, weights);
        rescale(lowered, a.o);
      }
      release_keys();
      if (i == begin && last_use) release_queries();
    }
    return i;
  }

  // The same with weigh_small_caps(), of tiles from i to `least`, without hidden keys. Whether a tile's products were
  // beyond is asked when the next one's are under way: the group has met at its turn by then. Then that turn is `held`.
  template <bool kCodes>
  __device__ __forceinline__ int run_small_caps(int least, int i, int begin, bool last_use, const int (&limit)[2],
                                                int& accumulate, bool& again, bool& held,
                                                unsigned (&weights)[Config::kWeights], float (&s)[Config::kKeys / 2],
                                                Accumulators& a) {
    float sum[2] = {a.sum[0], a.sum[1]};  // before the tile that has not been asked for yet
    PipelineState asked = k_pipe_;                 // its keys
    bool any = false, beyond = false;
    const auto forget = [&] {
      a.sum[0] = sum[0], a.sum[1] = sum[1];
#pragma unroll
      for (int j = 0; j < Config::kKeys / 4; ++j) weights[j] = ptx::kept(0);
      k_pipe_ = asked;
      again = true;
    };
    const auto release_asked = [&] {
      if (any && threadIdx.x % 32 == 0) ptx::arrive(smem_.k_empty(asked.stage));
    };
    for (; i >= least; --i) {
      const Keys<kCodes> k = keys<kCodes>();
      const Values<kCodes> v = values<kCodes>();
      ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
      if (Config::kCached && __any_sync(0xffffffffu, ptx::load_shared_u32(smem_.mask(k_pipe_.stage)) != 0)) break;
      ptx::sync_some(kWarpSchedulerBarrier + group_, Config::kMathThreads);
      multiply_keys<KeysProduct<kCodes>>(q_, k, s);
      ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
      if (__any_sync(0xffffffffu, ptx::load_shared_u32(smem_.over_cap(group_, i + 1)) != 0)) {
        ptx::wait_products<0>();
        ptx::pin(s);
        forget();
        held = true;
        ptx::sync_some(kGroupBarrier + group_, 128);  // all have read it, before it may be cleared
        return i + 1;
      }
      release_asked();
      multiply_values<kCodes>(weights, v, accumulate, a.o);
      accumulate = 1;
      ptx::arrive_some(kWarpSchedulerBarrier + 1 - group_, Config::kMathThreads);
      ptx::wait_products<1>();
      ptx::pin(s);
      sum[0] = a.sum[0], sum[1] = a.sum[1];
      const auto last = [&] {
        ptx::wait_products<0>();
        ptx::pin(a.o);
        release_values();
      };
      beyond = weigh_small_caps(i, s, limit, a, last, [&] { pack<kCodes, 0, kBeforeLast>(s, weights); });
      add_up<true>(kKeysOfThread - kLag, kKeysOfThread, s, a);
      pack<kCodes, kBeforeLast>(s, weights);
      // racecheck reports this beside the load above: it does not follow arrive_some(), for which the group waits.
      if (beyond) ptx::store_shared_u32(smem_.over_cap(group_, i), 1);
      asked = k_pipe_, any = true;
      k_pipe_.next<Config::kStages>();
    }
    if (!any) return i;
    if (any_of_group(beyond)) {
      forget();
      return i + 1;
    }
    release_asked();
    if (i < begin && last_use) release_queries();
    return i;
  }

  __device__ __forceinline__ bool any_of_group(bool x) const {
    return __any_sync(0xffffffffu, ptx::any_of_some(kGroupBarrier + group_, 128, x));  // the compiler is to know
  }

  __device__ __forceinline__ static PipelineState uniform(PipelineState x) {
    return {__shfl_sync(0xffffffffu, x.stage, 0), __shfl_sync(0xffffffffu, x.phase, 0)};
  }
  template <bool kCodes>
  __device__ __forceinline__ void start_keys(float (&s)[Config::kKeys / 2]) {
    const Keys<kCodes> k = keys<kCodes>();
    ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
    multiply_keys<KeysProduct<kCodes>>(q_, k, s);
  }

  // q of fp16; with it the units of products change.
  __device__ __forceinline__ void halve_queries(const WorkTile& work, int kv_head) {
    const float k_scale = Config::kHalfWeights ? scale_of(p_, work, kv_head, 0, false) : 1.0f;
    Fp16Queries::convert(smem_, group_, k_scale, factor_);
    if constexpr (Rows::kPlain) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor_[h] *= c_;
        if (factor_[h] == 0.0f) factor_[h] = __uint_as_float(1);  // times -inf it stays that; products are below 2^41
      }
    }
  }
  // Before what comes from codes is added, which is multiplied with v_scale afterwards, and has fp16 weights.
  // A scale that has no inverse leaves NaN, and the row is computed again (recompute.cuh).
  __device__ __forceinline__ static void divide_values(float v_scale, Accumulators& a) {
    constexpr float kUp = static_cast<float>(1 << static_cast<int>(kLift<true>));
    const float size = fabsf(v_scale);
    const float over =
        size >= 0x1p-64f && size <= 0x1p64f ? kUp * ptx::reciprocal_approx(v_scale) : __uint_as_float(0x7fffffffu);
    rescale({over, over}, a.o);
#pragma unroll
    for (int h = 0; h < 2; ++h) a.sum[h] *= kUp, a.reference[h] -= kLift<true>;
  }

  // Of the next tile's. Well before they are needed: a shuffle takes its time.
  template <bool kCodes>
  __device__ __forceinline__ Keys<kCodes> keys() const {
    if constexpr (Config::kXpackedK && kCodes) {
      return ptx::uniform(ptx::descriptor_of_pieces<8 * Config::kXpackedKBytes>(smem_.k(k_pipe_.stage)));
    } else {
      return ptx::uniform(ptx::descriptor_k_major(smem_.k(k_pipe_.stage)));
    }
  }
  template <bool kCodes>
  __device__ __forceinline__ Values<kCodes> values() const {
    if constexpr (Config::kXpacked && kCodes) {
      return ptx::uniform(ptx::descriptor_of_narrow_rows(smem_.v(v_pipe_.stage)));
    } else {
      return ptx::uniform(ptx::descriptor_mn_major(smem_.v(v_pipe_.stage), Config::kKeys * 128));
    }
  }

  template <bool kCodes>
  __device__ __forceinline__ void multiply_values(unsigned (&weights)[Config::kWeights], Values<kCodes> v,
                                                  int accumulate, float (&o)[Config::kChannels / 2]) const {
    constexpr int kParts = kCodes ? Config::kWeightParts : 1;
    constexpr int kStep = Config::kXpacked && kCodes ? 16 * Config::kXpackedVBytes : 16 * 128;
    ptx::pin(o);
    ptx::pin(weights);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < kParts * Config::kStepsKeys; ++i)
      ValuesProduct<kCodes>::registers(o, weights + i % kParts * (Config::kKeys / 4) + i / kParts * 4,
                                       v + i / kParts * (kStep >> 4), i == 0 ? accumulate : 1);
    ptx::commit_products();
  }

  __device__ __forceinline__ void release_queries() const {
    if (Config::kOutThroughQueries) return;  // but when the work tile has been stored
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty(Config::kEarly ? q_pipe_.stage ^ 1 : 0));
  }
  __device__ __forceinline__ void release_values() {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.v_empty(v_pipe_.stage));
    v_pipe_.next<Config::kValueStages>();
  }

  const int group_;
  ptx::Descriptor q_;
  PipelineState q_pipe_, v_pipe_;
};

}  // namespace attune::prefill
