// SPDX-License-Identifier: Apache-2.0
// Stores dense rows to a packed MLA cache: append, quantise, and qkv_prepare if its prologue is RoPE on the last 64
// channels of k, and of q in place. Rows must allow vectors; store.cu takes all other rows and prologues.
//
// Maths: docs/semantics.md, "Caches". A group's scale is computed from its largest magnitude, codes are e4m3 of x /
// scale, the last 64 channels are bf16.
//
// Grid: one block of 256 threads for each `tile` tokens; a warp takes kRows of them at a time; a group's lanes compute
// its scale by shuffles. Then rows of q: 8 lanes take the 64 rotary channels, a warp takes kHeads heads of a token.
#include "common/lanes.cuh"
#include "ptx/grid.cuh"
#include "rows/mla_rope.cuh"
#include "rows/mla_row.cuh"

namespace attune::rows {

using kernels::StoreParams;

constexpr bool kPrepare = ATTUNE_PREPARE != 0;
constexpr int kRows = kPrepare || common::element_size(kRowType) == 4 ? 1 : 2;  // tokens in flight in a warp
constexpr int kHeads = 16;                                                    // heads of q that a warp takes at a time
static_assert(Mla::kHeadDim - Mla::kNope == kTail, "the channels that are not quantised are the rotary ones");

struct TokenAddresses {
  PackedAddresses k;
  char* q;            // row of head 0; null: not wanted
  const float* rope;  // null: no RoPE
};

__device__ __forceinline__ TokenAddresses addresses_of(const StoreParams& p, long long row, const Owner& owner) {
  TokenAddresses address{};
  const Target target = target_of(p.tokens, p.cache, true, false, row, owner);
  if (!target.written) return address;
  const long long outer = p.tokens.rows_per_outer > 0 ? row / p.tokens.rows_per_outer : 0;
  const long long inner = row - outer * p.tokens.rows_per_outer;
  address.k.dense = dense_row(p.in[common::kRowOfK], outer, inner);
  set_packed_addresses(p.cache, target.slots.k, address.k);
  if constexpr (kPrepare) {
    if (p.heads_q > 0) address.q = dense_row(p.out[common::kRowOfQ], outer, inner);
    address.rope = common::prologue_token(p.prologue, row, owner.sequence, target.position).rope[0];
  }
  return address;
}

// A token whose loads are in flight.
struct Row {
  PackedAddresses address;
  RawRun<kRun> raw[kRuns];
  TailRope rope;
};

__device__ __forceinline__ void start_row(const StoreParams& p, const TokenAddresses& address, int lane, Row& r) {
  r.address = address.k;
  if (address.k.row == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int d = channel_of(lane, i);
    if (d < Mla::kHeadDim)
      r.raw[i] =
          common::load_run<kRun>(kRowType, global(address.k.dense + d * common::element_size(kRowType)), 0, true);
  }
  // The last 64 channels begin at a lane that is a multiple of 8.
  if constexpr (kPrepare) load_tail_rope(p.prologue.interleaved != 0, address.rope, lane % kTailLanes, r.rope);
}

// Has shuffles: all lanes of the warp must call it, with the same token.
__device__ __forceinline__ void convert_and_store_row(const StoreParams& p, const Row& r, int lane) {
  if (r.address.row == nullptr) return;
  const bool power_of_two = p.cache.power_of_two_scales != 0;
  float of_step[kCodeRuns];  // the scale of each step
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int d = channel_of(lane, i);
    float x[kRun] = {};
    if (d < Mla::kHeadDim) common::decode_run<kRun>(kRowType, r.raw[i], x);
    if (i < kCodeRuns) {
      float amax = 0;
#pragma unroll
      for (int k = 0; k < kRun; ++k) amax = common::larger_magnitude(amax, x[k]);
      amax = common::max_of_lanes<kGroupLanes>(amax);
      of_step[i] = common::mla_scale<kFormat>(amax, power_of_two);
      if (d < Mla::kNope) {
        float scaled[kRun];
#pragma unroll
        for (int k = 0; k < kRun; ++k) scaled[k] = x[k];
        common::divide_by_scale<kFormat>(scaled, amax, of_step[i], power_of_two);
        common::store_run<kRun>(common::kE4m3, common::encode_run<kRun>(common::kE4m3, scaled),
                                global(r.address.row + d), 1, true);
      }
    }
    if (i < kRuns - 1) continue;
    if constexpr (kPrepare) rotate_tail(p.prologue.interleaved != 0, r.rope, lane % kTailLanes, x);
    if (d >= Mla::kNope && d < Mla::kHeadDim) {
      common::store_run<kRun>(common::kBFloat16, common::encode_run<kRun>(common::kBFloat16, x),
                              global(r.address.row + Mla::kRope + 2 * (d - Mla::kNope)), 2, true);
    }
  }
  // The first lanes of a group store one step each, so that all scales take one store instruction.
  static_assert(kCodeRuns == 2 && kGroupLanes >= 2, "as many lanes as steps");
  const int step = lane % kGroupLanes, group = step * kStepGroups + lane / kGroupLanes;
  if (step < kCodeRuns && group < Mla::kGroups)
    Mla::store_scale(global(r.address.scales), group, step == 0 ? of_step[0] : of_step[1], true);
}

// RoPE on heads first .. first + kHeads - 1 of a token's q, in place.
__device__ __forceinline__ void rotate_heads(const StoreParams& p, const TokenAddresses& address, int first, int lane) {
  if (address.q == nullptr || address.rope == nullptr) return;  // warp-uniform
  constexpr int kAtOnce = 32 / kTailLanes, kSteps = kHeads / kAtOnce, kSize = common::element_size(kRowType);
  const int run = lane % kTailLanes;
  TailRope rope;
  load_tail_rope(p.prologue.interleaved != 0, address.rope, run, rope);
  char* row = address.q + (Mla::kNope + run * kRun) * kSize;
  RawRun<kRun> raw[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int head = first + i * kAtOnce + lane / kTailLanes;
    if (head < p.heads_q)
      raw[i] = common::load_run<kRun>(kRowType, global(row + head * p.out[common::kRowOfQ].head_stride), 0, true);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int head = first + i * kAtOnce + lane / kTailLanes;
    float x[kRun] = {};
    if (head < p.heads_q) common::decode_run<kRun>(kRowType, raw[i], x);
    rotate_tail(p.prologue.interleaved != 0, rope, run, x);
    if (head < p.heads_q) {
      common::store_run<kRun>(kRowType, common::encode_run<kRun>(kRowType, x),
                              global(row + head * p.out[common::kRowOfQ].head_stride), 0, true);
    }
  }
}

__device__ __forceinline__ void store_rows(const StoreParams& p) {
  __shared__ TokenAddresses addresses[kernels::kMaxTileTokens];
  const int count = for_each_token(
      p.tokens, [&](int i, long long row, const Owner& owner) { addresses[i] = addresses_of(p, row, owner); });
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int t = warp; t < count; t += kWarps * kRows) {
    Row r[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = t + i * kWarps;
      start_row(p, at < count ? addresses[at] : TokenAddresses{}, lane, r[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) convert_and_store_row(p, r[i], lane);
  }
  if constexpr (kPrepare) {
    const int parts = (p.heads_q + kHeads - 1) / kHeads;
    for (int i = warp; i < count * parts; i += kWarps) rotate_heads(p, addresses[i / parts], i % parts * kHeads, lane);
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads, ATTUNE_BLOCKS_PER_SM)
    attune_store_mla(const __grid_constant__ attune::kernels::StoreParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  attune::rows::store_rows(p);
}
