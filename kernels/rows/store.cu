// SPDX-License-Identifier: Apache-2.0
// Brings rows of new tokens through the prologue to outputs and to a cache: qkv_prepare, append, quantise.
//
// Maths: docs/semantics.md, "The prologue" and "Caches": x = RoPE(IA3 * (scale * code + bias)), q times log-n. Outputs
// are x rounded once. The cache holds x or round(x / scale); the scale is the caller's or computed from the row's
// largest magnitude.
//
// Grid: one block of 256 threads for each `tile` tokens; ATTUNE_LANES threads take a row (token, head of q, k or v),
// each of them ATTUNE_UNITS units of two runs of ATTUNE_WIDTH channels. The two runs of a unit are partners in RoPE, so
// no thread needs another's channels. Only the largest magnitude of a row, or of an MLA group, is exchanged, by
// shuffles.
//
// Order: 1. One thread for each token computes its sequence, position and addresses, in shared memory. 2. A thread
// takes several heads of a token and keeps the cosines and sines in registers. It loads its runs of ATTUNE_ROWS rows,
// then converts and stores them row by row. A whole row is read before any of it is written, because outputs may alias
// the inputs.
#include "ptx/grid.cuh"
#include "rows/scales.cuh"

namespace attune::rows {

using kernels::StoreParams;
using common::kRowOfK;
using common::kRowOfQ;
using common::kRowOfV;
using common::PrologueToken;
using common::RawRun;

constexpr bool kPrepare = ATTUNE_PREPARE != 0;    // qkv_prepare: there are rows of q, and outputs
constexpr bool kPrologue = ATTUNE_PROLOGUE != 0;  // there is more than append
#ifndef ATTUNE_COPIES
#define ATTUNE_COPIES 0
#endif
constexpr bool kOutputsAreInputs = ATTUNE_COPIES != 0;  // outputs are bitwise copies of the inputs
// Bytes are copied to the cache unchanged.
constexpr bool kCopies = !kPrologue && kFormat == 0 && kScales == 0 && kRowType != 0 && kRowType == kCacheType;

using Channels = float[kUnits][2][kWidth];
using RopeUnits = common::RopeUnit<kWidth>[kUnits];

// The addresses of head 0 of a token.
struct TokenAddresses {
  PrologueToken prologue;
  const char* in[3];
  char* out[3];
  char* cache[2];   // of K and V; null: not appended
  char* scales[2];  // of the row; packed formats: of the token
  int written;      // 0: the token is skipped
};

__device__ __forceinline__ TokenAddresses addresses_of(const StoreParams& p, long long row, const Owner& owner) {
  TokenAddresses address{};
  const long long outer = p.tokens.rows_per_outer > 0 ? row / p.tokens.rows_per_outer : 0;
  const long long inner = row - outer * p.tokens.rows_per_outer;
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    if (p.in[part].data != nullptr) address.in[part] = row_at(p.in[part], outer, inner);
    if (kPrepare && p.out[part].data != nullptr) address.out[part] = row_at(p.out[part], outer, inner);
  }
  const Target target = target_of(p.tokens, p.cache, p.append != 0, p.has_v != 0, row, owner);
  address.written = target.written ? 1 : 0;
  if (!target.written) return address;
  if (kPrologue) address.prologue = common::prologue_token(p.prologue, row, owner.sequence, target.position);
  set_slot_addresses(p, target.slots.k, target.slots.v, address);
  return address;
}

// A thread's channels in rows of q and k, and in rows of v. first -1: none.
struct Units {
  Unit qk[kUnits], v[kUnits];
  __device__ __forceinline__ Units(const StoreParams& p, int lane) {
    const int rotary = kPrologue && p.prologue.cos_sin != nullptr ? p.prologue.rotary_dim : 0;
    const int num = common::num_units<kWidth>(rotary, p.head_dim_qk);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      v[u] = plain_unit(p.head_dim_v, lane, u);
      if constexpr (kPrologue) {
        qk[u] = {-1, -1, -1};
        if (u * kLanes + lane < num)
          qk[u] = common::unit_at<kWidth>(p.prologue, rotary, p.head_dim_qk, u * kLanes + lane);
      } else {
        qk[u] = plain_unit(p.head_dim_qk, lane, u);
      }
    }
  }
  __device__ __forceinline__ Unit of(int part, int u) const {
    if constexpr (!kPrologue && kHeadDim != 0) return qk[u];
    return part == kRowOfV ? v[u] : qk[u];
  }
};

