// SPDX-License-Identifier: Apache-2.0
// wgmma as in ptx/wgmma.cuh, d [64, N] (+)= a [64, 16] b [16, N], with a in registers and b K-major.
#pragma once

#include "ptx/wgmma.cuh"

namespace attune::ptx {

// Specialisations: static void registers(d, a, b, accumulate); accumulate 0: d is overwritten.
template <int kN, Type kType>
struct WgmmaAlongK;

#define ATTUNE_K4(i) "+f"(d[4 * (i)]), "+f"(d[4 * (i) + 1]), "+f"(d[4 * (i) + 2]), "+f"(d[4 * (i) + 3])
#define ATTUNE_KN8 "%0, %1, %2, %3"
#define ATTUNE_KN16 ATTUNE_KN8 ", %4, %5, %6, %7"
#define ATTUNE_KO8 ATTUNE_K4(0)
#define ATTUNE_KO16 ATTUNE_K4(0), ATTUNE_K4(1)
#define ATTUNE_KN32 ATTUNE_N0
#define ATTUNE_KO32 ATTUNE_O0
#define ATTUNE_KN64 ATTUNE_N1
#define ATTUNE_KO64 ATTUNE_O1
#define ATTUNE_KN96 ATTUNE_N2
#define ATTUNE_KO96 ATTUNE_O2
#define ATTUNE_KN128 ATTUNE_N3
#define ATTUNE_KO128 ATTUNE_O3
#define ATTUNE_KN160 ATTUNE_N4
#define ATTUNE_KO160 ATTUNE_O4
#define ATTUNE_KN192 ATTUNE_N5
#define ATTUNE_KO192 ATTUNE_O5
#define ATTUNE_KN224 ATTUNE_N6
#define ATTUNE_KO224 ATTUNE_O6
#define ATTUNE_KN256 ATTUNE_N7
#define ATTUNE_KO256 ATTUNE_O7

// i0..i5: the numbers of the operands after the n / 2 of d.
#define ATTUNE_PRODUCT_ALONG_K(n, kind, name, i0, i1, i2, i3, i4, i5)                                              \
  template <>                                                                                                      \
  struct WgmmaAlongK<n, Type::kind> {                                                                              \
    template <class B>                                                                                             \
    __device__ __forceinline__ static void registers(float (&d)[n / 2], const unsigned* a, B b, int accumulate) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n           \
                   "k16.f32." name "." name " {" ATTUNE_KN##n "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 \
                   ", p, 1, 1, 0;\n}"                                                                              \
                   : ATTUNE_KO##n                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(accumulate)                    \
                   : "memory");                                                                                    \
    }                                                                                                              \
  };
#define ATTUNE_PRODUCTS_ALONG_K(n, ...)                   \
  ATTUNE_PRODUCT_ALONG_K(n, kBf16, "bf16", __VA_ARGS__)   \
  ATTUNE_PRODUCT_ALONG_K(n, kF16, "f16", __VA_ARGS__)
ATTUNE_PRODUCTS_ALONG_K(8, 4, 5, 6, 7, 8, 9)
ATTUNE_PRODUCTS_ALONG_K(16, 8, 9, 10, 11, 12, 13)
ATTUNE_PRODUCTS_ALONG_K(32, 16, 17, 18, 19, 20, 21)
ATTUNE_PRODUCTS_ALONG_K(64, 32, 33, 34, 35, 36, 37)
ATTUNE_PRODUCTS_ALONG_K(96, 48, 49, 50, 51, 52, 53)
ATTUNE_PRODUCTS_ALONG_K(128, 64, 65, 66, 67, 68, 69)
ATTUNE_PRODUCTS_ALONG_K(160, 80, 81, 82, 83, 84, 85)
ATTUNE_PRODUCTS_ALONG_K(192, 96, 97, 98, 99, 100, 101)
ATTUNE_PRODUCTS_ALONG_K(224, 112, 113, 114, 115, 116, 117)
ATTUNE_PRODUCTS_ALONG_K(256, 128, 129, 130, 131, 132, 133)
#undef ATTUNE_PRODUCTS_ALONG_K
#undef ATTUNE_PRODUCT_ALONG_K

}  // namespace attune::ptx
