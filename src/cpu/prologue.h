// SPDX-License-Identifier: Apache-2.0
// The prologue on the CPU: a row of q, k or v of a new token, dequantised, biased, scaled, rotated, in fp32.
#pragma once

#include "core/prologue.h"
#include "core/tensor.h"

namespace attune::cpu {

// One row of the source, through the prologue, to out (fp32). row is the row in the tensor (and in positions), batch
// its sequence, position its absolute position in the sequence.
void prepare_q_row(const Prologue& p, const RowView& q, int64_t head_dim, int64_t row, int64_t head, int64_t batch,
                   int64_t position, float* out);
void prepare_k_row(const Prologue& p, const RowView& k, int64_t head_dim, int64_t row, int64_t head, int64_t batch,
                   int64_t position, float* out);
void prepare_v_row(const Prologue& p, const RowView& v, int64_t head_dim, int64_t row, int64_t head, int64_t batch,
                   float* out);

}  // namespace attune::cpu
