// SPDX-License-Identifier: Apache-2.0
// New tokens, which are not in the cache yet. The block with the first split of an output tile attends to them, in fp32
// after the prologue, and appends them. Tokens go to warps in reverse, because high warps have fewer queries: warp w
// takes tokens w', w' + kWarps, .., where w' = kWarps - 1 - w.
//
//   scratch <- k, v of a token | mainloop over the cache | row_max, row_sum, O <- token
//
// The load of the first token overlaps that of the first tile. The token is added before the mainloop. With 8-bit
// caches it is added after the mainloop, because before that O lacks the scale of cached values.
#pragma once

#include "common/kv_codec.cuh"
#include "decode/mainloop.cuh"
#include "decode/shared_storage.cuh"
#include "ptx/atomic.cuh"

namespace attune::decode {

__device__ __noinline__ void write_row(const kernels::KvPlane& plane, const KvScale& scale, int page,
                                       int offset, int head, const float* row, int head_dim) {
  common::store_row<Config::kKvType>(plane, scale, page, offset, head, row, head_dim);
}

// The slot for a position of a sequence. page -1: the cache is too short.
__device__ __forceinline__ Slot slot_of_new(const AttentionParams& p, int batch, int position) {
  if (p.ring_capacity == 0 && position >= p.capacity) return {-1, -1, 0};
  return find_slot(p, batch, p.ring_capacity > 0 ? position % p.ring_capacity : position);
}

// k, v: rows in shared memory that other lanes have also written.
__device__ __forceinline__ void append_rows(const AttentionParams& p, const Slot& slot, int head, const float* k,
                                            const float* v) {
  if (!slot.exists(p)) return;
  __syncwarp();
  write_row(p.k, p.k_scale, slot.k_page, slot.offset, head, k, Config::kHeadDimQk);
  if (!p.v_is_k) write_row(p.v, p.v_scale, slot.v_page(p), slot.offset, head, v, Config::kHeadDimV);
}

struct NewTokens {
  static constexpr int kN = Config::kRowTiles;
  static constexpr int kPaddedDimQk = 16 * Config::kBlocksQk, kPaddedDimV = 16 * Config::kBlocksV;

  float* scratch;  // this warp's, in shared memory
  int warp;        // w' above

  __device__ __forceinline__ explicit NewTokens(SharedStorage& shared)
      : scratch(shared.exchange[threadIdx.x / 32]),
        warp(Config::kWarps - 1 - static_cast<int>(threadIdx.x / 32)) {}

  // A token whose loads are in flight.
  struct Input {
    RowInput<Config::kHeadDimQk, common::kRowOfK> k;
    RowInput<Config::kHeadDimV, common::kRowOfV> v;
    Slot slot;  // where it is appended; page -1: nowhere
    // kAppendsLate: the results of the prologue, for append().
    float key[RowInput<Config::kHeadDimQk, common::kRowOfK>::kVec];
    float value[RowInput<Config::kHeadDimV, common::kRowOfV>::kVec];

    __device__ __forceinline__ void load(const AttentionParams& p, const Sequence& s, int batch, int head, int i,
                                         bool wanted, bool append) {
      const TokenRow at = key_row(p, s, batch, head, i);
      slot = {-1, -1, 0};
      if (append && wanted) slot = slot_of_new(p, batch, at.position);
      k.load(p, at, p.new_k.data, wanted);
      v.load(p, value_row(p, s, batch, head, i), p.new_v.data, wanted && !p.v_is_k);
    }
    // The same in two steps. The first step does not need the sequence's lengths.
    __device__ __forceinline__ void load_rows(const AttentionParams& p, int batch, int head, int i, bool wanted) {
      k.load_row(p, key_row(p, {}, batch, head, i), p.new_k.data, wanted);
      v.load_row(p, value_row(p, {}, batch, head, i), p.new_v.data, wanted && !p.v_is_k);
    }
    __device__ __forceinline__ void load_terms(const AttentionParams& p, int head, const common::PrologueToken& token,
                                               bool wanted) {
      k.load_terms(p, head, token, wanted);
      v.load_terms(p, head, token, wanted && !p.v_is_k);
    }
  };

  static constexpr int kVecK = RowInput<Config::kHeadDimQk, common::kRowOfK>::kVec,
                       kVecV = RowInput<Config::kHeadDimV, common::kRowOfV>::kVec;
  // Whether a lane stores its channels to the cache as one vector.
  static constexpr bool kVectors = Config::kLoad != kLoadElements && Config::kCopyBytes >= kVecK * Config::kElement &&
                                   Config::kCopyBytes >= kVecV * Config::kElement;
  // In a cluster the warp with the token is the slowest, so it appends after the block has sent its rows.
  static constexpr bool kAppendsLate = Config::kCluster && kVectors;

