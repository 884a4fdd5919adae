// SPDX-License-Identifier: Apache-2.0
// A prologue before the attention of prompts and of MLA: a launch of its own (kernels/rows/store.cu, as for
// attune_qkv_prepare) that writes q, k and v as they enter the products to the workspace and new keys to the cache.
// There are many products to a byte in prompts, and with the many heads of MLA: fusing it, as decode does, would save
// little.
#pragma once

#include <cstddef>

#include "core/ops.h"
#include "core/problem.h"

namespace attune::cuda::prefill {

// Whether q, k and v are e4m3 codes that enter the products as they are, their scales with them.
bool is_fp8_attention(const Problem& p);

bool has_prologue(const Problem& p);

// "" if the prologue can go ahead, else what cannot.
std::string prologue_refusal(const Problem& p);

// Whether q, or dense k and v, do not lie as the TMA takes them, but for a launch before that copies them: of 16 bits,
// or codes that enter the products.
bool copies_rows(const Problem& p);
// The first of them by name; null if none does.
const char* row_to_copy(const Problem& p);

// What q, k and v are in the workspace: of their own type, or of fp32, for the kernel of that.
enum class Rows { kOwnType, kFp32 };

// Bytes of the workspace for q, k and v; 0 without a prologue or copies.
size_t prologue_bytes(const Problem& p, Rows rows = Rows::kOwnType);

// What is launched for a prologue, and what attention sees then: no prologue, and q, k and v at `memory`.
PrepareProblem to_prepare(const Problem& p, void* memory, Rows rows = Rows::kOwnType);
Problem after_prologue(const Problem& p, void* memory, Rows rows = Rows::kOwnType);

// The same where there may be no prologue: copies then, of k and v apart where they are not rows of q's tokens. What it
// copies it copies from anywhere: a plan made for rows at any address takes those that lie well, too.
struct Launches {
  PrepareProblem ops[2];
  int count = 0;
  const PrepareProblem* begin() const { return ops; }
  const PrepareProblem* end() const { return ops + count; }
};
Launches launches_before(const Problem& p, void* memory, Rows rows = Rows::kOwnType);

}  // namespace attune::cuda::prefill
