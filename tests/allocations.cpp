// SPDX-License-Identifier: Apache-2.0
// A malloc that counts, and the library's runs wrapped by the linker (--wrap, tests/CMakeLists.txt): one that succeeds
// on the CPU and has allocated fails its test. Threads of the pool run the same code as the caller, which is counted.
#include "allocations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "attune/attune.h"

#if defined(ATTUNE_COUNT_ALLOCATIONS)

namespace attune::tests {
namespace {

thread_local int64_t t_allocations = 0;
std::atomic<int64_t> g_watched_runs{0};

// Calls run and fails the test where it allocates. Errors may: their messages are strings.
template <class Run>
attune_status watch(const char* name, bool on_cpu, Run run) {
  const int64_t before = t_allocations;
  const attune_status status = run();
  const int64_t allocated = t_allocations - before;
  if (!on_cpu || status != ATTUNE_OK) return status;
  ++g_watched_runs;
  if (allocated != 0) ADD_FAILURE() << name << " allocated " << allocated << " times";
  return status;
}

bool is_on_cpu(const attune_plan* plan) {
  constexpr char kCpuKernel[] = "kernel cpu_";
  char text[sizeof(kCpuKernel)] = "";
  size_t needed = 0;
  (void)attune_plan_describe(plan, text, sizeof(text), &needed);
  return std::strncmp(text, kCpuKernel, sizeof(kCpuKernel) - 1) == 0;
}

// A plan starts as many threads as any test uses: operations without a plan find them there.
class StartsThreads : public testing::Environment {
  void SetUp() override {
    attune_attention a;
    attune_plan* plan = nullptr;
    ASSERT_EQ(attune_attention_init(&a, sizeof(a)), ATTUNE_OK);
    const int64_t shape[] = {1, 1, 8};
    a.q = a.k = a.v = a.out = attune_dense_tensor(nullptr, ATTUNE_FLOAT32, 3, shape);
    int32_t by_default = 0;
    ASSERT_EQ(attune_get_num_threads(&by_default), ATTUNE_OK);
    ASSERT_EQ(attune_set_num_threads(std::max(16, by_default)), ATTUNE_OK);
    ASSERT_EQ(attune_plan_create(&a, {ATTUNE_DEVICE_CPU, 0}, &plan), ATTUNE_OK) << attune_last_error();
    EXPECT_EQ(attune_plan_destroy(plan), ATTUNE_OK);
    EXPECT_EQ(attune_set_num_threads(0), ATTUNE_OK);
  }
};
const testing::Environment* const kEnvironment = testing::AddGlobalTestEnvironment(new StartsThreads);

}  // namespace

bool counts_allocations() { return true; }
int64_t num_allocations() { return t_allocations; }
int64_t num_watched_runs() { return g_watched_runs; }

}  // namespace attune::tests

extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  ++attune::tests::t_allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  ++attune::tests::t_allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  ++attune::tests::t_allocations;
  return __libc_realloc(old, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  ++attune::tests::t_allocations;
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** out, size_t alignment, size_t bytes) {
  *out = memalign(alignment, bytes);
  return *out != nullptr ? 0 : ENOMEM;
}

#define ATTUNE_WATCH_PLANNED(name, op_type)                                                              \
  attune_status __real_##name(const attune_plan* plan, const op_type* op, void* workspace, size_t bytes, \
                              void* stream);                                                             \
  attune_status __wrap_##name(const attune_plan* plan, const op_type* op, void* workspace, size_t bytes, \
                              void* stream) {                                                            \
    return attune::tests::watch(#name, attune::tests::is_on_cpu(plan),                                   \
                                [&] { return __real_##name(plan, op, workspace, bytes, stream); });      \
  }
ATTUNE_WATCH_PLANNED(attune_run, attune_attention)
ATTUNE_WATCH_PLANNED(attune_schedule, attune_attention)
ATTUNE_WATCH_PLANNED(attune_run_scheduled, attune_attention)
ATTUNE_WATCH_PLANNED(attune_attention_backward_run, attune_attention_backward)

#define ATTUNE_WATCH(name, op_type)                                                    \
  attune_status __real_##name(const op_type* op, attune_device device, void* stream);  \
  attune_status __wrap_##name(const op_type* op, attune_device device, void* stream) { \
    return attune::tests::watch(#name, device.type == ATTUNE_DEVICE_CPU,               \
                                [&] { return __real_##name(op, device, stream); });    \
  }
ATTUNE_WATCH(attune_qkv_prepare_run, attune_qkv_prepare)
ATTUNE_WATCH(attune_merge_run, attune_merge)
ATTUNE_WATCH(attune_cache_op_run, attune_cache_op)

attune_status __real_attune_indexer_run(const attune_indexer* op, attune_device device, void* workspace, size_t bytes,
                                        void* stream);
attune_status __wrap_attune_indexer_run(const attune_indexer* op, attune_device device, void* workspace, size_t bytes,
                                        void* stream) {
  return attune::tests::watch("attune_indexer_run", device.type == ATTUNE_DEVICE_CPU,
                              [&] { return __real_attune_indexer_run(op, device, workspace, bytes, stream); });
}

}  // extern "C"

#else

namespace attune::tests {

bool counts_allocations() { return false; }
int64_t num_allocations() { return 0; }
int64_t num_watched_runs() { return 0; }

}  // namespace attune::tests

#endif
