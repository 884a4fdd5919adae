// SPDX-License-Identifier: Apache-2.0
#include "core/prologue.h"

#include "core/dtype.h"

namespace attune {
namespace {

// The tensor that a parameter applies to.
struct Operand {
  const char* name;
  bool present;
  int64_t heads, dim;
  const char* heads_name;
  const char* dim_name;
};

void read_scale(Prologue& out, const attune_prologue& p, const PrologueShapes& s, Data data) {
  const struct {
    const char* name;
    bool present;
    int32_t dtype;
  } inputs[3] = {{"q", s.has_q, s.q_dtype}, {"k", s.has_k, s.k_dtype}, {"v", s.has_v, s.v_dtype}};
  if (!present(p.qkv_scale)) {
    for (const auto& x : inputs) {
      require(!x.present || x.dtype != ATTUNE_INT8, "prologue.qkv_scale is absent, but ", x.name,
              " is int8 and needs it");
    }
    return;
  }
  bool narrow = false;
  for (const auto& x : inputs) narrow = narrow || (x.present && is_8bit(x.dtype));
  require(narrow, "prologue.qkv_scale is set, but none of q, k and v is int8, e4m3 or e5m2");
  check_tensor("prologue.qkv_scale", p.qkv_scale, {ATTUNE_FLOAT32}, {1}, data);
  check_extent("prologue.qkv_scale", p.qkv_scale, 0, 3, "q, k and v");
  out.scaled = true;
  out.qkv_scale = static_cast<const float*>(p.qkv_scale.data);
  out.qkv_scale_stride = p.qkv_scale.stride[0];
}

// A bias [heads, dim], or IA3 weights [tasks, heads, dim].
ParamView read_weights(const char* name, const attune_tensor& t, const Operand& x, int rank, Data data) {
  if (!present(t)) return {};
  require(x.present, name, " is set, but ", x.name, " is absent");
  check_tensor(name, t, kFloats, {rank}, data);
  check_extent(name, t, rank - 2, x.heads, x.heads_name);
  check_extent(name, t, rank - 1, x.dim, x.dim_name);
  return param_view(t);
}

// An optional int32 vector [batch].
IntView read_per_sequence(const char* name, const attune_tensor& t, int64_t batch, Data data) {
  if (!present(t)) return {};
  check_tensor(name, t, {ATTUNE_INT32}, {1}, data);
  check_extent(name, t, 0, batch, "batch");
  return int_view(t);
}

void read_ia3(Prologue& out, const attune_prologue& p, const PrologueShapes& s, const Operand& k, const Operand& v,
              Data data) {
  out.ia3_k = read_weights("prologue.ia3_k", p.ia3_k, k, 3, data);
  out.ia3_v = read_weights("prologue.ia3_v", p.ia3_v, v, 3, data);
  if (!out.ia3_k && !out.ia3_v) {
    require(!present(p.ia3_task), "prologue.ia3_task is set, but prologue.ia3_k and prologue.ia3_v are absent");
    return;
  }
  const int64_t tasks = out.ia3_k ? out.ia3_k.shape[0] : out.ia3_v.shape[0];
  require(tasks >= 1, out.ia3_k ? "prologue.ia3_k" : "prologue.ia3_v", ".shape[0] is ", tasks,
          "; it must be at least 1 (num_tasks)");
  if (out.ia3_v) check_extent("prologue.ia3_v", p.ia3_v, 0, tasks, "num_tasks, as prologue.ia3_k");
  out.ia3_task = read_per_sequence("prologue.ia3_task", p.ia3_task, s.batch, data);
}

void require_no_rope(const attune_prologue& p) {
  const char* absent = " is set, but prologue.rope_cos_sin is absent";
  require(!present(p.rope_table_index), "prologue.rope_table_index", absent);
  require(!present(p.positions), "prologue.positions", absent);
  require(p.rope_offset == 0, "prologue.rope_offset", absent);
  require(p.rope_interleaved == 0, "prologue.rope_interleaved", absent);
  require(p.mrope_section[0] == 0 && p.mrope_section[1] == 0 && p.mrope_section[2] == 0, "prologue.mrope_section",
          absent);
  require(p.mrope_interleaved == 0, "prologue.mrope_interleaved", absent);
}

void read_mrope(Prologue& out, const attune_prologue& p) {
  check_flag("prologue.mrope_interleaved", p.mrope_interleaved);
  int64_t pairs = 0;
  for (int i = 0; i < 3; ++i) {
    require(p.mrope_section[i] >= 0, "prologue.mrope_section[", i, "] is ", p.mrope_section[i], "; it must be >= 0");
    out.mrope_section[i] = p.mrope_section[i];
    pairs += p.mrope_section[i];
  }
  out.mrope = pairs > 0;
  out.mrope_interleaved = p.mrope_interleaved == 1;
  require(pairs <= out.rotary_dim / 2, "prologue.mrope_section covers ", pairs, " pairs; rope_cos_sin has ",
          out.rotary_dim / 2);
  require(out.mrope || !out.mrope_interleaved, "prologue.mrope_interleaved is 1, but prologue.mrope_section is all 0");
}

void read_positions(Prologue& out, const attune_prologue& p, const PrologueShapes& s, Data data) {
  if (!present(p.positions)) return;
  require(!s.has_k || s.same_tokens,
          "prologue.positions is set, but q and k are not the same tokens, so it cannot serve both");
  check_tensor("prologue.positions", p.positions, {ATTUNE_INT32}, {1, 2}, data);
  check_extent("prologue.positions", p.positions, 0, s.total_q, "total_q");
  out.has_positions = true;
  out.positions.data = static_cast<const int32_t*>(p.positions.data);
  out.positions.rows = p.positions.shape[0];
  out.positions.row_stride = p.positions.stride[0];
  out.positions.cols = 1;
  if (p.positions.rank == 2) {
    check_extent("prologue.positions", p.positions, 1, 3, "components of mRoPE");
    require(out.mrope, "prologue.positions has 3 components a token, but prologue.mrope_section is all 0");
    out.positions.cols = 3;
    out.positions.col_stride = p.positions.stride[1];
  }
}

void read_rope(Prologue& out, const attune_prologue& p, const PrologueShapes& s, Data data) {
  if (!present(p.rope_cos_sin)) {
    require_no_rope(p);
    return;
  }
  const attune_tensor& t = p.rope_cos_sin;
  require(s.has_q || s.has_k, "prologue.rope_cos_sin is set, but q and k are absent");
  check_tensor("prologue.rope_cos_sin", t, {ATTUNE_FLOAT32}, {2, 3}, data);
  const int last = t.rank - 1;
  const int64_t width = t.shape[last];
  require(width >= 2 && width % 2 == 0, "prologue.rope_cos_sin.shape[", last, "] is ", width,
          "; the rotary width must be even and >= 2");
  require(width <= s.head_dim_qk, "prologue.rope_cos_sin.shape[", last, "] is ", width,
          "; it must be at most head_dim_qk (", s.head_dim_qk, ")");
  require(p.rope_offset >= 0 && p.rope_offset <= s.head_dim_qk - width, "prologue.rope_offset is ", p.rope_offset,
          "; it must be 0..", s.head_dim_qk - width, ": ", width, " channels of head_dim_qk (", s.head_dim_qk,
          ") are rotated");
  check_flag("prologue.rope_interleaved", p.rope_interleaved);
  out.cos_sin = static_cast<const float*>(t.data);
  out.num_tables = t.rank == 3 ? t.shape[0] : 1;
  out.num_positions = t.shape[last - 1];
  out.rotary_dim = width;
  out.table_stride = t.rank == 3 ? t.stride[0] : 0;
  out.position_stride = t.stride[last - 1];
  out.channel_stride = t.stride[last];
  out.rope_offset = p.rope_offset;
  out.interleaved = p.rope_interleaved == 1;
  out.rope_table_index = read_per_sequence("prologue.rope_table_index", p.rope_table_index, s.batch, data);
  read_mrope(out, p);
  read_positions(out, p, s, data);
}

void read_logn(Prologue& out, const attune_prologue& p, const PrologueShapes& s, Data data) {
  if (!present(p.logn)) return;
  require(s.has_q, "prologue.logn is set, but q is absent");
  check_tensor("prologue.logn", p.logn, {ATTUNE_FLOAT32}, {1}, data);
  require(p.logn.shape[0] >= 1, "prologue.logn.shape[0] is ", p.logn.shape[0], "; it must be at least 1");
  out.logn = param_view(p.logn);
  out.logn_length = p.logn.shape[0];
}

}  // namespace

Prologue make_prologue(const attune_prologue& p, const PrologueShapes& s, Data data) {
  const Operand q{"q", s.has_q, s.heads_q, s.head_dim_qk, "num_heads_q", "head_dim_qk"};
  const Operand k{"k", s.has_k, s.heads_kv, s.head_dim_qk, "num_heads_kv", "head_dim_qk"};
  const Operand v{"v", s.has_v, s.heads_kv, s.head_dim_v, "num_heads_kv", "head_dim_v"};
  Prologue out;
  read_scale(out, p, s, data);
  out.q_bias = read_weights("prologue.q_bias", p.q_bias, q, 2, data);
  out.k_bias = read_weights("prologue.k_bias", p.k_bias, k, 2, data);
  out.v_bias = read_weights("prologue.v_bias", p.v_bias, v, 2, data);
  read_ia3(out, p, s, k, v, data);
  read_rope(out, p, s, data);
  read_logn(out, p, s, data);
  check_flag("prologue.append", p.append);
  out.append = p.append == 1;
  check_flag("prologue.power_of_two_scales", p.power_of_two_scales);
  out.power_of_two_scales = p.power_of_two_scales == 1;
  require(out.append || !out.power_of_two_scales,
          "prologue.power_of_two_scales is 1, but prologue.append is 0: no scale is written");
  out.any =
      out.scaled || out.q_bias || out.k_bias || out.v_bias || out.ia3_k || out.ia3_v || out.has_rope() || out.logn;
  return out;
}

void check_scales(const Prologue& p, const KvCache& cache) {
  require(!p.power_of_two_scales || cache.writes_scales(),
          "prologue.power_of_two_scales is 1, but the cache is plain without scales per token and head: no scale is "
          "written");
}

}  // namespace attune
