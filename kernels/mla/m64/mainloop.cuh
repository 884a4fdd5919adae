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

#include "mla/m64/mask.cuh"
#include "ptx/convert.cuh"

namespace attune::mla {

struct Accumulators {
  float o[Config::kChannels / 2];
  // In the scale of raw products. max, sum: of this group's tiles and, of sum, this thread's keys. o and sum are taken
  // against reference.
  float max[2], reference[2], sum[2];
};

__device__ __forceinline__ void rescale_if_lowered(const float (&lowered)[2], Accumulators& a) {
  if (__any_sync(0xffffffffu, lowered[0] != 1.0f || lowered[1] != 1.0f)) [[unlikely]] {
#pragma unroll
    for (int i = 0; i < Config::kChannels / 2; ++i) a.o[i] *= lowered[i / 2 % 2];
  }
}

template <int kGroup>
class Attend {
 public:
  using QkProduct = ptx::Product<Config::kKeys, Config::kProduct>;
  // An instruction may take no more registers than threads begin with.
  static constexpr int kColumns = Config::kThreads > 384 ? Config::kChannels / 2 : Config::kChannels;
  using PvProduct = ptx::Product<kColumns, Config::kProduct>;
  static constexpr int kWeights = Config::kKeys / 4;  // registers
  // Group 0 has S of its next tile computed while its last product runs; keys that are decoded come too late for that.
  static constexpr bool kLooksAhead = kGroup == 0 && Config::kLooksAhead;
  // Group 1 waits for the product of group 0's weights before it hands over its own, for lack of registers.
  static constexpr bool kWaitsFirst = !Config::kHandsOverFirst && !Config::kDecodes;

  __device__ __forceinline__ Attend(const PrefillParams& p, const Smem& smem)
      : smem_(smem), c_(p.scale * kLog2e) {}

  // All tiles of a work tile, from the last to the first.
  __device__ __forceinline__ void run(const WorkTile& work, const Rows& rows, Counts& counts, Accumulators& a) {
    if (kGroup == 0) rows.note_limits(smem_), __syncwarp();  // the other group waits for this one's weights first
    int left = __shfl_sync(0xffffffffu, work.tile_end - work.tile_begin, 0);
    a.max[0] = a.max[1] = a.reference[0] = a.reference[1] = -ptx::infinity();
    // A row has a sum in each group.
    a.sum[0] = a.sum[1] = smem_.first_sum();
    ptx::wait_phase(smem_.q_full(), counts.work_tiles() % 2);
    accumulate_ = 0;
    float s[Config::kKeys / 2];  // of group 0
    if (kLooksAhead && left > 0) {
      multiply_keys(counts.pipe(0), s, [] {});
      ptx::wait_products<0>();
      ptx::pin(s);
    }
    for (; left > 1; left -= 2) {
      const PipelineState first = counts.pipe(0), second = counts.pipe(1);
      counts.go_on(2);
      if constexpr (kGroup == 0) {
        lead(first, left == 2, s, a);
        take_second(second, counts.pipe(0), left > 2, s, a);
      } else {
        follow(first, second, left <= 3, a);
      }
    }
    if (left == 1) {
      const PipelineState first = counts.pipe(0);
      counts.go_on(1);
      if constexpr (kGroup == 0) {
        lead(first, true, s, a);
      } else {
        if (accumulate_ == 0) {  // there was no pair
          __syncwarp();          // all lanes have seen that q is there: the next one's phase would hide it
          release_queries();
        }
        wait_for_values(first);
        take_first(values_of(first), a);
        ptx::wait_products<0>();
        ptx::pin(a.o);
        release(first, 2);
      }
    }
  }

