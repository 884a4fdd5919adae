// SPDX-License-Identifier: Apache-2.0
// The prologue's tensors of a problem.
#include <algorithm>
#include <cmath>

#include "problem.h"
#include "reference/reference.h"

namespace attune::cases {

void Problem::build_prologue() {
  const Case& c = case_;
  const PrologueSpec& spec = c.prologue;
  attune_prologue& p = host_.prologue;
  const attune_dtype aux = aux_dtype();
  if (spec.qkv_scale || c.dtype == ATTUNE_INT8) {
    p.qkv_scale = arena_.add("prologue.qkv_scale", ATTUNE_FLOAT32, {3});
    const double unit = c.dtype == ATTUNE_INT8 ? 1.0 / 32 : 1.0;
    for_each_element(p.qkv_scale, [&](const int64_t* index, void* element) {
      encode(ATTUNE_FLOAT32, unit * (0.8 + 0.3 * static_cast<double>(index[0])), element);
    });
  }
  const auto add_bias = [&](const char* name, bool present, int64_t heads, int64_t dim, attune_tensor& t) {
    if (!present) return;
    t = arena_.add(name, aux, {heads, dim});
    fill_normal(t, 0.5);
  };
  add_bias("prologue.q_bias", spec.q_bias, c.num_heads_q, c.head_dim_qk, p.q_bias);
  add_bias("prologue.k_bias", spec.k_bias, c.num_heads_kv, c.head_dim_qk, p.k_bias);
  add_bias("prologue.v_bias", spec.v_bias, c.num_heads_kv, c.head_dim_v, p.v_bias);
  if (spec.ia3_tasks > 0) {
    const auto near_one = [&](const attune_tensor& t) {
      for_each_element(t, [&](const int64_t*, void* element) { encode(aux, 1 + 0.3 * random_.normal(), element); });
    };
    p.ia3_k = arena_.add("prologue.ia3_k", aux, {spec.ia3_tasks, c.num_heads_kv, c.head_dim_qk});
    near_one(p.ia3_k);
    if (!c.shared_kv) {
      p.ia3_v = arena_.add("prologue.ia3_v", aux, {spec.ia3_tasks, c.num_heads_kv, c.head_dim_v});
      near_one(p.ia3_v);
    }
    if (spec.ia3_tasks > 1 || spec.ia3_no_task) {
      std::vector<int64_t> tasks;
      for (int64_t b = 0; b < c.batch(); ++b) tasks.push_back((b + 1) % spec.ia3_tasks);
      if (spec.ia3_no_task && !tasks.empty()) tasks.back() = -1;
      p.ia3_task = add_vector("prologue.ia3_task", ATTUNE_INT32, tasks);
    }
  }
  if (spec.rope.dim > 0) build_rope();
  if (spec.logn > 0) {
    // Shorter than the longest sequence: the last entry serves the rest.
    p.logn = arena_.add("prologue.logn", ATTUNE_FLOAT32, {2 * spec.logn});
    for_each_element(p.logn, [&](const int64_t* index, void* element) {
      const auto n = static_cast<double>(index[0]);
      encode(ATTUNE_FLOAT32, index[0] > spec.logn ? std::log(n + 1) / std::log(static_cast<double>(spec.logn)) : 1.0,
             element);
    });
  }
  p.append = spec.append;
  p.power_of_two_scales = spec.power_of_two_scales;
}

void Problem::build_rope() {
  const Case& c = case_;
  const RopeSpec& spec = c.prologue.rope;
  attune_prologue& p = host_.prologue;
  int64_t positions = 1;
  for (int64_t b = 0; b < c.batch(); ++b) positions = std::max(positions, c.keys(b));
  positions += 5;
  const std::vector<int64_t> shape = spec.tables > 1 ? std::vector<int64_t>{spec.tables, positions, spec.dim}
                                                     : std::vector<int64_t>{positions, spec.dim};
  p.rope_cos_sin = arena_.add("prologue.rope_cos_sin", ATTUNE_FLOAT32, shape);
  std::vector<std::vector<double>> frequencies;
  for (int64_t table = 0; table < spec.tables; ++table) {
    attune_rope rope{};
    rope.struct_size = sizeof(rope);
    rope.style = spec.style;
    rope.dim = spec.dim;
    rope.theta = spec.theta;
    rope.scale = spec.scale;
    rope.max_position = spec.max_position;
    rope.seqlen = spec.max_position * (table + 1) + 1;
    rope.beta_fast = 32;
    rope.beta_slow = 1;
    rope.extrapolation_factor = 1;
    rope.mscale = spec.mscale;
    rope.low_freq_factor = 1;
    rope.high_freq_factor = 4;
    frequencies.push_back(reference::rope_frequencies(rope));
  }
  for_each_element(p.rope_cos_sin, [&](const int64_t* index, void* element) {
    const int64_t* last = index + p.rope_cos_sin.rank - 2;
    const auto& table = frequencies[spec.tables > 1 ? static_cast<size_t>(index[0]) : 0];
    const int64_t half = spec.dim / 2;
    const double angle = static_cast<double>(last[0]) * table[static_cast<size_t>(last[1] % half)];
    encode(ATTUNE_FLOAT32, spec.mscale * (last[1] < half ? std::cos(angle) : std::sin(angle)), element);
  });
  if (spec.tables > 1) {
    std::vector<int64_t> tables;
    for (int64_t b = 0; b < c.batch(); ++b) tables.push_back((b + 1) % spec.tables);
    p.rope_table_index = add_vector("prologue.rope_table_index", ATTUNE_INT32, tables);
  }
  if (spec.positions > 0) {
    const std::vector<int64_t> position_shape =
        spec.positions == 3 ? std::vector<int64_t>{num_rows_, 3} : std::vector<int64_t>{num_rows_};
    p.positions = arena_.add("prologue.positions", ATTUNE_INT32, position_shape);
    for_each_element(p.positions, [&](const int64_t* index, void* element) {
      // Position 0 is a position like any other.
      encode(ATTUNE_INT32, index[0] % 4 == 1 ? 0.0 : static_cast<double>(random_.integer(0, positions - 1)), element);
    });
  }
  p.rope_offset = spec.offset;
  p.rope_interleaved = spec.interleaved;
  for (size_t i = 0; i < spec.mrope_section.size() && i < 3; ++i) {
    p.mrope_section[i] = static_cast<int32_t>(spec.mrope_section[i]);
  }
  p.mrope_interleaved = spec.mrope_interleaved;
}

}  // namespace attune::cases
