// SPDX-License-Identifier: Apache-2.0
#include "layer_parameters.h"

#include <algorithm>
#include <cmath>

#include "synthetic.h"

namespace attune::cli {
namespace {

Buffer rope_table(const RopeSpec& spec, int64_t positions) {
  Rope rope;
  rope.style = spec.style;
  rope.dim = spec.dim;
  rope.theta = spec.theta;
  rope.scale = spec.scale;
  rope.mscale = spec.mscale;
  rope.max_position = spec.max_position;
  rope.beta_fast = spec.beta_fast;
  rope.beta_slow = spec.beta_slow;
  rope.low_freq_factor = spec.low_freq_factor;
  rope.high_freq_factor = spec.high_freq_factor;
  Buffer table(static_cast<size_t>(positions * spec.dim) * sizeof(float));
  check(attune_rope_table(&rope, 0, positions, table.as<float>()));
  return table;
}

Buffer normal_table(int64_t n, cases::Random& random) {
  Buffer table(static_cast<size_t>(n) * sizeof(float));
  fill_normal(ATTUNE_FLOAT32, table.data(), n, 1.0, random);
  return table;
}

}  // namespace

int64_t window_left(const Model& model, int64_t kind) {
  const int64_t window = model.windows[static_cast<size_t>(kind)];
  return window == 0 ? -1 : window - 1;  // the query's own key counts
}

LayerParameters::LayerParameters(const Model& model, int64_t positions, cases::Random& random)
    : model_(model), positions_(positions) {
  if (model.rope) rope_ = rope_table(*model.rope, positions);
  if (model.alibi) {
    alibi_ = Buffer(static_cast<size_t>(model.num_heads_q) * sizeof(float));
    check(attune_alibi_slopes(model.num_heads_q, alibi_.as<float>()));
  }
  if (model.sinks) sinks_ = normal_table(model.num_heads_q, random);
  if (model.t5_num_buckets > 0) {
    t5_decoder_ = normal_table(model.num_heads_q * model.t5_num_buckets, random);
    t5_encoder_ = normal_table(model.num_heads_q * model.t5_num_buckets, random);
  }
}

attune_tensor LayerParameters::t5(const Buffer& table) const {
  return dense(table.as<float>(), {model_.num_heads_q, model_.t5_num_buckets});
}

void LayerParameters::apply_rope(attune_prologue& prologue) const {
  if (!model_.rope) return;
  prologue.rope_cos_sin = dense(rope_.as<float>(), {positions_, model_.rope->dim});
  prologue.rope_offset = model_.rope->offset;
  prologue.rope_interleaved = model_.rope->interleaved ? 1 : 0;
}

void LayerParameters::apply_decoder(attune_attention& a, int64_t kind) const {
  apply_cross(a);
  a.causal = 1;
  a.window_left = window_left(model_, kind);
  if (model_.alibi) a.alibi_slopes = dense(alibi_.as<float>(), {model_.num_heads_q});
  if (model_.sinks) a.sinks = dense(sinks_.as<float>(), {model_.num_heads_q});
  if (model_.t5_num_buckets > 0) {
    a.t5_bias = t5(t5_decoder_);
    a.t5_max_distance = model_.t5_max_distance;
  }
  apply_rope(a.prologue);
}

void LayerParameters::apply_encoder(attune_attention& a) const {
  apply_cross(a);
  a.t5_bias = t5(t5_encoder_);
  a.t5_max_distance = model_.t5_max_distance;
  a.t5_bidirectional = 1;
}

void LayerParameters::apply_cross(attune_attention& a) const {
  a.softmax_scale = static_cast<float>(model_.softmax_scale);
  a.softcap = static_cast<float>(model_.softcap);
  if (model_.is_mla()) a.head_dim_v = model_.head_dim_v;
}

}  // namespace attune::cli
