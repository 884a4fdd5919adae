// SPDX-License-Identifier: Apache-2.0
// Running the case table on a GPU for a kernel by itself: every case that it covers, against the oracle, twice with the
// same bits. Tests derive from CudaCases.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cases/cuda_memory.h"
#include "cuda/kernel.h"
#include "cuda_fixture.h"
#include "dispatch/registry.h"
#include "picked_cases.h"
#include "support.h"

namespace attune::cuda {

using tests::keep_picked, tests::picks_cases;

// What is tested.
class CaseSubject {
 public:
  virtual ~CaseSubject() = default;
  // Every way to run the problem; none where it is not covered.
  virtual std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const = 0;
  // What those will compile.
  virtual std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const = 0;
};

class CudaCases : public CudaFixture {
 protected:
  static std::vector<cases::Case> table_and_random_cases(int random) {
    std::vector<cases::Case> list = cases::all_cases();
    for (int seed = 0; seed < random; ++seed) list.push_back(cases::random_case(static_cast<uint64_t>(seed)));
    keep_picked(list);
    return list;
  }

  // Compiles what the cases need, side by side.
  static void warm_all(const std::vector<cases::Case>& list, const CaseSubject& subject) {
    std::vector<KernelSpec> specs;
    for (const cases::Case& spec : list) {
      cases::Problem problem(spec);
      const Problem p = make_problem(problem.host(), Data::kRequired);
      for (KernelSpec& kernel : subject.kernels(problem.host(), p)) specs.push_back(std::move(kernel));
    }
    warm_or_precompile(specs);
  }

  // "" if the case agrees with the oracle, or is not covered.
  static std::string check(const cases::Case& spec, const CaseSubject& subject, const Stream& stream,
                           std::atomic<int>& ran) {
    cases::CudaMemory memory(kDevice);
    cases::Problem problem(spec, memory);
    problem.arena().upload();
    const attune_attention a = problem.device();
    const Problem p = make_problem(a, Data::kRequired);
    const auto plans = subject.plans(a, p);
    if (plans.empty()) return "";
    const cases::Expected expected = cases::evaluate(problem);
    ++ran;
    for (const auto& plan : plans) {
      if (std::string failure = check_plan(*plan, p, problem, expected, memory, stream); !failure.empty())
        return failure + " (" + plan->describe() + ")";
    }
    return "";
  }

  static std::string check_plan(const KernelPlan& plan, const Problem& p, cases::Problem& problem,
                                const cases::Expected& expected, cases::CudaMemory& memory, const Stream& stream) {
    cases::Workspace workspace(memory, plan.workspace_size());
    std::vector<std::vector<std::byte>> first;
    for (int i = 0; i < 2; ++i) {
      problem.arena().upload();  // appending changes the cache
      plan.schedule(p, workspace.buffer.device(), stream.handle());
      plan.run(p, workspace.buffer.device(), stream.handle());
      stream.synchronize();
      std::vector<std::vector<std::byte>> bytes;
      for (const auto& buffer : problem.arena().buffers()) bytes.push_back(buffer->download());
      if (i > 0 && bytes != first) return "two runs differ";
      first = std::move(bytes);
    }
    if (const std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;
    return cases::compare(problem, expected).failure;
  }

  // Checks all cases, side by side because the oracle takes its time; reports what fails. Returns how many were
  // covered.
  static int check_all(const std::vector<cases::Case>& list, const CaseSubject& subject) {
    if (precompiles()) return static_cast<int>(list.size());
    constexpr unsigned kMaxThreads = 16;
    std::atomic<int> ran{0};
    std::atomic<size_t> next{0};
    std::vector<std::string> failures(list.size());
    std::vector<std::thread> threads;
    const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads);
    for (unsigned t = 0; t < count; ++t) {
      threads.emplace_back([&] {
        const Stream stream(kDevice);
        for (size_t i = next++; i < list.size(); i = next++) {
          try {
            failures[i] = check(list[i], subject, stream, ran);
          } catch (const std::exception& e) {
            failures[i] = e.what();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < list.size(); ++i) EXPECT_EQ(failures[i], "") << list[i].name;
    return ran;
  }

  // What of the list is picked; all of it must be covered.
  static void check_all_of(std::vector<cases::Case> list, const CaseSubject& subject) {
    keep_picked(list);
    warm_all(list, subject);
    EXPECT_EQ(check_all(list, subject), static_cast<int>(list.size()));
  }
};

}  // namespace attune::cuda
