// SPDX-License-Identifier: Apache-2.0
// What a device's kernels are compiled for: its own architecture, or the one that ATTUNE_ARCH names. Their
// instructions: kernels/ptx/architecture.h.
#pragma once

#include <string>

#include "ptx/architecture.h"

namespace attune {
struct Problem;
}

namespace attune::cuda {

// CUDA C++ Programming Guide, "Compute Capabilities".
struct Architecture {
  const char* name;    // of machine code: "sm_80"
  int capability;      // 10 * major + minor
  bool specific;       // "sm_90a": code that runs on no newer GPU
  int shared_per_sm;   // bytes of a multiprocessor
  int shared_a_block;  // bytes that a block may ask for
  int threads_per_sm;
  int blocks_per_sm;
};
constexpr int kKiB = 1024;
// By capability.
constexpr Architecture kArchitectures[] = {
    {"sm_80", 80, false, 164 * kKiB, 163 * kKiB, 2048, 32},    // A100
    {"sm_86", 86, false, 100 * kKiB, 99 * kKiB, 1536, 16},     // A10, A40, RTX 30
    {"sm_87", 87, false, 164 * kKiB, 163 * kKiB, 1536, 16},    // Orin
    {"sm_89", 89, false, 100 * kKiB, 99 * kKiB, 1536, 24},     // L4, L40S, RTX 40
    {"sm_90", 90, false, 228 * kKiB, 227 * kKiB, 2048, 32},    // Hopper's code that newer GPUs run too
    {"sm_90a", 90, true, 228 * kKiB, 227 * kKiB, 2048, 32},    // H100, H200
    {"sm_100", 100, false, 228 * kKiB, 227 * kKiB, 2048, 32},  // B200
    {"sm_103", 103, false, 228 * kKiB, 227 * kKiB, 2048, 32},  // B300
    {"sm_110", 110, false, 228 * kKiB, 227 * kKiB, 1536, 24},  // Thor
    {"sm_120", 120, false, 100 * kKiB, 99 * kKiB, 1536, 24},   // RTX 50, RTX PRO
    {"sm_121", 121, false, 100 * kKiB, 99 * kKiB, 1536, 24},   // GB10
};
constexpr int kOldestCapability = kArchitectures[0].capability;

struct Target {
  std::string name = "sm_90a";
  int capability = 90;  // 10 * major + minor
  unsigned features = ptx::features_of(90, true);
  bool as_ptx = false;  // compiled to PTX, which the driver compiles for the device

  // Of the compiler: "sm_80" for machine code, "compute_80" for PTX.
  std::string option() const;
  bool has(ptx::Feature feature) const { return (features & feature) != 0; }
};

// What kernels made of warpgroups need.
constexpr unsigned kWarpgroups = ptx::kDependentLaunch | ptx::kClusters | ptx::kTma | ptx::kRegisterMoves | ptx::kWgmma;
// Kernel::leaves of those of mma.sync that have one of warpgroups beside them.
inline bool leaves_to_warpgroups(const Problem&, unsigned features) { return (features & kWarpgroups) == kWarpgroups; }

// Why no kernel runs on GPUs of that capability, as the end of a sentence about one; or "".
std::string too_old(int capability);
// "8.6".
std::string capability_text(int capability);
// The row of a name; null where there is none.
const Architecture* find_architecture(const std::string& name);
// Why ATTUNE_ARCH may not be that name; "" for the rows'.
std::string unknown_architecture(const std::string& name);

// Code for that architecture.
Target target_of(const Architecture& architecture);
// A GPU's own target; it need not be in the table.
Target own_target(int capability);
// PTX that every GPU can run: the fallback where neither the bundle nor a compiler has code for a GPU.
Target portable_target();
// The target of a GPU that shall run as the architecture of that name (ATTUNE_ARCH). *why: "", or why it cannot.
Target forced_target(const std::string& name, int capability, std::string* why);

// "" if all of `needs` (bits of ptx::Feature) are there, else e.g. "wgmma: compute capability 9.0, this is 8.6".
std::string missing_feature(unsigned needs, const Target& target);

}  // namespace attune::cuda
