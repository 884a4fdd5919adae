// SPDX-License-Identifier: Apache-2.0
// Planning and warming without data, without a GPU: the kernels are those that a call with data gets.
#include <map>
#include <string>
#include <vector>

#include "cuda/attention/prologue.h"
#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "cuda/ops/ops.h"
#include "dispatch/registry.h"
#include "support.h"

namespace attune::cuda {
namespace {

// Of each CUDA kernel: what it says of the problem, and the launches before it.
std::map<std::string, std::string> answers(const attune_attention& a) {
  const Problem p = make_problem(a, Data::kOptional);
  const Traits traits = traits_of(p, a);
  std::map<std::string, std::string> all;
  for (int i = 0; i < kernel_count(); ++i) {
    const Kernel& k = kernel_at(i);
    if (k.device_type != ATTUNE_DEVICE_CUDA || !k.coverage.difference(traits).empty()) continue;
    std::string answer = k.refusal != nullptr ? k.refusal(p) : "";
    if (answer.empty()) {
      for (const PrepareProblem& op : attention::launches_before(p, nullptr)) answer += spec_name(kernel_of(op)) + "; ";
      if (&k == &mla_kernel()) answer += spec_name(mla::choose_config(p, 132).main_kernel());
    }
    all[k.name] = answer;
  }
  return all;
}

void expect_the_same_without_data(const cases::Case& spec) {
  cases::Problem problem(spec);
  problem.arena().upload();
  attune_attention a = problem.device();
  // Whose tokens dense keys are shows in their table's address, so without data they are q's.
  if (a.cu_seqlens_kv.shape[0] == a.cu_seqlens_q.shape[0]) a.cu_seqlens_kv.data = a.cu_seqlens_q.data;
  const auto with_data = answers(a);
  for (auto& [name, tensor] : cases::tensors_of(a)) tensor->data = nullptr;
  EXPECT_EQ(answers(a), with_data) << spec.name;
}

TEST(CudaWithoutData, GetsTheSameKernels) {
  for (const cases::Case& spec : cases::all_cases()) expect_the_same_without_data(spec);
}

}  // namespace
}  // namespace attune::cuda
