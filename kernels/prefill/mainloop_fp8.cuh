// SPDX-License-Identifier: Apache-2.0
// The math of a warpgroup on e4m3 codes: 64 rows of the block against the tiles that the producer brings.
//
//   S_i = Q K_i^T;  P_i = 2^(c S_i - r), rounded to e4m3;  l = l + rowsum P_i;  O = O + (P_i V_i);
//   where r rises by d: P_i, l and O times 2^-d;   c = scale log2 e, with the scales of q and k
//
// Each tile's P V is summed by the tensor cores from zero and then added to O in fp32, as their sums of codes keep
// about 14 bits. The reference r is the maximum of the first tile that a row sees anything of, less kHeadroom. Later it
// rises where weights would leave e4m3's range: whether they do is seen after the exponentials, which wait for no
// maximum. The largest weight of the first tile is 2^kHeadroom: small ones have as many bits more before they become
// subnormal, and later ones may be up to 448.
#pragma once

#include "prefill/accumulators.cuh"
#include "prefill/qk_gemm.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

class MainloopFp8 {
 public:
  __device__ __forceinline__ MainloopFp8(const PrefillParams& p, const Smem& smem, int group)
      : p_(p), smem_(smem), group_(group), c_(p.scale * kLog2e * code_scale(p, false)) {
    q_ = ptx::uniform(ptx::descriptor_k_major(smem.q() + group * 64 * 128));
  }

  // Of the current work tile.
  __device__ __forceinline__ PipelineState slot() const {
    return {static_cast<int>(work_tiles() % kernels::kWorkSlots), work_tiles() / kernels::kWorkSlots};
  }
  __device__ __forceinline__ void next_work() {
    count_ = (count_ & 0xffff) | (work_tiles() + 1) % (2 * kernels::kWorkSlots) << 16;
  }

