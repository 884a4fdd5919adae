// SPDX-License-Identifier: Apache-2.0
// The prologue of prefill and MLA: a separate launch (kernels/rows/store.cu, as for attune_qkv_prepare) that writes q,
// k and v to the workspace and appends new keys to the cache. Prefill, and MLA with its many heads, do many operations
// a byte, so fusing the prologue, as decode does, would save little.
#pragma once

#include <cstddef>

#include "core/ops.h"
#include "core/problem.h"

namespace attune::cuda::attention {

// Whether q, k and v are e4m3 and enter the tensor cores as they are, with their scales.
bool is_fp8_attention(const Problem& p);

bool has_prologue(const Problem& p);

// "" if the prologue is supported, else what is not.
std::string prologue_refusal(const Problem& p);

// Whether q, or dense k and v, of 16 bits or e4m3, must be copied by a launch before, as the TMA cannot read them.
bool copies_rows(const Problem& p);
// The name of the first of them, or null.
const char* row_to_copy(const Problem& p);

// The type of q, k and v in the workspace: their own, fp32, or bf16, which codes of e4m3 become with their scales.
enum class Rows { kOwnType, kFp32, kBf16 };

// Whether q, k and v are written to the workspace before attention.
bool prepares_rows(const Problem& p, Rows rows);

// Bytes of the workspace for q, k and v; 0 without a prologue or copies.
size_t prologue_bytes(const Problem& p, Rows rows = Rows::kOwnType);

// The launch of a prologue, and the problem that attention sees afterwards: no prologue, and q, k and v at `memory`.
PrepareProblem to_prepare(const Problem& p, void* memory, Rows rows = Rows::kOwnType);
Problem after_prologue(const Problem& p, void* memory, Rows rows = Rows::kOwnType);

// The launches before attention: a prologue, or copies; two where k and v are not of q's tokens. Copies read from any
// address, so a plan made for unaligned rows also takes aligned ones.
struct Launches {
  PrepareProblem ops[2];
  int count = 0;
  const PrepareProblem* begin() const { return ops; }
  const PrepareProblem* end() const { return ops + count; }
};
Launches launches_before(const Problem& p, void* memory, Rows rows = Rows::kOwnType);

}  // namespace attune::cuda::attention
