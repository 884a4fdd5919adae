// SPDX-License-Identifier: Apache-2.0
// Several threads at once, and thread pools of several sizes. Run under ThreadSanitizer in CI.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "support.h"

namespace attune::tests {
namespace {

std::vector<cases::Case> some_cases() {
  std::vector<cases::Case> picked;
  const std::vector<cases::Case>& all = cases::all_cases();
  for (size_t i = 0; i < all.size(); i += 23) picked.push_back(all[i]);
  return picked;
}

TEST(Threads, RunDifferentPlansAtOnce) {
  const ThreadCount pool(2);
  const std::vector<cases::Case> picked = some_cases();
  std::atomic<size_t> next{0};
  std::vector<std::string> failures(picked.size());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < picked.size(); i = next++) failures[i] = cases::run_case(picked[i]).failure;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < picked.size(); ++i) EXPECT_EQ(failures[i], "") << picked[i].name;
}

TEST(Threads, ShareOnePlan) {
  cases::Problem problem(make_case(
      R"({"name": "shared plan", "heads": [8, 2], "dtype": "bf16", "kv": "paged", "seqlens_kv": [200, 3, 64]})"));
  const attune_attention a = problem.device();
  plan_and_run(a);
  const std::vector<std::byte> expected = gather(a.out);
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan));
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      cases::Workspace workspace(cases::host_memory(), bytes);
      std::vector<std::byte> out(expected.size()), lse(static_cast<size_t>(cases::num_elements(a.lse)) * 4);
      attune_attention own = a;
      own.out.data = out.data();
      own.lse.data = lse.data();
      for (int repeat = 0; repeat < 5; ++repeat) {
        if (attune_run(plan, &own, workspace.buffer.device(), bytes, nullptr) != ATTUNE_OK || out != expected) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

TEST(Threads, EachHasItsOwnError) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int repeat = 0; repeat < 100; ++repeat) {
        attune_attention a;
        if (attune_attention_init(&a, sizeof(a)) != ATTUNE_OK) ++wrong;
        a.struct_size = 1000000u + static_cast<unsigned>(t);
        if (attune_supported(&a, kCpu) != ATTUNE_INVALID_ARGUMENT) ++wrong;
        if (std::string(attune_last_error()).find(std::to_string(1000000 + t)) == std::string::npos) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Threads, PoolsOfAllSizesMatchTheOracle) {
  const std::vector<cases::Case> picked = some_cases();
  for (const int32_t count : {1, 2, 3, 8}) {
    const ThreadCount pool(count);
    int32_t used = 0;
    ASSERT_ATTUNE_OK(attune_get_num_threads(&used));
    EXPECT_EQ(used, count);
    for (size_t i = 0; i < picked.size(); i += 2) {
      const cases::Report report = cases::run_case(picked[i]);
      EXPECT_TRUE(report.passed()) << count << " threads: " << picked[i].name << ": " << report.failure;
    }
  }
}

std::vector<std::byte> bits_with(int32_t threads, const cases::Row& row) {
  const ThreadCount pool(threads);
  cases::Problem problem(make_case(row));
  const attune_attention a = problem.device();
  plan_and_run(a);
  std::vector<std::byte> bits = gather(a.out);
  for (const attune_tensor& t : {a.lse, a.max_logits}) {
    const std::vector<std::byte> more = gather(t);
    bits.insert(bits.end(), more.begin(), more.end());
  }
  return bits;
}

