// SPDX-License-Identifier: Apache-2.0
// The kernels that move rows, from their own sources on the CPU (tests/emulator): the bytes of the CPU backend for
// cache operations whatever the tables say, the oracle for qkv_prepare. Without a GPU.
#include "emulated_rows.h"
#include "emulated.h"
#include "far.h"
#include "prepare_fixture.h"
#include "random_cache_op.h"

namespace attune::cuda {
namespace {

using namespace attune::tests;  // NOLINT: the fixtures of the tests of the CPU
constexpr uint64_t kPackedOps = 120, kAllOps = 40;

void run(const CacheProblem& op, int num_sms) {
  if (op.tokens == 0) return;
  if (op.kind == ATTUNE_CACHE_APPEND || op.kind == ATTUNE_CACHE_QUANTIZE) {
    launch_rows(ops::choose_store(op), ops::store_params(op), num_sms);
  } else {
    launch_rows(ops::choose_fetch(op), ops::fetch_params(op), num_sms);
  }
}

std::string run(const PrepareProblem& op, int num_sms) {
  launch_prepare(op, num_sms);
  return "";
}

class EmulatedRows : public tests::Emulated {
 protected:
  static int check_cache_ops(Formats formats, uint64_t seeds) {
    int ran = 0;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      RandomCacheOp cpu(cases::host_memory(), seed, formats), gpu(cases::host_memory(), seed, formats);
      const attune_cache_op on_cpu = cpu.device();
      if (attune_cache_op_run(&on_cpu, kCpu, nullptr) != ATTUNE_OK) continue;
      const CacheProblem op = make_cache_op(gpu.device());
      run(op, seed % 2 == 0 ? 1 : 132);
      ++ran;
      expect_same_bytes(cpu, gpu, seed);
    }
    return ran;
  }
};

TEST_F(EmulatedRows, PackedCachesGiveTheBytesOfTheCpu) {
  EXPECT_GT(check_cache_ops(Formats::kPacked, kPackedOps), static_cast<int>(kPackedOps) / 2);
}

TEST_F(EmulatedRows, CachesOfAllFormatsGiveTheBytesOfTheCpu) {
  EXPECT_GT(check_cache_ops(Formats::kAll, kAllOps), static_cast<int>(kAllOps) / 2);
}

TEST_F(EmulatedRows, PagesAndRowsThatLieFarApart) {
  const Reservation far;
  if (far.data() == nullptr) GTEST_SKIP() << "this machine does not reserve " << kFarMemory << " bytes";
  for (const attune_kv_format format : kFarFormats) {
    const auto move = [](const attune_cache_op& op) { run(make_cache_op(op), 1); };
    EXPECT_EQ(find_near_sighted_op(format, cases::host_memory(), far.data(), move), "") << format;
  }
}

// RoPE of the last columns, and append: on the way to a packed cache, with q beside it.
TEST_F(EmulatedRows, PreparedRowsOfPackedCachesMatchTheOracle) {
  int ran = 0, only_tails = 0;
  for_each_prepare(cases::host_memory(), [&](Prepare& prepare, const std::string& name) {
    const PrepareProblem op = make_qkv_prepare(prepare.device());
    if (!op.prologue.append || op.cache.format->plain) return;
    ++ran;
    only_tails += ops::choose_store(op).tail_only ? 1 : 0;
    EXPECT_EQ(prepare.run_and_check([](const attune_qkv_prepare& p) { return run(make_qkv_prepare(p), 1); }), "")
        << name;
  });
  EXPECT_GE(ran, 12);
  EXPECT_GE(only_tails, 5);
}

}  // namespace
}  // namespace attune::cuda