  // Applies the prologue and stores the token to the scratch, and to the cache if it has a slot.
  __device__ __forceinline__ void store_to_scratch(const AttentionParams& p, Input& input, int head) const {
    const int d_k = input.k.first_channel(), d_v = input.v.first_channel();
    float (&k)[kVecK] = input.key, (&v)[kVecV] = input.value;
    input.k.apply(p, k);
    store<kPaddedDimQk>(k, d_k, scratch);
    if (p.v_is_k) {
      store<kPaddedDimV>(k, d_k, scratch + kPaddedDimQk);
    } else {
      input.v.apply(p, v);
      store<kPaddedDimV>(v, d_v, scratch + kPaddedDimQk);
    }
    if constexpr (kAppendsLate) return;
    append(p, input, head);
  }
  __device__ __forceinline__ void append(const AttentionParams& p, const Input& input, int head) const {
    if (!input.slot.exists(p)) return;
    if constexpr (kVectors) {
      common::store_vector<Config::kKvType, Config::kHeadDimQk>(p.k, p.k_scale, input.slot.k_page, input.slot.offset,
                                                                head, input.key, input.k.first_channel());
      if (!p.v_is_k)
        common::store_vector<Config::kKvType, Config::kHeadDimV>(p.v, p.v_scale, input.slot.v_page(p),
                                                                 input.slot.offset, head, input.value,
                                                                 input.v.first_channel());
    } else {
      append_rows(p, input.slot, head, scratch, scratch + kPaddedDimQk);
    }
  }

  // Loads a token, applies the prologue and stores the token, in loops: slower, but less code.
  __device__ __noinline__ static void fetch(const AttentionParams& p, const Sequence& s, int batch, int head, int i,
                                            bool append, float* scratch) {
    const TokenRow at = key_row(p, s, batch, head, i);
    prepare_in_memory<Config::kHeadDimQk, common::kRowOfK, kPaddedDimQk>(p, at, p.new_k.data, p.new_k.dim_stride,
                                                                         scratch);
    if (p.v_is_k) {
      for (int d = threadIdx.x % 32; d < kPaddedDimV; d += 32) scratch[kPaddedDimQk + d] = scratch[d];
    } else {
      prepare_in_memory<Config::kHeadDimV, common::kRowOfV, kPaddedDimV>(
          p, value_row(p, s, batch, head, i), p.new_v.data, p.new_v.dim_stride, scratch + kPaddedDimQk);
    }
    if (append) append_rows(p, slot_of_new(p, batch, at.position), head, scratch, scratch + kPaddedDimQk);
  }

  // Attends to the token in the scratch for all rows of the split. key: its number in the sequence.
  __device__ __forceinline__ void attend(const AttentionParams& p, const Split& split, const QueryRows& rows,
                                         const unsigned char* queries, const float* query_scales, int key,
                                         AttentionState& state) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float dot[kN][2] = {};
    for (int chunk = g; chunk < kPaddedDimQk / 8; chunk += 8) dot_chunk(queries, chunk, t, dot);
    float p_for_o[kN][2], o_rescale[kN][2];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int position = rows.position(p, split, n, e);
        const float raw = sum_over_keys(dot[n][e]) * query_scales[8 * n + 2 * t + e] * QueryRows::score_scale(p);
        bool is_visible = (rows.visible(p, split.batch, position, key) & 1) != 0;
        if constexpr (QueryRows::KeyMask::kAny) is_visible = is_visible && rows.sees(p, split, n, e, key);
        const float s = is_visible ? rows.score(p, split, n, e, raw, key) : -ptx::infinity();
        const float row_max = fmaxf(state.row_max[n][e], s), row_max_ref = finite_row_max(row_max);
        const float rescale = ptx::exp2_approx(state.row_max[n][e] - row_max_ref),
                    probability = ptx::exp2_approx(s - (row_max_ref - kMaxOffset));
        state.row_max[n][e] = row_max;
        state.row_sum[n][e] = state.row_sum[n][e] * rescale + (g == 0 ? probability : 0.0f);
        o_rescale[n][e] = rescale, p_for_o[n][e] = probability;
        if constexpr (Config::kKeyFactors) {
          const float pv_max = fmaxf(state.pv_max[n][e], s), pv_max_ref = finite_row_max(pv_max);
          o_rescale[n][e] = ptx::exp2_approx(state.pv_max[n][e] - pv_max_ref);
          p_for_o[n][e] = ptx::exp2_approx(s - (pv_max_ref - kMaxOffset));
          state.pv_max[n][e] = pv_max;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v = scratch[kPaddedDimQk + common::channel_of_row<Config::kKvType>(i, g, j / 2)];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float& o = state.o[i][n][j];
          o *= o_rescale[n][j % 2];
          if (p_for_o[n][j % 2] != 0) o += p_for_o[n][j % 2] * v;
        }
      }
    }
  }

  __device__ __forceinline__ static TokenRow key_row(const AttentionParams& p, const Sequence& s, int batch, int head,
                                                     int i) {
    return TokenRow(p, s, batch, head, i, p.new_k.batch_stride, p.new_k.row_stride, p.new_k.head_stride);
  }
  __device__ __forceinline__ static TokenRow value_row(const AttentionParams& p, const Sequence& s, int batch, int head,
                                                       int i) {
    return TokenRow(p, s, batch, head, i, p.new_v.batch_stride, p.new_v.row_stride, p.new_v.head_stride);
  }

 private:
  template <int kPaddedDim, int kVec>
  __device__ __forceinline__ static void store(const float (&x)[kVec], int d, float* to) {
    if (d >= kPaddedDim) return;
#pragma unroll
    for (int i = 0; i < kVec; i += 4) *reinterpret_cast<float4*>(to + d + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  }

  // Adds eight channels of the dot products of the key and this lane's rows.
  __device__ __forceinline__ void dot_chunk(const unsigned char* queries, int chunk, int t, float (&dot)[kN][2]) const {
    float k[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) k[j] = scratch[common::channel_of_k<Config::kKvType>(chunk * 8 + j)];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) {
          const int row = 8 * n + 2 * t + e;
          const uint4 q = *reinterpret_cast<const uint4*>(queries + part * Config::kRows * Config::LayoutQ::kPitch +
                                                          Config::LayoutQ::offset(row, chunk));
          const unsigned words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            dot[n][e] += common::low_half<Config::kComputeType>(words[j]) * k[2 * j];
            dot[n][e] += common::high_half<Config::kComputeType>(words[j]) * k[2 * j + 1];
          }
        }
      }
    }
  }
};

