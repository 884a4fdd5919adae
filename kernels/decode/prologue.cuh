// SPDX-License-Identifier: Apache-2.0
// The prologue of one row of q, k or v, by one warp, in fp32. A whole step may take 10 us, a round trip to memory 0.5
// us and an instruction of a single warp 3 ns. So if rows are vectors (Config::kVectors), load() issues all loads at
// once, of the row and of all that the prologue needs for it; lane l has kVec channels from kVec l on. Other rows go
// through shared memory in loops (prepare_in_memory).
#pragma once

#include "common/int_table.cuh"
#include "common/prologue_row.cuh"
#include "decode/config.cuh"

namespace attune::decode {

using kernels::AttentionParams;
using kernels::FloatTable;
using kernels::PrologueParams;
using kernels::Sequence;

// The row of token i of a sequence in the tensor q, k or v.
struct TokenRow {
  int batch, head;
  int position;      // absolute
  long long offset;  // of the row, in elements
  long long row;     // the row of `positions`

  __device__ __forceinline__ TokenRow(const AttentionParams& p, const Sequence& s, int b, int h, int i,
                                      long long batch_stride, long long row_stride, long long head_stride)
      : batch(b), head(h), position(s.num_keys - s.num_q + i) {
    const bool ragged = !Config::kCluster && p.cu_seqlens_q.data != nullptr;
    offset = (ragged ? s.q_begin * row_stride : b * batch_stride) + i * row_stride + h * head_stride;
    row = ragged ? s.q_begin + i : static_cast<long long>(b) * p.fixed_q + i;
  }

