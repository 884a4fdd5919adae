// SPDX-License-Identifier: Apache-2.0
// What the drawings of random cases and of serving batches share.
#pragma once

#include "case.h"
#include "number.h"

namespace attune::cases {

// What a batch of attention is like; kAny: as random_case draws it.
// kShortPrompts: few, short, and plain, as encoders have them. Hopper has another kernel for these.
enum class Kind { kDecode, kChunk, kPrefill, kShortPrompts, kMixed, kCodes, kFloats, kMla, kMlaSparse, kAny, kIndexer };

// A packed row, in place of a plain one.
void draw_packed(Random& r, Case& c);
// One sequence among unlike ones.
int64_t draw_length(Random& r, int64_t most);
// A plain cache of 16-byte formats, paged or contiguous.
void draw_plain_cache(Random& r, Case& c);
void draw_lengths(Random& r, Case& c, Kind kind, int64_t budget);
// Lengths for a case that was drawn with few and short ones. What it asks for of them stays true.
void draw_any_lengths(Random& r, Case& c, int64_t budget);

// A batch of qkv_prepare, of a cache operation or of a merge; what kernels are compiled for follows from configuration.
Case serving_op_case(Random& r, uint64_t configuration, int64_t budget);
// Prompts of thousands of tokens, which fill a GPU; as above.
Case serving_long_case(Random& r, uint64_t configuration);
// A batch of the backward of attention, as training and as fine-tuning beside serving have it; as above.
Case serving_backward_case(Random& r, uint64_t configuration, int64_t budget);

}  // namespace attune::cases
