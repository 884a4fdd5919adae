// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup as in ptx/wgmma.cuh, d [64, N] (+)= a [64, 32] b [32, N], of e4m3 codes. Both operands are K-major:
// rows of 128 codes in shared memory, as ptx/descriptor.cuh says; 32 codes of K further is kStepK again. a in registers:
// lane l has in a[i] codes 4 (l % 4) + 16 (i / 2) .. + 3 of row l / 4 + 8 (i % 2), the first in the lowest byte. Sums lose
// what is below 2^-13 of their largest term or so, so that long ones are better continued in other registers.
#pragma once

#include "ptx/wgmma.cuh"

namespace attune::ptx {

// Specialisations: static void shared(d, a, b, accumulate) and registers(d, a, b, accumulate); accumulate 0: d is
// overwritten.
template <int kN>
struct ProductOfCodes;

// n = 32 (k + 1) columns in n / 2 registers; i0..i5: the numbers of the operands after them.
#define ATTUNE_PRODUCT_OF_CODES(n, k, i0, i1, i2, i3, i4, i5)                                                      \
  template <>                                                                                                      \
  struct ProductOfCodes<n> {                                                                                       \
    __device__ __forceinline__ static void shared(float (&d)[n / 2], Descriptor a, Descriptor b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n           \
                   "k32.f32.e4m3.e4m3 {" ATTUNE_N##k "}, %" #i0 ", %" #i1 ", p, 1, 1;\n}"                          \
                   : ATTUNE_O##k                                                                                   \
                   : "l"(a.bits()), "l"(b.bits()), "r"(accumulate)                                                 \
                   : "memory");                                                                                    \
    }                                                                                                              \
    __device__ __forceinline__ static void registers(float (&d)[n / 2], const unsigned* a, Descriptor b,           \
                                                     int accumulate) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n           \
                   "k32.f32.e4m3.e4m3 {" ATTUNE_N##k "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4          \
                   ", p, 1, 1;\n}"                                                                                 \
                   : ATTUNE_O##k                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(accumulate)                    \
                   : "memory");                                                                                    \
    }                                                                                                              \
  };
ATTUNE_PRODUCT_OF_CODES(32, 0, 16, 17, 18, 19, 20, 21)
ATTUNE_PRODUCT_OF_CODES(64, 1, 32, 33, 34, 35, 36, 37)
ATTUNE_PRODUCT_OF_CODES(96, 2, 48, 49, 50, 51, 52, 53)
ATTUNE_PRODUCT_OF_CODES(128, 3, 64, 65, 66, 67, 68, 69)
#undef ATTUNE_PRODUCT_OF_CODES

}  // namespace attune::ptx
