// SPDX-License-Identifier: Apache-2.0
// The C ABI on CUDA. What it says where there is no GPU is tested on any machine; the rest needs one.
#include <gmock/gmock.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "cases/cuda_memory.h"
#include "cuda/attention/prologue.h"
#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "cuda/mixed/mixed.h"
#include "cuda/mla/config.h"
#include "cuda/prefill/config.h"
#include "cuda_fixture.h"
#include "dispatch/device.h"
#include "dispatch/registry.h"
#include "failure.h"
#include "support.h"

namespace attune::tests {
namespace {

using testing::HasSubstr;
constexpr attune_device kGpu = {ATTUNE_DEVICE_CUDA, 0};
constexpr attune_device kNoGpu = {ATTUNE_DEVICE_CUDA, 99};

constexpr char kDecode[] =
    R"({"name": "decode", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
    "seqlens_kv": [3000, 0, 17, 900]})";

// Status and message of a call.
struct Answer {
  attune_status status;
  std::string message;
};
Answer answer(attune_status status) { return {status, status == ATTUNE_OK ? "" : attune_last_error()}; }

std::string describe() {
  size_t needed = 0;
  EXPECT_ATTUNE_OK(attune_describe_cuda(nullptr, 0, &needed));
  std::string text(needed, '\0');
  EXPECT_ATTUNE_OK(attune_describe_cuda(text.data(), needed, &needed));
  EXPECT_EQ(text.size(), needed);
  return text.c_str();
}

TEST(CudaApi, EveryCallGivesTheSameReasonForAMissingDevice) {
  cases::Problem problem(make_case(kDecode));
  const attune_attention& a = problem.host();
  const attune_attention* list[] = {&a};
  attune_plan* plan = nullptr;
  attune_merge merge;
  attune_cache_op cache_op;
  attune_qkv_prepare prepare;
  ASSERT_ATTUNE_OK(attune_merge_init(&merge, sizeof(merge)));
  ASSERT_ATTUNE_OK(attune_cache_op_init(&cache_op, sizeof(cache_op)));
  ASSERT_ATTUNE_OK(attune_qkv_prepare_init(&prepare, sizeof(prepare)));
  const Answer first = answer(attune_supported(&a, kNoGpu));
  EXPECT_EQ(first.status, ATTUNE_DEVICE_ERROR);
  EXPECT_THAT(first.message, HasSubstr("device cuda:99 is not available: "));
  for (const Answer& other :
       {answer(attune_plan_create(&a, kNoGpu, &plan)), answer(attune_validate(&a, kNoGpu, nullptr)),
        answer(attune_merge_run(&merge, kNoGpu, nullptr)), answer(attune_cache_op_run(&cache_op, kNoGpu, nullptr)),
        answer(attune_qkv_prepare_run(&prepare, kNoGpu, nullptr)), answer(attune_warm(list, 1, kNoGpu))}) {
    EXPECT_EQ(other.status, first.status);
    EXPECT_EQ(other.message, first.message);
  }
}

TEST(CudaApi, DescribesTheRuntimeOnAnyMachine) {
  const std::string text = describe();
  for (const char* line : {"driver: ", "bundle: ", "disk cache: ", "compiler: "}) EXPECT_THAT(text, HasSubstr(line));
  char small[8];
  EXPECT_ATTUNE_OK(attune_describe_cuda(small, sizeof(small), nullptr));
  EXPECT_EQ(std::string(small), text.substr(0, 7));
  EXPECT_EQ(answer(attune_describe_cuda(nullptr, 1, nullptr)).status, ATTUNE_INVALID_ARGUMENT);
}

