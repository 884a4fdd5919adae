// SPDX-License-Identifier: Apache-2.0
// wgmma: d [64, N] (+)= a [64, K] b [K, N] in fp32, by a warpgroup. K is 16 for 16-bit elements, 32 for e4m3. PTX ISA,
// "wgmma.mma_async" and "Matrix Descriptor". b is in shared memory in a layout of ptx/descriptor.cuh; a is there too,
// or in registers.
//
// Warp w of the warpgroup has rows 16 w .. 16 w + 15 of d. Its lane l holds in d[4 j + 2 h + e] element (16 w + l / 4 +
// 8 h, 8 j + 2 (l % 4) + e). A 16-bit operand a in registers is laid out as for mma.m16n8k16 (ptx/matrix.cuh). For e4m3
// lane l has in a[i] K = 4 (l % 4) + 16 (i / 2) .. + 3 of row l / 4 + 8 (i % 2), the first in the lowest byte.
//
// Sums of e4m3 products lose bits below about 2^-13 of their largest term, so long sums should be split over
// accumulators. wgmma is asynchronous: d, the registers of a and the shared memory must not be touched before
// wgmma_wait().
#pragma once

#include "ptx/descriptor.cuh"

namespace attune::ptx {

// wgmma.fence: needed before the first wgmma after registers of its operands were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the kPending youngest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// A compiler barrier: accesses to d do not move across it (CUTLASS: warpgroup_fence_operand).
template <int kCount>
__device__ __forceinline__ void fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void fence_operand(unsigned (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Specialisations have static void ss(d, a, b, accumulate), with a and b in shared memory, both K-major (SS); and
// rs(d, a, b, accumulate), with a in registers (RS) and b MN-major, or K-major for e4m3. accumulate = 0
// overwrites d.
template <int kN, Type kType>
struct Wgmma;

#define ATTUNE_D8(i)                                                                                        \
  "+f"(d[8 * (i)]), "+f"(d[8 * (i) + 1]), "+f"(d[8 * (i) + 2]), "+f"(d[8 * (i) + 3]), "+f"(d[8 * (i) + 4]), \
      "+f"(d[8 * (i) + 5]), "+f"(d[8 * (i) + 6]), "+f"(d[8 * (i) + 7])
#define ATTUNE_D16(i) ATTUNE_D8(2 * (i)), ATTUNE_D8(2 * (i) + 1)
#define ATTUNE_N32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTUNE_N64 ATTUNE_N32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTUNE_N96 ATTUNE_N64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTUNE_N128 ATTUNE_N96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTUNE_N160 ATTUNE_N128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define ATTUNE_N192 ATTUNE_N160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTUNE_N224 \
  ATTUNE_N192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define ATTUNE_N256 \
  ATTUNE_N224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTUNE_O32 ATTUNE_D16(0)
#define ATTUNE_O64 ATTUNE_O32, ATTUNE_D16(1)
#define ATTUNE_O96 ATTUNE_O64, ATTUNE_D16(2)
#define ATTUNE_O128 ATTUNE_O96, ATTUNE_D16(3)
#define ATTUNE_O160 ATTUNE_O128, ATTUNE_D16(4)
#define ATTUNE_O192 ATTUNE_O160, ATTUNE_D16(5)
#define ATTUNE_O224 ATTUNE_O192, ATTUNE_D16(6)
#define ATTUNE_O256 ATTUNE_O224, ATTUNE_D16(7)

// N is n: n / 2 registers hold d. i0 to i5: the numbers of the asm operands after them. majors_shared,
// majors_registers: the immediates that say whether a and b are transposed.
#define ATTUNE_WGMMA(n, kind, shape, majors_shared, majors_registers, i0, i1, i2, i3, i4, i5)                  \
  template <>                                                                                                  \
  struct Wgmma<n, Type::kind> {                                                                                \
    template <class B>                                                                                         \
    __device__ __forceinline__ static void ss(float (&d)[n / 2], Descriptor a, B b, int accumulate) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape \
                   " {" ATTUNE_N##n "}, %" #i0 ", %" #i1 ", p, 1, 1" majors_shared ";\n}"                      \
                   : ATTUNE_O##n                                                                               \
                   : "l"(a.bits()), "l"(b.bits()), "r"(accumulate)                                             \
                   : "memory");                                                                                \
    }                                                                                                          \
    __device__ __forceinline__ static void rs(float (&d)[n / 2], const unsigned* a, Descriptor b,       \
                                              int accumulate) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape \
                   " {" ATTUNE_N##n "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4                       \
                   ", p, 1, 1" majors_registers ";\n}"                                                         \
                   : ATTUNE_O##n                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(accumulate)                \
                   : "memory");                                                                                \
    }                                                                                                          \
  };
#define ATTUNE_WGMMAS(n, ...)                                               \
  ATTUNE_WGMMA(n, kBf16, "k16.f32.bf16.bf16", ", 0, 0", ", 1", __VA_ARGS__) \
  ATTUNE_WGMMA(n, kF16, "k16.f32.f16.f16", ", 0, 0", ", 1", __VA_ARGS__)    \
  ATTUNE_WGMMA(n, kE4m3, "k32.f32.e4m3.e4m3", "", "", __VA_ARGS__)