 private:
  // Group 0: its tile.
  __device__ __forceinline__ void lead(PipelineState pipe, bool last, float (&s)[Config::kKeys / 2], Accumulators& a) {
    float lowered[2];
    if constexpr (!kLooksAhead) multiply_keys(pipe, s, [] {});
    const ptx::Descriptor v = values_of(pipe);
    if constexpr (!kLooksAhead) {
      ptx::wait_products<0>();
      ptx::pin(s);
    }
    if (last) release_queries();
    weigh(Note(smem_, pipe.stage), s, lowered, a);
    release(pipe, kKeysOnly);
    add_up(lowered, s, a);
    pack(s, weights_);
    hand_over(weights_, a);
    ptx::arrive_some(first_is_ready(), 64);
    rescale_if_lowered(lowered, a);
    multiply_values(weights_, v, a);
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release(pipe, 1);
  }
  // Group 0, the tile of group 1; and S of its next one, if there are more.
  __device__ __forceinline__ void take_second(PipelineState pipe, PipelineState next, bool more,
                                              float (&s)[Config::kKeys / 2], Accumulators& a) {
    wait_for_values(pipe);
    const ptx::Descriptor v = values_of(pipe);
    ptx::sync_some(second_is_ready(), 64);
    receive(weights_, a);
    multiply_values(weights_, v, a);
    if (kLooksAhead && more) {
      multiply_keys(next, s, [&] {
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
  __device__ __forceinline__ void follow(PipelineState first, PipelineState second, bool last, Accumulators& a) {
    float s[Config::kKeys / 2], lowered[2];
    unsigned weights[kWeights];
    wait_for_values(first);
    const ptx::Descriptor v_first = values_of(first);
    // Keys that are decoded come late: the product of group 0's weights is done by then, and its values are released.
    if constexpr (Config::kDecodes) {
      take_first(v_first, a);
      ptx::wait_products<0>();
      ptx::pin(a.o);
      release(first, 2);
      multiply_keys(second, s, [] {});
    } else {
      multiply_keys(second, s, [] {});
      // Nothing to wait for, which ptxas must be told: it else puts a wait where O is multiplied beside S (C7517), to
      // which some warps of the group would come, and others not. It counts the products of each part.
      ptx::wait_products<kParts>();
      ptx::pin(a.o);
      take_first(v_first, a);
    }
    const Note note(smem_, second.stage);
    ptx::wait_products<Config::kDecodes ? 0 : 1>();
    ptx::pin(s);
    if (last) release_queries();
    weigh(note, s, lowered, a);
    release(second, kKeysOnly);
    add_up(lowered, s, a);  // before they are packed: registers are scarce while a product runs
    if constexpr (kWaitsFirst) {
      ptx::pin(s);
      finish_first(first, a);
    }
    pack(s, weights);
    hand_over(weights, a);
    ptx::arrive_some(second_is_ready(), 64);
    if constexpr (!kWaitsFirst && !Config::kDecodes) finish_first(first, a);
    const ptx::Descriptor v_second = values_of(second);
    rescale_if_lowered(lowered, a);
    multiply_values(weights, v_second, a);
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release(second, 2);
  }
  // Group 1: the product of group 0's weights is done.
  __device__ __forceinline__ void finish_first(PipelineState first, Accumulators& a) const {
    ptx::wait_products<0>();
    ptx::pin(a.o);
    release(first, 2);
  }
  // Group 1: the product of group 0's weights, which runs on.
  __device__ __forceinline__ void take_first(ptx::Descriptor v, Accumulators& a) {
    ptx::sync_some(first_is_ready(), 64);
    receive(weights_, a);
    multiply_values(weights_, v, a);
  }

  // between: when the products of the first half of the channels have been issued.
  template <class Between>
  __device__ __forceinline__ void multiply_keys(PipelineState pipe, float (&s)[Config::kKeys / 2],
                                                Between&& between) const {
    const ptx::Descriptor q = ptx::uniform(ptx::descriptor_k_major(smem_.q())),
                          k = ptx::uniform(ptx::descriptor_k_major(smem_.k(pipe.stage)));
    ptx::pin(s);
    int accumulate = 0;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int part = part_in_turn(j, kGroup == 1);
      if (part_at(part).count == 0) continue;
      if (is_first_handed_over(part)) {
        ptx::wait_phase(smem_.k_full(pipe.stage, barrier_of(part)), pipe.phase);
        if (Config::kReadersFence) ptx::fence_async_proxy();
        ptx::fence_products();
      }
#pragma unroll
      for (int i = 0; i < 4 * part_at(part).count; ++i) {
        const int chunk = part_at(part).chunk + i / 4, at = chunk * (Config::kChunkBytes >> 4) + i % 4 * ptx::kStepK;
        QkProduct::shared(s, q + at, k + at, accumulate);
        accumulate = 1;
      }
      if (j == 2) between();
    }
    ptx::commit_products();
  }

  // The group's half of a tile's values.
  __device__ __forceinline__ ptx::Descriptor values_of(PipelineState pipe) const {
    return ptx::uniform(ptx::descriptor_mn_major(
        smem_.k(pipe.stage) + kGroup * (Config::kChunksV / 2) * Config::kChunkBytes, Config::kChunkBytes));
  }
  __device__ __forceinline__ void multiply_values(unsigned (&weights)[kWeights], ptx::Descriptor v, Accumulators& a) {
    ptx::pin(a.o);
    ptx::pin(weights);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < Config::kKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kChannels / kColumns; ++j) {
        PvProduct::registers(reinterpret_cast<float(&)[kColumns / 2]>(a.o[j * kColumns / 2]), weights + 4 * i,
                             v + (i * 2048 + j * kColumns / 64 * Config::kChunkBytes >> 4), i == 0 ? accumulate_ : 1);
      }
    }
    ptx::commit_products();
    accumulate_ = 1;
  }
  // Of the other group's tile: that group has waited, not this one.
  __device__ __forceinline__ void wait_for_values(PipelineState pipe) const {
    if (!kByHalves) ptx::wait_phase(smem_.k_full(pipe.stage, 1 + 2 * kGroup), pipe.phase);
    ptx::wait_phase(smem_.k_full(pipe.stage, 2 + 2 * kGroup), pipe.phase);
    if (Config::kReadersFence) ptx::fence_async_proxy();
  }

  // Weights may exceed 1 by so many powers of 2 before o is multiplied: seldom after the first tile.
  static constexpr float kSlack = 8;

  // Products to weights in place, and how much what came before counts less.
  __device__ __forceinline__ void weigh(const Note& note, float (&s)[Config::kKeys / 2], float (&lowered)[2],
                                        Accumulators& a) const {
    hide(smem_, note, s);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max[4];
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) {
        const float pair = fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
        max[j % 4] = fmaxf(j < 4 ? a.max[h] : max[j % 4], pair);
      }
      float top = fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      a.max[h] = top;
      lowered[h] = 1.0f;
      if ((top - a.reference[h]) * c_ > kSlack) {
        lowered[h] = ptx::exp2_approx((a.reference[h] - top) * c_);
        a.reference[h] = top;
      }
      const float reference = reference_of(a.reference[h]) * c_;
#pragma unroll
      for (int i = 0; i < Config::kKeys / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        x = ptx::exp2_approx(fmaf(x, c_, -reference));
      }
    }
  }