TEST(CudaApi, WarmsTheCpuAndNamesTheDescriptorThatFails) {
  cases::Problem problem(make_case(kDecode));
  attune_attention bad = problem.host();
  bad.softcap = -1;
  const attune_attention* list[] = {&problem.host(), &bad, nullptr};
  EXPECT_ATTUNE_OK(attune_warm(list, 1, kCpu));
  EXPECT_ATTUNE_OK(attune_warm(nullptr, 0, kCpu));
  const Answer failed = answer(attune_warm(list, 3, kCpu));
  EXPECT_EQ(failed.status, ATTUNE_INVALID_ARGUMENT);
  EXPECT_THAT(failed.message, HasSubstr("attentions[1]: softcap"));
  EXPECT_EQ(answer(attune_warm(nullptr, 1, kCpu)).status, ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(answer(attune_warm(list, -1, kCpu)).status, ATTUNE_INVALID_ARGUMENT);
}

// What the axes cannot say is refused by the kernel itself, in its own words.
TEST(CudaApi, TheDecodeKernelRefusesWhatItsRowCannotSay) {
  const Kernel& kernel = cuda::decode_kernel();
  ASSERT_NE(kernel.refusal, nullptr);
  cases::Problem problem(make_case(
      R"({"name": "odd", "heads": [4, 2], "head_dim": [20, 20], "dtype": "bf16", "kv": "paged", "seqlens_kv": [5]})"));
  const Problem p = make_problem(problem.host(), Data::kRequired);
  EXPECT_NE(kernel.refusal(p), "");
}

// What no kernel covers: the row that is nearest, and what it lacks.
TEST(CudaApi, TheNearestKernelIsNamed) {
  const cases::Row common(R"("heads": [4, 1], "dtype": "bf16", "seqlens_q": [40], "seqlens_kv": [40])");
  for (
      const auto& [fields, wanted] :
      {std::pair{R"("head_dim": [264, 264])", "cuda_prefill_mma, which lacks head_dim_qk: 264 (at most 256)"},
       {R"("head_dim": [36, 36], "seqlens_kv": [50], "prologue": {"k_bias": true})",
        "cuda_prefill_mma, which does not take a prologue for dense keys that are not q's tokens"},
       {R"("dtype": "e4m3", "out_dtype": "bf16", "softcap": 30, "head_dim": [60, 60])",
        "cuda_prefill_fp8_mma, which does not take head dims that are no multiples of 8"},
       {R"("head_dim": [544, 512], "shared_kv": true, "kv": "paged")", "cuda_mla, which does not take head_dim_qk 544"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "softcap": 30)", "cuda_mla, which lacks score"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "dtype": "f32")",
        "cuda_mla, which lacks query dtype: float32"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "cache": {"dtype": "e4m3"})",
        "cuda_mla, which lacks KV format: e4m3"},
       {R"("head_dim": [576, 512], "shared_kv": true, "kv": "paged", "cache": {"dtype": "e4m3", "scales": "head"})",
        "cuda_mla, which lacks KV format: e4m3; KV scales: per tensor"},
       {R"("head_dim": [576, 512], "kv": "paged", "cache": {"format": "mla_656"}, "ranges": [[3, 9]])",
        "cuda_mla, which lacks mask: bidirectional ranges"},
       {R"("head_dim": [512, 512], "kv": "slots", "sparse": {"topk": 9}, "cache": {"format": "mla_584"}, "dtype": "f16")",
        "cuda_mla, which does not take q of float16 over cache, a packed one; it takes bfloat16"},
       {R"("dtype": "e5m2", "out_dtype": "bf16")", "cuda_decode, which lacks KV source: dense"}}) {
    cases::Problem problem(make_case(common.with(fields)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_THAT(
        failure_of([&] { choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA); }, ATTUNE_UNSUPPORTED),
        HasSubstr(wanted))
        << fields;
  }
}

