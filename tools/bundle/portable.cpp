// SPDX-License-Identifier: Apache-2.0
#include "portable.h"

#include <mutex>
#include <set>
#include <string>

#include "attune/attune.h"
#include "core/indexer.h"
#include "core/ops.h"
#include "core/parallel.h"
#include "core/status.h"
#include "cuda/attention/prologue.h"
#include "cuda/backward/config.h"
#include "cuda/decode/config.h"
#include "cuda/indexer/config.h"
#include "cuda/mla/config.h"
#include "cuda/ops/config.h"
#include "cuda/ops/ops.h"
#include "cuda/prefill/mma.h"

namespace attune::bundle {
namespace {

constexpr int64_t kBatch = 64, kPageSize = 64, kPages = 64, kHeadsQ = 32, kHeadsKv = 8, kHeadDim = 128;
constexpr int kSms = 100;

attune_tensor tensor(attune_dtype dtype, std::initializer_list<int64_t> shape) {
  return attune_dense_tensor(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.begin());
}

attune_kv_cache cache_of(attune_dtype dtype) {
  attune_kv_cache c = {};
  c.k = c.v = tensor(dtype, {kBatch * kPages, kPageSize, kHeadsKv, kHeadDim});
  if (dtype == ATTUNE_INT8) c.k_scale = tensor(ATTUNE_FLOAT32, {kBatch * kPages, kPageSize, kHeadsKv});
  if (dtype == ATTUNE_FLOAT8_E4M3) c.k_scale = tensor(ATTUNE_FLOAT32, {kHeadsKv});
  c.v_scale = c.k_scale;
  c.page_table = tensor(ATTUNE_INT32, {kBatch, kPages});
  return c;
}

void add_prologue(attune_dtype dtype, attune_attention& a) {
  a.prologue.append = 1;
  a.prologue.q_bias = tensor(dtype, {kHeadsQ, kHeadDim});
  a.prologue.k_bias = a.prologue.v_bias = tensor(dtype, {kHeadsKv, kHeadDim});
  a.prologue.rope_cos_sin = tensor(ATTUNE_FLOAT32, {kPages * kPageSize, kHeadDim});
}

// A decode step; appends: with new tokens, biases and RoPE.
attune_attention step(attune_dtype dtype, attune_dtype cache, bool appends) {
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  a.q = a.out = tensor(dtype, {kBatch, 1, kHeadsQ, kHeadDim});
  a.cache = cache_of(cache);
  a.seqused_kv = tensor(ATTUNE_INT32, {kBatch});
  a.causal = 1;
  if (!appends) return a;
  a.k = a.v = tensor(dtype, {kBatch, 1, kHeadsKv, kHeadDim});
  add_prologue(dtype, a);
  return a;
}

attune_attention prompt(attune_dtype dtype = ATTUNE_BFLOAT16, int64_t head_dim = kHeadDim) {
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  a.q = a.out = tensor(dtype, {kBatch, kPageSize, kHeadsQ, head_dim});
  a.k = a.v = tensor(dtype, {kBatch, kPageSize, kHeadsKv, head_dim});
  a.causal = 1;
  return a;
}

// A chunk of a prompt: its own tokens behind those of the cache.
attune_attention chunk(attune_dtype cache) {
  attune_attention a = prompt();
  a.cache = cache_of(cache);
  a.seqused_kv = tensor(ATTUNE_INT32, {kBatch});
  return a;
}

// A step of latent attention: over a paged cache, or of lists over packed rows.
attune_attention latent_step(int64_t heads, bool sparse) {
  constexpr int64_t kLatent = 576, kValue = 512;
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  a.q = tensor(ATTUNE_BFLOAT16, {kBatch, 1, heads, kLatent});
  a.out = tensor(ATTUNE_BFLOAT16, {kBatch, 1, heads, kValue});
  a.head_dim_v = kValue;
  if (sparse) {
    a.cache.format = ATTUNE_KV_MLA_656;
    a.cache.layout = ATTUNE_KV_BYTES;
    a.cache.k = tensor(ATTUNE_UINT8, {kBatch * kPages, kPageSize, 656});
    a.indices = tensor(ATTUNE_INT32, {kBatch, 1, 2048});
    return a;
  }
  a.cache.k = tensor(ATTUNE_BFLOAT16, {kBatch * kPages, kPageSize, 1, kLatent});
  a.cache.page_table = tensor(ATTUNE_INT32, {kBatch, kPages});
  a.seqused_kv = tensor(ATTUNE_INT32, {kBatch});
  a.causal = 1;
  return a;
}

// Gradients of plain scores: all of them; dq alone on sm_120, whose dk and dv spill (docs/kernels/backward-mma.md).
cuda::backward::Config gradients(int head_dim, attune_dtype dtype, const cuda::Architecture& to) {
  cuda::backward::Config c{head_dim, head_dim, dtype};
  c.gradients = to.capability >= 120 ? kernels::kGradientDq : kernels::kGradients;
  c.mma = cuda::backward::MmaInstruction::kMmaSync;
  c.limits = {to.shared_per_sm, to.shared_a_block};
  return c;
}

// Gradients of a bias and of T5's, which the wgmma kernel's plans run too.
cuda::backward::Config bias_gradients(attune_dtype dtype, const cuda::Architecture& to) {
  cuda::backward::Config c = gradients(kHeadDim, dtype, to);
  c.gradients = 0;
  c.score = static_cast<int>(use::kBias | use::kT5);
  c.with_dbias = true;
  c.t5_entries = 32;
  return c;
}

// The whole cache at once.
attune_cache_op cache_op(attune_dtype dtype, attune_dtype cache, attune_cache_op_kind kind) {
  attune_cache_op op;
  attune_cache_op_init(&op, sizeof(op));
  op.kind = kind;
  // Addresses of which only the alignment counts.
  const auto at = [](attune_tensor t, uintptr_t place) {
    if (t.rank > 0) t.data = reinterpret_cast<void*>(place << 40);
    return t;
  };
  op.k = at(tensor(dtype, {kBatch * kPages * kPageSize, kHeadsKv, kHeadDim}), 1);
  op.v = at(op.k, 2);
  op.cache = cache_of(cache);
  op.cache.page_table = {};
  op.cache.k = at(op.cache.k, 3), op.cache.v = at(op.cache.v, 4);
  op.cache.k_scale = at(op.cache.k_scale, 5), op.cache.v_scale = at(op.cache.v_scale, 6);
  return op;
}

std::string name_of(const cuda::ModuleSpec& module, const std::string& entry) {
  return cat(module.target.option(), " ", cuda::spec_name({module.source, entry, module.defines, 0}));
}

}  // namespace

std::vector<ManifestEntry> portable_kernels() {
  std::vector<ManifestEntry> list;
  std::set<std::string> names;
  const auto add = [&](const cuda::KernelSpec& spec, const cuda::Target& target) {
    cuda::ModuleSpec module{spec.source, spec.defines, target};
    if (names.insert(name_of(module, spec.entry)).second) list.push_back({std::move(module), {spec.entry}});
  };
  const auto add_step = [&](const attune_attention& a, const cuda::Architecture& to) {
    const Problem p = make_problem(a, Data::kOptional);
    const cuda::decode::Config c = cuda::decode::choose_config(p, cuda::decode::device_shape(to, kSms));
    add(c.main_kernel(), cuda::target_of(to));
    if (&to == &cuda::kArchitectures[0]) add(c.schedule_kernel(), cuda::target_of(to));
  };
  const cuda::Architecture& oldest = cuda::kArchitectures[0];
  for (const attune_dtype cache : {ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_INT8})
    add_step(step(ATTUNE_BFLOAT16, cache, cache == ATTUNE_FLOAT8_E4M3), oldest);
  for (const char* name : {"sm_86", "sm_89", "sm_100", "sm_120"})
    add_step(step(ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, false), *cuda::find_architecture(name));
  for (const char* name : {"sm_80", "sm_120"}) {
    const Problem p = make_problem(prompt(), Data::kOptional);
    const cuda::Architecture& to = *cuda::find_architecture(name);
    add(cuda::prefill_mma::choose_config(p, to.shared_per_sm, to.shared_a_block).kernel(), cuda::target_of(to));
  }
  for (const char* name : {"sm_80", "sm_86", "sm_89", "sm_120"}) {
    for (const attune_dtype cache : {ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_INT8}) {
      const Problem p = make_problem(chunk(cache), Data::kOptional);
      const cuda::Architecture& to = *cuda::find_architecture(name);
      add(cuda::prefill_mma::choose_config(p, to.shared_per_sm, to.shared_a_block).kernel(), cuda::target_of(to));
    }
  }
  const auto add_floats = [&](int64_t head_dim, const char* name) {
    const Problem p = make_problem(prompt(ATTUNE_FLOAT32, head_dim), Data::kOptional);
    const cuda::Architecture& to = *cuda::find_architecture(name);
    add(cuda::prefill_mma::choose_config(p, to.shared_per_sm, to.shared_a_block).kernel(), cuda::target_of(to));
  };
  // Others spill a few numbers of the loop over row blocks (docs/kernels/prefill-fp32.md).
  for (const char* name : {"sm_80", "sm_86", "sm_89"}) add_floats(128, name);
  add_floats(64, "sm_80");
  // What is launched before a chunk with new tokens, biases and RoPE.
  attune_attention fused = chunk(ATTUNE_FLOAT8_E4M3);
  add_prologue(ATTUNE_BFLOAT16, fused);
  for (const char* name : {"sm_80", "sm_86", "sm_89", "sm_100", "sm_120"}) {
    const PrepareProblem before = cuda::attention::to_prepare(make_problem(fused, Data::kOptional), nullptr);
    add(cuda::kernel_of(before), cuda::target_of(*cuda::find_architecture(name)));
  }
  const auto add_gradients = [&](int head_dim, attune_dtype dtype, const char* name) {
    const cuda::Architecture& to = *cuda::find_architecture(name);
    for (const cuda::backward::Launch& launch : cuda::backward::launches(gradients(head_dim, dtype, to)))
      add(launch.kernel, cuda::target_of(to));
  };
  for (const char* name : {"sm_80", "sm_86", "sm_90a", "sm_120"}) add_gradients(128, ATTUNE_FLOAT32, name);
  for (const int head_dim : {64, 256}) add_gradients(head_dim, ATTUNE_FLOAT32, "sm_90a");
  for (const int head_dim : {64, 128}) add_gradients(head_dim, ATTUNE_BFLOAT16, "sm_80");
  for (const char* name : {"sm_80", "sm_86", "sm_90a", "sm_120"}) {
    const cuda::Architecture& to = *cuda::find_architecture(name);
    for (const attune_dtype dtype : {ATTUNE_FLOAT32, ATTUNE_BFLOAT16}) {
      for (const cuda::backward::Launch& launch : cuda::backward::launches(bias_gradients(dtype, to)))
        add(launch.kernel, cuda::target_of(to));
    }
  }
  const cuda::Target target = cuda::target_of(oldest);
  for (const int64_t heads : {16, 128}) {
    for (const bool sparse : {false, true}) {
      const Problem p = make_problem(latent_step(heads, sparse), Data::kOptional);
      for (const char* name : {"sm_80", "sm_86", "sm_120"}) {
        const cuda::Architecture& to = *cuda::find_architecture(name);
        const cuda::mla::Config c = cuda::mla::choose_mma_config(p, kSms, to.shared_a_block);
        add(c.main_kernel(), cuda::target_of(to));
        if (to.capability != oldest.capability) continue;
        add(c.schedule_kernel(), target);
        add(c.combine_kernel(), target);
      }
    }
  }
  for (const attune_cache_op_kind kind : {ATTUNE_CACHE_QUANTIZE, ATTUNE_CACHE_DEQUANTIZE})
    add(cuda::kernel_of(make_cache_op(cache_op(ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, kind))), target);
  for (const cuda::ops::Entry entry : {cuda::ops::Entry::kStore, cuda::ops::Entry::kFetch}) {
    cuda::ops::Config packed;
    packed.entry = entry, packed.format = 656, packed.width = 8, packed.row_type = ATTUNE_BFLOAT16;
    packed.blocks_per_sm = 4;
    add(packed.spec(), target);
  }
  cuda::ops::Config merge;
  merge.entry = cuda::ops::Entry::kMerge, merge.width = 8, merge.lanes = 16;
  merge.row_type = ATTUNE_FLOAT32, merge.out_type = ATTUNE_BFLOAT16;
  add(merge.spec(), target);
  add(cuda::indexer::owners_kernel(), target);
  add(cuda::indexer::ScoresConfig{.exact = true}.kernel(), target);
  IndexerProblem few{};
  add(cuda::indexer::choose_select(few, 1, kSms, target).kernel(), target);
  return list;
}

Ledger compile_portable(const cuda::Nvrtc& nvrtc, const Ledger& known, size_t* compiled,
                        std::vector<std::string>* warnings) {
  const std::vector<ManifestEntry> kernels = portable_kernels();
  Ledger ledger;
  ledger.compiler = nvrtc.version();
  std::mutex mutex;
  run_in_parallel(kernels.size(), [&](size_t i) {
    const ManifestEntry& e = kernels[i];
    std::vector<std::string> options = cuda::compiler_options(e.module), warned;
    const cuda::SourceUnit unit = cuda::read_source(e.module.source, "");
    const std::string code = code_digest(unit, options), name = name_of(e.module, e.entries.at(0));
    std::optional<Resources> resources = recorded(known, nvrtc.version(), name, code);
    const bool compiles = !resources;
    if (compiles) {
      options.push_back("--ptxas-options=-v");
      resources = parse_ptxas_log(nvrtc.compile(unit, options).log, &warned).at(e.entries[0]);
    }
    std::lock_guard lock(mutex);
    if (compiles) ++*compiled;
    ledger.kernels[name] = *resources;
    if (warned.empty()) ledger.code[name] = code;
    for (const std::string& line : warned) warnings->push_back(cat(name, ": ", line));
  });
  return ledger;
}

}  // namespace attune::bundle
