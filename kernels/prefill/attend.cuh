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

#include "prefill/accumulators.cuh"
#include "prefill/scores.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

class Attend {
 public:
  using QkProduct = ptx::Product<Config::kKeys, Config::kProduct>;
  using PvProduct = ptx::Product<Config::kChannels, Config::kProduct>;

  __device__ __forceinline__ Attend(const PrefillParams& p, const Places& places, int group)
      : p_(p), places_(places), group_(group), c_(Rows::kProducts ? p.scale * kLog2e : 1.0f) {
    q_ = ptx::uniform(ptx::descriptor_k_major(places.q() + group * 64 * 128));
  }

  // Issues the first product of a task.
  __device__ __forceinline__ void start(float (&s)[Config::kKeys / 2]) {
    const ptx::Descriptor k = keys();
    ptx::wait_phase(places_.k_full(k_turn_.stage), k_turn_.parity);
    ptx::wait_phase(places_.q_full(), q_parity_);
    q_parity_ ^= 1;
    multiply_keys<QkProduct>(q_, k, s);
  }

  // All tiles of the task that has been started. Turns count tiles over all tasks.
  __device__ __forceinline__ void run(const Task& task, const Rows& rows, float (&s)[Config::kKeys / 2],
                                      Accumulators& a) {
    const TileLine<Config::kKeys> line(task.num_cached, task.first_key, task.end_key);
    const Run whole = rows.whole_tiles(task, line);
    unsigned weights[Config::kKeys / 4];
    float lowered[2];
    a.max[0] = a.max[1] = a.reference[0] = a.reference[1] = -ptx::infinity();
    a.sum[0] = a.sum[1] = 0;
    if constexpr (Rows::kCapped) a.limit[0] = a.limit[1] = -ptx::infinity();

    ptx::wait_products<0>();
    ptx::pin(s);
    const int begin = __shfl_sync(0xffffffffu, task.tile_begin, 0), end = __shfl_sync(0xffffffffu, task.tile_end, 0);
    if (end - begin == 1) release_queries();
    if (!Config::kCached) release_keys();
    weigh(rows, task, line, end - 1, kManyRegisters ? whole : rows.whole_tiles(task, line), s, lowered, a);
    pack(line.is_cached(end - 1), lowered, s, a, weights);
    if (Config::kCached) release_keys();

    int accumulate = 0;
    for (int i = end - 2; i >= begin; --i) {
      const ptx::Descriptor k = keys(), v = values();
      ptx::wait_phase(places_.k_full(k_turn_.stage), k_turn_.parity);
      ptx::sync_some(kTurnOfGroup + group_, Config::kMathThreads);
      multiply_keys<QkProduct>(q_, k, s);
      ptx::wait_phase(places_.v_full(v_turn_.stage), v_turn_.parity);
      multiply_values(weights, v, accumulate, a.o);
      accumulate = 1;
      ptx::arrive_some(kTurnOfGroup + 1 - group_, Config::kMathThreads);
      ptx::wait_products<1>();
      ptx::pin(s);
      if (i == begin) release_queries();
      if (!Config::kCached) release_keys();
      weigh(rows, task, line, i, kManyRegisters ? whole : rows.whole_tiles(task, line), s, lowered, a);
      if (__any_sync(0xffffffffu, lowered[0] != 1.0f || lowered[1] != 1.0f)) {
        ptx::wait_products<0>();
        ptx::pin(a.o);
        rescale(lowered, a.o);
      }
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release_values();
      pack(line.is_cached(i), lowered, s, a, weights);
      if (Config::kCached) release_keys();
    }
    const ptx::Descriptor v = values();
    ptx::wait_phase(places_.v_full(v_turn_.stage), v_turn_.parity);
    multiply_values(weights, v, accumulate, a.o);
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release_values();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (a.max[h] != -ptx::infinity()) a.max[h] = level_of(a.max[h]);
      lowered[h] = a.max[h] == a.reference[h] ? 1.0f : ptx::exp2_approx(a.reference[h] - a.max[h]);
    }
    rescale(lowered, a.o);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a.sum[h] *= lowered[h];
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 1);
      a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 2);
    }
  }

 private:
  // Of the next tile's. Well before they are needed: a shuffle takes its time.
  __device__ __forceinline__ ptx::Descriptor keys() const {
    return ptx::uniform(ptx::descriptor_k_major(places_.k(k_turn_.stage)));
  }
  __device__ __forceinline__ ptx::Descriptor values() const {
    return ptx::uniform(ptx::descriptor_mn_major(places_.v(v_turn_.stage), Config::kKeys * 128));
  }

  __device__ __forceinline__ void multiply_values(unsigned (&weights)[Config::kKeys / 4], ptx::Descriptor v,
                                                  int accumulate, float (&o)[Config::kChannels / 2]) const {
    ptx::pin(o);
    ptx::pin(weights);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < Config::kStepsKeys; ++i)
      PvProduct::registers(o, weights + 4 * i, v + i * (2048 >> 4), i == 0 ? accumulate : 1);
    ptx::commit_products();
  }

  // Weights may exceed 1 by so many powers of 2 before o is rescaled: seldom after the first tile.
  static constexpr float kSlack = 8;
  static constexpr bool kManyRegisters = Config::kChannels <= 128;
  static constexpr int kChains = kManyRegisters ? 4 : 1;

  // Of a maximum of products: the score in base 2.
  __device__ __forceinline__ float level_of(float max) const {
    return Rows::kCapped ? Rows::score_of(p_, max, {}, 0, 0.0f) : max * c_;
  }

  // Products to weights in place, and how much what came before counts less.
  __device__ __forceinline__ void weigh(const Rows& rows, const Task& task, const TileLine<Config::kKeys>& line, int i,
                                        const Run& whole, float (&s)[Config::kKeys / 2], float (&lowered)[2],
                                        Accumulators& a) const {
    const bool scaled = Config::kConverts && line.is_cached(i);
    if (scaled) multiply_columns(places_.scales(k_turn_.stage, false), s);
    const int start = line.start(task, i);
    if constexpr (Rows::kSloped) rows.add_slope(s);
    if constexpr (!Rows::kProducts) rows.score(p_, start, s);
    const unsigned hidden = Config::kCached ? places_.hidden(k_turn_.stage) : 0;
    const bool flagged = Config::kCached && ptx::load_shared_u32(hidden) != 0;
    const bool edge = Rows::kBits || flagged || !whole.has(i);
    if (edge) rows.hide(p_, tile_at(task, line, i), flagged, hidden, s);
    raise(rows, start, s, a);
    follow(lowered, a);
    float reference[2], c = c_;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = reference_of(a.reference[h]);
      if constexpr (Rows::kSloped) reference[h] = fmaf(rows.slope[h], rows.distance_of(h, start), reference[h]);
    }
    if constexpr (Rows::kCapped) {
      if (!__any_sync(0xffffffffu, !(Rows::takes_polynomial(p_, a.max[0]) && Rows::takes_polynomial(p_, a.max[1])))) {
        exponentiate(i, s, [&](int j) { return Rows::capped_exponent(p_, s[j], reference[j / 2 % 2]); });
        return;
      }
      rows.score(p_, start, s);
      if (edge) rows.hide(p_, tile_at(task, line, i), flagged, hidden, s);  // the least product has a finite score
      c = 1;
    }
    exponentiate(i, s, [&](int j) { return fmaf(s[j], c, -reference[j / 2 % 2]); });
  }

  // 2^exponent(j) to s[j], in groups: exponents of the next one are computed beside the exponentials of one, of which
  // the special-function unit takes one every 8 clocks. A group is a loop that is left at once, as tile numbers are not
  // negative: the compiler moves nothing across its borders, and would else have all exponents computed first.
  template <class Exponent>
  __device__ __forceinline__ static void exponentiate(int tile, float (&s)[Config::kKeys / 2],
                                                      const Exponent& exponent) {
    constexpr int kGroup = Rows::kCapped ? 8 : 16, kCount = Config::kKeys / 2;
    static_assert(kCount % kGroup == 0);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) s[j] = exponent(j);