// The checks of a run let through what its plan was made for.
TEST(CudaApi, RunsLikeTheirPlansAreTaken) {
  alignas(256) static std::byte rows[256];  // whose address counts
  constexpr int kEvery = 3, kSms = 132;
  int taken = 0;
  std::vector<cases::Case> list = cases::all_cases();
  for (uint64_t seed = 0; seed < 60; ++seed) list.push_back(cases::random_case(seed));
  for (size_t i = 0; i < list.size(); i += kEvery) {
    cases::Problem problem(list[i]);
    const Problem p = make_problem(problem.host(), Data::kRequired);
    std::string name;
    try {
      name = choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA).name;
    } catch (const Failure&) {
      continue;
    }
    using namespace cuda;  // NOLINT: all of its kernels
    const bool as_fp32 = name == "cuda_prefill_fp32";
    const bool moved = attention::has_prologue(p) || (name != "cuda_mla" && attention::copies_rows(p)) || as_fp32;
    const Problem after =
        moved && name != "cuda_decode"
            ? attention::after_prologue(p, rows, as_fp32 ? attention::Rows::kFp32 : attention::Rows::kOwnType)
            : p;
    const decode::DeviceShape device;
    if (name == "cuda_mla") {
      EXPECT_NO_THROW(mla::check_run(after, mla::choose_config(p, kSms))) << list[i].name;
    } else if (name == "cuda_decode") {
      EXPECT_NO_THROW(decode::check_run(p, decode::choose_config(p, device))) << list[i].name;
    } else {
      EXPECT_NO_THROW(prefill::check_run(after, prefill::choose_config(after, kSms))) << list[i].name;
      if (name == "cuda_mixed") {
        EXPECT_NO_THROW(decode::check_run(after, mixed::choose_configs(p, device).steps)) << list[i].name;
      }
    }
    ++taken;
  }
  EXPECT_GT(taken, 100);
}

class CudaApiOnDevice : public cuda::CudaFixture {
 protected:
  void SetUp() override {
    CudaFixture::SetUp();
    if (!IsSkipped()) memory_ = std::make_unique<cases::CudaMemory>(0);
  }
  std::unique_ptr<cases::CudaMemory> memory_;
};

TEST_F(CudaApiOnDevice, ListsTheDevice) {
  int32_t count = 0;
  ASSERT_ATTUNE_OK(attune_device_count(&count));
  ASSERT_GE(count, 2);
  attune_device_info info{};
  info.struct_size = sizeof(info);
  ASSERT_ATTUNE_OK(attune_get_device_info(1, &info));
  EXPECT_EQ(info.device.type, ATTUNE_DEVICE_CUDA);
  EXPECT_EQ(info.num_units, cuda::devices()[static_cast<size_t>(info.device.index)].num_sms);
  EXPECT_EQ(info.isa, cuda::devices()[static_cast<size_t>(info.device.index)].target.name);
  EXPECT_THAT(describe(), HasSubstr(info.name));
  EXPECT_EQ(answer(attune_get_device_info(count, &info)).status, ATTUNE_INVALID_ARGUMENT);
}

TEST_F(CudaApiOnDevice, RunsAndMatchesTheOracle) {
  EXPECT_EQ(cases::run_case(make_case(kDecode), *memory_).failure, "");
}

TEST_F(CudaApiOnDevice, SaysWhatNoKernelCovers) {
  cases::Problem dense(make_case(R"({"name": "prefill", "heads": [4, 2], "seqlens_q": [20], "dtype": "e5m2",
      "out_dtype": "bf16"})"),
                       *memory_);
  const attune_attention a = dense.device();
  const Answer refused = answer(attune_supported(&a, kGpu));
  EXPECT_EQ(refused.status, ATTUNE_UNSUPPORTED);
  EXPECT_THAT(refused.message, HasSubstr("lacks KV source: dense"));

  cases::Problem wide(make_case(R"({"name": "wide", "heads": [4, 1], "head_dim": [264, 264], "dtype": "bf16",
      "seqlens_q": [40], "seqlens_kv": [40]})"),
                      *memory_);
  const attune_attention b = wide.device();
  const Answer too = answer(attune_supported(&b, kGpu));
  EXPECT_EQ(too.status, ATTUNE_UNSUPPORTED);
  EXPECT_THAT(too.message, HasSubstr("lacks head_dim_qk: 264 (at most 256)"));
}

