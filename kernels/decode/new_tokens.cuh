// SPDX-License-Identifier: Apache-2.0
// Tokens beside the cache: the block that has the first tile of a pair attends to them, exactly as the prologue leaves
// them, and appends them. Warp w takes tokens w', w' + kWarps.., w' = kWarps - 1 - w: warps with fewer queries first.
//
//   scratch <- k, v of a token | the warp's tiles of the cache | m, l, o <- token
//
// The first token is fetched before the tiles are read, so that nobody waits for it, and counts before them too, but
// for 8-bit caches, where o lacks the scale of cached values until then. Everything is fp32: a few rows times a few
// tokens are no work.
#pragma once

#include "decode/append.cuh"
#include "decode/attend.cuh"
#include "decode/shared_storage.cuh"
#include "ptx/atomic.cuh"

namespace attune::decode {

struct NewTokens {
  static constexpr int kN = Config::kRowTiles;
  static constexpr int kPlacesOfK = 16 * Config::kBlocksQk, kPlacesOfV = 16 * Config::kBlocksV;

  float* scratch;  // this warp's, shared memory
  int warp;        // w'

  __device__ __forceinline__ explicit NewTokens(SharedStorage& shared)
      : scratch(shared.exchange[threadIdx.x / 32]),
        warp(Config::kWarps - 1 - static_cast<int>(threadIdx.x / 32)) {}

  // A token on its way from memory.
  struct Input {
    RowInput<Config::kHeadDimQk, tile::kRowOfK> k;
    RowInput<Config::kHeadDimV, tile::kRowOfV> v;
    Slot slot;  // where it is appended; page -1: nowhere
    // kAppendsLate: the token as the prologue left it, for append().
    float key[RowInput<Config::kHeadDimQk, tile::kRowOfK>::kVec];
    float value[RowInput<Config::kHeadDimV, tile::kRowOfV>::kVec];

    __device__ __forceinline__ void load(const DecodeParams& p, const Sequence& s, int batch, int head, int i,
                                         bool wanted, bool append) {
      const TokenRow at = key_row(p, s, batch, head, i);
      slot = {-1, -1, 0};
      if (append && wanted) slot = slot_of_new(p, batch, at.position);
      k.load(p, at, p.new_k.data, wanted);
      v.load(p, value_row(p, s, batch, head, i), p.new_v.data, wanted && !p.v_is_k);
    }
    // The same in two steps; the first does without the sequence's lengths.
    __device__ __forceinline__ void load_rows(const DecodeParams& p, int batch, int head, int i, bool wanted) {
      k.load_row(p, key_row(p, {}, batch, head, i), p.new_k.data, wanted);
      v.load_row(p, value_row(p, {}, batch, head, i), p.new_v.data, wanted && !p.v_is_k);
    }
    __device__ __forceinline__ void load_terms(const DecodeParams& p, int head, const tile::PrologueToken& token,
                                               bool wanted) {
      k.load_terms(p, head, token, wanted);
      v.load_terms(p, head, token, wanted && !p.v_is_k);
    }
  };

  static constexpr int kVecK = RowInput<Config::kHeadDimQk, tile::kRowOfK>::kVec,
                       kVecV = RowInput<Config::kHeadDimV, tile::kRowOfV>::kVec;
  // The cache takes a lane's channels at a time.
  static constexpr bool kVectors = Config::kLoad != kLoadElements && Config::kCopyBytes >= kVecK * Config::kElement &&
                                   Config::kCopyBytes >= kVecV * Config::kElement;
  // In a cluster the warp with the token is the last of all; it appends when its part is sent.
  static constexpr bool kAppendsLate = Config::kCluster && kVectors;

