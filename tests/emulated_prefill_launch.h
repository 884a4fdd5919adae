// SPDX-License-Identifier: Apache-2.0
// The kernels of prefill on the CPU (tests/emulator), launched as their plan launches them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/prefill/config.h"
#include "emulated.h"

namespace attune::cuda {

// 16-bit rows at addresses that are no multiples of 16 bytes.
inline RowView moved(const RowView& v, int64_t heads, int64_t dim, std::vector<uint16_t>& memory) {
  RowView to = v;
  to.head_stride = dim + 1, to.row_stride = heads * (dim + 1) + 3, to.batch_stride = v.rows_per_batch * to.row_stride;
  memory.assign(static_cast<size_t>(v.rows * to.row_stride + 1), 0x7fff);  // NaN
  to.data = reinterpret_cast<std::byte*>(memory.data() + 1);
  for (int64_t row = 0; row < v.rows; ++row) {
    for (int64_t head = 0; head < heads; ++head)
      memcpy(to.at(row, head), v.at(row, head), static_cast<size_t>(2 * dim));
  }
  return to;
}
inline void move_rows(Problem& p, std::vector<uint16_t> (&memory)[3]) {
  p.q = moved(p.q, p.heads_q, p.head_dim_qk, memory[0]);
  if (p.k) p.k = moved(p.k, p.heads_kv, p.head_dim_qk, memory[1]);
  if (p.v) p.v = moved(p.v, p.heads_kv, p.head_dim_v, memory[2]);
}

// Of prefill's or MLA's configuration.
template <class Config>
void emulate_schedule(const Config& c, const kernels::WorkTileParams& params) {
  const auto schedule = reinterpret_cast<void (*)(kernels::WorkTileParams)>(emulator::find_kernel(c.schedule_kernel()));
  emulator::run(1, 1024, [&] { schedule(params); });
}

// p: what the parameters are of.
inline void emulate_attention(const Problem& p, const prefill::Config& c, const kernels::WorkTileParams& params) {
  using ptx::TensorMap;
  using MainKernel = void (*)(kernels::WorkTileParams, TensorMap, TensorMap, TensorMap, TensorMap, TensorMap);
  using Fp32Kernel = void (*)(kernels::WorkTileParams, kernels::Fp32Rows);
  void* const kernel = emulator::find_kernel(c.main_kernel());
  const kernels::Fp32Rows vec4 = prefill::fp32_rows(p);
  const prefill::Maps m = prefill::describe_maps(p, c);
  emulator::run(
      static_cast<unsigned>(c.blocks), static_cast<unsigned>(c.threads()),
      [&] {
        if (c.fp32()) return reinterpret_cast<Fp32Kernel>(kernel)(params, vec4);
        reinterpret_cast<MainKernel>(kernel)(params, emulator::tensor_map(m.q), emulator::tensor_map(m.k),
                                             emulator::tensor_map(m.v), emulator::tensor_map(m.dense_k),
                                             emulator::tensor_map(m.dense_v));
      },
      static_cast<unsigned>(c.cluster));
}

}  // namespace attune::cuda