  __device__ __forceinline__ common::PrologueToken prologue_token(const AttentionParams& p) const {
    if constexpr (!Config::kPrologue) return {};
    return common::prologue_token(p.prologue, row, batch, position);
  }
};

template <int kRow>
__device__ __forceinline__ const FloatTable& bias_of(const PrologueParams& g) {
  return kRow == common::kRowOfQ ? g.q_bias : kRow == common::kRowOfK ? g.k_bias : g.v_bias;
}
template <int kRow>
__device__ __forceinline__ const FloatTable& ia3_of(const PrologueParams& g) {
  return kRow == common::kRowOfK ? g.ia3_k : g.ia3_v;
}

// Loads kBytes (4, 8, 16 or 32) from an address that is aligned to kBytes or to 16.
template <int kBytes>
__device__ __forceinline__ void load_words(const void* at, unsigned* words) {
  if constexpr (kBytes == 4) {
    words[0] = *static_cast<const unsigned*>(at);
  } else if constexpr (kBytes == 8) {
    const uint2 x = *static_cast<const uint2*>(at);
    words[0] = x.x, words[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 x = static_cast<const uint4*>(at)[i];
      words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
    }
  }
}

// Element i of an array of words that hold elements of this type.
__device__ __forceinline__ float decode_word(int dtype, const unsigned* words, int i) {
  if (dtype == common::kFloat32) return __uint_as_float(words[i]);
  if (common::element_size(dtype) == 2) {
    const float2 pair = common::decode_pair(dtype, words[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
  }
  const float2 pair = common::decode_pair(dtype, words[i / 4] >> (i % 4 / 2 * 16) & 0xffff);
  return i % 2 == 0 ? pair.x : pair.y;
}

// kRow: common::kRowOfQ, kRowOfK or kRowOfV.
template <int kHeadDim, int kRow>
struct RowInput {
  static constexpr int kVec = kHeadDim <= 128 ? 4 : 8, kType = Config::kQType, kSize = common::element_size(kType);
  static constexpr bool kRotates = kRow != common::kRowOfV, kHasIa3 = kRow != common::kRowOfQ;

  unsigned raw[kVec * kSize / 4], bias[kVec], ia3[kVec];
  float cosine[kVec], sine[kVec];
  float logn;
  bool rotates, scaled_by_ia3;

  __device__ __forceinline__ static int first_channel() { return threadIdx.x % 32 * kVec; }

  // wanted = false loads nothing; then the result of apply() is meaningless.
  __device__ __forceinline__ void load(const AttentionParams& p, const TokenRow& at, const char* data, bool wanted) {
    load_row(p, at, data, wanted);
    if (wanted && first_channel() < kHeadDim) load_terms(p, at.head, at.prologue_token(p), wanted);
  }
  // Loads what does not depend on the token's position.
  __device__ __forceinline__ void load_row(const AttentionParams& p, const TokenRow& at, const char* data,
                                           bool wanted) {
    const int d = first_channel();
    rotates = scaled_by_ia3 = false;
    logn = 1.0f;
#pragma unroll
    for (int i = 0; i < kVec * kSize / 4; ++i) raw[i] = 0;
    // Without the loop, registers that only some branches write would stay live across the loop over splits.
#pragma unroll
    for (int i = 0; i < kVec && !Config::kCluster; ++i) bias[i] = ia3[i] = 0, cosine[i] = sine[i] = 0;
    if (!wanted || d >= kHeadDim) return;
    load_words<kVec * kSize>(data + (at.offset + d) * kSize, raw);
    if constexpr (Config::kPrologue) {
      const FloatTable& b = bias_of<kRow>(p.prologue);
      if (b.data != nullptr) load_table(b, b.data + at.head * b.head_stride, d, bias);
    }
  }
  // Loads what depends on the token's position.
  __device__ __forceinline__ void load_terms(const AttentionParams& p, int head, const common::PrologueToken& token,
                                             bool wanted) {
    const int d = first_channel();
    if (!wanted || d >= kHeadDim) return;
    if constexpr (Config::kPrologue) {
      const PrologueParams& g = p.prologue;
      logn = token.logn;
      if constexpr (kHasIa3) {
        const FloatTable& w = ia3_of<kRow>(g);
        scaled_by_ia3 = w.data != nullptr && token.task >= 0;
        if (scaled_by_ia3) load_table(w, w.data + token.task * w.outer_stride + head * w.head_stride, d, ia3);
      }
      if constexpr (kRotates) load_rope(g, token.rope[0], d - g.rope_offset);
    }
  }

  // The prologue's result. Lanes beyond the head dim get zeros.
  __device__ __forceinline__ void apply(const AttentionParams& p, float (&x)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = decode_word(kType, raw, i);
    if constexpr (Config::kPrologue) {
      const PrologueParams& g = p.prologue;
      const bool inside = first_channel() < kHeadDim;
      if (kSize == 1 && g.qkv_scale != nullptr && inside) {
        const float scale = g.qkv_scale[kRow * g.qkv_scale_stride];
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] *= scale;
      }
      if (bias_of<kRow>(g).data != nullptr && inside) {
        const bool narrow = bias_of<kRow>(g).dtype != common::kFloat32,
                   f16 = bias_of<kRow>(g).dtype == common::kFloat16;
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] += decode_weight(narrow, f16, bias, i);
      }
      if (kHasIa3 && scaled_by_ia3) {
        const bool narrow = ia3_of<kRow>(g).dtype != common::kFloat32, f16 = ia3_of<kRow>(g).dtype == common::kFloat16;
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] *= decode_weight(narrow, f16, ia3, i);
      }
      if constexpr (kRotates) {
        if (g.cos_sin != nullptr) rotate(g, x);
      }
      if (kRow == common::kRowOfQ && g.logn != nullptr) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] *= logn;
      }
    }
  }

 private:
  __device__ __forceinline__ static float decode_weight(bool narrow, bool f16, const unsigned (&words)[kVec], int i) {
    if (!narrow) return __uint_as_float(words[i]);
    const unsigned half = i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16;
    return f16 ? ptx::f16_to_float(static_cast<unsigned short>(half)) : __uint_as_float(half << 16);
  }

  __device__ __forceinline__ static void load_table(const FloatTable& t, const char* row, int d,
                                                    unsigned (&words)[kVec]) {
    if (t.dtype == common::kFloat32) {
      load_words<4 * kVec>(row + 4 * d, words);
    } else {
      load_words<2 * kVec>(row + 2 * d, words);
    }
  }

  // u: the lane's first channel, counted from the start of the rotary range.
  __device__ __forceinline__ void load_rope(const PrologueParams& g, const float* row, int u) {
    const int half = g.rotary_dim / 2;
    rotates = row != nullptr && u >= 0 && u < g.rotary_dim;
    if (!rotates) return;
    if (g.interleaved) {
      load_words<2 * kVec>(row + u / 2, reinterpret_cast<unsigned*>(cosine));
      load_words<2 * kVec>(row + half + u / 2, reinterpret_cast<unsigned*>(sine));
    } else {
      const int pair = u < half ? u : u - half;
      load_words<4 * kVec>(row + pair, reinterpret_cast<unsigned*>(cosine));
      load_words<4 * kVec>(row + half + pair, reinterpret_cast<unsigned*>(sine));
    }
  }

  __device__ __forceinline__ void rotate(const PrologueParams& g, float (&x)[kVec]) const {
    if (g.interleaved) {
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        if (rotates) common::rotate_pair(x[i], x[i + 1], cosine[i / 2], sine[i / 2]);
      }
      return;
    }
    const int lanes = g.rotary_dim / (2 * kVec);
    const bool first = first_channel() - g.rope_offset < g.rotary_dim / 2;
    const int partner = static_cast<int>(threadIdx.x % 32) + (first ? lanes : -lanes);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float y = __shfl_sync(0xffffffffu, x[i], partner & 31);
      if (rotates) x[i] = first ? cosine[i] * x[i] - sine[i] * y : cosine[i] * x[i] + sine[i] * y;
    }
  }
};