#pragma unroll
    for (int first = 0; first < kCount; first += kGroup) {
      do {
#pragma unroll
        for (int j = first; j < first + kGroup; ++j) {
          s[j] = ptx::exp2_approx(s[j]);
          if (j + kGroup < kCount) s[j + kGroup] = exponent(j + kGroup);
        }
      } while (static_cast<int>(ptx::kept(tile)) < 0);
    }
  }

  // a.max, with this tile.
  __device__ __forceinline__ static void raise(const Rows& rows, int start, const float (&s)[Config::kKeys / 2],
                                               Accumulators& a) {
    float top[2];
    // Where the largest is not negative, it is that of the numbers' bits as integers: three at a time.
    if (kManyRegisters && !Rows::kSloped &&
        !__any_sync(0xffffffffu, (bits_of(a.max[0]) | bits_of(a.max[1])) < 0)) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        top[h] = __uint_as_float(top_of_row(s, h, bits_of(a.max[h]), bits_of,
                                           [](int x, int y, int z) { return max(max(x, y), z); }));
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        top[h] = top_of_row(s, h, a.max[h], [](float x) { return x; },
                            [](float x, float y, float z) { return fmaxf(x, fmaxf(y, z)); });
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (Rows::kSloped)
        top[h] = fmaxf(a.max[h], fmaf(-rows.product_slope[h], rows.distance_of(h, start), top[h]));
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
      a.max[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 2));
    }
  }
  __device__ __forceinline__ static int bits_of(float x) { return static_cast<int>(__float_as_uint(x)); }
  // The maximum of this thread's products of row h and, without slopes, of x. Chains of their own for neighbours: too few
  // warps hide what a long chain waits for.
  template <class T, class Bits, class Max>
  __device__ __forceinline__ static T top_of_row(const float (&s)[Config::kKeys / 2], int h, T x, const Bits& bits,
                                                 const Max& largest) {
    T top[kChains];
#pragma unroll
    for (int j = 0; j < Config::kKeys / 8; ++j) {
      const T first = bits(s[4 * j + 2 * h]), second = bits(s[4 * j + 2 * h + 1]);
      top[j % kChains] = largest(j >= kChains ? top[j % kChains] : Rows::kSloped ? first : x, first, second);
    }
#pragma unroll
    for (int j = 1; j < kChains; j += 2) top[0] = largest(top[0], top[j], top[j + 1 < kChains ? j + 1 : j]);
    return top[0];
  }

  // Has references follow maxima that are too far ahead.
  __device__ __forceinline__ void follow(float (&lowered)[2], Accumulators& a) const {
    lowered[0] = lowered[1] = 1.0f;
    if (Rows::kCapped && a.max[0] <= a.limit[0] && a.max[1] <= a.limit[Rows::kCapped ? 1 : 0]) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (Rows::kCapped ? a.max[h] > a.limit[Rows::kCapped ? h : 0] : a.max[h] * c_ - a.reference[h] > kSlack) {
        const float level = level_of(a.max[h]);
        lowered[h] = ptx::exp2_approx(a.reference[h] - level);
        a.reference[h] = level;
        if constexpr (Rows::kCapped) a.limit[h] = a.max[h] + kSlack / c_;  // scores grow more slowly than products
      }
    }
  }

  // The weights' sums; not right after the exponentials, each of which would be waited for.
  __device__ __forceinline__ static void add_up(const float (&s)[Config::kKeys / 2], const float (&lowered)[2],
                                                Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[kChains] = {a.sum[h] * lowered[h]};
#pragma unroll
      for (int i = 0; i < Config::kKeys / 4; ++i) sum[i % kChains] += s[i / 2 * 4 + 2 * h + i % 2];
      a.sum[h] = sum[0];
#pragma unroll
      for (int j = 1; j < kChains; ++j) a.sum[h] += sum[j];
    }
  }

  // scales: of the tile's keys, in shared memory.
  __device__ __forceinline__ static void multiply_columns(const float* scales, float (&s)[Config::kKeys / 2]) {
#pragma unroll
    for (int j = 0; j < Config::kKeys / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(scales + 8 * j + threadIdx.x % 4 * 2);
      s[4 * j] *= x.x, s[4 * j + 1] *= x.y, s[4 * j + 2] *= x.x, s[4 * j + 3] *= x.y;
    }
  }

  // The weights, summed, as an operand.
  __device__ __forceinline__ void pack(bool cached, const float (&lowered)[2], float (&s)[Config::kKeys / 2],
                                       Accumulators& a, unsigned (&weights)[Config::kKeys / 4]) const {
    add_up(s, lowered, a);
    if (Config::kScalesWeights && cached) multiply_columns(places_.scales(k_turn_.stage, true), s);
#pragma unroll
    for (int i = 0; i < Config::kKeys / 4; ++i) {
      weights[i] = Config::kType == tile::kBFloat16 ? ptx::pack_bf16(s[2 * i], s[2 * i + 1])
                                                    : ptx::pack_f16(s[2 * i], s[2 * i + 1]);
    }
  }

  __device__ __forceinline__ static void rescale(const float (&lowered)[2], float (&o)[Config::kChannels / 2]) {
#pragma unroll
    for (int i = 0; i < Config::kChannels / 2; ++i) o[i] *= lowered[i / 2 % 2];
  }

  __device__ __forceinline__ void release_keys() {
    if (Config::kCached) __syncwarp();  // all lanes have read what lies beside the keys
    if (threadIdx.x % 32 == 0) ptx::arrive(places_.k_empty(k_turn_.stage));
    k_turn_.next<Config::kStages>();
  }
  __device__ __forceinline__ void release_queries() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(places_.q_empty());
  }
  __device__ __forceinline__ void release_values() {
    if (threadIdx.x % 32 == 0) ptx::arrive(places_.v_empty(v_turn_.stage));
    v_turn_.next<Config::kStages>();
  }

  const PrefillParams& p_;
  const Places& places_;
  const int group_;
  const float c_;
  ptx::Descriptor q_;
  Turn k_turn_, v_turn_;
  unsigned q_parity_ = 0;
};

}  // namespace attune::prefill
