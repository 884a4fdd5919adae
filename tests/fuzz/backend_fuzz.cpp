// SPDX-License-Identifier: Apache-2.0
// Random valid cases on every instruction set of this machine: each against the oracle, and so against each other.
#include <cstdio>
#include <cstdlib>

#include "cases/compare.h"
#include "cpu/kernels.h"
#include "fuzz.h"

int64_t fuzz_default_iterations() { return 150; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attune::fuzz::Input input(data, size);
  const uint64_t seed = input.word();
  const auto kind = input.choose(10);
  const attune::cases::Case spec = kind < 2    ? attune::cases::random_indexer_case(seed)
                                   : kind == 2 ? attune::cases::random_mla_case(seed)
                                   : kind == 3 ? attune::cases::random_backward_case(seed)
                                               : attune::cases::random_case(seed);
  int count = 0;
  const char* const* names = attune::cpu::isa_names(&count);
  for (int i = 0; i < count; ++i) {
    attune::cpu::force_isa(names[i]);
    const attune::cases::Report report = attune::cases::run_case(spec);
    if (report.passed()) continue;
    std::fprintf(stderr, "%s on %s: %s\n", spec.name.c_str(), names[i], report.failure.c_str());
    std::abort();
  }
  attune::cpu::force_isa(nullptr);
  return 0;
}
