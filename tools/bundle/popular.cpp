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

namespace attune::bundle {
namespace {

using Json = nlohmann::ordered_json;

// One way to serve: dtypes, and how many sequences of which length.
struct Serving {
  attune_dtype activations, cache;
  int64_t batch, keys, queries;
};

struct Dtypes {
  attune_dtype activations, cache;
};
constexpr Dtypes kDtypes[] = {{ATTUNE_BFLOAT16, ATTUNE_BFLOAT16},
                              {ATTUNE_FLOAT16, ATTUNE_FLOAT16},
                              {ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3},
                              {ATTUNE_BFLOAT16, ATTUNE_INT8}};
constexpr int64_t kBatches[] = {1, 2, 4, 16, 64, 128};
constexpr int64_t kKeys[] = {512, 1024, 4096, 8192, 32768, 131072};
constexpr int64_t kPageSize = 64;
constexpr int64_t kMostHeadDim = 256;
constexpr int kPortableSms = 108;  // of an A100

attune_tensor tensor(attune_dtype dtype, std::initializer_list<int64_t> shape) {
  return attune_dense_tensor(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.begin());
}

void set_cache(attune_attention& a, const PopularModel& m, const Serving& s) {
  const int64_t pages = (s.keys + kPageSize - 1) / kPageSize;
  a.cache.k = tensor(s.cache, {s.batch * pages, kPageSize, m.num_heads_kv, m.head_dim_qk});
  a.cache.v = tensor(s.cache, {s.batch * pages, kPageSize, m.num_heads_kv, m.head_dim_v});
  if (s.cache == ATTUNE_INT8) a.cache.k_scale = tensor(ATTUNE_FLOAT32, {s.batch * pages, kPageSize, m.num_heads_kv});
  if (s.cache == ATTUNE_FLOAT8_E4M3) a.cache.k_scale = tensor(ATTUNE_FLOAT32, {m.num_heads_kv});
  a.cache.v_scale = a.cache.k_scale;
  a.cache.page_table = tensor(ATTUNE_INT32, {s.batch, pages});
  a.seqused_kv = tensor(ATTUNE_INT32, {s.batch});
}

// ragged: sequences by cu_seqlens, as engines with mixed batches pass them.
attune_attention cross_call(const PopularModel& m, const Serving& s, bool ragged) {
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  if (ragged) {
    a.q = tensor(s.activations, {s.batch * s.queries, m.num_heads_q, m.head_dim_qk});
    a.out = tensor(s.activations, {s.batch * s.queries, m.num_heads_q, m.head_dim_v});
    a.cu_seqlens_q = tensor(ATTUNE_INT32, {s.batch + 1});
    a.max_seqlen_q = s.queries;
  } else {
    a.q = tensor(s.activations, {s.batch, s.queries, m.num_heads_q, m.head_dim_qk});
    a.out = tensor(s.activations, {s.batch, s.queries, m.num_heads_q, m.head_dim_v});
  }
  set_cache(a, m, s);
  a.softcap = static_cast<float>(m.softcap);
  return a;
}

attune_attention self_call(const PopularModel& m, const Serving& s, bool ragged) {
  attune_attention a = cross_call(m, s, ragged);
  a.causal = 1;
  if (m.window > 0) a.window_left = m.window - 1;
  if (m.alibi) a.alibi_slopes = tensor(ATTUNE_FLOAT32, {m.num_heads_q});
  if (m.sinks) a.sinks = tensor(ATTUNE_FLOAT32, {m.num_heads_q});
  if (m.t5_buckets > 0) {
    a.t5_bias = tensor(ATTUNE_FLOAT32, {m.num_heads_q, m.t5_buckets});
    a.t5_max_distance = m.t5_max_distance;
  }
  return a;
}

void set_rows(attune_attention& a, const PopularModel& m, const Serving& s) {
  const int heads = a.q.rank - 2, dim = a.q.rank - 1;
  int64_t shape[ATTUNE_MAX_RANK];
  std::copy(a.q.shape, a.q.shape + a.q.rank, shape);
  shape[heads] = m.num_heads_kv;
  a.k = attune_dense_tensor(nullptr, s.activations, a.q.rank, shape);
  shape[dim] = m.head_dim_v;
  a.v = attune_dense_tensor(nullptr, s.activations, a.q.rank, shape);
}

// A chunk of a prompt: the tokens before it in the cache, its own beside it.
attune_attention chunk_call(const PopularModel& m, const Serving& s) {
  attune_attention a = self_call(m, s, true);
  set_rows(a, m, s);
  return a;
}

// The same over vLLM's x-packed pages.
attune_attention packed_chunk_call(const PopularModel& m, const Serving& s) {
  attune_attention a = chunk_call(m, s);
  const int64_t x = a.cache.k.dtype == s.activations ? 8 : 16;
  const int64_t pages = a.cache.k.shape[0];
  a.cache.layout = ATTUNE_KV_XPACKED;
  a.cache.k = tensor(s.cache, {pages, m.num_heads_kv, m.head_dim_qk / x, kPageSize, x});
  a.cache.v = tensor(s.cache, {pages, m.num_heads_kv, m.head_dim_v, kPageSize});
  if (s.cache == ATTUNE_INT8)
    a.cache.k_scale = a.cache.v_scale = tensor(ATTUNE_FLOAT32, {pages, m.num_heads_kv, kPageSize});
  return a;
}

// A whole prompt, without a cache.
attune_attention prompt_call(const PopularModel& m, const Serving& s) {
  attune_attention a = chunk_call(m, s);
  a.cache = attune_kv_cache{};
  a.seqused_kv = attune_tensor{};
  a.cu_seqlens_kv = a.cu_seqlens_q;
  return a;
}

// A whole prompt whose queries, keys and values are e4m3 with scales.
attune_attention codes_call(const PopularModel& m, const Serving& s) {
  attune_attention a = prompt_call(m, {ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E4M3, s.batch, s.keys, s.queries});
  a.out.dtype = ATTUNE_BFLOAT16;
  a.prologue.qkv_scale = tensor(ATTUNE_FLOAT32, {3});
  return a;
}

// With RoPE and append inside.
attune_attention fused_call(const PopularModel& m, const Serving& s, bool ragged) {
  attune_attention a = self_call(m, s, ragged);
  set_rows(a, m, s);
  a.prologue.append = 1;
  if (m.rope_dim > 0) {
    a.prologue.rope_cos_sin = tensor(ATTUNE_FLOAT32, {s.keys + s.queries, m.rope_dim});
    a.prologue.rope_offset = m.rope_offset;
    a.prologue.rope_interleaved = m.rope_interleaved ? 1 : 0;
  }
  return a;
}

// These operations are checked as for a run, so their tensors need addresses; nothing is there.
attune_tensor placed(attune_tensor t, int64_t place) {
  t.data = reinterpret_cast<void*>(place << 40);
  return t;
}

attune_kv_cache placed(attune_kv_cache c) {
  c.k = placed(c.k, 1);
  c.v = placed(c.v, 2);
  if (c.k_scale.dtype != ATTUNE_DTYPE_NONE) c.k_scale = placed(c.k_scale, 3), c.v_scale = placed(c.v_scale, 4);
  c.page_table = placed(c.page_table, 5);
  return c;
}

// The prologue of prompts: RoPE in place, and append.
attune_qkv_prepare prepare_call(const PopularModel& m, const Serving& s) {
  const attune_attention a = fused_call(m, s, true);
  attune_qkv_prepare op;
  attune_qkv_prepare_init(&op, sizeof(op));
  op.q = op.q_out = placed(a.q, 6);
  op.k = placed(a.k, 7);
  op.v = placed(a.v, 8);
  op.cu_seqlens_q = placed(a.cu_seqlens_q, 9);
  op.seqused_kv = placed(a.seqused_kv, 10);
  op.cache = placed(a.cache);
  op.prologue = a.prologue;
  if (m.rope_dim > 0) op.prologue.rope_cos_sin = placed(a.prologue.rope_cos_sin, 11);
  return op;
}

attune_cache_op append_call(const PopularModel& m, const Serving& s) {
  const attune_attention a = fused_call(m, s, true);
  attune_cache_op op;
  attune_cache_op_init(&op, sizeof(op));
  op.kind = ATTUNE_CACHE_APPEND;
  op.k = placed(a.k, 7);
  op.v = placed(a.v, 8);
  op.cu_seqlens = placed(a.cu_seqlens_q, 9);
  op.seqused_kv = placed(a.seqused_kv, 10);
  op.cache = placed(a.cache);
  return op;
}

// MLA: one head, V is part of K.
attune_kv_cache latent_cache(const PopularModel& m, const Serving& s) {
  const int64_t pages = s.batch * ((s.keys + kPageSize - 1) / kPageSize);
  attune_kv_cache c{};
  if (m.packed_cache) {
    c.format = ATTUNE_KV_MLA_656;
    c.layout = ATTUNE_KV_BYTES;
    c.k = placed(tensor(ATTUNE_UINT8, {pages, kPageSize, 656}), 1);
  } else {
    c.k = placed(tensor(s.cache, {pages, kPageSize, 1, m.head_dim_qk}), 1);
  }
  c.page_table = placed(tensor(ATTUNE_INT32, {s.batch, pages / s.batch}), 5);
  return c;
}

attune_qkv_prepare latent_prepare(const PopularModel& m, const Serving& s) {
  attune_qkv_prepare op;
  attune_qkv_prepare_init(&op, sizeof(op));
  op.q = op.q_out = placed(tensor(s.activations, {s.batch * s.queries, m.num_heads_q, m.head_dim_qk}), 6);
  op.k = placed(tensor(s.activations, {s.batch * s.queries, 1, m.head_dim_qk}), 7);
  op.cu_seqlens_q = placed(tensor(ATTUNE_INT32, {s.batch + 1}), 9);
  op.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 10);
  op.cache = latent_cache(m, s);
  op.prologue.append = 1;
  op.prologue.rope_cos_sin = placed(tensor(ATTUNE_FLOAT32, {s.keys + s.queries, m.rope_dim}), 11);
  op.prologue.rope_offset = m.rope_offset;
  op.prologue.rope_interleaved = m.rope_interleaved ? 1 : 0;
  return op;
}

attune_cache_op latent_cache_op(const PopularModel& m, const Serving& s, attune_cache_op_kind kind) {
  attune_cache_op op;
  attune_cache_op_init(&op, sizeof(op));
  op.kind = kind;
  op.k = placed(tensor(s.activations, {s.batch * s.queries, 1, m.head_dim_qk}), 7);
  op.cu_seqlens = placed(tensor(ATTUNE_INT32, {s.batch + 1}), 9);
  op.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 10);
  op.cache = latent_cache(m, s);
  return op;
}

