// SPDX-License-Identifier: Apache-2.0
// The kinds of mask and score term, numbered and named once for host and device: values of the axes of the host's
// coverage (core/kernel.h), bits of ATTUNE_MASK and ATTUNE_SCORE. Scales of a cache: common/kv_scale.h. Compiled by
// NVRTC and by the host's compiler; no standard headers.
#pragma once

namespace attune {

namespace use {

// ATTUNE_MASK has those of kCompiledMasks. The others are parameters. kKeyMasks: those of common/key_masks.h.
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

// ATTUNE_SCORE has kSoftcap, kAlibi, kAlibiSqrt, kBias (of either bias) and kT5; 0: scaled products alone.
enum Scores : unsigned {
  kPlain = 1,
  kSoftcap = 2,
  kAlibi = 4,
  kAlibiSqrt = 8,
  kBias = 16,
  kNewTokenBias = 32,
  kT5 = 64,
  kSinks = 128,
  kTables = kBias | kT5  // what is looked up key by key
};
#define ATTUNE_SCORE_NAMES \
  "scale", "softcap", "ALiBi", "ALiBi sqrt", "bias table", "new-token bias", "T5 buckets", "sinks"

}  // namespace use

}  // namespace attune
