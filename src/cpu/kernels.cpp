// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel table: the best that the machine runs, or the one that ATTUNE_CPU_ISA or force_isa() names.
#include "cpu/kernels.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include <hwy/targets.h>

#include "core/status.h"
#include "cpu/kernels_targets.h"

namespace attune::cpu {
namespace {

constexpr int kMaxTables = 8;

// The tables of this binary (built), and those of them that this machine runs (tables), best first, with public names.
struct Registry {
  BuiltIsa built[kMaxTables];
  int built_count = 0;
  KernelTable tables[kMaxTables];
  const char* names[kMaxTables];
  int count = 0;
  // The best table, with bf16 products only where they are fast; one that is named has all that it can.
  KernelTable by_default;
  const KernelTable* preferred = &by_default;

  Registry() {
    int num_targets = 0;
    const TargetTable* targets = target_tables(&num_targets);
    const int64_t supported = hwy::SupportedTargets();
    for (int i = 0; i < num_targets; ++i) {
      // The last one is the baseline. It always runs: a CPU without it could not run this binary.
      const bool runs_here = (targets[i].target & supported) != 0 || i == num_targets - 1;
      if (targets[i].target == HWY_AVX3) {
        KernelTable table = *targets[i].table;
        add(table, "AVX3+AVX512BF16", runs_here && use_avx512bf16(&table));
      }
      add(*targets[i].table, hwy::TargetName(targets[i].target), runs_here);
    }
    by_default = tables[0];
    by_default.fast_bf16 = by_default.fast_bf16 && has_fast_bf16();
    if (const char* wanted = std::getenv("ATTUNE_CPU_ISA"); wanted != nullptr && *wanted != '\0') {
      if (const KernelTable* table = find(wanted)) {
        preferred = table;
      } else {
        log_unknown(wanted);
      }
    }
  }

  void add(const KernelTable& table, const char* name, bool runs_here) {
    built[built_count++] = {name, runs_here};
    if (!runs_here) return;
    tables[count] = table;
    tables[count].isa = name;
    names[count] = name;
    ++count;
  }

  const KernelTable* find(const char* isa) const {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(names[i], isa) == 0) return &tables[i];
    }
    return nullptr;
  }

  void log_unknown(const char* wanted) const {
    std::string message = std::string("ATTUNE_CPU_ISA=") + wanted + " is not one of";
    for (int i = 0; i < count; ++i) message += std::string(" ") + names[i];
    log_message(ATTUNE_LOG_WARNING, message);
  }
};

const Registry& registry() {
  static const Registry instance;
  return instance;
}

std::atomic<const KernelTable*> forced_table{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* forced = forced_table.load(std::memory_order_acquire);
  return forced != nullptr ? *forced : *registry().preferred;
}

const char* const* isa_names(int* count) {
  *count = registry().count;
  return registry().names;
}

const BuiltIsa* built_isas(int* count) {
  *count = registry().built_count;
  return registry().built;
}

const KernelTable* kernels_for(const char* isa) { return isa != nullptr ? registry().find(isa) : nullptr; }

bool force_isa(const char* isa) {
  const KernelTable* table = kernels_for(isa);
  if (isa != nullptr && table == nullptr) return false;
  forced_table.store(table, std::memory_order_release);
  return true;
}

}  // namespace attune::cpu
