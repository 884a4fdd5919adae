// SPDX-License-Identifier: Apache-2.0
// The mainloop of a consumer warpgroup on fp32 inputs as bf16x3: 64 rows of the block against the tiles of the
// producer.
//
//   S_i = Q K_i^T;  m' = max(m, rowmax c S_i);  P_i = 2^(c S_i - m');  l = l 2^(m - m') + rowsum P_i;
//   O = O 2^(m - m') + (P_i V_i);   c = scale log2 e
//
// Of the nine products of three parts by three, six are computed; the others are below 2^-24 of the whole. The smallest
// is added first, so that the largest parts go through few roundings of the accumulator (towards zero). For the same
// reason PV of a tile starts from zero and is added to O in fp32, which rescales O at no cost.
//
// A warpgroup does not overlap its softmax with its GEMMs: the GEMMs take several times as long, and the other
// warpgroup has the tensor cores meanwhile.
#pragma once

#include "common/operand.cuh"
#include "prefill/accumulators.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

class MainloopFp32 {
 public:
  __device__ __forceinline__ MainloopFp32(const WorkTileParams& p, const Smem& smem, int group)
      : p_(p), smem_(smem), group_(group), c_(Rows::kProducts ? p.scale * kLog2e : 1.0f) {}

  // Runs all tiles of a work tile.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile, Accumulators& a) {
    Rows rows;
    if (kKeepsRows) rows.start(p_, work, head_tile);
    // recomputed, because it would be spilled over the loop
    q_ = ptx::uniform(ptx::descriptor_k_major(smem_.q() + group_ * 64 * 128));
    const int begin = __shfl_sync(0xffffffffu, work.tile_begin, 0), end = __shfl_sync(0xffffffffu, work.tile_end, 0);
    a.row_max[0] = a.row_max[1] = -ptx::infinity();
    a.row_sum[0] = a.row_sum[1] = smem_.first_sum();
#pragma unroll
    for (float& x : a.o) x = 0;
    for (int i = end - 1; i >= begin; --i) {
      float s[Config::kKeys / 2], rescale[2];
      const ptx::Descriptor k = ptx::uniform(ptx::descriptor_k_major(smem_.k(k_pipe_.stage)));
      const ptx::Descriptor v = ptx::uniform(ptx::descriptor_mn_major(smem_.v(v_pipe_.stage), Config::kKeys * 128));
      ptx::wait_phase(smem_.k_full(k_pipe_.stage), k_pipe_.phase);
      if (i == end - 1) ptx::wait_phase(smem_.q_full(), q_phase_);
      qk_gemm(k, s);
      if (i == begin) release(smem_.q_empty());
      if (!kKeepsRows) rows.start(p_, work, head_tile);
      online_softmax(rows, work, i, s, rescale, a);
      release(smem_.k_empty(k_pipe_.stage));
      k_pipe_.next<Config::kStages>();
      unsigned p_regs[Config::kBf16Parts][Config::kKeys / 4];
#pragma unroll
      for (int j = 0; j < Config::kKeys / 4; ++j) {
        unsigned parts[common::kSplitParts];
        common::split_pair(s[2 * j], s[2 * j + 1], parts);
#pragma unroll
        for (int part = 0; part < Config::kBf16Parts; ++part) p_regs[part][j] = parts[part];
      }
      ptx::wait_phase(smem_.v_full(v_pipe_.stage), v_pipe_.phase);
      pv_gemm_add<0>(i, p_regs, v, rescale, a.o);
      release(smem_.v_empty(v_pipe_.stage));
      v_pipe_.next<Config::kStages>();
    }
    q_phase_ ^= 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.o_scale[h] = 1.0f;
      a.row_sum[h] = common::quad_sum(a.row_sum[h]);
    }
  }

 private:
  // The products of bf16x3 parts, smallest first.
  static constexpr int kPairs = 6;
  __device__ __forceinline__ static constexpr int left_part(int pair) {
    return pair == 0 ? 2 : pair == 2 || pair == 3 ? 1 : 0;
  }
  __device__ __forceinline__ static constexpr int right_part(int pair) {
    return pair == 1 ? 2 : pair == 2 || pair == 4 ? 1 : 0;
  }
  // With wide O no registers are left for the rows: they are recomputed for each tile.
  static constexpr bool kKeepsRows = Config::kChannels <= 128;
  // Channels of O in one PV GEMM: as many as registers allow.
  static constexpr int kMostChannels = Config::kChannels < 128 ? Config::kChannels : 64;

  __device__ __forceinline__ void qk_gemm(ptx::Descriptor k, float (&s)[Config::kKeys / 2]) const {
    constexpr int kPartQ = Config::kBlocksQk * Config::kRows * 8, kPartK = Config::kBlocksQk * Config::kKeys * 8;
    ptx::fence_operand(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < Config::kQkSteps; ++i) {
        const int block = i / 4, within = i % 4 * ptx::kStepK;
        ptx::Wgmma<Config::kKeys, ptx::Type::kBf16>::ss(
            s, q_ + left_part(pair) * kPartQ + block * (Config::kRows * 8) + within,
            k + right_part(pair) * kPartK + block * (Config::kKeys * 8) + within, pair == 0 && i == 0 ? 0 : 1);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s);
  }

  // Channels kFirst .. of O = O rescale + P V. The addition is in a loop that exits at once, because tile numbers are
  // not negative. The compiler moves nothing across a loop's borders; without it all products would stay live until the
  // last one.
  template <int kFirst>
  __device__ __forceinline__ static void pv_gemm_add(int tile,
                                                     unsigned (&p_regs)[Config::kBf16Parts][Config::kKeys / 4],
                                                     ptx::Descriptor v, const float (&rescale)[2],
                                                     float (&o)[Config::kChannels / 2]) {
    constexpr int kRest = Config::kChannels - kFirst, kCount = kRest < kMostChannels ? kRest : kMostChannels;
    constexpr int kPartV = Config::kBlocksV * Config::kKeys * 8, kBlock = kFirst / 64 * Config::kKeys * 8;
    float pv[kCount / 2];
    ptx::fence_operand(pv);
#pragma unroll
    for (int part = 0; part < Config::kBf16Parts; ++part) ptx::fence_operand(p_regs[part]);
    ptx::wgmma_fence();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < Config::kPvSteps; ++i) {
        ptx::Wgmma<kCount, ptx::Type::kBf16>::rs(pv, p_regs[left_part(pair)] + 4 * i,
                                                 v + right_part(pair) * kPartV + kBlock + i * (2048 >> 4),
                                                 pair == 0 && i == 0 ? 0 : 1);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(pv);
    do {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) o[kFirst / 2 + i] = fmaf(o[kFirst / 2 + i], rescale[i / 2 % 2], pv[i]);
    } while (kRest > kCount && static_cast<int>(ptx::opaque(tile)) < 0);
    if constexpr (kRest > kCount) pv_gemm_add<kFirst + kCount>(tile, p_regs, v, rescale, o);
  }

  // Turns S of tile i into P in place, updates row_max and row_sum, and sets `rescale` for O.
  __device__ __forceinline__ void online_softmax(const Rows& rows, const WorkTile& work, int i,
                                                 float (&s)[Config::kKeys / 2], float (&rescale)[2],
                                                 Accumulators& a) const {
    const Tiles tiles(work.num_cached, work.first_key, work.end_key);
    if constexpr (!Rows::kProducts) rows.score(p_, tiles.start(i), s);
    const unsigned tile_mask = Config::kCached ? smem_.mask(k_pipe_.stage) : 0;
    const bool any_invalid = Config::kCached && ptx::load_shared_u32(tile_mask) != 0;
    if (Rows::KeyMask::kAny || any_invalid || !rows.whole_tiles(work, tiles).has(i)) {
      const Tile tile = tile_at(work, tiles, i);
      rows.apply_mask<Config::kKeys / 2>(p_, tile, rows.visible_keys(p_, tile), any_invalid, tile_mask, s);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int j = 1; j < Config::kKeys / 4; ++j) top = fmaxf(top, s[j / 2 * 4 + 2 * h + j % 2]);
      top = common::quad_max(top);
      const float before = a.row_max[h];
      a.row_max[h] = fmaxf(before, top * c_);
      const float row_max_ref = finite_row_max(a.row_max[h]);
      rescale[h] = ptx::exp2_approx(before - row_max_ref);
      float sum[2] = {};
#pragma unroll
      for (int j = 0; j < Config::kKeys / 4; ++j) {
        float& x = s[j / 2 * 4 + 2 * h + j % 2];
        x = ptx::exp2_approx(fmaf(x, c_, -row_max_ref));
        sum[j % 2] += x;
      }
      a.row_sum[h] = fmaf(a.row_sum[h], rescale[h], sum[0] + sum[1]);
    }
  }

  // Called by all lanes of a warp after their last read.
  __device__ __forceinline__ static void release(unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(barrier);
  }

  const WorkTileParams& p_;
  const Smem& smem_;
  const int group_;
  const float c_;
  ptx::Descriptor q_;
  PipelineState k_pipe_, v_pipe_;
  unsigned q_phase_ = 0;
};

}  // namespace attune::prefill