  // All tiles of the work tile in its slot.
  __device__ __forceinline__ void run(Accumulators& a) {
    const int slot = this->slot().stage;
    const WorkTile& work = smem_.work(slot);  // read where needed
    const int end = __shfl_sync(0xffffffffu, work.tile_end, 0), begin = __shfl_sync(0xffffffffu, work.tile_begin, 0);
    float s[Config::kKeys / 2], product[Config::kChannels / 2];
    unsigned weights[Config::kKeys / 8];
    const ptx::Descriptor first = ptx::uniform(keys(count_));
    ptx::wait_phase(smem_.k_full(stage()), phase());
    ptx::wait_phase(smem_.q_full(), work_tiles() % 2);
    multiply_keys<QkProduct>(q_, first, s);
    Run whole;
    {
      Rows rows;
      rows.start(p_, work, smem_.head_tile(slot));
      const Line line(work.num_cached, work.first_key, work.end_key);
      whole = rows.whole_tiles(work, line);
      whole = {__shfl_sync(0xffffffffu, whole.begin, 0), __shfl_sync(0xffffffffu, whole.end, 0)};
      const int key = line.dense_start;
      unsigned limits[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        limits[2 * h] = static_cast<unsigned>(rows.first[h] - key);
        limits[2 * h + 1] = static_cast<unsigned>(rows.end[h] - key);
        a.reference[h] = rows.token[h] >= 0 ? kNothingSeen : 0.0f;
        a.sum[h] = smem_.first_sum();
      }
      ptx::store_shared_four(smem_.limits(), limits);
    }
#pragma unroll
    for (float& x : a.o) x = 0;
    takes_maxima_ = true;

    ptx::wait_products<0>();
    ptx::pin(s);
    if (end - begin == 1) release_queries();
    release_keys(count_);
    weigh<false>(end - 1, whole.has(end - 1), 0, s, product, weights, a);
    // Of tile i is count - i: counted like i, which the compiler keeps in registers of the warp.
    const unsigned count = __shfl_sync(0xffffffffu, count_, 0) + end - 1;
    for (int i = end - 2; i >= begin; --i) {
      // The keys of this tile, and the values of the one before.
      const unsigned now = count - i, before = now - 1;
      ptx::wait_phase(smem_.k_full(stage(now)), phase(now));
      ptx::sync_some(kWarpSchedulerBarrier + group_, Config::kMathThreads);
      multiply_keys<QkProduct>(q_, keys(now), s);
      ptx::wait_phase(smem_.v_full(stage(before)), phase(before));
      multiply_values(weights, values(before), product);
      ptx::arrive_some(kWarpSchedulerBarrier + 1 - group_, Config::kMathThreads);
      ptx::wait_products<1>();
      ptx::pin(s);
      if (i == begin) release_queries();
      release_keys(now);
      weigh<true>(i, whole.has(i), before, s, product, weights, a);
    }
    count_ =
        ptx::kept((count_ & 0xffff0000) | (count - begin & 0xffff));  // what follows from the work tile is found again
    const ptx::Descriptor v = ptx::uniform(values(count_));
    ptx::wait_phase(smem_.v_full(stage()), phase());
    multiply_values(weights, v, product);
    ptx::wait_products<0>();
    ptx::pin(product);
    release_values(count_);
    next_tile();
    add_product(0, Config::kChannels / 2, product, a.o);
    constexpr float kUnit = 1.0f / (1 << kHeadroom);
    const float of_values = kUnit * code_scale(p_, true);
#pragma unroll
    for (float& x : a.o) x *= of_values;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.max[h] = a.reference[h] == kNothingSeen ? -ptx::infinity() : a.reference[h] + kHeadroom;
      a.factor[h] = 1.0f;
      a.sum[h] *= kUnit;
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 1);
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 2);
    }
  }

 private:
  using QkProduct = ptx::Product<Config::kKeys, ptx::Type::kE4m3>;
  using PvProduct = ptx::Product<Config::kChannels, ptx::Type::kE4m3>;
  static constexpr int kHeadroom = 5;
  static constexpr float kLargestWeight = 448;
  // In place of a reference. Weights against it are 0, as all scores are -inf.
  static constexpr float kNothingSeen = -3e38f;
  // Of exponentials; those before P V is waited for, and how much of it is added beside each of the others.
  static constexpr int kGroup = 8, kGroups = Config::kKeys / 2 / kGroup, kGroupsAhead = kGroups / 2;
  static constexpr int kAdded = Config::kChannels / 2 / (kGroups - kGroupsAhead);

  static_assert(0x10000 % (2 * Config::kStages) == 0 && kernels::kWorkSlots % 2 == 1, "turns go on where counts wrap");
  __device__ __forceinline__ unsigned work_tiles() const { return count_ >> 16; }
  __device__ __forceinline__ void next_tile() { count_ = (count_ & 0xffff0000) | (count_ + 1 & 0xffff); }
  // Of the current tile in both rings.
  __device__ __forceinline__ int stage(unsigned tile) const { return tile % Config::kStages; }
  __device__ __forceinline__ int stage() const { return stage(count_); }
  __device__ __forceinline__ unsigned phase(unsigned tile) const { return tile / Config::kStages % 2; }
  __device__ __forceinline__ unsigned phase() const { return phase(count_); }
  // Well before they are needed: a shuffle takes its time.
  __device__ __forceinline__ ptx::Descriptor keys(unsigned tile) const {
    return ptx::descriptor_k_major(smem_.k(stage(tile)));
  }
  __device__ __forceinline__ ptx::Descriptor values(unsigned tile) const {
    return ptx::descriptor_k_major(smem_.v(stage(tile)));
  }

  __device__ __forceinline__ static void multiply_values(unsigned (&weights)[Config::kKeys / 8], ptx::Descriptor v,
                                                         float (&product)[Config::kChannels / 2]) {
    ptx::pin(product);
    ptx::pin(weights);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < Config::kStepsKeys; ++i)
      PvProduct::registers(product, weights + 4 * i, v + i * ptx::kStepK, i == 0 ? 0 : 1);
    ptx::commit_products();
  }

  __device__ __forceinline__ static void add_product(int first, int count,
                                                     const float (&product)[Config::kChannels / 2],
                                                     float (&o)[Config::kChannels / 2]) {
#pragma unroll
    for (int i = first; i < first + count; ++i) o[i] += product[i];
  }
  __device__ __forceinline__ static void rescale(const float (&lowered)[2], float (&o)[Config::kChannels / 2]) {
#pragma unroll
    for (int i = 0; i < Config::kChannels / 2; ++i) o[i] *= lowered[i / 2 % 2];
  }

  // Products of tile i to weights. kAdds: the tile before has P V in `product`, which is added to O on the way.
  //
  // Exponentials come in groups. Beside those of one, of which the special-function unit takes one every 8 clocks,
  // stand the exponents of the next, the sums and maxima of the one before, and O's sums. A group is a loop that is
  // left at once, as tile numbers are not negative: the compiler moves nothing across its borders.
  template <bool kAdds>
  __device__ __forceinline__ void weigh(int i, bool whole, unsigned before, float (&s)[Config::kKeys / 2],
                                        float (&product)[Config::kChannels / 2],
                                        unsigned (&weights)[Config::kKeys / 8], Accumulators& a) {
    float c = c_;
    if (!(c_ > 0 && c_ < ptx::infinity())) {  // the order of products is not that of scores
      c = 1;
#pragma unroll
      for (float& x : s) x *= c_;
    }
    if (!whole) {
      unsigned limits[4];
      ptx::load_shared_four(smem_.limits(), limits);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = static_cast<int>(limits[2 * h]), end = static_cast<int>(limits[2 * h + 1]);
        Rows::hide_row(h, Rows::keys_between(first - i * Config::kKeys, end - i * Config::kKeys), s);
      }
    }
    if (takes_maxima_) {  // all warps of the group, or none: they wait for products together
      float lowered[2] = {1, 1};
      follow_maximum(s, c, lowered, a);
      if (kAdds && any_of_group(lowered[0] != 1.0f || lowered[1] != 1.0f)) {
        ptx::wait_products<0>();
        ptx::pin(product);
#pragma unroll
        for (int j = 0; j < Config::kChannels / 2; ++j) {
          a.o[j] = (a.o[j] + product[j]) * lowered[j / 2 % 2];
          product[j] = 0;
        }
      }
      takes_maxima_ =
          p_.max_logits != nullptr || any_of_group(a.reference[0] == kNothingSeen || a.reference[1] == kNothingSeen);
    }
    const auto exponent = [&](int j) { s[j] = fmaf(s[j], c, -a.reference[j / 2 % 2]); };
    // Numbers that are not negative are in the order of their bits, and integers have maxima of three.
    int top = 0;
    const auto take = [&](int group) {
#pragma unroll
      for (int j = group * kGroup; j < (group + 1) * kGroup; j += 2) {
        top = max(max(top, static_cast<int>(__float_as_uint(s[j]))), static_cast<int>(__float_as_uint(s[j + 1])));
        a.sum[j / 2 % 2] += s[j] + s[j + 1];
      }
    };