// The prologue of a row in shared memory: for any strides and positions, slower, with little code and few registers.
// Fills kPaddedDim floats of `to`, with zeros after the head dim.
template <int kHeadDim, int kRow, int kPaddedDim>
__device__ __forceinline__ void prepare_in_memory(const AttentionParams& p, const TokenRow& at, const char* data,
                                                  long long dim_stride, float* to) {
  constexpr int kType = Config::kQType, kSize = common::element_size(kType);
  const PrologueParams& g = p.prologue;
  common::PrologueToken token{};
  if constexpr (Config::kPrologue) token = common::prologue_token(g, at.row, at.batch, at.position);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int d = lane; d < kPaddedDim; d += 32) {
    float x = d < kHeadDim ? common::load_element(kType, data, at.offset + d * dim_stride) : 0.0f;
    if (Config::kPrologue && d < kHeadDim) {
      const FloatTable& bias = bias_of<kRow>(g);
      const FloatTable& ia3 = ia3_of<kRow>(g);
      if (kSize == 1 && g.qkv_scale != nullptr) x *= g.qkv_scale[kRow * g.qkv_scale_stride];
      if (bias.data != nullptr)
        x += common::load_element(bias.dtype, bias.data + at.head * bias.head_stride + d * bias.channel_stride, 0);
      if (kRow != common::kRowOfQ && ia3.data != nullptr && token.task >= 0) {
        x *= common::load_element(
            ia3.dtype, ia3.data + token.task * ia3.outer_stride + at.head * ia3.head_stride + d * ia3.channel_stride,
            0);
      }
    }
    to[d] = x;
  }
  __syncwarp();
  if constexpr (Config::kPrologue && kRow != common::kRowOfV) {
    const bool sections = g.positions.data != nullptr && g.components == 3;
    const int pairs = g.cos_sin != nullptr ? g.rotary_dim / 2 : 0;
#pragma unroll 1
    for (int j = lane; j < pairs; j += 32) {
      const int which = sections ? common::mrope_component(g, j) : 0;
      const float* row = which == 0 ? token.rope[0] : which == 1 ? token.rope[1] : token.rope[2];
      if (row == nullptr) continue;
      float& x = to[g.rope_offset + (g.interleaved ? 2 * j : j)];
      float& y = to[g.rope_offset + (g.interleaved ? 2 * j + 1 : j + pairs)];
      common::rotate_pair(x, y, row[j * g.channel_stride], row[(pairs + j) * g.channel_stride]);
    }
    __syncwarp();
    if (kRow == common::kRowOfQ && g.logn != nullptr) {
      for (int d = lane; d < kHeadDim; d += 32) to[d] *= token.logn;
      __syncwarp();
    }
  }
}

}  // namespace attune::decode
