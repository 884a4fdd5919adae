// SPDX-License-Identifier: Apache-2.0
// The kernels that move rows, from their own sources on the CPU (tests/emulator): the bytes of the CPU backend for
// cache operations whatever the tables say, the oracle for qkv_prepare. Without a GPU.
#include "emulated_rows.h"

#include <map>
#include <memory>

#include "emulated.h"
#include "far.h"
#include "merge_fixture.h"
#include "prepare_fixture.h"
#include "random_cache_op.h"

namespace attune::cuda {
namespace {

using namespace attune::tests;  // NOLINT: the fixtures of the tests of the CPU
constexpr uint64_t kPackedOps = 120, kAllOps = 40, kFewOps = 16;

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

std::string run(const MergeProblem& op) {
  const ops::Config c = ops::choose_merge(op);
  const int64_t lines = kernels::kRowsThreads / c.lanes;
  const auto kernel = reinterpret_cast<void (*)(kernels::MergeParams)>(emulator::find_kernel(c.spec()));
  const kernels::MergeParams params = ops::merge_params(op);
  emulator::run(static_cast<unsigned>((op.rows * op.heads + lines - 1) / lines), kernels::kRowsThreads,
                [&] { kernel(params); });
  return std::string();
}

std::string run(cases::OpProblem& problem, int num_sms) {
  if (auto* prepare = dynamic_cast<cases::PrepareProblem*>(&problem))
    return run(make_qkv_prepare(prepare->device()), num_sms);
  if (auto* merge = dynamic_cast<cases::MergeProblem*>(&problem)) return run(make_merge(merge->device()));
  run(make_cache_op(dynamic_cast<cases::CacheOpProblem&>(problem).device()), num_sms);
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

// As for GPUs before Hopper, whose codes of 8 bits come of arithmetic.
TEST_F(EmulatedRows, CachesOfAllFormatsOnAmpere) {
  const emulator::Capability ampere(80);
  EXPECT_GT(check_cache_ops(Formats::kAll, kFewOps), static_cast<int>(kFewOps) / 2);
}

// Where V has pages of its own, and some of them are bad.
TEST_F(EmulatedRows, ValuesOnPagesOfTheirOwn) {
  int ran = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    RandomCacheOp cpu(cases::host_memory(), seed, Formats::kAll), gpu(cases::host_memory(), seed, Formats::kAll);
    attune_cache_op on_cpu = cpu.device(), on_gpu = gpu.device();
    const attune_tensor& table = on_cpu.cache.page_table;
    if (table.rank == 0) continue;
    const auto* pages = static_cast<const int32_t*>(table.data);
    std::vector<int32_t> of_v(pages, pages + table.shape[0] * table.shape[1]);
    for (size_t i = seed % 3; i < of_v.size(); i += 3) of_v[i] = -1;
    for (attune_cache_op* op : {&on_cpu, &on_gpu}) {
      op->cache.v_page_table = table;
      op->cache.v_page_table.data = of_v.data();
    }
    if (attune_cache_op_run(&on_cpu, kCpu, nullptr) != ATTUNE_OK) continue;
    run(make_cache_op(on_gpu), 1);
    ++ran;
    expect_same_bytes(cpu, gpu, seed);
  }
  EXPECT_GT(ran, 10);
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
  for_each_prepare(cases::host_memory(), [&](cases::PrepareProblem& prepare, const std::string& name) {
    const PrepareProblem op = make_qkv_prepare(prepare.device());
    if (!op.prologue.append || op.cache.format->plain) return;
    ++ran;
    only_tails += ops::choose_store(op).tail_only ? 1 : 0;
    EXPECT_EQ(prepare.run_and_check([&] { return run(op, 1); }), "") << name;
  });
  EXPECT_GE(ran, 12);
  EXPECT_GE(only_tails, 5);
}

// RoPE by three positions, several channels a thread: each pair by its own one.
TEST_F(EmulatedRows, PreparedRowsOfThreePositionsMatchTheOracle) {
  int ran = 0;
  for_each_prepare(cases::host_memory(), [&](cases::PrepareProblem& prepare, const std::string& name) {
    if (name.find("mrope") == std::string::npos) return;
    const PrepareProblem op = make_qkv_prepare(prepare.device());
    ++ran;
    EXPECT_EQ(prepare.run_and_check([&] { return run(op, 1); }), "") << name;
  });
  EXPECT_GE(ran, 3);
}

// Vectors by 16 and by 32 threads, and what are no vectors; more splits than threads.
TEST_F(EmulatedRows, MergedPartsMatchTheOracle) {
  struct Case {
    MergeShape shape;
    attune_dtype partial, out;
    bool sinks, padded;
  };
  for (const Case& c : {Case{{7, 5, 3, 128}, ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, true, false},
                        Case{{40, 3, 2, 64}, ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, false, false},
                        Case{{40, 3, 2, 576}, ATTUNE_FLOAT32, ATTUNE_FLOAT8_E4M3, true, false},
                        Case{{33, 3, 4, 1}, ATTUNE_FLOAT16, ATTUNE_FLOAT32, true, false},
                        Case{{2, 9, 3, 37}, ATTUNE_FLOAT32, ATTUNE_FLOAT16, false, true},
                        Case{{1, 3, 2, 40}, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, false, true}}) {
    SCOPED_TRACE(std::to_string(c.shape.parts) + " parts of " + std::to_string(c.shape.dim));
    cases::MergeProblem problem(merge_case(c.shape, c.partial, c.out, c.sinks, c.padded), cases::host_memory());
    EXPECT_EQ(problem.run_and_check([&] { return run(make_merge(problem.device())); }), "");
  }
}

// As attune check --stress draws them.
TEST_F(EmulatedRows, ServingBatchesMatchTheOracle) {
  constexpr int kConfigurations = 12;
  constexpr int64_t kBudget = 600;
  std::map<std::string, int> ran;
  for (uint64_t index = 0; index < 300; ++index) {
    const cases::Case spec = cases::serving_case(1, index, kConfigurations, kBudget);
    if (spec.op.operation == cases::Operation::kAttention) continue;
    const std::unique_ptr<cases::OpProblem> problem = cases::make_op_problem(spec, cases::host_memory());
    EXPECT_EQ(problem->run_and_check([&] { return run(*problem, index % 2 == 0 ? 1 : 132); }), "") << spec.name;
    ++ran[cases::operation_name(spec)];
  }
  for (const char* name : {"qkv_prepare", "cache_op", "merge"}) EXPECT_GT(ran[name], 3) << name;
}

TEST_F(EmulatedRows, HaveNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(1);
  EXPECT_GT(check_cache_ops(Formats::kPacked, 8), 4);
  EXPECT_GT(check_cache_ops(Formats::kAll, 8), 4);
}

}  // namespace
}  // namespace attune::cuda