  // The weights as an operand.
  __device__ __forceinline__ static void pack(const float (&s)[Config::kKeys / 2], unsigned (&weights)[kWeights]) {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      weights[i] = Config::kType == tile::kBFloat16 ? ptx::pack_bf16(s[2 * i], s[2 * i + 1])
                                                    : ptx::pack_f16(s[2 * i], s[2 * i + 1]);
    }
  }
  // Their sums. The other group need not wait for them.
  __device__ __forceinline__ static void add_up(const float (&lowered)[2], const float (&s)[Config::kKeys / 2],
                                                Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2] = {a.sum[h] * lowered[h], 0};
#pragma unroll
      for (int i = 0; i < Config::kKeys / 4; ++i) sum[i % 2] += s[i / 2 * 4 + 2 * h + i % 2];
      a.sum[h] = sum[0] + sum[1];
    }
  }

  // racecheck reports these stores beside receive()'s loads: it does not follow bar.arrive, for which the twin waits.
  __device__ __forceinline__ void hand_over(const unsigned (&weights)[kWeights], const Accumulators& a) const {
    const int thread = threadIdx.x % 128;
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        ptx::store_shared_u32(smem_.reference(kGroup, row_of_thread() + 8 * h), __float_as_uint(a.reference[h]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared_four(smem_.weights(thread, i), weights + 4 * i);
  }
  // The twin's weights for a tile, and its reference; o and sum are then against that.
  __device__ __forceinline__ void receive(unsigned (&weights)[kWeights], Accumulators& a) const {
    const int thread = threadIdx.x % 128;
    float reference[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) reference[h] = ptx::load_shared(smem_.reference(1 - kGroup, row_of_thread() + 8 * h));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned four[4];
      ptx::load_shared_four(smem_.weights(thread, i), four);
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[4 * i + j] = four[j];
    }
    if (__any_sync(0xffffffffu, reference[0] != a.reference[0] || reference[1] != a.reference[1])) [[unlikely]] {
      float lowered[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        lowered[h] = reference[h] == a.reference[h] ? 1.0f : ptx::exp2_approx((a.reference[h] - reference[h]) * c_);
        a.reference[h] = reference[h];
        a.sum[h] *= lowered[h];
      }
      rescale_if_lowered(lowered, a);
    }
  }

  __device__ __forceinline__ void release(PipelineState pipe, int half) const {
    if (half == kKeysOnly) __syncwarp();  // all lanes have read what lies beside the keys
    const unsigned barrier = smem_.k_empty(pipe.stage, half);
    if constexpr (Config::kCluster == 1) {
      if (threadIdx.x % 32 == 0) ptx::arrive(barrier);
    } else {  // both blocks write to the buffers of both
      if (threadIdx.x % 32 < Config::kCluster) ptx::arrive_in_cluster(ptx::shared_in_block(barrier, threadIdx.x % 32));
    }
  }
  __device__ __forceinline__ void release_queries() const {
    if (threadIdx.x % 32 == 0) ptx::arrive(smem_.q_empty());
  }

  const Smem& smem_;
  const float c_;
  unsigned weights_[kWeights];  // of the first tile of a pair
  int accumulate_ = 0;
};

