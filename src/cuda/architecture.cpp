// SPDX-License-Identifier: Apache-2.0
#include "cuda/architecture.h"

#include <bit>
#include <iterator>

#include "core/status.h"

namespace attune::cuda {
namespace {

// In the order of ptx::Feature.
constexpr const char* kFeatureNames[] = {"conversions of 8-bit floats",
                                         "e4m3 mma",
                                         "max of pairs of integers",
                                         "programmatic dependent launch",
                                         "clusters",
                                         "TMA",
                                         "setmaxnreg",
                                         "wgmma"};
static_assert(1u << (std::size(kFeatureNames) - 1) == ptx::kLastFeature, "a name for each feature");

bool runs(const Architecture& a, int capability) {
  return a.specific ? a.capability == capability : a.capability <= capability;
}

// "sm_80, sm_86 or sm_87": those that a GPU of that capability runs.
std::string names_for(int capability) {
  std::string names, last;
  for (const Architecture& a : kArchitectures) {
    if (!runs(a, capability)) continue;
    if (!last.empty()) names += cat(names.empty() ? "" : ", ", last);
    last = a.name;
  }
  return names.empty() ? last : cat(names, " or ", last);
}

}  // namespace

std::string Target::option() const {
  if (!as_ptx) return name;
  // GPUs without any feature share the PTX of the oldest.
  return cat("compute_", features == 0 ? kOldestCapability : capability);
}

std::string too_old(int capability) {
  if (capability >= kOldestCapability) return "";
  return cat("has compute capability ", capability_text(capability), "; the kernels need ",
             capability_text(kOldestCapability), " (Ampere) or newer");
}

std::string capability_text(int capability) { return cat(capability / 10, ".", capability % 10); }

const Architecture* find_architecture(const std::string& name) {
  for (const Architecture& a : kArchitectures)
    if (name == a.name) return &a;
  return nullptr;
}

std::string unknown_architecture(const std::string& name) {
  if (find_architecture(name) != nullptr) return "";
  std::string names;
  for (const Architecture& a : kArchitectures) names += cat(names.empty() ? "" : ", ", a.name);
  return cat("ATTUNE_ARCH is '", name, "'; it must be one of ", names);
}

Target target_of(const Architecture& a) { return {a.name, a.capability, ptx::features_of(a.capability, a.specific)}; }

Target own_target(int capability) {
  Target own = {cat("sm_", capability), capability, ptx::features_of(capability, false)};
  for (const Architecture& a : kArchitectures)
    if (a.specific && a.capability == capability) own.name = a.name, own.features = ptx::features_of(capability, true);
  return own;
}

Target portable_target() {
  Target target = target_of(kArchitectures[0]);
  target.as_ptx = true;
  return target;
}

Target forced_target(const std::string& name, int capability, std::string* why) {
  *why = unknown_architecture(name);
  if (!why->empty()) return {};
  const Architecture* forced = find_architecture(name);
  if (!runs(*forced, capability)) {
    *why = cat("ATTUNE_ARCH names ", name, ", whose code a GPU of compute capability ", capability_text(capability),
               " does not run; it may be ", names_for(capability));
    return {};
  }
  Target target = target_of(*forced);
  target.as_ptx = forced->capability != capability;
  return target;
}

std::string missing_feature(unsigned needs, const Target& target) {
  const unsigned missing = needs & ~target.features;
  if (missing == 0) return "";
  // Names the last missing feature: it needs the newest GPU.
  const unsigned feature = std::bit_floor(missing);
  const char* const name = kFeatureNames[std::countr_zero(feature)];
  return cat(name, ": compute capability ", capability_text(ptx::first_with(feature)),
             ptx::only_there(feature) ? "" : " or newer", ", this is ", capability_text(target.capability));
}

}  // namespace attune::cuda
