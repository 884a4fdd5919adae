// SPDX-License-Identifier: Apache-2.0
// The mainloop of a consumer warpgroup on e4m3 inputs: 64 rows of the block against the tiles that the producer loads.
//
//   S_i = Q K_i^T;  P_i = 2^(c S_i - r), rounded to e4m3;  l = l + rowsum P_i;  O = O + (P_i V_i);
//   where r rises by d: P_i, l and O times 2^-d;   c = scale log2 e, with the scales of q and k
//
// The tensor cores accumulate e4m3 products with about 14 bits, so PV of each tile starts from zero and is added to O
// in fp32. r is row_max_ref: the max of the row's first visible tile, less kMaxOffset. The largest P of that tile is
// 2^kMaxOffset: small P stay normal numbers, and later P may grow to 448. If P would be larger, r is raised. This shows
// only after the exponentials, so that they wait for no max.
#pragma once

#include "prefill/accumulators.cuh"
#include "prefill/qk_gemm.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

class MainloopFp8 {
 public:
  __device__ __forceinline__ MainloopFp8(const WorkTileParams& p, const Smem& smem, int group)
      : p_(p), smem_(smem), group_(group), c_(p.scale * kLog2e * code_scale(p, false)) {
    q_ = ptx::uniform(ptx::descriptor_k_major(smem.q() + group * 64 * 128));
  }

  // The slot of the current work tile.
  __device__ __forceinline__ PipelineState slot() const {
    return {static_cast<int>(work_tiles() % kernels::kWorkSlots), work_tiles() / kernels::kWorkSlots};
  }
  __device__ __forceinline__ void next_work() {
    count_ = (count_ & 0xffff) | (work_tiles() + 1) % (2 * kernels::kWorkSlots) << 16;
  }

