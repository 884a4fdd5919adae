// SPDX-License-Identifier: Apache-2.0
// Reads tokens of a packed MLA cache into dense rows: dequantise and gather. Dense rows must allow vectors; fetch.cu
// takes all other rows.
//
// Maths: x = code * scale of its group in fp32, rounded once to the dense type; the last 64 channels are bf16. A token
// that the cache does not hold becomes zeros.
//
// Grid: one block of 256 threads for each `tile` tokens; a warp takes kRows of them at a time. Lanes exchange nothing.
#include "ptx/grid.cuh"
#include "rows/mla_row.cuh"

namespace attune::rows {

using kernels::FetchParams;

constexpr int kRows = common::element_size(kRowType) == 4 ? 1 : 2;  // tokens in flight in a warp

// A token whose loads are in flight.
struct Row {
  PackedAddresses address;
  RawRun<kRun> raw[kRuns];
  float scale[kCodeRuns];
};

__device__ __forceinline__ void start_row(const PackedAddresses& address, int lane, Row& r) {
  r.address = address;
  if (address.dense == nullptr || address.row == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int d = channel_of(lane, i);
    if (i < kCodeRuns && d < Mla::kNope) {
      r.raw[i] = common::load_run<kRun>(common::kE4m3, global(address.row + d), 1, true);
      r.scale[i] = Mla::load_scale(global(address.scales), d / Mla::kGroup, true);
    } else if (d < Mla::kHeadDim) {
      r.raw[i] =
          common::load_run<kRun>(common::kBFloat16, global(address.row + Mla::kRope + 2 * (d - Mla::kNope)), 2, true);
    }
  }
}

__device__ __forceinline__ void convert_and_store_row(const Row& r, int lane) {
  if (r.address.dense == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int d = channel_of(lane, i);
    if (d >= Mla::kHeadDim) continue;
    float x[kRun] = {};
    if (r.address.row == nullptr) {
    } else if (i < kCodeRuns && d < Mla::kNope) {
      common::decode_run<kRun>(common::kE4m3, r.raw[i], x);
#pragma unroll
      for (int k = 0; k < kRun; ++k) x[k] *= r.scale[i];
    } else {
      common::decode_run<kRun>(common::kBFloat16, r.raw[i], x);
    }
    common::store_run<kRun>(kRowType, common::encode_run<kRun>(kRowType, x),
                            global(r.address.dense + d * common::element_size(kRowType)), 0, true);
  }
}

__device__ __forceinline__ void fetch_rows(const FetchParams& p) {
  __shared__ PackedAddresses addresses[kernels::kMaxTileTokens];
  const int count = for_each_token(p.tokens, [&](int i, long long row, const Owner& owner) {
    PackedAddresses address{};
    const Source source = source_of(p.tokens, p.cache, false, row, owner);
    if (source.written) {
      address.dense = dense_row(p.k, 0, row);
      set_packed_addresses(p.cache, source.slots.k, address);
    }
    addresses[i] = address;
  });
  const int lane = threadIdx.x % 32;
  for (int t = threadIdx.x / 32; t < count; t += kWarps * kRows) {
    Row r[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = t + i * kWarps;
      start_row(at < count ? addresses[at] : PackedAddresses{}, lane, r[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) convert_and_store_row(r[i], lane);
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads, ATTUNE_BLOCKS_PER_SM)
    attune_fetch_mla(const __grid_constant__ attune::kernels::FetchParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  attune::rows::fetch_rows(p);
}