// With batch_invariant bits do not depend on the number of threads. Without they may, where a sequence is cut; for one
// number they are the same every time.
TEST(Threads, TheirNumberChangesBitsOnlyWithoutBatchInvariant) {
  bool differ = false;
  const cases::Row common(R"("max_logits": true, "head_dim": [64, 64], "heads": [4, 2])");
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    for (const char* what :
         {R"("kv": "paged", "seqlens_q": [1, 2, 1], "seqlens_kv": [5300, 1500, 70], "causal": true)",
          R"("kv": "paged", "seqlens_kv": [4000, 9], "cache": {"dtype": "i8", "scales": "token"}, "sinks": "normal")",
          R"("kv": "paged", "new_tokens": true, "causal": true, "seqlens_q": [90, 1, 9], "seqlens_kv": [2030, 700, 0])",
          R"("seqlens_q": [150, 3], "seqlens_kv": [150, 2000], "causal": true)",
          R"("heads": [4, 1], "kv": "slots", "seqlens_q": [2, 1], "sparse": {"topk": 3000, "slots": 4000})"}) {
      const cases::Row row = common.set("dtype", dtype).with(what), careful = row.set("batch_invariant", true);
      const std::vector<std::byte> invariant = bits_with(1, careful);
      const std::vector<std::byte> one = bits_with(1, row);
      for (const int32_t threads : {2, 3}) {
        EXPECT_EQ(bits_with(threads, careful), invariant) << threads << " " << row.text();
        const std::vector<std::byte> bits = bits_with(threads, row);
        EXPECT_EQ(bits_with(threads, row), bits) << threads << " " << row.text();
        differ |= bits != one;
      }
    }
  }
  EXPECT_TRUE(differ) << "no sequence was cut: this shows nothing";
}

// Long enough that an item walks several KV heads together (their rows follow each other in NHD) and that items are
// split.
TEST(Threads, SplitAndWalkKvHeadsTogetherAsTheOracleSays) {
  const cases::Row common(R"("name": "long", "heads": [10, 5], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged",
      "seqlens_q": [1, 2, 1], "seqlens_kv": [3300, 1500, 70], "causal": true)");
  for (const int32_t count : {1, 3}) {
    const ThreadCount pool(count);
    for (const char* cache :
         {R"("cache": {"page_size": 16})", R"("cache": {"dtype": "e4m3", "scales": "head"})",
          R"("cache": {"dtype": "i8", "scales": "token"})", R"("cache": {"dtype": "f16", "page_size": 5})"}) {
      for (const char* window : {"", R"("window": [700, 0])"}) {
        const cases::Case c = make_case(common.with(window).with(cache));
        const cases::Report report = cases::run_case(c);
        EXPECT_TRUE(report.passed()) << count << " threads, cache " << cache << ": " << report.failure;
      }
    }
  }
}

// With batch_invariant the bits depend on nothing but the sequence: not on the number of threads either.
TEST(Threads, DoNotChangeTheBitsOfABatchInvariantRun) {
  const cases::Row common(R"("name": "threads", "dtype": "bf16", "kv": "paged",
      "seqlens_kv": [900, 3, 64, 120, 65, 7], "batch_invariant": true)");
  for (const char* heads : {R"("heads": [4, 1])", R"("heads": [8, 8])"}) {
    cases::Problem problem(make_case(common.with(heads)));
    const attune_attention a = problem.device();
    std::vector<std::byte> first;
    for (const int32_t count : {1, 2, 5}) {
      const ThreadCount pool(count);
      plan_and_run(a);
      if (first.empty()) first = gather(a.out);
      EXPECT_EQ(gather(a.out), first) << count << " threads, " << heads;
    }
  }
}

TEST(Threads, OfTheCallerMayChangeThePoolAtAnyTime) {
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int32_t n = 1; !stop; n = n % 4 + 1) attune_set_num_threads(n);
  });
  const std::vector<cases::Case> picked = some_cases();
  for (size_t i = 0; i < picked.size(); i += 3) {
    const cases::Report report = cases::run_case(picked[i]);
    EXPECT_TRUE(report.passed()) << picked[i].name << ": " << report.failure;
  }
  stop = true;
  changer.join();
  EXPECT_ATTUNE_OK(attune_set_num_threads(0));
}

// A server may fork after it has used the library: the child's pool has none of the parent's threads.
TEST(Fork, AChildComputesTheSame) {
  const std::vector<cases::Case> picked = some_cases();
  const cases::Case& spec = picked.front();
  ASSERT_TRUE(cases::run_case(spec).passed());
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    const ThreadCount pool(3);
    std::exit(cases::run_case(spec).passed() ? 0 : 1);  // waits for the threads of its pool, and no others
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST(Threads, NumberIsChecked) {
  EXPECT_EQ(attune_set_num_threads(-1), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find("num_threads"), std::string::npos);
  EXPECT_EQ(attune_get_num_threads(nullptr), ATTUNE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attune::tests