  // Runs all tiles of the work tile in its slot.
  __device__ __forceinline__ void run(Accumulators& a) {
    const int slot = this->slot().stage;
    const WorkTile& work = smem_.work(slot);  // read from shared memory at each use
    const int end = __shfl_sync(0xffffffffu, work.tile_end, 0), begin = __shfl_sync(0xffffffffu, work.tile_begin, 0);
    float s[Config::kKeys / 2], pv[Config::kChannels / 2];
    unsigned p_regs[Config::kKeys / 8];
    const ptx::Descriptor first = ptx::uniform(k_descriptor(count_));
    ptx::wait_phase(smem_.k_full(stage()), phase());
    ptx::wait_phase(smem_.q_full(), work_tiles() % 2);
    qk_gemm<QkMma>(q_, first, s);
    TileSpan whole;
    {
      Rows rows;
      rows.start(p_, work, smem_.head_tile(slot));
      const Tiles tiles(work.num_cached, work.first_key, work.end_key);
      whole = rows.whole_tiles(work, tiles);
      whole = {__shfl_sync(0xffffffffu, whole.begin, 0), __shfl_sync(0xffffffffu, whole.end, 0)};
      const int key = tiles.dense_start;
      unsigned limits[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        limits[2 * h] = static_cast<unsigned>(rows.first[h] - key);
        limits[2 * h + 1] = static_cast<unsigned>(rows.end[h] - key);
        a.row_max_ref[h] = rows.token[h] >= 0 ? kNoRowMax : 0.0f;
        a.row_sum[h] = smem_.first_sum();
      }
      ptx::store_shared_four(smem_.limits(), limits);
    }
#pragma unroll
    for (float& x : a.o) x = 0;
    needs_row_max_ = true;

    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
    if (end - begin == 1) release_q();
    release_k(count_);
    online_softmax<false>(end - 1, whole.has(end - 1), 0, s, pv, p_regs, a);
    // Tile i has the count `count - i`: in this form the compiler keeps it in warp-uniform registers.
    const unsigned count = __shfl_sync(0xffffffffu, count_, 0) + end - 1;
    for (int i = end - 2; i >= begin; --i) {
      // K is of this tile, V of the tile before.
      const unsigned now = count - i, before = now - 1;
      ptx::wait_phase(smem_.k_full(stage(now)), phase(now));
      warp_scheduler_sync(group_);
      qk_gemm<QkMma>(q_, k_descriptor(now), s);
      ptx::wait_phase(smem_.v_full(stage(before)), phase(before));
      pv_gemm(p_regs, v_descriptor(before), pv);
      warp_scheduler_arrive(group_);
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s);
      if (i == begin) release_q();
      release_k(now);
      online_softmax<true>(i, whole.has(i), before, s, pv, p_regs, a);
    }
    count_ =
        // Recomputed from the work tile: registers are scarce.
        ptx::opaque((count_ & 0xffff0000) | (count - begin & 0xffff));
    const ptx::Descriptor v = ptx::uniform(v_descriptor(count_));
    ptx::wait_phase(smem_.v_full(stage()), phase());
    pv_gemm(p_regs, v, pv);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(pv);
    release_v(count_);
    next_tile();
    add_pv(0, Config::kChannels / 2, pv, a.o);
    constexpr float kUnit = 1.0f / (1 << kMaxOffset);
    const float of_values = kUnit * code_scale(p_, true);
#pragma unroll
    for (float& x : a.o) x *= of_values;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.row_max[h] = a.row_max_ref[h] == kNoRowMax ? -ptx::infinity() : a.row_max_ref[h] + kMaxOffset;
      a.o_scale[h] = 1.0f;
      a.row_sum[h] = common::quad_sum(a.row_sum[h] * kUnit);
    }
  }

 private:
  using QkMma = ptx::Wgmma<Config::kKeys, ptx::Type::kE4m3>;
  using PvMma = ptx::Wgmma<Config::kChannels, ptx::Type::kE4m3>;
  static constexpr int kMaxOffset = 5;
  static constexpr float kMaxP = 448;
  // row_max_ref of a row that has seen no key. P relative to it is 0, because all scores are -inf.
  static constexpr float kNoRowMax = -3e38f;
  // Exponentials of a group; groups before the wait for the PV GEMM; registers of PV that are added during each later
  // group.
  static constexpr int kExpGroup = 8, kExpGroups = Config::kKeys / 2 / kExpGroup, kGroupsBeforePv = kExpGroups / 2;
  static constexpr int kPvAdded = Config::kChannels / 2 / (kExpGroups - kGroupsBeforePv);

  static_assert(0x10000 % (2 * Config::kStages) == 0 && kernels::kWorkSlots % 2 == 1,
                "phases continue where counts wrap");
  __device__ __forceinline__ unsigned work_tiles() const { return count_ >> 16; }
  __device__ __forceinline__ void next_tile() { count_ = (count_ & 0xffff0000) | (count_ + 1 & 0xffff); }
  // The stage of the current tile in both rings.
  __device__ __forceinline__ int stage(unsigned tile) const { return tile % Config::kStages; }
  __device__ __forceinline__ int stage() const { return stage(count_); }
  __device__ __forceinline__ unsigned phase(unsigned tile) const { return tile / Config::kStages % 2; }
  __device__ __forceinline__ unsigned phase() const { return phase(count_); }
  // Made well before their use, because the shuffle has latency.
  __device__ __forceinline__ ptx::Descriptor k_descriptor(unsigned tile) const {
    return ptx::descriptor_k_major(smem_.k(stage(tile)));
  }
  __device__ __forceinline__ ptx::Descriptor v_descriptor(unsigned tile) const {
    return ptx::descriptor_k_major(smem_.v(stage(tile)));
  }

  __device__ __forceinline__ static void pv_gemm(unsigned (&p_regs)[Config::kKeys / 8], ptx::Descriptor v,
                                                 float (&pv)[Config::kChannels / 2]) {
    ptx::fence_operand(pv);
    ptx::fence_operand(p_regs);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kPvSteps; ++i)
      PvMma::rs(pv, p_regs + 4 * i, v + i * ptx::kStepK, i == 0 ? 0 : 1);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ static void add_pv(int first, int count, const float (&pv)[Config::kChannels / 2],
                                                float (&o)[Config::kChannels / 2]) {
#pragma unroll
    for (int i = first; i < first + count; ++i) o[i] += pv[i];
  }
  __device__ __forceinline__ static void rescale_o(const float (&rescale)[2], float (&o)[Config::kChannels / 2]) {
#pragma unroll
    for (int i = 0; i < Config::kChannels / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  // Turns S of tile i into P. kAddsPv: also adds PV of the tile before to O.
  //
  // Exponentials go in groups. While the special-function unit computes one group (8 clocks for each exponential), the
  // exponents of the next group, the sums and maxima of the previous one and the additions to O are issued. A group is
  // a loop that exits at once, because tile numbers are not negative: the compiler moves nothing across its borders.
  template <bool kAddsPv>
  __device__ __forceinline__ void online_softmax(int i, bool whole, unsigned before, float (&s)[Config::kKeys / 2],
                                                 float (&pv)[Config::kChannels / 2],
                                                 unsigned (&p_regs)[Config::kKeys / 8], Accumulators& a) {
    float c = c_;
    if (!(c_ > 0 && c_ < ptx::infinity())) {  // then products do not have the order of scores
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
        Rows::mask_row(h, Rows::keys_between(first - i * Config::kKeys, end - i * Config::kKeys), s);
      }
    }
    if (needs_row_max_) {  // the whole warpgroup decides, because waits for wgmma are warpgroup-wide
      float rescale[2] = {1, 1};
      update_row_max_ref(s, c, rescale, a);
      if (kAddsPv && any_of_group(rescale[0] != 1.0f || rescale[1] != 1.0f)) {
        ptx::wgmma_wait<0>();
        ptx::fence_operand(pv);
#pragma unroll
        for (int j = 0; j < Config::kChannels / 2; ++j) {
          a.o[j] = (a.o[j] + pv[j]) * rescale[j / 2 % 2];
          pv[j] = 0;
        }
      }
      needs_row_max_ =
          p_.max_logits != nullptr || any_of_group(a.row_max_ref[0] == kNoRowMax || a.row_max_ref[1] == kNoRowMax);
    }
    const auto exponent = [&](int j) { s[j] = fmaf(s[j], c, -a.row_max_ref[j / 2 % 2]); };
    // Nonnegative floats have the order of integers, and integers have a three-input max.
    int top = 0;
    const auto reduce = [&](int group) {
#pragma unroll
      for (int j = group * kExpGroup; j < (group + 1) * kExpGroup; j += 2) {
        top = max(max(top, static_cast<int>(__float_as_uint(s[j]))), static_cast<int>(__float_as_uint(s[j + 1])));
        a.row_sum[j / 2 % 2] += s[j] + s[j + 1];
      }
    };
#pragma unroll
    for (int j = 0; j < kExpGroup; ++j) exponent(j);
#pragma unroll
    for (int group = 0; group < kExpGroups; ++group) {
      if (kAddsPv && group == kGroupsBeforePv) {
        ptx::wgmma_wait<0>();
        ptx::fence_operand(pv);
        release_v(before);
      }
      do {
#pragma unroll
        for (int j = group * kExpGroup; j < (group + 1) * kExpGroup; ++j) {
          s[j] = ptx::exp2_approx(s[j]);
          if (group + 1 < kExpGroups) exponent(j + kExpGroup);
        }
        if (group > 0) reduce(group - 1);
        if (group >= kGroupsBeforePv) {
          if (kAddsPv) add_pv((group - kGroupsBeforePv) * kPvAdded, kPvAdded, pv, a.o);
          if (group == kGroupsBeforePv) pack_p(0, kGroupsBeforePv - 1, s, p_regs);
          if (group > kGroupsBeforePv) pack_p(group - 2, group, s, p_regs);
        }
      } while (group == kGroupsBeforePv - 1 && static_cast<int>(ptx::opaque(i)) < 0);
    }
    reduce(kExpGroups - 1);
    pack_p(kExpGroups - 1, kExpGroups, s, p_regs);
    // NaN counts as the largest. raise_row_max_ref() decides for each row.
    if (__any_sync(0xffffffffu, top > static_cast<int>(__float_as_uint(kMaxP)))) {
      float rescale[2] = {1, 1};
      raise_row_max_ref(s, rescale, a);
      pack_p(0, kExpGroups, s, p_regs);
      if (kAddsPv) rescale_o(rescale, a.o);
    }
  }

  // Warp-uniform for the compiler. The warpgroup's number is recomputed: registers are scarce.
  __device__ __forceinline__ static bool any_of_group(bool x) {
    const int group = static_cast<int>(ptx::opaque(threadIdx.x) / 128) - 1;
    return __any_sync(0xffffffffu, ptx::named_barrier_any(kGroupBarriers + group, 128, x));
  }

  __device__ __forceinline__ static float quad_row_max(const float (&s)[Config::kKeys / 2], int h) {
    float top = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int j = 1; j < Config::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    return common::quad_max(top);
  }

  __device__ __forceinline__ static void update_row_max_ref(const float (&s)[Config::kKeys / 2], float c,
                                                            float (&rescale)[2], Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = quad_row_max(s, h) * c - kMaxOffset;
      if (top > a.row_max_ref[h]) {
        rescale[h] = ptx::exp2_approx(a.row_max_ref[h] - top);
        a.row_sum[h] *= rescale[h];
        a.row_max_ref[h] = top;
      }
    }
  }

  // Deferred rescale: raises row_max_ref of rows whose P is too large, by whole powers of two, which round nothing. It
  // touches only these rows, because other rows of the warp may belong to another sequence. An infinite P stays
  // infinite, and the row is recomputed (recompute.cuh).
  __device__ __forceinline__ static void raise_row_max_ref(float (&s)[Config::kKeys / 2], float (&rescale)[2],
                                                           Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = quad_row_max(s, h);
      if (!(top > kMaxP)) continue;
      const int powers = static_cast<int>(__float_as_uint(top) >> 23) - 127 - kMaxOffset;
      const float factor = __uint_as_float(static_cast<unsigned>(127 - powers) << 23);
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) s[4 * j + 2 * h] *= factor, s[4 * j + 2 * h + 1] *= factor;
      a.row_sum[h] *= factor;
      rescale[h] *= factor;
      a.row_max_ref[h] += static_cast<float>(powers);
    }
  }

  // Packs P of groups [first, end) as a wgmma operand (ptx/wgmma.cuh), with the keys in the order of transpose_v.cuh.
  __device__ __forceinline__ static void pack_p(int first, int end, const float (&s)[Config::kKeys / 2],
                                                unsigned (&p_regs)[Config::kKeys / 8]) {
#pragma unroll
    for (int i = first * kExpGroup / 4; i < end * kExpGroup / 4; ++i) {
      const float* const x = s + 8 * (i / 2) + 2 * (i % 2);
      p_regs[i] = ptx::pack_four_e4m3(x[0], x[1], x[4], x[5]);
    }
  }

  __device__ __forceinline__ void release_k(unsigned tile) const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.k_empty(stage(tile)));
  }
  __device__ __forceinline__ void release_q() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty());
  }
  __device__ __forceinline__ void release_v(unsigned tile) const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.v_empty(stage(tile)));
  }

  const WorkTileParams& p_;
  const Smem& smem_;
  const int group_;
  const float c_;
  bool needs_row_max_ = true;  // some row of the warpgroup has no row_max_ref yet, or max_logits are wanted
  ptx::Descriptor q_;
  // The lower half counts tiles before the current one, the upper half work tiles. Stages, slots and phases follow from
  // it. One register for all, because registers are scarce.
  unsigned count_ = 0;
};

}  // namespace attune::prefill