// What a plan's kernel would fault on, or get wrong, is named, and the device works on.
TEST_F(CudaApiOnDevice, ARunMayNotBringWhatItsPlanDoesNotTake) {
  using Change = void (*)(attune_attention&);
  const Change odd_pages = [](attune_attention& a) { a.cache.k.stride[0] += 1; };
  const Change odd_rows = [](attune_attention& a) { a.q.stride[0] += 1; };
  const Change negative = [](attune_attention& a) { a.softmax_scale = -1; };
  const Change spread_channels = [](attune_attention& a) { a.q.stride[2] = 2; };
  const Change small_pages = [](attune_attention& a) { a.cache.k.shape[1] = a.cache.v.shape[1] = 3; };
  const Change small_rows = [](attune_attention& a) { a.cache.k.shape[1] = 3; };
  const char* const decode = R"("kv": "paged", "heads": [8, 2], "head_dim": [128, 128], "cache": {"page_size": 64},
      "seqlens_q": [1, 1], "seqlens_kv": [100, 9])";
  const char* const prompt =
      R"("kv": "dense", "heads": [8, 2], "head_dim": [128, 128], "seqlens_q": [200, 9], "causal": true)";
  const char* const chunks = R"("kv": "paged", "heads": [8, 2], "head_dim": [128, 128], "cache": {"page_size": 64},
      "seqlens_q": [100, 40], "seqlens_kv": [100, 9], "new_tokens": true, "causal": true, "prologue": {"append": true})";
  const char* const mixed = R"("kv": "paged", "heads": [8, 2], "head_dim": [128, 128], "cache": {"page_size": 64},
      "seqlens_q": [300, 1, 1], "seqlens_kv": [10, 900, 9], "new_tokens": true, "causal": true, "prologue": {"append": true})";
  const char* const latent = R"("kv": "paged", "heads": [20, 1], "head_dim": [576, 512], "shared_kv": true,
      "cache": {"page_size": 64}, "seqlens_q": [2, 1], "seqlens_kv": [100, 9])";
  const struct {
    const char *rest, *kernel;
    Change change;
    const char* wanted;
  } runs[] = {
      {decode, "cuda_decode", odd_pages,
       "rows of cache.k do not lie at multiples of 16 bytes, as they did when the plan was made"},
      {decode, "cuda_decode", small_pages,
       "cache.page_size is 3; the plan was made for pages of multiples of 16 tokens"},
      {prompt, "cuda_prefill", odd_rows, "rows of q do not lie at multiples of 16 bytes"},
      {prompt, "cuda_prefill", spread_channels, "rows of q do not lie at multiples of 16 bytes"},
      {prompt, "cuda_prefill", negative, "softmax_scale is -1.000000; the plan was made for one that is positive"},
      {mixed, "cuda_mixed", negative, "softmax_scale is -1.000000; the plan was made for one that is positive"},
      {chunks, "cuda_prefill", odd_pages, "rows of cache.k that do not lie at multiples of 16 bytes"},
      {mixed, "cuda_mixed", odd_pages, "rows of cache.k that do not lie at multiples of 16 bytes"},
      {mixed, "cuda_mixed", small_pages, "the plan was made for pages of multiples of 16 tokens"},
      {latent, "cuda_mla", odd_pages, "rows of cache that do not lie at multiples of 16 bytes"},
      {latent, "cuda_mla", small_rows, "cache.page_size is 3; the plan was made for pages of multiples of 8 tokens"},
  };
  const cases::Row common(R"("dtype": "bf16")");
  for (const auto& [rest, kernel, change, wanted] : runs) {
    cases::Problem problem(make_case(common.with(rest)), *memory_);
    problem.arena().upload();
    const attune_attention a = problem.device();
    attune_attention other = a;
    change(other);
    attune_plan* plan = nullptr;
    setenv("ATTUNE_KERNEL", kernel, 1);
    ASSERT_ATTUNE_OK(attune_plan_create(&a, kGpu, &plan));
    unsetenv("ATTUNE_KERNEL");
    size_t bytes = 0;
    ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
    cases::Workspace workspace(*memory_, bytes);
    const auto run = [&](const attune_attention& x) {
      return answer(attune_run(plan, &x, workspace.buffer.device(), bytes, memory_->stream().handle()));
    };
    EXPECT_EQ(run(a).status, ATTUNE_OK) << kernel;
    const Answer refused = run(other);
    EXPECT_EQ(refused.status, ATTUNE_INVALID_ARGUMENT) << kernel;
    EXPECT_THAT(refused.message, HasSubstr(wanted)) << kernel;
    EXPECT_EQ(run(a).status, ATTUNE_OK) << kernel;
    memory_->synchronize();
    EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
  }
}

