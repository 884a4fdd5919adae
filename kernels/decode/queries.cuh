// SPDX-License-Identifier: Apache-2.0
// The packed query rows of a split, loaded and rounded once by the block: the B operand of S^T = K Q^T.
#pragma once

#include "common/lanes.cuh"
#include "decode/prologue.cuh"
#include "ptx/async_copy.cuh"
#include "scheduler/stream_k_range.cuh"

namespace attune::decode {

using kernels::Split;

// The factor of a query row before it is rounded to fp16: a power of two that makes its range fit. The scores undo it.
__device__ __forceinline__ float query_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
  if (exponent == 0 || exponent >= 255) return 1.0f;
  return __uint_as_float(static_cast<unsigned>(min(262 - exponent, 253)) << 23);
}

using QueryInput = RowInput<Config::kHeadDimQk, common::kRowOfQ>;

// Packed row r of the split.
__device__ __forceinline__ TokenRow query_row(const AttentionParams& p, const Split& split, const Sequence& s, int r) {
  const int packed = split.row_begin + r, query = kernels::divide(packed, p.by_group);
  return TokenRow(p, s, split.batch, split.head * p.group + packed - query * p.group, query, p.q_batch_stride,
                  p.q_row_stride, p.q_head_stride);
}

// Stores kVec channels from d on to shared memory, [part][row] in LayoutQ, multiplied by `up` and rounded.
template <int kVec>
__device__ __forceinline__ void store_query(const float (&x)[kVec], int d, int r, float up, unsigned char* rows) {
  if (d >= Config::kBlocksQk * 16) return;
  float rest[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) rest[i] = x[i] * up;
#pragma unroll
  for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      // Channels 2i and 2i + 1 are neighbours in every operand layout.
      const unsigned rounded = common::pack<Config::kComputeType>(rest[i], rest[i + 1]);
      const int k = common::k_of_channel<Config::kKvType>(d + i);
      *reinterpret_cast<unsigned*>(rows + part * Config::kRows * Config::LayoutQ::kPitch +
                                   Config::LayoutQ::offset(r, k / 8) + k % 8 * 2) = rounded;
      rest[i] -= common::low_half<Config::kComputeType>(rounded);
      rest[i + 1] -= common::high_half<Config::kComputeType>(rounded);
    }
  }
}

__device__ __forceinline__ float scale_up(float largest) {
  if constexpr (Config::kComputeType != common::kFloat16 || Config::kQType == common::kFloat16) {
    return 1.0f;
  } else {
    return query_scale(common::max_of_lanes(largest));
  }
}

// Rounds a query row and stores it, and in `scales` what undoes query_scale().
__device__ __forceinline__ void store_query_row(const float (&x)[QueryInput::kVec], int r, unsigned char* rows,
                                                float* scales) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < QueryInput::kVec; ++i) largest = fmaxf(largest, fabsf(x[i]));
  const float up = scale_up(largest);
  if (threadIdx.x % 32 == 0) scales[r] = 1.0f / up;
  store_query(x, QueryInput::first_channel(), r, up, rows);
}

// Stores all rows of the split, and zeros after its end. Warp w stores rows w, w + kWarps.. kVectors: `inputs` have
// loaded the first of them. The prologue is compiled once: where there is one, kInputs is 1.
template <int kInputs>
__device__ __forceinline__ void store_queries(const AttentionParams& p, const Split& split, const Sequence& s,
                                              QueryInput (&inputs)[kInputs], unsigned char* rows, float* scales,
                                              float* scratch) {
  constexpr int kVec = QueryInput::kVec;
  const int d = QueryInput::first_channel();
  int r = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kInputs - 1; ++i, r += Config::kWarps) {
    float x[kVec] = {};
    if (r < split.num_rows) inputs[i].apply(p, x);
    store_query_row(x, r, rows, scales);
  }
  QueryInput& input = inputs[kInputs - 1];
#pragma unroll 1
  for (;;) {
    float x[kVec] = {};
    if (r < split.num_rows) {
      if constexpr (Config::kVectors) {
        input.apply(p, x);
      } else {
        prepare_in_memory<Config::kHeadDimQk, common::kRowOfQ, 16 * Config::kBlocksQk>(p, query_row(p, split, s, r),
                                                                                       p.q, p.q_dim_stride, scratch);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = d < 16 * Config::kBlocksQk ? scratch[d + i] : 0.0f;
        __syncwarp();
      }
    }
    store_query_row(x, r, rows, scales);
    r += Config::kWarps;
    if (r >= Config::kRows) break;
    if (Config::kVectors && r < split.num_rows) input.load(p, query_row(p, split, s, r), p.q, true);
  }
}

// The B fragments of the query rows.
class QueryOperand {
 public:
  __device__ __forceinline__ explicit QueryOperand(const unsigned char* rows) {
    const int lane = threadIdx.x % 32, row = lane % 8;
    base_ = ptx::shared_address(rows) + row * Config::LayoutQ::kPitch;
    chunk_ = lane / 8 % 2;
    swizzle_ = Config::LayoutQ::swizzle(row);
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
        b, base_ + (part * Config::kRows + 8 * n) * Config::LayoutQ::kPitch + (((2 * block + chunk_) ^ swizzle_) << 4));
  }
  static constexpr int kKept = Config::kQueriesInRegisters ? Config::kBlocksQk : 1;
  unsigned kept_[Config::kParts][kKept][Config::kRowTiles][2];
  unsigned base_;
  int chunk_, swizzle_;
};

}  // namespace attune::decode
