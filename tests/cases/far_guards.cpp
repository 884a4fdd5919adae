// SPDX-License-Identifier: Apache-2.0
#include "far_guards.h"

#include <algorithm>
#include <cstring>

#include "check/guard_params.h"

namespace attune::cases {
namespace {

constexpr size_t kAlignment = 256;
constexpr int64_t kBlocks = 1056, kThreads = 256;

}  // namespace

FarGuards::FarGuards(Memory& below, size_t before, size_t near, size_t behind)
    : MemoryOver(below),
      before_bytes_(before),
      near_bytes_(near),
      behind_bytes_(behind),
      all_(static_cast<std::byte*>(below.allocate(before + near + behind))),
      near_(all_ + before) {
  below_.fill(all_, kPoison, before + near + behind);
}

FarGuards::~FarGuards() { below_.release(all_); }

void* FarGuards::allocate(size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded > near_bytes_ - used_) return below_.allocate(bytes);
  std::byte* data = near_ + used_;
  used_ += rounded;
  ++live_;
  return data;
}

void FarGuards::release(void* data) noexcept {
  if (!is_near(data)) {
    below_.release(data);
  } else if (--live_ == 0) {
    used_ = 0;
  }
}

std::string FarGuards::check_far() {
  std::string wrong = check_stretch(all_, before_bytes_);
  return wrong.empty() ? check_stretch(near_ + near_bytes_, behind_bytes_) : wrong;
}

std::string FarGuards::check_stretch(std::byte* begin, size_t bytes) {
  Buffer first(below_, "guard's first", kBlocks * kThreads * sizeof(int64_t));
  Buffer params(below_, "guard's params", sizeof(oracle::GuardParams));
  oracle::GuardParams p{};
  p.words = reinterpret_cast<const unsigned long long*>(begin);
  p.num_words = static_cast<int64_t>(bytes / sizeof(*p.words));
  std::memset(&p.filler, std::to_integer<int>(kPoison), sizeof(p.filler));
  p.first = static_cast<long long*>(first.device());
  std::memcpy(params.host(), &p, sizeof(p));
  params.upload();
  below_.launch(kSource, kEntry, kBlocks, kThreads, params.device());
  const std::vector<std::byte> found = first.download();
  int64_t word = -1;
  for (size_t i = 0; i < found.size(); i += sizeof(int64_t)) {
    int64_t of_thread;
    std::memcpy(&of_thread, found.data() + i, sizeof(of_thread));
    if (of_thread >= 0 && (word < 0 || of_thread < word)) word = of_thread;
  }
  if (word < 0) return "";
  below_.fill(begin, kPoison, bytes);
  const auto byte = word * static_cast<int64_t>(sizeof(*p.words));
  const int64_t from_blocks = begin - near_ + byte;
  return "bytes far from all buffers were overwritten: the first " + std::to_string(std::abs(from_blocks)) +
         (from_blocks < 0 ? " before" : " behind") + " the first buffer";
}

}  // namespace attune::cases
