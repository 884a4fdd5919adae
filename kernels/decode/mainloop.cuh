// SPDX-License-Identifier: Apache-2.0
// The mainloop of one warp: 16 keys at a time against all rows of the split. S^T = K Q^T, the online softmax over the
// keys, O^T += V^T P^T.
//
// Swap-AB: keys are the M rows of the mma, so eight query rows fill one N tile and groups of up to 8 waste nothing. The
// accumulator has S as (key g, rows 2t, 2t + 1), but the B operand of P V needs (keys 2t.., row g): movmatrix
// transposes.
#pragma once

#include "decode/producer.cuh"
#include "decode/mask.cuh"
#include "decode/softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attune::decode {

class Mainloop {
 public:
  __device__ __forceinline__ explicit Mainloop(int lane) : k_(lane), v_(lane), g_(lane / 4), t_(lane % 4) {}

  // Runs one tile. stage: the shared address of the 16 keys from first_token on. valid_keys: those that some row sees.
  __device__ __forceinline__ void attend_tile(const AttentionParams& p, const Split& split, const QueryRows& rows,
                                              const QueryOperand& queries, unsigned stage, int first_token,
                                              unsigned valid_keys, AttentionState& state) const {
    float s[kN][4] = {};
    qk_gemm(queries, stage, s);
    scale(p, split, rows, stage, first_token, s);
    bool skips_keys = false;
    if (QueryRows::KeyMask::kAny || valid_keys != 0xffffu || !rows.all_visible(first_token)) {
      skips_keys = (valid_keys & ~rows.keys_visible_to_all(first_token)) != 0;
      skips_keys |= mask(p, split, rows, first_token, valid_keys, s);
    }
    if constexpr (QueryRows::kTables) skips_keys |= any_masked(s);

    float v_scale[2] = {1.0f, 1.0f};
    if constexpr (Config::kKeyFactors) {
      if (p.v_scale.mode == ScaleMode::kTokenHead) {
        v_scale[0] = read_scale(stage, kernels::kKeysOfWarp + g_);
        v_scale[1] = read_scale(stage, kernels::kKeysOfWarp + g_ + 8);
      }
    }
    unsigned p_regs[Config::kParts][kN][2];
    Softmax::softmax(s, v_scale, p_regs, state);
    // P is 0 where a row does not see a key or the score is -inf, and a 16-bit part of P may be 0 too. 0 times a NaN or
    // an infinite value would be NaN, so tiles with such values take the slow path.
    if ((skips_keys || Config::kParts > 1 || Config::kBf16x3) && Config::kKvType != common::kInt8 &&
        any_nonfinite_v(stage + Config::kBytesK)) {
      pv_gemm_by_key(stage + Config::kBytesK, s, state);
    } else {
      pv_gemm(stage + Config::kBytesK, p_regs, state);
    }
  }

 private:
  static constexpr int kN = Config::kRowTiles, kCompute = Config::kComputeType;
  static constexpr bool kIs16Bit = Config::kElement == 2;

  __device__ __forceinline__ static float read_scale(unsigned stage, int i) {
    return ptx::load_shared(stage + Config::kBytesK + Config::kBytesV + i * 4);
  }

  __device__ __forceinline__ static void qk_mma(const QueryOperand& queries, int block, const unsigned (&a)[4],
                                                float (&s)[kN][4]) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        unsigned b[2];
        queries.get(part, block, n, b);
        common::mma<kCompute>(s[n], a, b);
      }
    }
  }

  // bf16x3: the products that are left out are below 2^-24 of the sum.
  __device__ __forceinline__ static void qk_mma_bf16x3(const QueryOperand& queries, int block,
                                                       const unsigned (&a)[common::kSplitParts][4], float (&s)[kN][4]) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        unsigned b[2];
        queries.get(part, block, n, b);