// A row whose loads are in flight.
struct Row {
  int part, head;
  bool live;    // false: there is no such row, or it is skipped
  char* out;    // null: not wanted
  char* cache;  // null: not appended
  char* scale;
  RawRun<kWidth> raw[kUnits][2];
};

// Starts row j of a token. The heads of q come first, then those of k and v.
__device__ __forceinline__ void start_row(const StoreParams& p, const TokenAddresses& address, const Units& units,
                                          int j, bool live, Row& r) {
  const int heads_q = kPrepare ? p.heads_q : 0;
  r.part = j < heads_q ? kRowOfQ : j < heads_q + p.heads_kv ? kRowOfK : kRowOfV;
  r.head = j - (r.part == kRowOfQ ? 0 : r.part == kRowOfK ? heads_q : heads_q + p.heads_kv);
  r.live = false;
  r.out = r.cache = r.scale = nullptr;
  if (!live) return;
  const int of_v = r.part == kRowOfV ? 1 : 0;
  const char* row = address.in[r.part];
  if (r.part != kRowOfQ) r.cache = address.cache[of_v];
  if constexpr (kPrepare) r.out = address.out[r.part];
  if (kScales != 0 || kFormat != 0) r.scale = address.scales[of_v];
  if (row == nullptr || (r.cache == nullptr && r.out == nullptr)) return;
  r.live = true;
  const RowTensor& in = p.in[r.part];
  row += r.head * in.head_stride;
  if (kPrepare && r.out != nullptr) r.out += r.head * p.out[r.part].head_stride;
  if (kFormat == 0 && r.cache != nullptr) {
    r.cache += r.head * (of_v ? p.cache.v : p.cache.k).head_stride;
    if (kScales != 0) r.scale += 4 * r.head * (of_v ? p.cache.v_scale : p.cache.k_scale).head_stride;
  }
  const int dtype = type_of(kRowType, in.dtype);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
    if (unit.first < 0) continue;
    r.raw[u][0] = load(in, dtype, row, unit.first);
    if (unit.second >= 0) r.raw[u][1] = load(in, dtype, row, unit.second);
  }
}

// The loaded row after the prologue, in fp32. Zeros if the thread has no channels.
__device__ __forceinline__ void prepare_row(const StoreParams& p, const PrologueToken& token, const Units& units,
                                            const RopeUnits& rope, const Row& r, Channels& x) {
  const int dtype = type_of(kRowType, p.in[r.part].dtype);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
    if (unit.first < 0) continue;
    common::decode_run<kWidth>(dtype, r.raw[u][0], x[u][0]);
    if (unit.second >= 0) common::decode_run<kWidth>(dtype, r.raw[u][1], x[u][1]);
    if constexpr (kPrologue)
      common::prepare_unit<kWidth>(p.prologue, token, r.part, r.head, unit, rope[u], common::element_size(dtype) == 1,
                                   x[u]);
  }
}

__device__ __forceinline__ void store_plain(const StoreParams& p, const Units& units, const Row& r, int lane,
                                            const Channels& x) {
  const KvPlane& plane = r.part == kRowOfV ? p.cache.v : p.cache.k;
  const int dtype = type_of(kCacheType, plane.dtype);
  const ScaleMode mode = scale_mode(r.part == kRowOfV ? p.cache.v_scale : p.cache.k_scale);
  const auto computed = computed_scale(p.cache, dtype, units, r, x);
  if (r.cache == nullptr) return;
  const RowDivider over(mode, computed, r.scale, lane);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
    if (unit.first < 0) continue;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (side == 1 && unit.second < 0) continue;
      float scaled[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) scaled[k] = x[u][side][k];
      over.divide(u, side, scaled);
      store(plane, dtype, r.cache, side == 0 ? unit.first : unit.second,
            kCopies ? r.raw[u][side] : common::encode_run<kWidth>(dtype, scaled));
    }
  }
}