TEST_F(CudaApiOnDevice, ForcesAKernelByName) {
  cases::Problem problem(make_case(kDecode), *memory_);
  const attune_attention a = problem.device();
  setenv("ATTUNE_KERNEL", "cuda_decode", 1);
  const attune_status forced = attune_supported(&a, kGpu);
  setenv("ATTUNE_KERNEL", "no_such_kernel", 1);
  const attune_status unknown = attune_supported(&a, kGpu);
  unsetenv("ATTUNE_KERNEL");
  EXPECT_EQ(forced, ATTUNE_OK);
  EXPECT_EQ(unknown, ATTUNE_UNSUPPORTED);
}

// A plan, its workspace on the device, and a stream of the caller's.
struct DeviceRun {
  explicit DeviceRun(cases::CudaMemory& memory, const attune_attention& a) : stream(0) {
    EXPECT_ATTUNE_OK(attune_plan_create(&a, kGpu, &plan));
    EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
    workspace = std::make_unique<cases::Workspace>(memory, bytes);
  }
  ~DeviceRun() { attune_plan_destroy(plan); }
  void* data() const { return workspace->buffer.device(); }

  cuda::Stream stream;
  attune_plan* plan = nullptr;
  size_t bytes = 0;
  std::unique_ptr<cases::Workspace> workspace;
};

TEST_F(CudaApiOnDevice, RunsOnTheCallersStreamAndInsideACapture) {
  cases::Problem problem(make_case(kDecode), *memory_);
  const cases::Expected expected = cases::evaluate(problem);
  const attune_attention a = problem.device();
  DeviceRun run(*memory_, a);
  {
    const cuda::Graph graph(
        run.stream, [&] { EXPECT_ATTUNE_OK(attune_run(run.plan, &a, run.data(), run.bytes, run.stream.handle())); });
    graph.replay(run.stream);
    run.stream.synchronize();
  }
  EXPECT_EQ(cases::compare(problem, expected).failure, "");
  problem.arena().upload();
  EXPECT_ATTUNE_OK(attune_schedule(run.plan, &a, run.data(), run.bytes, run.stream.handle()));
  EXPECT_ATTUNE_OK(attune_run_scheduled(run.plan, &a, run.data(), run.bytes, run.stream.handle()));
  run.stream.synchronize();
  EXPECT_EQ(cases::compare(problem, expected).failure, "");
}

// One plan, several threads, each with its own stream, workspace and outputs.
TEST_F(CudaApiOnDevice, ThreadsShareAPlan) {
  constexpr size_t kThreads = 4;
  std::vector<std::unique_ptr<cases::Problem>> problems;
  std::vector<std::unique_ptr<DeviceRun>> runs;
  for (size_t i = 0; i < kThreads; ++i) {
    problems.push_back(std::make_unique<cases::Problem>(make_case(kDecode), *memory_));
    runs.push_back(std::make_unique<DeviceRun>(*memory_, problems.back()->device()));
  }
  const cases::Expected expected = cases::evaluate(*problems[0]);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const attune_attention a = problems[i]->device();
      for (int n = 0; n < 50; ++n) {
        EXPECT_ATTUNE_OK(attune_run(runs[0]->plan, &a, runs[i]->data(), runs[i]->bytes, runs[i]->stream.handle()));
      }
      runs[i]->stream.synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kThreads; ++i) EXPECT_EQ(cases::compare(*problems[i], expected).failure, "") << "thread " << i;
}

