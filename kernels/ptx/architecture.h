// SPDX-License-Identifier: Apache-2.0
// What instructions the architectures of NVIDIA GPUs have, from Ampere on: one table for device code and for the choice
// of kernels. PTX ISA, "Target ISA Notes" of each instruction. Compiled by NVRTC and by the host's compiler; functions
// rather than arrays, which would be variables of every kernel's module.
#pragma once

namespace attune::ptx {

// Bits. Each is one for which some kernel has no other way, or needs another one.
enum Feature : unsigned {
  kFp8Conversion = 1,    // cvt between e4m3, e5m2 and fp16
  kFp8Mma = 2,           // mma.m16n8k32 of e4m3
  kPairMaximum = 4,      // max of pairs of 16-bit integers
  kDependentLaunch = 8,  // griddepcontrol (PDL)
  kClusters = 16,        // and DSMEM, st.async
  kTma = 32,             // cp.async.bulk, tensor maps
  kRegisterMoves = 64,   // setmaxnreg, in code for one architecture alone (sm_90a)
  kWgmma = 128,          // likewise
  kLastFeature = kWgmma
};

// The first compute capability that has a feature, as 10 * major + minor.
constexpr int first_with(unsigned feature) { return feature <= kFp8Mma ? 89 : 90; }
// Whether no later one has it, and on that one only code that runs there alone.
constexpr bool only_there(unsigned feature) { return feature >= kRegisterMoves; }

// specific: code for that architecture alone.
constexpr unsigned features_of(int capability, bool specific) {
  unsigned bits = 0;
  for (unsigned f = 1; f <= kLastFeature; f *= 2) {
    const int first = first_with(f);
    if (only_there(f) ? specific && capability == first : capability >= first) bits |= f;
  }
  return bits;
}

#ifdef __CUDA_ARCH__
// Whether the code that is being compiled may use a feature. Kernels of the others are compiled where they are there.
constexpr bool has(Feature feature) { return (features_of(__CUDA_ARCH__ / 10, false) & feature) != 0; }
#endif

}  // namespace attune::ptx