// Computes and stores the scales of a packed row, which a whole warp holds. Returns the scales of this thread's runs.
__device__ __forceinline__ void scale_groups(const StoreParams& p, char* scales, const Units& units, const Row& r,
                                             int lane, const Channels& x, float (&scale)[kUnits][2]) {
  const bool power_of_two = p.cache.power_of_two_scales != 0;
  float amax[kUnits][2];
  int group[kUnits][2];  // -1: none
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int channel = side == 0 ? unit.first : unit.second;
      group[u][side] = channel >= 0 && channel < Mla::kNope ? channel / Mla::kGroup : -1;
      amax[u][side] = 0;
      scale[u][side] = 1;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (group[u][side] >= 0) amax[u][side] = common::larger_magnitude(amax[u][side], x[u][side][k]);
      }
    }
  }
  constexpr bool kInOrder = kWidth == 8 && !kPrologue;
  // If no RoPE pair crosses groups, lane l has channels 16 l .., and neighbouring lanes share a group.
  if (kInOrder || (kWidth == 8 && (p.prologue.cos_sin == nullptr || p.prologue.rope_offset >= Mla::kNope))) {
    constexpr int kLanesOfGroup = Mla::kGroup / 16;
    const float largest = common::max_of_lanes<kLanesOfGroup>(fmaxf(amax[0][0], amax[0][1]));
    if (group[0][0] < 0) return;
    scale[0][0] = scale[0][1] = common::mla_scale<kFormat>(largest, power_of_two);
    if (lane % kLanesOfGroup == 0) Mla::store_scale(scales, group[0][0], scale[0][0]);
    return;
  }
  if constexpr (!kInOrder) {
#pragma unroll 1
    for (int g = 0; g < Mla::kGroups; ++g) {
      float largest = 0;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (group[u][0] == g) largest = fmaxf(largest, amax[u][0]);
        if (group[u][1] == g) largest = fmaxf(largest, amax[u][1]);
      }
      // Non-negative floats have the order of their bits.
      largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
      const float of_group = common::mla_scale<kFormat>(largest, power_of_two);
      if (lane == 0) Mla::store_scale(scales, g, of_group);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (group[u][0] == g) scale[u][0] = of_group;
        if (group[u][1] == g) scale[u][1] = of_group;
      }
    }
  }
}

__device__ __forceinline__ void store_packed(const StoreParams& p, const Units& units, const Row& r, int lane,
                                             const Channels& x) {
  if (r.cache == nullptr) return;  // warp-uniform
  float scale[kUnits][2];
  scale_groups(p, global(r.scale), units, r, lane, x, scale);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int d = side == 0 ? unit.first : unit.second;
      if (d < 0) continue;
      if (d < Mla::kNope) {
        const common::Divider over(scale[u][side]);
        float scaled[kWidth];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) scaled[k] = x[u][side][k];
        over.divide(scaled);
        common::store_run<kWidth>(common::kE4m3, common::encode_run<kWidth>(common::kE4m3, scaled), global(r.cache + d),
                                  1, kVector);
      } else {
        common::store_halves<kWidth>(common::encode_run<kWidth>(common::kBFloat16, x[u][side]),
                                     global(r.cache + Mla::kRope + 2 * (d - Mla::kNope)), kVector);
      }
    }
  }
}

