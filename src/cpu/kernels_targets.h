// SPDX-License-Identifier: Apache-2.0
// Private to the kernels_*.cpp files: which Highway targets are built, and the tables they make.
#pragma once

#include <hwy/detect_targets.h>

#include "cpu/kernels.h"

// The same short list with every Highway release keeps builds quick: the baseline, SSE4, AVX2 and AVX-512 on x86, NEON
// on Arm. Bits 4..7 are the x86 targets above AVX3, which differ between releases and would give the same code. The
// sizeless vectors of SVE and RVV cannot live in arrays, which the register tiles need.
#undef HWY_DISABLED_TARGETS
#if (defined(__x86_64__) || defined(__i386__)) && defined(ATTUNE_FEWER_TARGETS)
// For sanitizer and developers' builds: the baseline, and what most machines run, with which most of the tests run.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | (1LL << 4) | (1LL << 5) | (1LL << 6) | (1LL << 7))
#elif defined(__x86_64__) || defined(__i386__)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | (1LL << 4) | (1LL << 5) | (1LL << 6) | (1LL << 7))
#else
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

namespace attune::cpu {

struct TargetTable {
  int64_t target;  // a HWY_* bit
  const KernelTable* table;
};

// Tables of all targets in this binary, best first; the machine need not support them.
const TargetTable* target_tables(int* count);

// Replaces entries of the AVX3 table by versions that use AVX512-BF16 and VBMI. Where this machine lacks them it
// returns false and replaces nothing.
bool use_avx512bf16(KernelTable* table);
// Whether this machine's bf16 products take less time than those of fp32.
bool has_fast_bf16();

}  // namespace attune::cpu