// Scales O by the scale of cached values, per tensor or head, and by the unit of their codes, before new values are
// added, which have neither.
__device__ __forceinline__ void scale_cached_values(const AttentionParams& p, int head, AttentionState& state) {
  constexpr float kUnit = common::code_unit<Config::kKvType>();
  const bool has_scale = p.v_scale.mode == ScaleMode::kTensor || p.v_scale.mode == ScaleMode::kHead;
  if (kUnit == 1.0f && !has_scale) return;
  float scale = 1.0f;
  if (has_scale) scale = p.v_scale.data[p.v_scale.mode == ScaleMode::kTensor ? 0 : head * p.v_scale.head_stride];
#pragma unroll
  for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float by = state.row_max[n][j % 2] == -ptx::infinity() ? 1.0f : scale;  // O is 0
#pragma unroll
      for (int i = 0; i < Config::kBlocksV; ++i) state.o[i][n][j] = state.o[i][n][j] * kUnit * by;
    }
  }
}

// Appends the new tokens of one sequence and head. Called by a whole block once all readers are done.
__device__ __forceinline__ void append_sequence(const AttentionParams& p, int batch, int head, const Sequence& s,
                                                SharedStorage& shared) {
  const NewTokens tokens(shared);
  const int stay = p.ring_capacity > 0 ? min(s.num_new, p.ring_capacity) : s.num_new;
  for (int i = s.num_new - stay + tokens.warp; i < s.num_new; i += Config::kWarps) {
    __syncwarp();
    NewTokens::fetch(p, s, batch, head, i, true, tokens.scratch);
  }
}

// For rings and beams, where other blocks may still read the slot that is written: the block that is the last to have
// read tiles of those sequences appends.
__device__ __noinline__ void append_last(const AttentionParams& p, const Split& split, const Sequence& sequence,
                                         SharedStorage& shared) {
  constexpr int kTileKeys = Config::kTileKeys, kRows = Config::kRows;
  const int request = split.batch / p.beam_width, first = request * p.beam_width;
  if (threadIdx.x == 0) {
    unsigned total = 0;
    for (int b = first; b < first + p.beam_width; ++b) {
      const Sequence s = p.beam_width == 1 ? sequence : scheduler::read_sequence<kTileKeys, kRows>(p, b);
      total += static_cast<unsigned>(s.row_blocks) * static_cast<unsigned>(s.num_tiles);
    }
    unsigned* done = p.tiles_done + static_cast<long long>(request) * p.num_heads_kv + split.head;
    const unsigned mine = static_cast<unsigned>(split.end_tile - split.first_tile);
    shared.is_last = ptx::add_arrivals(done, mine) + mine == total ? 1 : 0;
    if (shared.is_last != 0) *done = 0;
  }
  __syncthreads();
  if (shared.is_last != 0) {
    for (int b = first; b < first + p.beam_width; ++b) {
      append_sequence(p, b, split.head, p.beam_width == 1 ? sequence : scheduler::read_sequence<kTileKeys, kRows>(p, b),
                      shared);
    }
  }
  __syncthreads();
}

}  // namespace attune::decode
