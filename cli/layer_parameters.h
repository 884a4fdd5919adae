// SPDX-License-Identifier: Apache-2.0
// What a model adds to plain attention: RoPE tables, slopes, biases, sinks. The same in every step.
#pragma once

#include <cstdint>

#include "attune/attune.hpp"
#include "buffer.h"
#include "cases/number.h"
#include "model.h"

namespace attune::cli {

class LayerParameters {
 public:
  // positions: of the RoPE table.
  LayerParameters(const Model& model, int64_t positions, cases::Random& random);
  // Shapes alone, which is all that planning looks at: a table of a long context takes a minute to fill.
  LayerParameters(const Model& model, int64_t positions) : model_(model), positions_(positions) {}

  // Decoder self attention of layer kind i (an index of model.windows). Causal.
  void apply_decoder(attune_attention& a, int64_t kind) const;
  // Encoder self attention: sees everything.
  void apply_encoder(attune_attention& a) const;
  // Cross attention: no mask, no bias.
  void apply_cross(attune_attention& a) const;
  // RoPE of the new tokens, if the model has any.
  void apply_rope(attune_prologue& prologue) const;

 private:
  attune_tensor t5(const Buffer& table) const;

  const Model model_;
  Buffer rope_, alibi_, sinks_, t5_decoder_, t5_encoder_;
  int64_t positions_;
};

// Window of layer kind i as attune_attention.window_left.
int64_t window_left(const Model& model, int64_t kind);

}  // namespace attune::cli
