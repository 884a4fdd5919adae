// SPDX-License-Identifier: Apache-2.0
// The bundle: kernels compiled when the library was built, in one file beside it.
//
//   "ATTNBNDL" | u32 format | u32 compiler major | u32 compiler minor | u32 count | sha256 of the numbers and the index
//   index: count x { key[32] | u64 offset | u64 size | sha256 of the image }, sorted by key
//   images
//
// Little endian. The key (module_key) holds the sources' contents: what was built from other sources is never found.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/sha256.h"

namespace attune::cuda {

struct BundleEntry {
  Digest key;
  std::string image;
};

// "" or what went wrong.
std::string write_bundle(const std::string& path, int compiler_major, int compiler_minor,
                         std::vector<BundleEntry> entries);

// A bundle mapped into memory. Read-only and thread-safe.
class Bundle {
 public:
  // Null where there is no such file (*why stays as it is) or it is damaged (*why says so).
  static std::unique_ptr<Bundle> open(const std::string& path, std::string* why);
  ~Bundle();
  Bundle(const Bundle&) = delete;
  Bundle& operator=(const Bundle&) = delete;

  int compiler_major() const { return compiler_major_; }
  int compiler_minor() const { return compiler_minor_; }
  size_t size() const { return count_; }
  // The image; empty where it is absent, or damaged, which *why says.
  std::string_view find(const Digest& key, std::string* why) const;

 private:
  Bundle() = default;

  std::string path_;
  std::string_view file_;
  int compiler_major_ = 0, compiler_minor_ = 0;
  size_t count_ = 0;
};

// Where the bundle is looked for: ATTUNE_BUNDLE if set, else beside the library; "" if nowhere.
std::string default_bundle_path();

}  // namespace attune::cuda
