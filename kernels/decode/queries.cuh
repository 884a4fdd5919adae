// SPDX-License-Identifier: Apache-2.0
// The packed query rows of a piece: read and rounded once by the block, then kept by each warp as the B operand of the
// first product.
#pragma once

#include "decode/config.cuh"
#include "ptx/async_copy.cuh"
#include "schedule/cursor.cuh"

namespace attune::decode {

using kernels::Piece;

constexpr float kLog2e = 1.4426950408889634f;

// What a query row is multiplied with before it is rounded to fp16, so that its range fits: a power of two, undone in
// the scores.
__device__ __forceinline__ float query_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
  if (exponent == 0 || exponent >= 255) return 1.0f;
  return __uint_as_float(static_cast<unsigned>(min(262 - exponent, 253)) << 23);
}

// Writes the rows to shared memory: [part][row] in LayoutQ, and in scales what a raw dot product is to be multiplied
// with (softmax_scale and log2 e left out). Rows past the piece become zeros.
__device__ __forceinline__ void store_queries(const DecodeParams& p, const Piece& piece, long long q_begin,
                                              unsigned char* rows, float* scales) {
  constexpr int kChannelsOfLane = (Config::kBlocksQk * 16 + 31) / 32;
  const int lane = threadIdx.x % 32;
  float k_scale = 1.0f;
  if (p.k_scale.mode == 1) k_scale = p.k_scale.data[0];
  if (p.k_scale.mode == 2) k_scale = p.k_scale.data[piece.head * p.k_scale.head_stride];
  for (int r = threadIdx.x / 32; r < Config::kRows; r += Config::kWarps) {
    float x[kChannelsOfLane];
    const int packed = piece.row_begin + r;
    const int query = packed / p.group, head = piece.head * p.group + packed - query * p.group;
    const long long at = (p.cu_seqlens_q.data != nullptr ? q_begin * p.q_row_stride : piece.batch * p.q_batch_stride) +
                         query * p.q_row_stride + head * p.q_head_stride;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kChannelsOfLane; ++i) {
      const int d = i * 32 + lane;
      x[i] = r < piece.num_rows && d < Config::kHeadDimQk
                 ? tile::load_element(Config::kQType, p.q, at + d * p.q_dim_stride)
                 : 0.0f;
      largest = fmaxf(largest, fabsf(x[i]));
    }
    float up = 1.0f;
    if (Config::kComputeType == tile::kFloat16 && Config::kQType != tile::kFloat16) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      up = query_scale(largest);
    }
    if (lane == 0) scales[r] = k_scale / up;
#pragma unroll
    for (int i = 0; i < kChannelsOfLane; ++i) {
      const int d = i * 32 + lane;
      if (d >= Config::kBlocksQk * 16) break;
      const int place = tile::place_of_channel<Config::kKvType>(d);
      float rest = x[i] * up;
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        const unsigned rounded = tile::pack<Config::kComputeType>(rest, 0.0f);
        unsigned char* to = rows + (part * Config::kRows) * Config::LayoutQ::kPitch +
                            Config::LayoutQ::offset(r, place / 8) + place % 8 * 2;
        *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(rounded);
        rest -= tile::low_half<Config::kComputeType>(rounded);
      }
    }
  }
}

// B fragments of the rows.
class QueryOperand {
 public:
  __device__ __forceinline__ explicit QueryOperand(const unsigned char* rows) {
    const int lane = threadIdx.x % 32, row = lane % 8;
    base_ = ptx::shared_address(rows) + row * Config::LayoutQ::kPitch;
    chunk_ = lane / 8 % 2;
    twist_ = Config::LayoutQ::twist(row);
  }
  __device__ __forceinline__ void load() {
    if constexpr (Config::kQueriesInRegisters) {
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
        for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
          for (int block = 0; block < Config::kBlocksQk; ++block) read(part, block, n, kept_[part][block][n]);
        }
      }
    }
  }
  __device__ __forceinline__ void get(int part, int block, int n, unsigned (&b)[2]) const {
    if constexpr (Config::kQueriesInRegisters) {
      b[0] = kept_[part][block][n][0];
      b[1] = kept_[part][block][n][1];
    } else {
      read(part, block, n, b);
    }
  }

 private:
  __device__ __forceinline__ void read(int part, int block, int n, unsigned (&b)[2]) const {
    ptx::load_matrix_x2(
        b, base_ + (part * Config::kRows + 8 * n) * Config::LayoutQ::kPitch + (((2 * block + chunk_) ^ twist_) << 4));
  }
  static constexpr int kKept = Config::kQueriesInRegisters ? Config::kBlocksQk : 1;
  unsigned kept_[Config::kParts][kKept][Config::kRowTiles][2];
  unsigned base_;
  int chunk_, twist_;
};

}  // namespace attune::decode
