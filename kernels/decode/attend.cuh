// SPDX-License-Identifier: Apache-2.0
// One warp, 16 keys, all rows of the piece: S^T = K Q^T, the online softmax along the keys, O^T += V^T P^T.
//
// Keys are the rows of the products, so a block of eight query rows costs one mma column tile and no row of the tensor
// core idles for groups up to 8. Scores come out as (key g, rows 2t, 2t + 1) and are wanted as (keys 2t.., row g):
// movmatrix turns them.
#pragma once

#include "decode/rows.cuh"
#include "ptx/math.cuh"
#include "ptx/reduce.cuh"
#include "ptx/shared.cuh"

namespace attune::decode {

// Exponents are taken against this: a row that has seen nothing has no maximum yet.
__device__ __forceinline__ float reference_of(float max) { return max == -ptx::infinity() ? 0.0f : max; }

// Powers of two that weights, and so o and the sum, are multiplied with until the warps merge. In fp16 the largest
// weight is 2^15: small probabilities, and those of values with small scales, keep their bits.
constexpr float kLift = Config::kComputeType == tile::kFloat16 ? 15 : 0;

struct State {
  static constexpr int kN = Config::kRowTiles;

  float o[Config::kBlocksV][kN][4];  // channels by rows, against max (token scales: value_max)
  float max[kN][2], sum[kN][2];                       // sum: of this thread's keys only
  float value_max[Config::kTokenScales ? kN : 1][2];  // of score + log2 |v_scale|, or above it
  unsigned unit;                     // biased exponent of a power of two above all v_scale so far

  // first_sum: with which sums begin.
  __device__ __forceinline__ void clear(float first_sum) {
#pragma unroll
    for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][n][j] = 0;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        max[n][e] = -ptx::infinity();
        sum[n][e] = first_sum;
        if constexpr (Config::kTokenScales) value_max[n][e] = -ptx::infinity(), unit = 1;
      }
    }
  }
};

// Over the lanes that hold the same rows.
__device__ __forceinline__ float max_of_keys(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ __forceinline__ float sum_of_keys(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

class Attend {
 public:
  __device__ __forceinline__ explicit Attend(int lane) : k_(lane), v_(lane), g_(lane / 4), t_(lane % 4) {}

  // stage: shared address of the 16 keys that begin at first_token; there: which of them exist and are visible to
  // somebody.
  __device__ __forceinline__ void operator()(const DecodeParams& p, const Piece& piece, const Rows& rows,
                                             const QueryOperand& queries, unsigned stage, int first_token,
                                             unsigned there, State& state) const {
    float s[kN][4] = {};
    multiply_queries(queries, stage, s);
    scale(p, piece, rows, stage, first_token, s);
    bool careful = false;
    if (Rows::kBits || there != 0xffffu || !rows.all_see(first_token)) {
      careful = (there & ~rows.seen_by_all(first_token)) != 0;
      careful |= hide(p, piece, rows, first_token, there, s);
    }
    if constexpr ((Config::kScore & (kBias | kT5)) != 0) careful |= any_without_weight(s);

    float value_scale[2] = {1.0f, 1.0f};
    if constexpr (Config::kTokenScales) {
      if (p.v_scale.mode == 3) {
        value_scale[0] = read_scale(stage, kernels::kKeysOfWarp + g_);
        value_scale[1] = read_scale(stage, kernels::kKeysOfWarp + g_ + 8);
      }
    }
    unsigned weights[Config::kParts][kN][2];
    softmax(s, value_scale, weights, state);
    // A value that some row may not see but another does, or whose score is -inf, must not be multiplied, not even by
    // zero, if it is NaN or infinite; nor by the parts of a weight, one of which may be zero.
    if ((careful || Config::kParts > 1 || Config::kSplit) && Config::kKvType != tile::kInt8 &&
        any_nonfinite_value(stage + Config::kBytesK)) {
      multiply_values_one_by_one(stage + Config::kBytesK, s, state);
    } else {
      multiply_values(stage + Config::kBytesK, weights, state);
    }
  }

 private:
  static constexpr int kN = Config::kRowTiles, kCompute = Config::kComputeType;
  static constexpr bool kWide = Config::kElement == 2;

  __device__ __forceinline__ static float read_scale(unsigned stage, int i) {
    return ptx::load_shared(stage + Config::kBytesK + Config::kBytesV + i * 4);
  }

  __device__ __forceinline__ static void multiply_block(const QueryOperand& queries, int block, const unsigned (&a)[4],
                                                        float (&s)[kN][4]) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        unsigned b[2];
        queries.get(part, block, n, b);
        tile::mma<kCompute>(s[n], a, b);
      }
    }
  }

  // Products of parts that matter: those that are left out are below 2^-24 of the whole.
  __device__ __forceinline__ static void multiply_split_block(const QueryOperand& queries, int block,
                                                              const unsigned (&a)[tile::kSplitParts][4],
                                                              float (&s)[kN][4]) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        unsigned b[2];
        queries.get(part, block, n, b);
