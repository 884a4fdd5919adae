// SPDX-License-Identifier: Apache-2.0
// Which instructions each architecture of NVIDIA GPUs has, from Ampere on: one table for device code and for the choice
// of kernels on the host. Source: PTX ISA, "Target ISA Notes" of each instruction. Compiled by NVRTC and by the host's
// compiler. These are functions because an array would become a variable of every kernel's module.
#pragma once

namespace attune::ptx {

// A bit for each feature that some kernel needs, or uses where it exists.
enum Feature : unsigned {
  kFp8Conversion = 1,    // cvt between e4m3, e5m2 and fp16
  kFp8Mma = 2,           // mma.m16n8k32 of e4m3
  kPairMaximum = 4,      // max of pairs of 16-bit integers
  kDependentLaunch = 8,  // griddepcontrol (PDL)
  kClusters = 16,        // thread block clusters, DSMEM and st.async
  kTma = 32,             // cp.async.bulk, tensor maps
  kRegisterMoves = 64,   // setmaxnreg; only in code for one architecture (sm_90a)
  kWgmma = 128,          // only in code for one architecture (sm_90a)
  kLastFeature = kWgmma
};

// The first compute capability that has a feature, as 10 * major + minor.
constexpr int first_with(unsigned feature) { return feature <= kFp8Mma ? 89 : 90; }
// Whether a feature exists on a single architecture, and only in code compiled for that one.
constexpr bool only_there(unsigned feature) { return feature >= kRegisterMoves; }

// specific: the code is compiled for that architecture alone (the suffix a).
constexpr unsigned features_of(int capability, bool specific) {
  unsigned bits = 0;
  for (unsigned f = 1; f <= kLastFeature; f *= 2) {
    const int first = first_with(f);
    if (only_there(f) ? specific && capability == first : capability >= first) bits |= f;
  }
  return bits;
}

#ifdef __CUDA_ARCH__
// Whether the code that is being compiled may use a feature. A kernel that needs other features is only compiled for
// architectures that have them.
constexpr bool has(Feature feature) { return (features_of(__CUDA_ARCH__ / 10, false) & feature) != 0; }
#endif

}  // namespace attune::ptx