constexpr int64_t kTopk = 2048;

// The index heads of DeepSeek V3.2, whose layers share their shapes; ragged: by cu_seqlens.
attune_indexer indexer_call(int64_t batch, int64_t queries, int64_t keys, bool ragged) {
  constexpr int64_t kHeads = 64, kHeadDim = 128;
  const int64_t pages = (keys + kPageSize - 1) / kPageSize, rows = batch * queries;
  attune_indexer op;
  attune_indexer_init(&op, sizeof(op));
  op.causal = 1;
  op.q = tensor(ATTUNE_FLOAT8_E4M3, {rows, kHeads, kHeadDim});
  op.q_scale = op.weights = tensor(ATTUNE_FLOAT32, {rows, kHeads});
  if (ragged) op.cu_seqlens_q = tensor(ATTUNE_INT32, {batch + 1});
  op.seqused_kv = tensor(ATTUNE_INT32, {batch});
  op.cache.k = tensor(ATTUNE_FLOAT8_E4M3, {batch * pages, kPageSize, 1, kHeadDim});
  op.cache.k_scale = tensor(ATTUNE_FLOAT32, {batch * pages, kPageSize, 1});
  op.cache.page_table = tensor(ATTUNE_INT32, {batch, pages});
  op.indices = tensor(ATTUNE_INT32, {rows, kTopk});
  return op;
}

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

