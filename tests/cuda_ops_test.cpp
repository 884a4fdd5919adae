// SPDX-License-Identifier: Apache-2.0
// qkv_prepare, cache operations and merge on a GPU: the tests of the CPU's on device memory, and the same bytes as the
// CPU where arithmetic is exact, whatever the tables say.
#include <algorithm>
#include <cstring>

#include "cache_fixture.h"
#include "cases/cuda_memory.h"
#include "cuda/ops/config.h"
#include "cuda/ops/ops.h"
#include "cuda/ops/params.h"
#include "cuda_fixture.h"
#include "merge_fixture.h"
#include "prepare_fixture.h"
#include "random_cache_op.h"

namespace attune::cuda {
namespace {

using namespace attune::tests;  // NOLINT: the fixtures of the tests of the CPU
constexpr int kRandomOps = 400;

class CudaOps : public CudaFixture {
 protected:
  void SetUp() override {
    CudaFixture::SetUp();
    if (!IsSkipped()) memory_ = std::make_unique<cases::CudaMemory>(kDevice);
  }
  std::unique_ptr<cases::CudaMemory> memory_;
};

// The kernels of the tests below are compiled side by side, before the first of them.
TEST_F(CudaOps, CacheOperationsOfEveryFormat) {
  std::vector<KernelSpec> specs;
  for (const Kind& kind : kinds()) {
    for_each_layout(kind, [&](attune_kv_layout layout, attune_dtype dense, const std::string&) {
      CacheFixture f(cases::host_memory(), kind, layout, dense, 2, true);
      for (const attune_cache_op_kind direction : {ATTUNE_CACHE_QUANTIZE, ATTUNE_CACHE_DEQUANTIZE}) {
        f.op().kind = direction;
        specs.push_back(kernel_of(make_cache_op(f.op())));
      }
    });
  }
  warm(specs, kDevice);
  for (const Kind& kind : kinds()) {
    for (const bool aligned : {true, false}) {
      check_slots(*memory_, kind, aligned);
      check_whole_cache(*memory_, kind, aligned);
      check_sequences(*memory_, kind, aligned);
    }
  }
}

TEST_F(CudaOps, CacheOperationsAtTheEdges) {
  for (const bool aligned : {true, false}) {
    check_gather_by_sequence(*memory_, aligned);
    check_gather_out_of_range(*memory_, aligned);
    check_saturation(*memory_, aligned);
  }
}

TEST_F(CudaOps, MergeMatchesTheOracle) { check_merge(*memory_); }

TEST_F(CudaOps, PrepareMatchesTheOracle) {
  std::vector<KernelSpec> specs;
  for_each_prepare(cases::host_memory(), [&](cases::PrepareProblem& prepare, const std::string&) {
    specs.push_back(kernel_of(make_qkv_prepare(prepare.device())));
  });
  warm(specs, kDevice);
  EXPECT_GT(check_prepare(*memory_), 60);
}

TEST_F(CudaOps, CacheOperationsGiveTheBytesOfTheCpu) {
  for (const Formats formats : {Formats::kAll, Formats::kPacked}) {
    int ran = 0;
    std::vector<KernelSpec> specs;
    for (uint64_t seed = 0; seed < kRandomOps; ++seed) {
      RandomCacheOp op(cases::host_memory(), seed, formats);
      try {
        specs.push_back(kernel_of(make_cache_op(op.device())));
      } catch (const Failure&) {  // some of them are none
      }
    }
    warm(specs, kDevice);
    for (uint64_t seed = 0; seed < kRandomOps; ++seed) {
      RandomCacheOp cpu(cases::host_memory(), seed, formats), gpu(*memory_, seed, formats);
      const attune_cache_op on_cpu = cpu.device(), on_gpu = gpu.device();
      const attune_status expected = attune_cache_op_run(&on_cpu, kCpu, nullptr);
      ASSERT_EQ(attune_cache_op_run(&on_gpu, memory_->device(), nullptr), expected) << attune_last_error();
      if (expected != ATTUNE_OK) continue;
      ++ran;
      expect_same_bytes(cpu, gpu, seed);
    }
    EXPECT_GT(ran, kRandomOps / 2);
  }
}

TEST_F(CudaOps, RefusesHostMemory) {
  RandomCacheOp op(cases::host_memory(), 3);
  const attune_cache_op on_host = op.device();
  const attune_status status = attune_cache_op_run(&on_host, memory_->device(), nullptr);
  // Some machines let a device reach all of the host's memory.
  if (status != ATTUNE_OK) {
    EXPECT_EQ(status, ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("k.data"), std::string::npos) << attune_last_error();
  }
  memory_->synchronize();
}

// What the host decides, without a GPU.
TEST(CudaOpsConfig, TakesVectorsWhereStridesAllow) {
  for (const bool aligned : {false, true}) {
    CacheFixture f(cases::host_memory(), kind_of("bf16"), ATTUNE_KV_NHD, ATTUNE_BFLOAT16, 4, aligned);
    f.op().kind = ATTUNE_CACHE_QUANTIZE;
    const ops::Config c = ops::choose_store(make_cache_op(f.op()));
    EXPECT_EQ(c.width, aligned ? 8 : 1);
    EXPECT_EQ(c.row_type, aligned ? ATTUNE_BFLOAT16 : 0);
    if (!aligned) continue;
    attune_cache_op op = f.op();
    op.k.data = static_cast<std::byte*>(op.k.data) + 2;
    EXPECT_EQ(ops::choose_store(make_cache_op(op)).width, 1);
  }
}

TEST(CudaOpsConfig, SpreadsSmallInputsAndFillsBlocksOfLargeOnes) {
  ops::Config c;
  c.lanes = 8, c.rows_of_token = 16, c.groups = 8;
  EXPECT_EQ(c.tile_tokens(1, 132), 1);
  EXPECT_EQ(c.tile_tokens(500, 132), 1);
  EXPECT_EQ(c.tile_tokens(1 << 20, 132), 32);
  EXPECT_EQ(1 << c.groups_shift(32), 8);
  EXPECT_EQ(1 << c.groups_shift(1), 32);
  c.rows_of_token = c.groups = 1;
  EXPECT_EQ(c.tile_tokens(1 << 20, 132), kernels::kMaxTileTokens);
  c.rows_of_token = 1 << 20, c.groups = 8;
  EXPECT_EQ(c.tile_tokens(1 << 20, 132), 16);
}

TEST(CudaOpsConfig, SpecialisationsHaveKeysOfTheirOwn) {
  std::vector<std::pair<uint64_t, std::string>> keys;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    RandomCacheOp op(cases::host_memory(), seed);
    CacheProblem p;
    try {
      p = make_cache_op(op.device());
    } catch (const Failure&) {
      continue;
    }
    const bool stores = p.kind == ATTUNE_CACHE_APPEND || p.kind == ATTUNE_CACHE_QUANTIZE;
    const ops::Config c = stores ? ops::choose_store(p) : ops::choose_fetch(p);
    keys.emplace_back(c.key(), spec_name(c.spec()));
  }
  for (const auto& a : keys) {
    for (const auto& b : keys) EXPECT_EQ(a.first == b.first, a.second == b.second) << a.second << "\n" << b.second;
  }
}

}  // namespace
}  // namespace attune::cuda
