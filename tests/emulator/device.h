// SPDX-License-Identifier: Apache-2.0
// What a kernel's source finds without an #include: the CUDA language on the emulator. Given to the compiler with
// -include.
#pragma once

#include <math.h>
#include <string.h>

#include "emulator/thread.h"

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__ __attribute__((visibility("default")))
#define __shared__ ATTUNE_EMULATED_SHARED
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)
#define threadIdx (::attune::emulator::g_running.thread)
#define blockIdx (::attune::emulator::g_running.block)
#define gridDim (::attune::emulator::g_running.grid)
#define blockDim (::attune::emulator::g_running.threads)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A, class B>
constexpr auto min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr auto max(A a, B b) {
  return a < b ? b : a;
}

namespace attune::emulator {
template <class To, class From>
To bit_cast(From from) {
  To to{};
  memcpy(&to, &from, sizeof(from) < sizeof(to) ? sizeof(from) : sizeof(to));
  return to;
}
template <class T>
T shuffle(T x, unsigned lane) {
  return bit_cast<T>(exchange(bit_cast<uint64_t>(x))[lane % 32]);
}
}  // namespace attune::emulator

inline float __uint_as_float(unsigned x) { return attune::emulator::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return attune::emulator::bit_cast<unsigned>(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
// NaN becomes 0, what does not fit the nearest that does.
inline int __float2int_rn(float x) {
  return isnan(x) ? 0 : static_cast<int>(lrintf(fminf(fmaxf(x, -0x1p31f), 0x7fffff80p0f)));
}
inline bool __isGlobal(const void*) { return true; }
#ifndef __clang__
inline void __builtin_assume(bool) {}
#endif
inline void __syncthreads() { attune::emulator::sync_threads(0, static_cast<int>(blockDim.x)); }
inline void __syncwarp() { attune::emulator::exchange(0, true); }
inline int __syncthreads_or(int x) { return attune::emulator::sync_any(x != 0) ? 1 : 0; }
template <class T>
T __shfl_sync(unsigned, T x, unsigned lane, unsigned width = 32) {
  return attune::emulator::shuffle(x, threadIdx.x % 32 / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, unsigned mask) {
  return attune::emulator::shuffle(x, (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T x, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  return attune::emulator::shuffle(x, lane >= step ? lane - step : lane);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __ballot_sync(unsigned, bool x) {
  const uint64_t* all = attune::emulator::exchange(x ? 1 : 0);
  unsigned lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= all[i] != 0 ? 1u << i : 0;
  return lanes;
}
inline unsigned __match_any_sync(unsigned, int x) {
  const uint64_t* all = attune::emulator::exchange(static_cast<unsigned>(x));
  unsigned lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= all[i] == static_cast<unsigned>(x) ? 1u << i : 0;
  return lanes;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const uint64_t* all = attune::emulator::exchange(x);
  for (int i = 0; i < 32; ++i) x = max(x, static_cast<unsigned>(all[i]));
  return x;
}
inline int __any_sync(unsigned, bool x) {
  const uint64_t* all = attune::emulator::exchange(x ? 1 : 0);
  for (int i = 0; i < 32; ++i) {
    if (all[i] != 0) return 1;
  }
  return 0;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
// Atomic operations, whose accesses the emulator notes itself.
#define ATTUNE_UNSEEN __attribute__((no_sanitize("thread")))
template <class T>
ATTUNE_UNSEEN T atomicAdd(T* at, T x) {
  attune::emulator::begin_atomic(at, sizeof *at);
  const T before = *at;
  *at += x;
  return before;
}
ATTUNE_UNSEEN inline unsigned atomicOr(unsigned* at, unsigned x) {
  attune::emulator::begin_atomic(at, sizeof *at);
  const unsigned before = *at;
  *at |= x;
  return before;
}
ATTUNE_UNSEEN inline unsigned atomicAnd(unsigned* at, unsigned x) {
  attune::emulator::begin_atomic(at, sizeof *at);
  const unsigned before = *at;
  *at &= x;
  return before;
}
ATTUNE_UNSEEN inline int atomicMax(int* at, int x) {
  attune::emulator::begin_atomic(at, sizeof *at);
  const int before = *at;
  *at = max(before, x);
  return before;
}
ATTUNE_UNSEEN inline int atomicMin(int* at, int x) {
  attune::emulator::begin_atomic(at, sizeof *at);
  const int before = *at;
  *at = min(before, x);
  return before;
}
