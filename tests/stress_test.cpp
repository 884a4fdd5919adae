// SPDX-License-Identifier: Apache-2.0
// What attune check --stress would find, put there on purpose.
#include "cases/stress.h"

#include <utility>
#include <vector>

#include "cases/beside.h"
#include "support.h"

namespace attune::tests {
namespace {

constexpr int kRepeats = 1;
constexpr size_t kGuards = 512;  // bytes of a block that are no data

// The first case that satisfies the condition.
template <typename F>
cases::Case find_case(F&& is_wanted) {
  for (uint64_t index = 0;; ++index) {
    const cases::Case spec = cases::serving_case(1, index, 64, 400);
    if (is_wanted(spec)) return spec;
  }
}

// Buffers of the one run, or of the other, change while both run.
class MixingMemory final : public cases::MemoryOver {
 public:
  explicit MixingMemory(bool of_other) : MemoryOver(cases::host_memory()), of_other_(of_other) {}
  void* allocate(size_t bytes) override {
    auto* block = static_cast<std::byte*>(MemoryOver::allocate(bytes));
    blocks_.emplace_back(block, bytes);
    return block;
  }
  void release(void* data) noexcept override {
    std::erase_if(blocks_, [&](const auto& block) { return block.first == data; });
    MemoryOver::release(data);
  }
  void side_by_side(const std::function<void(void* stream)>& one,
                    const std::function<void(void* stream)>& other) override {
    MemoryOver::side_by_side(one, other);
    // The other's came last.
    const size_t half = blocks_.size() / 2;
    for (size_t i = of_other_ ? half : 0; i < (of_other_ ? blocks_.size() : half); ++i) {
      const auto [block, bytes] = blocks_[i];
      if (bytes > kGuards) block[bytes / 2] ^= std::byte{0x40};
    }
  }

 private:
  bool of_other_;
  std::vector<std::pair<std::byte*, size_t>> blocks_;
};

TEST(Stress, FindsWhatOneRunDoesToAnother) {
  for (const char* name : {"attention", "attention_backward", "qkv_prepare", "cache_op", "merge"}) {
    const cases::Case spec = find_case([&](const cases::Case& c) {
      return std::string(cases::operation_name(c)) == name && cases::runs_beside(c) && c.beam_width <= 1;
    });
    EXPECT_EQ(cases::stress(spec, cases::host_memory(), kRepeats).failure, "") << spec.name;
    MixingMemory one(false), other(true);
    EXPECT_EQ(cases::stress(spec, one, kRepeats).failure.find("beside another run: "), 0u) << name;
    EXPECT_EQ(cases::stress(spec, other, kRepeats).failure.find("the run beside it: "), 0u) << name;
  }
}

TEST(Stress, DoesNotRunWhatIsNotWanted) {
  for (const char* name : {"attention", "attention_backward"}) {
    const cases::Case spec = find_case(
        [&](const cases::Case& c) { return std::string(cases::operation_name(c)) == name && c.indexer.topk == 0; });
    std::string asked;
    const cases::StressReport report =
        cases::stress(spec, cases::host_memory(), kRepeats, [&](const std::string& kernel) {
          asked = kernel;
          return false;
        });
    EXPECT_EQ(report.failure, "") << spec.name;
    EXPECT_EQ(report.runs, 0) << spec.name;
    EXPECT_EQ(report.kernel.rfind("cpu_", 0), 0u) << spec.name;
    EXPECT_EQ(report.kernel, asked);
    EXPECT_GT(cases::stress(spec, cases::host_memory(), kRepeats, [](const std::string&) { return true; }).runs, 0);
  }
}

// The other is another batch, of the same kernel.
TEST(Stress, RunsUnlikeBatchesBesideEachOther) {
  const cases::Case spec = find_case([](const cases::Case& c) { return c.batch() > 2 && c.beam_width <= 1; });
  const cases::Case other = cases::other_of(spec);
  EXPECT_EQ(other.seqlens_q.front(), spec.seqlens_q.back());
  EXPECT_EQ(other.seqlens_kv.back(), spec.seqlens_kv.front());
  EXPECT_NE(other.name, spec.name);
}

}  // namespace
}  // namespace attune::tests