#pragma unroll
        for (int i = 0; i + part < tile::kSplitParts; ++i) tile::mma<kCompute>(s[n], a[i], b);
      }
    }
  }

  __device__ __forceinline__ void multiply_queries(const QueryOperand& queries, unsigned stage,
                                                   float (&s)[kN][4]) const {
    // Two chains of dependent products are shorter than one.
    float odd[kN][4] = {};
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksQk; ++block) {
        unsigned a[tile::kSplitParts][4];
        k_.load_split(stage, block, a);
        multiply_split_block(queries, block, a, block % 2 == 0 ? s : odd);
      }
    } else if constexpr (kWide) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksQk; ++block) {
        unsigned a[4];
        k_.load_wide(stage, block, a);
        multiply_block(queries, block, a, block % 2 == 0 ? s : odd);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < Config::kBlocksQk / 2; ++pair) {
        unsigned a[2][4];
        k_.load_narrow(stage, pair, a);
        multiply_block(queries, 2 * pair, a[0], s);
        multiply_block(queries, 2 * pair + 1, a[1], odd);
      }
      if constexpr (Config::kBlocksQk % 2 != 0) {
        unsigned a[4];
        k_.load_last(stage, Config::kBlocksQk - 1, a);
        multiply_block(queries, Config::kBlocksQk - 1, a, s);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] += odd[n][j];
    }
  }

  __device__ __forceinline__ void scale(const DecodeParams& p, const Piece& piece, const Rows& rows, unsigned stage,
                                        int first_token, float (&s)[kN][4]) const {
    float key_scale[2] = {1.0f, 1.0f};
    if constexpr (Config::kTokenScales) {
      if (p.k_scale.mode == 3) {
        key_scale[0] = read_scale(stage, g_);
        key_scale[1] = read_scale(stage, g_ + 8);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float dot = Config::kTokenScales ? s[n][j] * key_scale[j / 2] : s[n][j];
        s[n][j] = rows.score(p, piece, n, j % 2, dot * rows.factor[n][j % 2], first_token + g_ + j / 2 * 8);
      }
    }
  }

  // -inf where a row may not see a key. True if some row of the piece misses a key that is there, as far as bits say.
  __device__ __forceinline__ bool hide(const DecodeParams& p, const Piece& piece, const Rows& rows, int first_token,
                                       unsigned there, float (&s)[kN][4]) const {
    bool missed = false;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const unsigned seen = there & rows.seen(p, piece.batch, rows.position(p, piece, n, e), first_token);
        if ((seen >> g_ & 1) == 0) s[n][e] = -ptx::infinity();
        if ((seen >> (g_ + 8) & 1) == 0) s[n][2 + e] = -ptx::infinity();
        if constexpr (Rows::kBits) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = g_ + 8 * half;
            if ((seen >> key & 1) == 0 || rows.bit_of(p, piece, n, e, first_token + key)) continue;
            s[n][2 * half + e] = -ptx::infinity();
            missed = true;
          }
        }
      }
    }
    return Rows::kBits && __any_sync(0xffffffffu, missed) != 0;
  }

  // Whether a table made some score -inf: its key counts for nothing, whatever the value holds.
  __device__ __forceinline__ static bool any_without_weight(const float (&s)[kN][4]) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) any |= s[n][j] == -ptx::infinity();
    }
    return __any_sync(0xffffffffu, any) != 0;
  }

  // Values' scales that are not far apart: their power of two above all that the warp has seen is the unit of its
  // weights, so that fp16 holds them; unit becomes both scales in it, and its logarithm. False: they are too far apart.
  __device__ __forceinline__ static bool find_unit(const float (&value_scale)[2], float (&unit)[3], State& state) {
    constexpr unsigned kSmallest = 12;  // binary places below the unit that fp16 weights can afford
    const unsigned a = __float_as_uint(fabsf(value_scale[0])), b = __float_as_uint(fabsf(value_scale[1]));
    // In most tiles no scale is above the unit, nor far below it.
    const unsigned above = state.unit << 23;
    const unsigned below = state.unit > kSmallest ? (state.unit - kSmallest) << 23 : 1;
    bool common = true;
    if (__any_sync(0xffffffffu, max(a, b) >= above || min(a - 1, b - 1) < below - 1)) {
      const unsigned largest = ptx::max_of_warp(max(a, b));
      const unsigned smallest = ptx::min_of_warp(min(a - 1, b - 1)) + 1;  // 0: all are
      if (largest < 253u << 23) state.unit = max(state.unit, (largest >> 23) + 1);
      common = largest < 253u << 23 && (smallest == 0 || (smallest >> 23) + kSmallest >= state.unit);
    }
    const float inverse = __uint_as_float((254 - state.unit) << 23);
    unit[0] = value_scale[0] * inverse, unit[1] = value_scale[1] * inverse;
    unit[2] = static_cast<float>(static_cast<int>(state.unit) - 127);
    return common;
  }
  // Weights of two keys from their scores, with the values' scales; returns what o is to be multiplied with.
  __device__ __forceinline__ static float weigh_common(float& s0, float& s1, const float (&unit)[3], float lowered,
                                                       float reference, int n, int e, State& state) {
    const float before = state.value_max[n][e];
    state.value_max[n][e] = state.max[n][e] + unit[2];
    const float p0 = ptx::exp2_approx(s0 - (reference - kLift)), p1 = ptx::exp2_approx(s1 - (reference - kLift));
    state.sum[n][e] = state.sum[n][e] * lowered + p0 + p1;
    s0 = p0 * unit[0], s1 = p1 * unit[1];
    return ptx::exp2_approx(before - (reference + unit[2]));
  }
  // Whatever the scales are: weights have a maximum of their own.
  __device__ __forceinline__ static float weigh(float& s0, float& s1, const float (&value_scale)[2], float lowered,
                                                float reference, int n, int e, State& state) {
    const float a = s0 + ptx::log2_approx(fabsf(value_scale[0])), b = s1 + ptx::log2_approx(fabsf(value_scale[1]));
    const float before = state.value_max[n][e], value_max = fmaxf(before, max_of_keys(fmaxf(a, b)));
    const float value_reference = reference_of(value_max);
    state.value_max[n][e] = value_max;
    state.sum[n][e] = state.sum[n][e] * lowered + ptx::exp2_approx(s0 - (reference - kLift)) +
                      ptx::exp2_approx(s1 - (reference - kLift));
    s0 = s0 == -ptx::infinity() ? 0.0f : copysignf(ptx::exp2_approx(a - (value_reference - kLift)), value_scale[0]);
    s1 = s1 == -ptx::infinity() ? 0.0f : copysignf(ptx::exp2_approx(b - (value_reference - kLift)), value_scale[1]);
    return ptx::exp2_approx(before - value_reference);
  }

  // Scores to weights: s becomes what it was rounded from, weights the B fragments. The sum adds the rounded weights.
  __device__ __forceinline__ void softmax(float (&s)[kN][4], const float (&value_scale)[2],
                                          unsigned (&weights)[Config::kParts][kN][2], State& state) const {
    float correction[kN][2];
    bool grew = false;
    float unit[3] = {};
    const bool common = Config::kTokenScales && find_unit(value_scale, unit, state);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float max = fmaxf(state.max[n][e], max_of_keys(fmaxf(s[n][e], s[n][2 + e])));
        const float reference = reference_of(max);
        const float lowered = ptx::exp2_approx(state.max[n][e] - reference);
        state.max[n][e] = max;
        if constexpr (Config::kTokenScales) {
          correction[n][e] = common ? weigh_common(s[n][e], s[n][2 + e], unit, lowered, reference, n, e, state)
                                    : weigh(s[n][e], s[n][2 + e], value_scale, lowered, reference, n, e, state);
        } else {
          correction[n][e] = lowered;
          state.sum[n][e] *= lowered;
          s[n][e] = ptx::exp2_approx(s[n][e] - (reference - kLift));
          s[n][2 + e] = ptx::exp2_approx(s[n][2 + e] - (reference - kLift));
        }
        grew |= correction[n][e] != 1.0f;
      }
    }
    // The maximum seldom moves after the first tiles.
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
      for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) state.o[i][n][j] *= correction[n][j % 2];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float rest[4] = {s[n][0], s[n][1], s[n][2], s[n][3]};
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned rounded = tile::pack<kCompute>(rest[2 * half], rest[2 * half + 1]);
          const float low = tile::low_half<kCompute>(rounded), high = tile::high_half<kCompute>(rounded);
          rest[2 * half] -= low;
          rest[2 * half + 1] -= high;
          if constexpr (!Config::kTokenScales) {
            state.sum[n][0] += low;
            state.sum[n][1] += high;
          }
          weights[part][n][half] = ptx::transpose_matrix(rounded);
        }
      }
    }
  }

  __device__ __forceinline__ static void multiply_block_of_values(const unsigned (&a)[4],
                                                                  const unsigned (&weights)[Config::kParts][kN][2],
                                                                  float (&o)[kN][4]) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) tile::mma<kCompute>(o[n], a, weights[part][n]);
    }
  }

  __device__ __forceinline__ void multiply_values(unsigned values, const unsigned (&weights)[Config::kParts][kN][2],
                                                  State& state) const {
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksV; ++block) {
        unsigned a[tile::kSplitParts][4];
        v_.load_split(values, block, a);
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i + part < tile::kSplitParts; ++i)
              tile::mma<kCompute>(state.o[block][n], a[i], weights[part][n]);
          }
        }
      }
    } else if constexpr (kWide) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksV; ++block) {
        unsigned a[4];
        v_.load_wide(values, block, a);
        multiply_block_of_values(a, weights, state.o[block]);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < Config::kBlocksV / 2; ++pair) {
        unsigned a[2][4];
        v_.load_narrow(values, pair, a);
        multiply_block_of_values(a[0], weights, state.o[2 * pair]);
        multiply_block_of_values(a[1], weights, state.o[2 * pair + 1]);
      }
      if constexpr (Config::kBlocksV % 2 != 0) {
        unsigned a[4];
        v_.load_last(values, Config::kBlocksV - 1, a);
        multiply_block_of_values(a, weights, state.o[Config::kBlocksV - 1]);
      }
    }
  }

  // An fp32, two 16-bit or four 8-bit elements, one of them not finite.
  __device__ __forceinline__ static bool nonfinite(unsigned x) {
    if constexpr (Config::kSplit) return (x & 0x7f800000u) == 0x7f800000u;
    if constexpr (Config::kKvType == tile::kBFloat16)
      return (x & 0x7f80u) == 0x7f80u || (x & 0x7f800000u) == 0x7f800000u;
    if constexpr (Config::kKvType == tile::kFloat16)
      return (x & 0x7c00u) == 0x7c00u || (x & 0x7c000000u) == 0x7c000000u;
    const unsigned exponent = Config::kKvType == tile::kE4m3 ? 0x7fu : 0x7cu;
    bool found = false;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) found |= (x >> 8 * byte & exponent) == exponent;
    return found;
  }

  __device__ __forceinline__ bool any_nonfinite_value(unsigned values) const {
    bool found = false;
    for (unsigned at = (g_ * 4 + t_) * 4; at < Config::kBytesV; at += 128) {
      const unsigned x = ptx::load_shared_u32(values + at);
      // What lies between rows was never written.
      const bool is_padding = at % Config::LayoutV::kPitch >= Config::kChunksV * 16;
      found |= !is_padding && nonfinite(x);
    }
    return __any_sync(0xffffffffu, found);
  }

  // Rare, hence plain: products for visible keys only.
  __device__ __forceinline__ void multiply_values_one_by_one(unsigned values, const float (&s)[kN][4],
                                                             State& state) const {
#pragma unroll 1
    for (int key = 0; key < kernels::kKeysOfWarp; ++key) {
      float weight[kN][2];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          weight[n][e] = __shfl_sync(0xffffffffu, key < 8 ? s[n][e] : s[n][2 + e], key % 8 * 4 + t_);
      }
#pragma unroll
      for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int byte = tile::channel_of_row<Config::kKvType>(i, g_, half) * Config::kElement;
          const float value = read_value(values + Config::LayoutV::offset(key, byte / 16) + byte % 16);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (weight[n][e] != 0) state.o[i][n][2 * half + e] += weight[n][e] * value;
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ static float read_value(unsigned at) {
    if constexpr (Config::kSplit) {
      return ptx::load_shared(at);
    } else if constexpr (kWide) {
      const unsigned short x = ptx::load_shared_u16(at);
      return tile::load_element(Config::kKvType, &x, 0);
    } else {
      const unsigned x = ptx::load_shared_u8(at);
      if constexpr (Config::kKvType == tile::kInt8)
        return static_cast<float>(static_cast<signed char>(x));
      else
        return ptx::f16_to_float(static_cast<unsigned short>(tile::pair_to_f16<Config::kKvType>(x)));
    }
  }

  tile::KeyOperand<Config::kKvType, kCompute, Config::kChunksK> k_;
  tile::ValueOperand<Config::kKvType, kCompute, Config::kChunksV> v_;
  int g_, t_;
};

}  // namespace attune::decode