__device__ __forceinline__ void copy_row(const StoreParams& p, const Units& units, const Row& r) {
  if (r.out == nullptr || !r.live) return;
  const RowTensor& out = p.out[r.part];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = units.of(r.part, u);
    if (unit.first >= 0) store(out, type_of(kOutType, out.dtype), r.out, unit.first, r.raw[u][0]);
    if (unit.first >= 0 && unit.second >= 0) store(out, type_of(kOutType, out.dtype), r.out, unit.second, r.raw[u][1]);
  }
}

__device__ __forceinline__ void convert_and_store_row(const StoreParams& p, const TokenAddresses& address,
                                                      const Units& units, const RopeUnits& rope, const Row& r,
                                                      int lane) {
  Channels x = {};
  if (r.live && !kCopies) prepare_row(p, address.prologue, units, rope, r, x);
  if (kPrepare && r.out != nullptr && r.live) {
    if (kCopies) prepare_row(p, address.prologue, units, rope, r, x);
    const RowTensor& out = p.out[r.part];
    const int dtype = type_of(kOutType, out.dtype);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const Unit unit = units.of(r.part, u);
      if (unit.first < 0) continue;
      store(out, dtype, r.out, unit.first, common::encode_run<kWidth>(dtype, x[u][0]));
      if (unit.second >= 0) store(out, dtype, r.out, unit.second, common::encode_run<kWidth>(dtype, x[u][1]));
    }
  }
  if (kPrepare && !p.append) return;
  if constexpr (kFormat == 0) {
    store_plain(p, units, r, lane, x);
  } else {
    store_packed(p, units, r, lane, x);
  }
}

__device__ __forceinline__ void store_rows(const StoreParams& p) {
  __shared__ TokenAddresses addresses[kMaxTileTokens];
  const int count = for_each_token(
      p.tokens, [&](int i, long long row, const Owner& owner) { addresses[i] = addresses_of(p, row, owner); });
  const ThreadRows thread_rows(p.tokens);
  const Units units(p, thread_rows.lane);
  const int rows = p.heads_q + p.heads_kv * (1 + p.has_v);
  // All threads of a warp must run the same number of iterations, because of the shuffles.
  if constexpr (!kPrologue) {
    const RopeUnits none = {};
    const int visits =
        ((count + thread_rows.tokens - 1) / thread_rows.tokens) * ((rows + thread_rows.rows - 1) / thread_rows.rows);
    int t = thread_rows.token, j = thread_rows.row;
    for (int v = 0; v < visits; v += kRows) {
      Row r[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool exists = t < count && j < rows;
        const TokenAddresses& address = addresses[exists ? t : 0];
        start_row(p, address, units, j, exists && address.written, r[i]);
        thread_rows.advance(rows, t, j);
      }
      __syncwarp();  // an output may alias its input and be narrower
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if constexpr (kOutputsAreInputs) {
          copy_row(p, units, r[i]);
        } else {
          convert_and_store_row(p, addresses[0], units, none, r[i], thread_rows.lane);
        }
      }
    }
  } else {
    for (int base = 0; base < count; base += thread_rows.tokens) {
      const bool exists = base + thread_rows.token < count;
      const TokenAddresses& address = addresses[exists ? base + thread_rows.token : 0];
      const bool live = exists && address.written;
      RopeUnits rope;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        rope[u].rotated = 0;
        const Unit unit = units.qk[u];
        if (live && unit.first >= 0) rope[u] = common::load_rope<kWidth>(p.prologue, address.prologue, unit);
      }
      for (int j = thread_rows.row; j - thread_rows.row < rows; j += thread_rows.rows * kRows) {
        Row r[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int at = j + i * thread_rows.rows;
          start_row(p, address, units, at, live && at < rows, r[i]);
        }
        __syncwarp();  // an output may alias its input and be narrower
#pragma unroll
        for (int i = 0; i < kRows; ++i) convert_and_store_row(p, address, units, rope, r[i], thread_rows.lane);
      }
    }
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads, ATTUNE_BLOCKS_PER_SM)
    attune_store_rows(const __grid_constant__ attune::kernels::StoreParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  attune::rows::store_rows(p);
}
