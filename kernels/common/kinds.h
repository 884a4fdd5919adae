// SPDX-License-Identifier: Apache-2.0
// The kinds of masks and score terms, numbered and named once for host and device. They are values of the coverage axes
// (core/kernel.h) and bits of ATTUNE_MASK and ATTUNE_SCORE. Scales of a cache are in common/kv_scale.h. Compiled by
// NVRTC and by the host's compiler; no standard headers.
#pragma once

namespace attune {

namespace use {

// ATTUNE_MASK has the bits of kCompiledMasks; the other masks are run-time parameters. kKeyMasks: common/key_masks.h.
enum Masks : unsigned {
  kNoMask = 1,
  kCausal = 2,
  kWindow = 4,
  kBits = 8,
  kRanges = 16,
  kFinished = 32,
  kSkipDecode = 64,
  kKeyMasks = kBits,
  kCompiledMasks = kKeyMasks | kRanges
};
#define ATTUNE_MASK_NAMES "none", "causal", "window", "bits", "bidirectional ranges", "finished rows", "skip decode"

// ATTUNE_SCORE has kSoftcap, kAlibi, kAlibiSqrt, kBias (for either bias) and kT5. 0: scores are scaled products alone.
enum Scores : unsigned {
  kPlain = 1,
  kSoftcap = 2,
  kAlibi = 4,
  kAlibiSqrt = 8,
  kBias = 16,
  kNewTokenBias = 32,
  kT5 = 64,
  kSinks = 128,
  kTables = kBias | kT5  // looked up key by key
};
#define ATTUNE_SCORE_NAMES \
  "scale", "softcap", "ALiBi", "ALiBi sqrt", "bias table", "new-token bias", "T5 buckets", "sinks"

}  // namespace use

}  // namespace attune
