// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4): names kernels by content and detects damaged files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace attune::cuda {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256& update(std::string_view bytes);
  // The length, then the bytes: two fields can never be taken for one.
  Sha256& update_field(std::string_view bytes);
  Digest finish();

 private:
  void block(const uint8_t* p);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t pending_[64] = {};
  uint64_t length_ = 0;
};

Digest sha256(std::string_view bytes);
std::string to_hex(const Digest& digest);

}  // namespace attune::cuda
