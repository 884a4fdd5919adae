// SPDX-License-Identifier: Apache-2.0
// The kernels' sources: embedded in the library, or read from the directory ATTUNE_KERNEL_DIR, for development.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cuda/jit/sha256.h"

namespace attune::cuda {

// One file of kernels/, in the generated embedded_kernels.cpp.
struct EmbeddedFile {
  const char* path;  // inside kernels/, e.g. "ptx/mbarrier.h"
  const char* text;
  size_t size;
};
extern const EmbeddedFile kEmbeddedKernels[];
extern const size_t kNumEmbeddedKernels;

// A source with everything it includes.
struct SourceUnit {
  std::string path;
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // path, text; sorted by path
  Digest digest;                                             // of all of it
};

// Reads a source and, through every #include "path" (paths start at kernels/), its headers. directory "": the embedded
// files. Failure(ATTUNE_INTERNAL) names a file that is missing and who includes it.
SourceUnit read_source(const std::string& path, const std::string& directory);

// From ATTUNE_KERNEL_DIR if that is set.
SourceUnit read_source(const std::string& path);

}  // namespace attune::cuda