// The end of a work tile's tiles, of both groups: the maximum as a score in base 2, and the sum against it. lowered:
// what o, which stays against the reference, is to be multiplied with for that. scale: of products to scores in base 2.
__device__ __forceinline__ void finish(const Smem& smem, float scale, Accumulators& a, float (&lowered)[2]) {
  const int group = math_group();
  // racecheck reports the stores beside receive()'s loads, and beside those below: twins meet between them.
  ptx::sync_some(twins(), 64);  // nobody reads weights any more
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 1);
    a.sum[h] += __shfl_xor_sync(0xffffffffu, a.sum[h], 2);
    if (threadIdx.x % 4 == 0) smem.stats(group)[h] = make_float2(a.max[h], a.sum[h]);
  }
  ptx::sync_some(twins(), 64);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 other = smem.stats(1 - group)[h];
    const float sum = a.sum[h] + other.y;
    a.max[h] = fmaxf(a.max[h], other.x);
    lowered[h] = a.max[h] == a.reference[h] ? 1.0f : ptx::exp2_approx((a.reference[h] - a.max[h]) * scale);
    a.sum[h] = sum * lowered[h];
    if (a.max[h] != -ptx::infinity()) a.max[h] *= scale;
  }
  ptx::sync_some(twins(), 64);  // before the next work tile's are written
}

}  // namespace attune::mla
