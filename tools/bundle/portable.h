// SPDX-License-Identifier: Apache-2.0
// The kernels that run on other GPUs than Hopper, compiled for them without one: what they take is in
// kernels/ledger_portable.json.
#pragma once

#include <vector>

#include "cuda/jit/nvrtc.h"
#include "ledger.h"
#include "manifest.h"

namespace attune::bundle {

// What the commonest shapes ask for: most for the oldest architecture, a few for the others.
std::vector<ManifestEntry> portable_kernels();

// Compiles them to machine code, but for those recorded() in known, and counts them. By name: "sm_80 decode/decode.cu
// attune_decode ...". What the compiler warns of goes to *warnings. Throws std::exception where one does not compile.
Ledger compile_portable(const cuda::Nvrtc& nvrtc, const Ledger& known, size_t* compiled,
                        std::vector<std::string>* warnings);

}  // namespace attune::bundle