TEST_F(CudaApiOnDevice, RefusesHostMemory) {
  cases::Problem problem(make_case(kDecode), *memory_);
  attune_attention a = problem.device();
  DeviceRun run(*memory_, a);
  alignas(256) std::byte on_host[256];
  const Answer workspace = answer(attune_run(run.plan, &a, on_host, run.bytes, run.stream.handle()));
  EXPECT_EQ(workspace.status, ATTUNE_INVALID_ARGUMENT);
  EXPECT_THAT(workspace.message, HasSubstr("workspace is not memory that CUDA device 0 can reach"));
  const attune_attention good_before = a;
  a.q = problem.host().q;
  EXPECT_THAT(answer(attune_run(run.plan, &a, run.data(), run.bytes, run.stream.handle())).message,
              HasSubstr("q.data"));
  EXPECT_ATTUNE_OK(attune_validate(&good_before, kGpu, nullptr));
  // attune_validate finds each of them.
  const attune_attention good = problem.device();
  attune_attention copy = good;
  const auto tensors = cases::tensors_of(copy);
  int found = 0;
  for (const auto& [name, tensor] : tensors) {
    if (tensor->dtype == ATTUNE_DTYPE_NONE) continue;
    void* kept = tensor->data;
    tensor->data = on_host;
    const Answer refused = answer(attune_validate(&copy, kGpu, nullptr));
    tensor->data = kept;
    EXPECT_EQ(refused.status, ATTUNE_INVALID_ARGUMENT) << name;
    EXPECT_THAT(refused.message, HasSubstr(std::string(name) + ".data is not memory")) << name;
    ++found;
  }
  EXPECT_GE(found, 6);
}

// Contents on the device: the same errors as on the CPU.
TEST_F(CudaApiOnDevice, ValidateReadsTheTablesFromTheDevice) {
  cases::Problem problem(make_case(kDecode), *memory_);
  const attune_attention a = problem.device();
  EXPECT_ATTUNE_OK(attune_validate(&a, kGpu, nullptr));
  const auto spoil = [&](void* host, int32_t value) {
    int32_t kept = 0;
    std::memcpy(&kept, host, sizeof(kept));
    memory_->upload(problem.arena().device_pointer(host), &value, sizeof(value));
    const Answer bad = answer(attune_validate(&a, kGpu, nullptr));
    memory_->upload(problem.arena().device_pointer(host), &kept, sizeof(kept));
    EXPECT_EQ(bad.status, ATTUNE_BAD_DATA);
    return bad.message;
  };
  EXPECT_THAT(spoil(cases::element_at(problem.host().cache.page_table, {3, 2}), -7),
              HasSubstr("cache.page_table[3][2] is -7"));
  EXPECT_THAT(spoil(cases::element_at(problem.host().seqused_kv, {2}), 1 << 30),
              HasSubstr("seqused_kv[2] is 1073741824"));
  EXPECT_ATTUNE_OK(attune_validate(&a, kGpu, nullptr));
}

TEST_F(CudaApiOnDevice, WarmedPlansAreQuick) {
  cases::Problem problem(make_case(kDecode), *memory_);
  const attune_attention a = problem.device();
  const attune_attention* list[] = {&a, &a};
  EXPECT_ATTUNE_OK(attune_warm(list, 2, kGpu));
  const auto start = std::chrono::steady_clock::now();
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kGpu, &plan));
  attune_plan_destroy(plan);
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  RecordProperty("plan_ms", std::to_string(elapsed.count()));
  EXPECT_LT(elapsed.count(), 20);
}

// CPU time of a run: argument checks and launches.
TEST_F(CudaApiOnDevice, ARunTakesMicroseconds) {
  cases::Problem problem(make_case(kDecode), *memory_);
  const attune_attention a = problem.device();
  DeviceRun run(*memory_, a);
  constexpr int kRuns = 200;
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    run.stream.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRuns; ++i) attune_run(run.plan, &a, run.data(), run.bytes, run.stream.handle());
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count() / kRuns);
  }
  std::printf("attune_run: %.2f us of CPU time\n", best);
  EXPECT_LT(best, 30);
}

}  // namespace
}  // namespace attune::tests