void add_prompt(const attune_attention& a, const Gpu& gpu, Kernels& kernels) {
  const Problem any = make_problem(a, Data::kOptional);
  const Kernel& row = gpu.has_wgmma() ? cuda::prefill::kernel_for(any) : cuda::prefill_mma_kernel();
  const std::optional<Problem> p = covered(row, any, a);
  if (!p) return;
  if (!gpu.has_wgmma())
    return add(cuda::prefill_mma::choose_config(*p, gpu.shape.shared_bytes_per_sm).kernel(), kernels);
  const cuda::prefill::Config c = cuda::prefill::choose_config(*p, gpu.shape.num_sms);
  add(c.main_kernel(), kernels);
  add(c.schedule_kernel(), kernels);
}

// Prompts beside decoding.
void add_mixed(const attune_attention& a, const Gpu& gpu, Kernels& kernels) {
  const std::optional<Problem> p = covered(cuda::mixed_kernel(), make_problem(a, Data::kOptional), a);
  if (!p || !gpu.has_wgmma()) return;
  for (const cuda::KernelSpec& spec : cuda::mixed::kernels_of(*p, gpu.shape)) add(spec, kernels);
}

// Decoding over pages of a 16-bit cache, or prompts whose queries have lists of rows. Decoding of all heads over packed
// caches is compiled when it is asked for.
attune_attention latent_call(const PopularModel& m, const Serving& s) {
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  const int64_t rows = s.batch * s.queries;
  a.q = placed(tensor(s.activations, {rows, m.num_heads_q, m.head_dim_qk}), 1);
  a.out = placed(tensor(s.activations, {rows, m.num_heads_q, m.head_dim_v}), 2);
  a.head_dim_v = m.head_dim_v;
  a.cu_seqlens_q = placed(tensor(ATTUNE_INT32, {s.batch + 1}), 3);
  if (m.packed_cache) {
    a.k = placed(tensor(s.activations, {s.keys, 1, m.head_dim_qk}), 4);
    a.cu_seqlens_kv = a.cu_seqlens_q;
    a.indices = placed(tensor(ATTUNE_INT32, {rows, kTopk}), 5);
  } else {
    a.cache = latent_cache(m, s);
    a.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 6);
    a.causal = 1;
  }
  return a;
}