#pragma unroll
    for (int j = 0; j < kGroup; ++j) exponent(j);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (kAdds && group == kGroupsAhead) {
        ptx::wait_products<0>();
        ptx::pin(product);
        release_values(before);
      }
      do {
#pragma unroll
        for (int j = group * kGroup; j < (group + 1) * kGroup; ++j) {
          s[j] = ptx::exp2_approx(s[j]);
          if (group + 1 < kGroups) exponent(j + kGroup);
        }
        if (group > 0) take(group - 1);
        if (group >= kGroupsAhead) {
          if (kAdds) add_product((group - kGroupsAhead) * kAdded, kAdded, product, a.o);
          if (group == kGroupsAhead) pack(0, kGroupsAhead - 1, s, weights);
          if (group > kGroupsAhead) pack(group - 2, group, s, weights);
        }
      } while (group == kGroupsAhead - 1 && static_cast<int>(ptx::kept(i)) < 0);
    }
    take(kGroups - 1);
    pack(kGroups - 1, kGroups, s, weights);
    // NaN is above all of them: it must not hide another row's.
    if (__any_sync(0xffffffffu, top > static_cast<int>(__float_as_uint(kLargestWeight)))) {
      float lowered[2] = {1, 1};
      lower(s, lowered, a);
      pack(0, kGroups, s, weights);
      if (kAdds) rescale(lowered, a.o);
    }
  }

  // For the compiler the answer is the warp's. The group is found anew, as registers are scarce.
  __device__ __forceinline__ static bool any_of_group(bool x) {
    const int group = static_cast<int>(ptx::kept(threadIdx.x) / 128) - 1;
    return __any_sync(0xffffffffu, ptx::any_of_some(kGroupBarrier + group, 128, x));
  }

  __device__ __forceinline__ static float top_of_row(const float (&s)[Config::kKeys / 2], int h) {
    float top = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int j = 1; j < Config::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  }

  __device__ __forceinline__ static void follow_maximum(const float (&s)[Config::kKeys / 2], float c,
                                                        float (&lowered)[2], Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = top_of_row(s, h) * c - kHeadroom;
      if (top > a.reference[h]) {
        lowered[h] = ptx::exp2_approx(a.reference[h] - top);
        a.sum[h] *= lowered[h];
        a.reference[h] = top;
      }
    }
  }

  // Has references rise where weights are too large, by whole powers of two: nothing is rounded. Not where those of
  // another row of the warp are: it may be of another sequence. A weight that is infinite by now stays that, and the
  // row is computed again (recompute.cuh).
  __device__ __forceinline__ static void lower(float (&s)[Config::kKeys / 2], float (&lowered)[2], Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = top_of_row(s, h);
      if (!(top > kLargestWeight)) continue;
      const int powers = static_cast<int>(__float_as_uint(top) >> 23) - 127 - kHeadroom;
      const float factor = __uint_as_float(static_cast<unsigned>(127 - powers) << 23);
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) s[4 * j + 2 * h] *= factor, s[4 * j + 2 * h + 1] *= factor;
      a.sum[h] *= factor;
      lowered[h] *= factor;
      a.reference[h] += static_cast<float>(powers);
    }
  }

  // The weights of groups [first, end) as an operand: ptx/wgmma.cuh, its keys in the order of transpose_v.cuh.
  __device__ __forceinline__ static void pack(int first, int end, const float (&s)[Config::kKeys / 2],
                                              unsigned (&weights)[Config::kKeys / 8]) {
#pragma unroll
    for (int i = first * kGroup / 4; i < end * kGroup / 4; ++i) {
      const float* const x = s + 8 * (i / 2) + 2 * (i % 2);
      weights[i] = ptx::pack_four_e4m3(x[0], x[1], x[4], x[5]);
    }
  }

  __device__ __forceinline__ void release_keys(unsigned tile) const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.k_empty(stage(tile)));
  }
  __device__ __forceinline__ void release_queries() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty());
  }
  __device__ __forceinline__ void release_values(unsigned tile) const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.v_empty(stage(tile)));
  }

  const PrefillParams& p_;
  const Smem& smem_;
  const int group_;
  const float c_;
  bool takes_maxima_ = true;  // some row of the group has no reference yet, or maxima are asked for
  ptx::Descriptor q_;
  // Tiles before the current one in the lower half, work tiles in the upper, as far as stages, slots and parities come
  // of them: registers are scarce.
  unsigned count_ = 0;
};

}  // namespace attune::prefill