#pragma unroll
        for (int i = 0; i + part < common::kSplitParts; ++i) common::mma<kCompute>(s[n], a[i], b);
      }
    }
  }

  __device__ __forceinline__ void qk_gemm(const QueryOperand& queries, unsigned stage, float (&s)[kN][4]) const {
    // Two accumulators halve the length of the chains of dependent mma instructions.
    float odd[kN][4] = {};
    if constexpr (Config::kBf16x3) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksQk; ++block) {
        unsigned a[common::kSplitParts][4];
        k_.load_bf16x3(stage, block, a);
        qk_mma_bf16x3(queries, block, a, block % 2 == 0 ? s : odd);
      }
    } else if constexpr (kIs16Bit) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksQk; ++block) {
        unsigned a[4];
        k_.load_16bit(stage, block, a);
        qk_mma(queries, block, a, block % 2 == 0 ? s : odd);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < Config::kBlocksQk / 2; ++pair) {
        unsigned a[2][4];
        k_.load_8bit(stage, pair, a);
        qk_mma(queries, 2 * pair, a[0], s);
        qk_mma(queries, 2 * pair + 1, a[1], odd);
      }
      if constexpr (Config::kBlocksQk % 2 != 0) {
        unsigned a[4];
        k_.load_8bit_last(stage, Config::kBlocksQk - 1, a);
        qk_mma(queries, Config::kBlocksQk - 1, a, s);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] += odd[n][j];
    }
  }

  __device__ __forceinline__ void scale(const AttentionParams& p, const Split& split, const QueryRows& rows,
                                        unsigned stage, int first_token, float (&s)[kN][4]) const {
    float key_scale[2] = {1.0f, 1.0f};
    if constexpr (Config::kKeyFactors) {
      if (p.k_scale.mode == ScaleMode::kTokenHead) {
        key_scale[0] = read_scale(stage, g_);
        key_scale[1] = read_scale(stage, g_ + 8);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float dot = Config::kKeyFactors ? s[n][j] * key_scale[j / 2] : s[n][j];
        s[n][j] = rows.score(p, split, n, j % 2, dot * rows.factor[n][j % 2], first_token + g_ + j / 2 * 8);
      }
    }
  }

  // Sets scores of keys that a row may not see to -inf. Returns true if a mask that is looked up key by key hides a
  // valid key from some row.
  __device__ __forceinline__ bool mask(const AttentionParams& p, const Split& split, const QueryRows& rows,
                                       int first_token, unsigned valid_keys, float (&s)[kN][4]) const {
    bool masks_valid_key = false;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const unsigned visible = valid_keys & rows.visible(p, split.batch, rows.position(p, split, n, e), first_token);
        if ((visible >> g_ & 1) == 0) s[n][e] = -ptx::infinity();
        if ((visible >> (g_ + 8) & 1) == 0) s[n][2 + e] = -ptx::infinity();
        if constexpr (QueryRows::KeyMask::kAny) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = g_ + 8 * half;
            if ((visible >> key & 1) == 0 || rows.sees(p, split, n, e, first_token + key)) continue;
            s[n][2 * half + e] = -ptx::infinity();
            masks_valid_key = true;
          }
        }
      }
    }
    return QueryRows::KeyMask::kAny && __any_sync(0xffffffffu, masks_valid_key) != 0;
  }

  // Returns true if a bias made some score -inf. Such a key does not count, whatever its value is.
  __device__ __forceinline__ static bool any_masked(const float (&s)[kN][4]) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) any |= s[n][j] == -ptx::infinity();
    }
    return __any_sync(0xffffffffu, any) != 0;
  }

  __device__ __forceinline__ static void pv_mma(const unsigned (&a)[4], const unsigned (&p_regs)[Config::kParts][kN][2],
                                                float (&o)[kN][4]) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) common::mma<kCompute>(o[n], a, p_regs[part][n]);
    }
  }

  __device__ __forceinline__ void pv_gemm(unsigned v_tile, const unsigned (&p_regs)[Config::kParts][kN][2],
                                          AttentionState& state) const {
    if constexpr (Config::kBf16x3) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksV; ++block) {
        unsigned a[common::kSplitParts][4];
        v_.load_bf16x3(v_tile, block, a);
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i + part < common::kSplitParts; ++i)
              common::mma<kCompute>(state.o[block][n], a[i], p_regs[part][n]);
          }
        }
      }
    } else if constexpr (kIs16Bit) {
#pragma unroll
      for (int block = 0; block < Config::kBlocksV; ++block) {
        unsigned a[4];
        v_.load_16bit(v_tile, block, a);
        pv_mma(a, p_regs, state.o[block]);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < Config::kBlocksV / 2; ++pair) {
        unsigned a[2][4];
        v_.load_8bit(v_tile, pair, a);
        pv_mma(a[0], p_regs, state.o[2 * pair]);
        pv_mma(a[1], p_regs, state.o[2 * pair + 1]);
      }
      if constexpr (Config::kBlocksV % 2 != 0) {
        unsigned a[4];
        v_.load_8bit_last(v_tile, Config::kBlocksV - 1, a);
        pv_mma(a, p_regs, state.o[Config::kBlocksV - 1]);
      }
    }
  }

  // Returns true if x, an fp32, two 16-bit or four 8-bit elements, has an element that is not finite.
  __device__ __forceinline__ static bool nonfinite(unsigned x) {
    if constexpr (Config::kBf16x3) return (x & 0x7f800000u) == 0x7f800000u;
    if constexpr (Config::kKvType == common::kBFloat16)
      return (x & 0x7f80u) == 0x7f80u || (x & 0x7f800000u) == 0x7f800000u;
    if constexpr (Config::kKvType == common::kFloat16)
      return (x & 0x7c00u) == 0x7c00u || (x & 0x7c000000u) == 0x7c000000u;
    const unsigned exponent = Config::kKvType == common::kE4m3 ? 0x7fu : 0x7cu;
    bool found = false;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) found |= (x >> 8 * byte & exponent) == exponent;
    return found;
  }

  __device__ __forceinline__ bool any_nonfinite_v(unsigned v_tile) const {
    bool found = false;
    for (unsigned at = (g_ * 4 + t_) * 4; at < Config::kBytesV; at += 128) {
      const unsigned x = ptx::load_shared_u32(v_tile + at);
      // The padding between rows was never written.
      const bool is_padding = at % Config::LayoutV::kPitch >= Config::kChunksV * 16;
      found |= !is_padding && nonfinite(x);
    }
    return __any_sync(0xffffffffu, found);
  }

  // The slow path: key by key, and only keys whose P is not 0.
  __device__ __forceinline__ void pv_gemm_by_key(unsigned v_tile, const float (&s)[kN][4],
                                                 AttentionState& state) const {
#pragma unroll 1
    for (int key = 0; key < kernels::kKeysOfWarp; ++key) {
      float p_of_key[kN][2];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          p_of_key[n][e] = __shfl_sync(0xffffffffu, key < 8 ? s[n][e] : s[n][2 + e], key % 8 * 4 + t_);
      }
#pragma unroll
      for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int byte = common::channel_of_row<Config::kKvType>(i, g_, half) * Config::kElement;
          const float value = read_v(v_tile + Config::LayoutV::offset(key, byte / 16) + byte % 16);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (p_of_key[n][e] != 0) state.o[i][n][2 * half + e] += p_of_key[n][e] * value;
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ static float read_v(unsigned at) {
    if constexpr (Config::kBf16x3) {
      return ptx::load_shared(at);
    } else if constexpr (kIs16Bit) {
      const unsigned short x = ptx::load_shared_u16(at);
      return common::load_element(Config::kKvType, &x, 0);
    } else {
      const unsigned x = ptx::load_shared_u8(at);
      if constexpr (Config::kKvType == common::kInt8)
        return static_cast<float>(static_cast<signed char>(x));
      else
        return ptx::f16_to_float(static_cast<unsigned short>(common::pair_to_f16<Config::kKvType>(x))) /
               common::code_unit<Config::kKvType>();
    }
  }

  common::KvOperand<false, Config::kKvType, kCompute, Config::kChunksK> k_;
  common::KvOperand<true, Config::kKvType, kCompute, Config::kChunksV> v_;
  int g_, t_;
};

// Runs the mainloop over this warp's keys in the tiles of a split. stage: of the next tile.
__device__ __forceinline__ void attend_split_tiles(const AttentionParams& p, const Split& split, const QueryRows& rows,
                                                   const QueryOperand& queries, const Mainloop& mainloop,
                                                   Producer& producer, int& stage, AttentionState& state) {
  const int end = producer.first_key_of_tile(split.end_tile);
  for (int first = producer.first_key_of_tile(split.first_tile); first < end; first += Config::kTileKeys) {
    ptx::wait_copies<Config::kStages - 2>();
    __syncwarp();
    const unsigned valid_keys = producer.valid_keys_of_oldest(stage);
    producer.issue_tile(p);
    if (valid_keys != 0) {
      mainloop.attend_tile(p, split, rows, queries, producer.ring + stage * Config::kStageBytes, first, valid_keys,
                           state);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
}

}  // namespace attune::decode