ATTUNE_WGMMAS(32, 16, 17, 18, 19, 20, 21)
ATTUNE_WGMMAS(64, 32, 33, 34, 35, 36, 37)
ATTUNE_WGMMAS(96, 48, 49, 50, 51, 52, 53)
ATTUNE_WGMMAS(128, 64, 65, 66, 67, 68, 69)
ATTUNE_WGMMAS(160, 80, 81, 82, 83, 84, 85)
ATTUNE_WGMMAS(192, 96, 97, 98, 99, 100, 101)
ATTUNE_WGMMAS(224, 112, 113, 114, 115, 116, 117)
ATTUNE_WGMMAS(256, 128, 129, 130, 131, 132, 133)
#undef ATTUNE_WGMMAS
#undef ATTUNE_WGMMA

// The same with a in registers and b K-major, for 16-bit elements: static void rs(d, a, b, accumulate).
template <int kN, Type kType>
struct WgmmaBKMajor;

#define ATTUNE_K4(i) "+f"(d[4 * (i)]), "+f"(d[4 * (i) + 1]), "+f"(d[4 * (i) + 2]), "+f"(d[4 * (i) + 3])
#define ATTUNE_N8 "%0, %1, %2, %3"
#define ATTUNE_N16 ATTUNE_N8 ", %4, %5, %6, %7"
#define ATTUNE_O8 ATTUNE_K4(0)
#define ATTUNE_O16 ATTUNE_K4(0), ATTUNE_K4(1)

// i0 to i5: the numbers of the asm operands after the n / 2 of d.
#define ATTUNE_WGMMA_ALONG_K(n, kind, name, i0, i1, i2, i3, i4, i5)                                               \
  template <>                                                                                                     \
  struct WgmmaBKMajor<n, Type::kind> {                                                                             \
    template <class B>                                                                                            \
    __device__ __forceinline__ static void rs(float (&d)[n / 2], const unsigned* a, B b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n          \
                   "k16.f32." name "." name " {" ATTUNE_N##n "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 \
                   ", p, 1, 1, 0;\n}"                                                                             \
                   : ATTUNE_O##n                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(accumulate)                   \
                   : "memory");                                                                                   \
    }                                                                                                             \
  };
#define ATTUNE_WGMMAS_ALONG_K(n, ...)                 \
  ATTUNE_WGMMA_ALONG_K(n, kBf16, "bf16", __VA_ARGS__) \
  ATTUNE_WGMMA_ALONG_K(n, kF16, "f16", __VA_ARGS__)
ATTUNE_WGMMAS_ALONG_K(8, 4, 5, 6, 7, 8, 9)
ATTUNE_WGMMAS_ALONG_K(16, 8, 9, 10, 11, 12, 13)
ATTUNE_WGMMAS_ALONG_K(32, 16, 17, 18, 19, 20, 21)
ATTUNE_WGMMAS_ALONG_K(64, 32, 33, 34, 35, 36, 37)
ATTUNE_WGMMAS_ALONG_K(96, 48, 49, 50, 51, 52, 53)
ATTUNE_WGMMAS_ALONG_K(128, 64, 65, 66, 67, 68, 69)
ATTUNE_WGMMAS_ALONG_K(160, 80, 81, 82, 83, 84, 85)
ATTUNE_WGMMAS_ALONG_K(192, 96, 97, 98, 99, 100, 101)
ATTUNE_WGMMAS_ALONG_K(224, 112, 113, 114, 115, 116, 117)
ATTUNE_WGMMAS_ALONG_K(256, 128, 129, 130, 131, 132, 133)
#undef ATTUNE_WGMMAS_ALONG_K
#undef ATTUNE_WGMMA_ALONG_K

// The same with both operands in shared memory, for 16-bit elements: static void ss(d, a, b, accumulate).
template <int kN, Type kType>
struct WgmmaBMnMajor;  // a K-major, b MN-major
template <int kN, Type kType>
struct WgmmaAMnMajor;  // a MN-major, with its 64 rows in one line; b K-major

// majors: the immediates of a and b. i0 to i2: the numbers of the asm operands after the n / 2 of d.
#define ATTUNE_WGMMA_ALONG(Wgmma, n, kind, name, majors, i0, i1, i2)                                              \
  template <>                                                                                                     \
  struct Wgmma<n, Type::kind> {                                                                                   \
    __device__ __forceinline__ static void ss(float (&d)[n / 2], Descriptor a, Descriptor b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n          \
                   "k16.f32." name "." name " {" ATTUNE_N##n "}, %" #i0 ", %" #i1 ", p, 1, 1, " majors ";\n}"     \
                   : ATTUNE_O##n                                                                                  \
                   : "l"(a.bits()), "l"(b.bits()), "r"(accumulate)                                                \
                   : "memory");                                                                                   \
    }                                                                                                             \
  };
#define ATTUNE_WGMMAS_ALONG(Wgmma, n, majors, ...)                 \
  ATTUNE_WGMMA_ALONG(Wgmma, n, kBf16, "bf16", majors, __VA_ARGS__) \
  ATTUNE_WGMMA_ALONG(Wgmma, n, kF16, "f16", majors, __VA_ARGS__)
ATTUNE_WGMMAS_ALONG(WgmmaBMnMajor, 32, "0, 1", 16, 17, 18)
ATTUNE_WGMMAS_ALONG(WgmmaBMnMajor, 64, "0, 1", 32, 33, 34)
ATTUNE_WGMMAS_ALONG(WgmmaBMnMajor, 128, "0, 1", 64, 65, 66)
ATTUNE_WGMMAS_ALONG(WgmmaAMnMajor, 16, "1, 0", 8, 9, 10)
ATTUNE_WGMMAS_ALONG(WgmmaAMnMajor, 32, "1, 0", 16, 17, 18)
#undef ATTUNE_WGMMAS_ALONG
#undef ATTUNE_WGMMA_ALONG

}  // namespace attune::ptx