  // To the scratch, and to the cache if it has a slot.
  __device__ __forceinline__ void put(const DecodeParams& p, Input& input, int head) const {
    const int d_k = input.k.first_channel(), d_v = input.v.first_channel();
    float (&k)[kVecK] = input.key, (&v)[kVecV] = input.value;
    input.k.finish(p, k);
    store<kPlacesOfK>(k, d_k, scratch);
    if (p.v_is_k) {
      store<kPlacesOfV>(k, d_k, scratch + kPlacesOfK);
    } else {
      input.v.finish(p, v);
      store<kPlacesOfV>(v, d_v, scratch + kPlacesOfK);
    }
    if constexpr (kAppendsLate) return;
    append(p, input, head);
  }
  __device__ __forceinline__ void append(const DecodeParams& p, const Input& input, int head) const {
    if (!input.slot.exists(p)) return;
    if constexpr (kVectors) {
      write_vector<Config::kHeadDimQk>(p.k, p.k_scale, input.slot.k_page, input.slot.offset, head, input.key,
                                       input.k.first_channel());
      if (!p.v_is_k)
        write_vector<Config::kHeadDimV>(p.v, p.v_scale, input.slot.v_page(p), input.slot.offset, head, input.value,
                                        input.v.first_channel());
    } else {
      append_rows(p, input.slot, head, scratch, scratch + kPlacesOfK);
    }
  }

  // Both, for tokens that nobody is in a hurry for.
  __device__ __noinline__ static void fetch(const DecodeParams& p, const Sequence& s, int batch, int head, int i,
                                            bool append, float* scratch) {
    const TokenRow at = key_row(p, s, batch, head, i);
    prepare_in_memory<Config::kHeadDimQk, tile::kRowOfK, kPlacesOfK>(p, at, p.new_k.data, p.new_k.dim_stride, scratch);
    if (p.v_is_k) {
      for (int d = threadIdx.x % 32; d < kPlacesOfV; d += 32) scratch[kPlacesOfK + d] = scratch[d];
    } else {
      prepare_in_memory<Config::kHeadDimV, tile::kRowOfV, kPlacesOfV>(p, value_row(p, s, batch, head, i), p.new_v.data,
                                                                      p.new_v.dim_stride, scratch + kPlacesOfK);
    }
    if (append) append_rows(p, slot_of_new(p, batch, at.position), head, scratch, scratch + kPlacesOfK);
  }

  // The token in the scratch, `key` of the sequence, for all rows of the piece.
  __device__ __forceinline__ void attend(const DecodeParams& p, const Piece& piece, const Rows& rows,
                                         const unsigned char* queries, const float* query_scales, int key,
                                         State& state) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float dot[kN][2] = {};
    for (int chunk = g; chunk < kPlacesOfK / 8; chunk += 8) multiply_chunk(queries, chunk, t, dot);
    float weight[kN][2], correction[kN][2];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int position = rows.position(p, piece, n, e);
        const float raw = sum_of_keys(dot[n][e]) * query_scales[8 * n + 2 * t + e] * Rows::unit(p);
        bool sees = (rows.seen(p, piece.batch, position, key) & 1) != 0;
        if constexpr (Rows::kBits) sees = sees && rows.bit_of(p, piece, n, e, key);
        const float s = sees ? rows.score(p, piece, n, e, raw, key) : -ptx::infinity();
        const float max = fmaxf(state.max[n][e], s), reference = reference_of(max);
        const float lowered = ptx::exp2_approx(state.max[n][e] - reference),
                    probability = ptx::exp2_approx(s - (reference - kLift));
        state.max[n][e] = max;
        state.sum[n][e] = state.sum[n][e] * lowered + (g == 0 ? probability : 0.0f);
        correction[n][e] = lowered, weight[n][e] = probability;
        if constexpr (Config::kTokenScales) {
          const float value_max = fmaxf(state.value_max[n][e], s), value_reference = reference_of(value_max);
          correction[n][e] = ptx::exp2_approx(state.value_max[n][e] - value_reference);
          weight[n][e] = ptx::exp2_approx(s - (value_reference - kLift));
          state.value_max[n][e] = value_max;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Config::kBlocksV; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float v = scratch[kPlacesOfK + tile::channel_of_row<Config::kKvType>(i, g, j / 2)];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float& o = state.o[i][n][j];
          o *= correction[n][j % 2];
          if (weight[n][j % 2] != 0) o += weight[n][j % 2] * v;
        }
      }
    }
  }

  __device__ __forceinline__ static TokenRow key_row(const DecodeParams& p, const Sequence& s, int batch, int head,
                                                     int i) {
    return TokenRow(p, s, batch, head, i, p.new_k.batch_stride, p.new_k.row_stride, p.new_k.head_stride);
  }
  __device__ __forceinline__ static TokenRow value_row(const DecodeParams& p, const Sequence& s, int batch, int head,
                                                       int i) {
    return TokenRow(p, s, batch, head, i, p.new_v.batch_stride, p.new_v.row_stride, p.new_v.head_stride);
  }

 private:
  template <int kPlaces, int kVec>
  __device__ __forceinline__ static void store(const float (&x)[kVec], int d, float* to) {
    if (d >= kPlaces) return;
#pragma unroll
    for (int i = 0; i < kVec; i += 4) *reinterpret_cast<float4*>(to + d + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  }

  // Eight places of the key times those of this lane's rows.
  __device__ __forceinline__ void multiply_chunk(const unsigned char* queries, int chunk, int t,
                                                 float (&dot)[kN][2]) const {
    float k[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) k[j] = scratch[tile::channel_of_place<Config::kKvType>(chunk * 8 + j)];
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
            dot[n][e] += tile::low_half<Config::kComputeType>(words[j]) * k[2 * j];
            dot[n][e] += tile::high_half<Config::kComputeType>(words[j]) * k[2 * j + 1];
          }
        }
      }
    }
  }
};

