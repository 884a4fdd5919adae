// SPDX-License-Identifier: Apache-2.0
// The kernels that run on other GPUs than Hopper, compiled for them without one: what they take is in
// kernels/ledger_portable.json.
#pragma once

#include <vector>

#include "cuda/jit/nvrtc.h"
#include "ledger.h"
#include "manifest.h"
#include "popular.h"

namespace attune::bundle {

// What the models ask for (popular.h) on each architecture of kLedgerArchitectures, and of what they do not ask for
// (gradients, fp32 prompts, packed rows) the commonest shapes.
inline constexpr const char* kLedgerArchitectures[] = {"sm_80", "sm_86", "sm_89", "sm_100", "sm_120"};
std::vector<ManifestEntry> portable_kernels(const std::vector<PopularModel>& models);

// Compiles them to machine code, but for those recorded() in known, and counts them. By name: "sm_80 decode/decode.cu
// attune_decode ...". What the compiler warns of goes to *warnings. Throws std::exception where one does not compile.
Ledger compile_portable(const std::vector<ManifestEntry>& kernels, const cuda::Nvrtc& nvrtc, const Ledger& known,
                        size_t* compiled, std::vector<std::string>* warnings);

}  // namespace attune::bundle