// The same with the step's own tokens beside the cache, RoPE and append.
attune_attention fused_latent_call(const PopularModel& m, const Serving& s) {
  attune_attention a = latent_call(m, s);
  const attune_qkv_prepare op = latent_prepare(m, s);
  a.k = op.k;
  a.prologue = op.prologue;
  return a;
}

// One token a sequence, on one of so many GPUs that share the query heads.
attune_attention shard_call(const PopularModel& m, const Serving& s, int64_t shards) {
  const int64_t heads = m.num_heads_q / shards;
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  a.q = placed(tensor(s.activations, {s.batch, 1, heads, m.head_dim_qk}), 1);
  a.out = placed(tensor(s.activations, {s.batch, 1, heads, m.head_dim_v}), 2);
  a.head_dim_v = m.head_dim_v;
  a.cache = latent_cache(m, s);
  if (m.packed_cache) {
    a.cache.page_table = {};  // slots are named by the lists
    a.indices = placed(tensor(ATTUNE_INT32, {s.batch, 1, kTopk}), 5);
  } else {
    a.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 6);
    a.causal = 1;
  }
  return a;
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
    if (m.latent) add_latent_rows(m, gpu, kernels);
    if (m.head_dim_v > kMostHeadDim || m.head_dim_qk > kMostHeadDim) continue;
    if (gpu.has_wgmma() && m.t5_buckets == 0 && m.softcap == 0 && m.head_dim_qk <= 128) add_backward(m, kernels);
    add_prompt(codes_call(m, {ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, 2, 512, 512}), gpu, kernels);
    // fp32 is for trying things out, with the commonest shapes.
    if (!m.alibi && m.t5_buckets == 0 && m.softcap == 0 && m.head_dim_qk == m.head_dim_v && m.head_dim_qk <= 128)
      add_prompt(prompt_call(m, {ATTUNE_FLOAT32, ATTUNE_FLOAT32, 2, 512, 512}), gpu, kernels);
    for (const Dtypes& d : kDtypes) {
      // Older models are served with the cache that they were trained with; each 8-bit one would double their share.
      if ((m.alibi || m.t5_buckets > 0) && d.cache != d.activations) continue;
      const Serving prompt{d.activations, d.cache, 2, 512, 512};
      add(cuda::kernel_of(make_qkv_prepare(prepare_call(m, prompt))), kernels);
      add(cuda::kernel_of(make_cache_op(append_call(m, prompt))), kernels);
      // On request only, so far: enough that a build sees what they take.
      if (d.activations == ATTUNE_BFLOAT16 && !m.cross_attention) {
        add_prompt(chunk_call(m, prompt), gpu, kernels);
        add_mixed(chunk_call(m, prompt), gpu, kernels);
        // Engines with such pages serve the commonest shape with them.
        if (m.head_dim_qk == 128 && m.head_dim_v == 128 && m.softcap == 0 && !m.alibi && m.t5_buckets == 0)
          add_prompt(packed_chunk_call(m, prompt), gpu, kernels);
      }
      if (d.cache == ATTUNE_BFLOAT16) add_prompt(prompt_call(m, prompt), gpu, kernels);
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
