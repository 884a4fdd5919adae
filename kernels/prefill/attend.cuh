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

#include "prefill/rows.cuh"
#include "ptx/convert.cuh"

namespace attune::prefill {

struct Accumulators {
  float o[Config::kChannels / 2];
  float max[2], sum[2];  // of raw products where Rows::kPlain, else of scores in base 2; sum: of this thread's keys
};

class Attend {
 public:
  using QkProduct = ptx::Product<Config::kKeys, Config::kProduct>;
  using PvProduct = ptx::Product<Config::kChannels, Config::kProduct>;

  __device__ __forceinline__ Attend(const PrefillParams& p, const Places& places, int group)
      : p_(p), places_(places), group_(group), c_(Rows::kPlain ? p.scale * kLog2e : 1.0f) {
    q_ = ptx::descriptor_k_major(places.q() + group * 64 * 128);
  }

  // All tiles of the task. Turns count tiles over all tasks.
  __device__ __forceinline__ void operator()(const Task& task, const Rows& rows, Accumulators& a) {
    const TileLine<Config::kKeys> line(task.num_cached, task.first_key, task.end_key);
    float s[Config::kKeys / 2];
    unsigned weights[Config::kKeys / 4];
    float lowered[2];

    ptx::wait_phase(places_.q_full(), q_parity_);
    q_parity_ ^= 1;
    a.max[0] = a.max[1] = -ptx::infinity();
    a.sum[0] = a.sum[1] = 0;

    ptx::wait_phase(places_.k_full(k_turn_.stage), k_turn_.parity);
    multiply_keys(s);
    ptx::wait_products<0>();
    ptx::pin(s);
    Tile tile = tile_at(task, line, task.tile_end - 1);
    weigh(rows, tile, s, lowered, a);
    release_keys();
    pack(s, weights);

    int accumulate = 0;
    for (int i = task.tile_end - 2; i >= task.tile_begin; --i) {
      ptx::wait_phase(places_.k_full(k_turn_.stage), k_turn_.parity);
      ptx::sync_some(kTurnOfGroup + group_, Config::kMathThreads);
      multiply_keys(s);
      ptx::wait_phase(places_.v_full(v_turn_.stage), v_turn_.parity);
      multiply_values(weights, accumulate, a.o);
      accumulate = 1;
      ptx::arrive_some(kTurnOfGroup + 1 - group_, Config::kMathThreads);
      ptx::wait_products<1>();
      ptx::pin(s);
      tile = tile_at(task, line, i);
      weigh(rows, tile, s, lowered, a);
      release_keys();
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release_values();
      rescale(lowered, a.o);
      pack(s, weights);
    }
    if (threadIdx.x % 32 == 0) ptx::arrive(places_.q_empty());
    ptx::wait_phase(places_.v_full(v_turn_.stage), v_turn_.parity);
    multiply_values(weights, accumulate, a.o);
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release_values();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 1);
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 2);
      if (Rows::kPlain && a.max[h] != -ptx::infinity()) a.max[h] *= c_;
    }
  }

 private:
  __device__ __forceinline__ void multiply_keys(float (&s)[Config::kKeys / 2]) const {
    const unsigned long long k = ptx::descriptor_k_major(places_.k(k_turn_.stage));
    ptx::pin(s);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < Config::kStepsQk; ++i) {
      const int block = i / 4, within = i % 4 * ptx::kStepK;
      QkProduct::shared(s, q_ + block * (Config::kRows * 8) + within, k + block * (Config::kKeys * 8) + within,
                        i == 0 ? 0 : 1);
    }
    ptx::commit_products();
  }

  __device__ __forceinline__ void multiply_values(unsigned (&weights)[Config::kKeys / 4], int accumulate,
                                                  float (&o)[Config::kChannels / 2]) const {
    const unsigned long long v = ptx::descriptor_mn_major(places_.v(v_turn_.stage), Config::kKeys * 128);
    ptx::pin(o);
    ptx::pin(weights);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < Config::kStepsKeys; ++i)
      PvProduct::registers(o, weights + 4 * i, v + i * (2048 >> 4), i == 0 ? accumulate : 1);
    ptx::commit_products();
  }

  // Products to weights in place, and how much what came before counts less.
  __device__ __forceinline__ void weigh(const Rows& rows, const Tile& tile, float (&s)[Config::kKeys / 2],
                                        float (&lowered)[2], Accumulators& a) const {
    const bool scaled = Config::kConverts && tile.cached;
    if (scaled) multiply_columns(places_.scales(k_turn_.stage, false), s);
    rows.score(p_, tile, s);
    rows.hide(p_, tile, Config::kCached ? places_.hidden(k_turn_.stage) : 0, s);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max = a.max[h];
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) max = fmaxf(max, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
      const float reference = reference_of(max) * c_;
      lowered[h] = ptx::exp2_approx(a.max[h] * c_ - reference);
      a.max[h] = max;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * h + e];
          x = ptx::exp2_approx(fmaf(x, c_, -reference));
          sum += x;
        }
      }
      a.sum[h] = a.sum[h] * lowered[h] + sum;
    }
    if (Config::kScalesWeights && scaled) multiply_columns(places_.scales(k_turn_.stage, true), s);
  }

  // scales: of the tile's keys, in shared memory.
  __device__ __forceinline__ static void multiply_columns(const float* scales, float (&s)[Config::kKeys / 2]) {
#pragma unroll
    for (int j = 0; j < Config::kKeys / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(scales + 8 * j + threadIdx.x % 4 * 2);
      s[4 * j] *= x.x, s[4 * j + 1] *= x.y, s[4 * j + 2] *= x.x, s[4 * j + 3] *= x.y;
    }
  }

  __device__ __forceinline__ static void pack(const float (&s)[Config::kKeys / 2],
                                              unsigned (&weights)[Config::kKeys / 4]) {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 4; ++i) {
      weights[i] = Config::kType == tile::kBFloat16 ? ptx::pack_bf16(s[2 * i], s[2 * i + 1])
                                                    : ptx::pack_f16(s[2 * i], s[2 * i + 1]);
    }
  }

  __device__ __forceinline__ static void rescale(const float (&lowered)[2], float (&o)[Config::kChannels / 2]) {
    // The maximum seldom moves after the first tiles.
    if (!__any_sync(0xffffffffu, lowered[0] != 1.0f || lowered[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kChannels / 2; ++i) o[i] *= lowered[i / 2 % 2];
  }

  __device__ __forceinline__ void release_keys() {
    if (threadIdx.x % 32 == 0) ptx::arrive(places_.k_empty(k_turn_.stage));
    k_turn_.next<Config::kStages>();
  }
  __device__ __forceinline__ void release_values() {
    if (threadIdx.x % 32 == 0) ptx::arrive(places_.v_empty(v_turn_.stage));
    v_turn_.next<Config::kStages>();
  }

  const PrefillParams& p_;
  const Places& places_;
  const int group_;
  const float c_;
  unsigned long long q_;
  Turn k_turn_, v_turn_;
  unsigned q_parity_ = 0;
};

}  // namespace attune::prefill
