// SPDX-License-Identifier: Apache-2.0
#include "popular.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "attune/attune.h"
#include "core/indexer.h"
#include "core/ops.h"
#include "core/status.h"
#include "cuda/attention/prologue.h"
#include "cuda/backward/config.h"
#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "cuda/indexer/indexer.h"
#include "cuda/mixed/mixed.h"
#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "cuda/ops/ops.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/mma.h"
#include "cuda/prefill/prefill.h"
#include "dispatch/registry.h"
#include "popular_calls.h"

namespace attune::bundle {
namespace {

using Json = nlohmann::ordered_json;

struct Dtypes {
  attune_dtype activations, cache;
};
constexpr Dtypes kDtypes[] = {{ATTUNE_BFLOAT16, ATTUNE_BFLOAT16},
                              {ATTUNE_FLOAT16, ATTUNE_FLOAT16},
                              {ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3},
                              {ATTUNE_BFLOAT16, ATTUNE_INT8}};
constexpr int64_t kBatches[] = {1, 2, 4, 16, 64, 128, 512};
constexpr int64_t kKeys[] = {512, 1024, 4096, 8192, 32768, 131072};
// Blocks copy the keys of prompts in pairs: where there is a KV head for each query head, of long ones over a cache,
// and of encoders.
constexpr int64_t kPrompts[] = {512, 8192};
constexpr int64_t kMostHeadDim = 256;
constexpr int kPortableSms = 108;  // of an A100

using Kernels = std::map<std::string, cuda::KernelSpec>;

void add(const cuda::KernelSpec& spec, Kernels& kernels) {
  cuda::KernelSpec& known = kernels.try_emplace(cuda::spec_name(spec), spec).first->second;
  known.shared_bytes = std::max(known.shared_bytes, spec.shared_bytes);
}

// What a GPU is to the choice of kernels.
struct Gpu {
  cuda::decode::DeviceShape shape;
  cuda::Target target;
  bool has_wgmma() const { return target.has(ptx::kWgmma); }
};

// The problem, where the kernel takes it.
std::optional<Problem> covered(const Kernel& row, const Problem& p, const attune_attention& a) {
  if (!row.coverage.difference(traits_of(p, a)).empty() || !row.refusal(p).empty()) return {};
  return p;
}

void add(const attune_attention& a, const Gpu& gpu, Kernels& kernels) {
  const std::optional<Problem> p = covered(cuda::decode_kernel(), make_problem(a, Data::kOptional), a);
  if (!p) return;
  const cuda::decode::Config c = cuda::decode::choose_config(*p, gpu.shape);
  add(c.main_kernel(), kernels);
  if (c.cluster == 0) add(c.schedule_kernel(), kernels);
}

void add_prompt_by_mma(const Problem& p, const Gpu& gpu, Kernels& kernels) {
  const cuda::decode::DeviceShape& shape = gpu.shape;
  add(cuda::prefill_mma::choose_config(p, shape.shared_bytes_per_sm, shape.shared_bytes_per_block).kernel(), kernels);
}

void add_prompt(const attune_attention& a, const Gpu& gpu, Kernels& kernels) {
  const Problem any = make_problem(a, Data::kOptional);
  const Kernel& row = gpu.has_wgmma()                 ? cuda::prefill::kernel_for(any)
                      : any.q.dtype == ATTUNE_FLOAT32 ? cuda::prefill_fp32_mma_kernel()
                                                      : cuda::prefill_mma_kernel();
  const std::optional<Problem> p = covered(row, any, a);
  if (!p) return;
  if (cuda::attention::has_prologue(*p)) add(cuda::kernel_of(cuda::attention::to_prepare(*p, nullptr)), kernels);
  if (!gpu.has_wgmma()) return add_prompt_by_mma(*p, gpu, kernels);
  const cuda::prefill::Config c = cuda::prefill::choose_config(*p, gpu.shape.num_sms);
  add(c.main_kernel(), kernels);
  add(c.schedule_kernel(), kernels);
  if (cuda::prefill::is_short_prompt(*p) && covered(cuda::prefill_mma_kernel(), any, a))
    add_prompt_by_mma(*p, gpu, kernels);
}

// Prompts beside decoding.
void add_mixed(const attune_attention& a, const Gpu& gpu, Kernels& kernels) {
  const std::optional<Problem> p = covered(cuda::mixed_kernel(), make_problem(a, Data::kOptional), a);
  if (!p || !gpu.has_wgmma()) return;
  for (const cuda::KernelSpec& spec : cuda::mixed::kernels_of(*p, gpu.shape)) add(spec, kernels);
}

void add_latent(const attune_attention& a, const Gpu& gpu, Kernels& kernels) {
  const Kernel& row = gpu.has_wgmma() ? cuda::mla_kernel() : cuda::mla_mma_kernel();
  const std::optional<Problem> p = covered(row, make_problem(a, Data::kOptional), a);
  if (!p) return;
  const cuda::mla::Config c =
      gpu.has_wgmma() ? cuda::mla::choose_config(*p, gpu.shape.num_sms)
                      : cuda::mla::choose_mma_config(*p, gpu.shape.num_sms, gpu.shape.shared_bytes_per_block);
  add(c.main_kernel(), kernels);
  add(c.schedule_kernel(), kernels);
  add(c.combine_kernel(), kernels);
  if (cuda::attention::has_prologue(*p)) add(cuda::kernel_of(cuda::attention::to_prepare(*p, nullptr)), kernels);
}

void add_latent_rows(const PopularModel& m, const Gpu& gpu, Kernels& kernels) {
  const Serving s{ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, 2, 512, 512};
  add(cuda::kernel_of(make_qkv_prepare(latent_prepare(m, s))), kernels);
  add(cuda::kernel_of(make_cache_op(latent_cache_op(m, s, ATTUNE_CACHE_APPEND))), kernels);
  add(cuda::kernel_of(make_cache_op(latent_cache_op(m, s, ATTUNE_CACHE_GATHER))), kernels);
  add_latent(latent_call(m, s), gpu, kernels);
  if (!m.packed_cache) {
    add_latent(fused_latent_call(m, s), gpu, kernels);
    const Serving one{s.activations, s.cache, 1, 1024, 1};  // short, and so by blocks of few rows
    add_latent(latent_call(m, one), gpu, kernels);
    add_latent(fused_latent_call(m, one), gpu, kernels);
  }
  add_latent(shard_call(m, s, 8), gpu, kernels);
  const Serving many{s.activations, s.cache, 128, 512, 512};
  if (m.packed_cache) add_latent(shard_call(m, many, 4), gpu, kernels);
}

// Prompts of latent attention see up-projected keys, by as many KV heads as query heads; those of a chunk's context
// without causality.
void add_up_projected(const PopularModel& latent, const Gpu& gpu, Kernels& kernels) {
  PopularModel m = latent;
  m.num_heads_kv = m.num_heads_q, m.head_dim_qk = 128 + m.rope_dim, m.head_dim_v = 128;
  for (const int64_t tokens : kPrompts) {
    attune_attention a = prompt_call(m, {ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, 2, tokens, tokens});
    add_prompt(a, gpu, kernels);
    a.causal = 0;
    add_prompt(a, gpu, kernels);
  }
}

void add_indexers(const Gpu& gpu, Kernels& kernels) {
  for (const int64_t keys : kKeys) {
    const auto add_all = [&](const attune_indexer& op) {
      const IndexerProblem p = make_indexer(op, Data::kOptional);
      for (const cuda::KernelSpec& spec : cuda::kernels_of(p, gpu.shape.num_sms, gpu.target)) add(spec, kernels);
    };
    for (const int64_t batch : kBatches) add_all(indexer_call(batch, 1, keys, false));
    for (const int64_t batch : {1, 4, 32}) add_all(indexer_call(batch, 1, keys, true));
    add_all(indexer_call(4, 512, keys, true));
  }
}

// Fine-tuning in bf16: plain scores, sinks, ALiBi, the softcap of Gemma 2.
void add_backward(const PopularModel& m, Kernels& kernels) {
  cuda::backward::Config c{static_cast<int>(m.head_dim_qk), static_cast<int>(m.head_dim_v), ATTUNE_BFLOAT16};
  c.dq_tiles = 1, c.gradients = kernels::kGradients;
  for (const bool more : {false, true}) {
    c.with_sinks = c.with_dsinks = more && m.sinks;
    c.score = m.alibi ? use::kAlibi : more && m.head_dim_qk == 128 ? use::kSoftcap : 0u;
    for (const cuda::backward::Launch& launch : cuda::backward::launches(c)) add(launch.kernel, kernels);
  }
}

void add_all(const std::vector<PopularModel>& models, const Gpu& gpu, Kernels& kernels) {
  for (const PopularModel& m : models) {
    if (m.latent) add_latent_rows(m, gpu, kernels), add_up_projected(m, gpu, kernels);
    if (m.head_dim_v > kMostHeadDim || m.head_dim_qk > kMostHeadDim) continue;
    if (gpu.has_wgmma() && m.t5_buckets == 0 && m.softcap == 0 && m.head_dim_qk <= 128) add_backward(m, kernels);
    add_prompt(fp8_call(m, {ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, 2, 512, 512}), gpu, kernels);
    // fp32 is for trying things out, with the commonest shapes.
    if (!m.alibi && m.t5_buckets == 0 && m.softcap == 0 && m.head_dim_qk == m.head_dim_v && m.head_dim_qk <= 128)
      add_prompt(prompt_call(m, {ATTUNE_FLOAT32, ATTUNE_FLOAT32, 2, 512, 512}), gpu, kernels);
    for (const Dtypes& d : kDtypes) {
      // Older models are served with the cache that they were trained with; each 8-bit one would double their share.
      if ((m.alibi || m.t5_buckets > 0) && d.cache != d.activations) continue;
      const Serving prompt{d.activations, d.cache, 2, 512, 512}, short_prompt{d.activations, d.cache, 2, 512, 8};
      const Serving long_prompt{d.activations, d.cache, 2, kPrompts[1], kPrompts[1]};
      add(cuda::kernel_of(make_qkv_prepare(prepare_call(m, prompt))), kernels);
      add(cuda::kernel_of(make_cache_op(append_call(m, prompt))), kernels);
      // On request only, so far: enough that a build sees what they take.
      if (d.activations == ATTUNE_BFLOAT16 && !m.cross_attention) {
        add_prompt(chunk_call(m, prompt), gpu, kernels);
        add_prompt(chunk_call(m, short_prompt), gpu, kernels);
        add_prompt(chunk_call(m, long_prompt), gpu, kernels);
        add_mixed(chunk_call(m, prompt), gpu, kernels);
        if (!gpu.has_wgmma()) add_prompt(fused_call(m, prompt, true), gpu, kernels);
        // Engines with such pages serve the commonest shape with them.
        if (m.head_dim_qk == 128 && m.head_dim_v == 128 && m.softcap == 0 && !m.alibi && m.t5_buckets == 0)
          add_prompt(packed_chunk_call(m, prompt), gpu, kernels);
      }
      if (d.cache == ATTUNE_BFLOAT16) {
        add_prompt(prompt_call(m, prompt), gpu, kernels);
        add_prompt(prompt_call(m, short_prompt), gpu, kernels);
        attune_attention encoder = prompt_call(m, long_prompt);
        encoder.causal = 0;
        add_prompt(encoder, gpu, kernels);
      }
      for (const int64_t batch : kBatches) {
        for (const int64_t keys : kKeys) {
          for (const bool ragged : {false, true}) {
            const Serving s{d.activations, d.cache, batch, keys, 1};
            add(self_call(m, s, ragged), gpu, kernels);
            add(fused_call(m, s, ragged), gpu, kernels);
            if (m.cross_attention) add(cross_call(m, s, ragged), gpu, kernels);
          }
        }
      }
    }
  }
  if (std::any_of(models.begin(), models.end(), [](const PopularModel& m) { return m.packed_cache; }))
    add_indexers(gpu, kernels);
}

}  // namespace

std::vector<cuda::KernelSpec> popular_kernels(const std::vector<PopularModel>& models, Code code) {
  Kernels kernels;
  if (code == Code::kHopper) {
    add_all(models, {cuda::decode::DeviceShape(), cuda::Target()}, kernels);
  } else {
    // An A100, and GPUs whose blocks have 99 KiB of shared memory.
    for (const char* name : {"sm_80", "sm_86"}) {
      const cuda::Architecture& like = *cuda::find_architecture(name);
      add_all(models, {cuda::decode::device_shape(like, kPortableSms), cuda::portable_target()}, kernels);
    }
  }
  std::vector<cuda::KernelSpec> list;
  for (auto& [name, spec] : kernels) list.push_back(std::move(spec));
  return list;
}

std::string popular_manifest(const std::vector<cuda::KernelSpec>& kernels, Code code) {
  const cuda::Target target = code == Code::kHopper ? cuda::Target() : cuda::portable_target();
  std::string text = cat("{\n  \"arch\": \"", target.option(), "\",\n  \"kernels\": [\n");
  text += "    {\"source\": \"selftest/saxpy.cu\", \"entries\": [\"saxpy\"], \"defines\": {\"A\": [2, -3]}}";
  for (const cuda::KernelSpec& spec : kernels) {
    Json row = {{"source", spec.source}, {"entries", {spec.entry}}};
    if (spec.shared_bytes > 0) row["dynamic_shared"] = spec.shared_bytes;
    for (const auto& [macro, value] : spec.defines) row["defines"][macro] = std::stoll(value);
    text += ",\n    " + row.dump(-1, ' ');
  }
  return text + "\n  ]\n}\n";
}

}  // namespace attune::bundle