// A scale of the values per tensor or head, which is otherwise applied at the very end: new values do not carry it.
__device__ __forceinline__ void scale_cached_values(const DecodeParams& p, int head, State& state) {
  if (p.v_scale.mode != 1 && p.v_scale.mode != 2) return;
  const float scale = p.v_scale.data[p.v_scale.mode == 1 ? 0 : head * p.v_scale.head_stride];
#pragma unroll
  for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float by = state.max[n][j % 2] == -ptx::infinity() ? 1.0f : scale;  // nothing was seen
#pragma unroll
      for (int i = 0; i < Config::kBlocksV; ++i) state.o[i][n][j] *= by;
    }
  }
}

// All new tokens that stay, of one sequence and head, to the cache: by a whole block, when every reader is done.
__device__ __forceinline__ void append_sequence(const DecodeParams& p, int batch, int head, const Sequence& s,
                                                SharedStorage& shared) {
  const NewTokens tokens(shared);
  const int stay = p.ring_capacity > 0 ? min(s.num_new, p.ring_capacity) : s.num_new;
  for (int i = s.num_new - stay + tokens.warp; i < s.num_new; i += Config::kWarps) {
    __syncwarp();
    NewTokens::fetch(p, s, batch, head, i, true, tokens.scratch);
  }
}

// Where a slot that is written may still be read, in a ring or by another beam: the block that is last to have read
// tiles of the sequences that may do so appends.
__device__ __noinline__ void append_last(const DecodeParams& p, const Piece& piece, const Sequence& sequence,
                                         SharedStorage& shared) {
  constexpr int kTileKeys = Config::kTileKeys, kRows = Config::kRows;
  const int request = piece.batch / p.beam_width, first = request * p.beam_width;
  if (threadIdx.x == 0) {
    unsigned total = 0;
    for (int b = first; b < first + p.beam_width; ++b) {
      const Sequence s = p.beam_width == 1 ? sequence : schedule::read_sequence<kTileKeys, kRows>(p, b);
      total += static_cast<unsigned>(s.row_blocks) * static_cast<unsigned>(s.num_tiles);
    }
    unsigned* done = p.tiles_done + static_cast<long long>(request) * p.num_heads_kv + piece.head;
    const unsigned mine = static_cast<unsigned>(piece.end_tile - piece.first_tile);
    shared.is_last = ptx::add_arrivals(done, mine) + mine == total ? 1 : 0;
    if (shared.is_last != 0) *done = 0;
  }
  __syncthreads();
  if (shared.is_last != 0) {
    for (int b = first; b < first + p.beam_width; ++b) {
      append_sequence(p, b, piece.head, p.beam_width == 1 ? sequence : schedule::read_sequence<kTileKeys, kRows>(p, b),
                      shared);
    }
  }
  __syncthreads();
}

}  // namespace attune::decode
