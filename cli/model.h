// SPDX-License-Identifier: Apache-2.0
// Models as data: the geometry of one attention layer, and what it adds to plain attention.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attune/attune.h"

namespace attune::cli {

// What a KV cache stores. kMla656: 656 bytes a token, e4m3 with scales beside a bf16 rope part (DeepSeek).
enum class KvDtype { kBf16, kFp16, kFp32, kE4m3, kInt8, kMla656 };
const char* kv_dtype_name(KvDtype dtype);
// Throws UserError for an unknown name.
KvDtype kv_dtype_from_name(std::string_view name);
// Type of q, k, v and out beside such a cache.
attune_dtype activation_dtype(KvDtype dtype);
int64_t kv_element_size(KvDtype dtype);

enum class ModelKind {
  kDecoder,         // grouped-query attention over a paged cache
  kMla,             // absorbed MLA: V is the first columns of K
  kSparseMla,       // the same over topk chosen tokens
  kEncoderDecoder,  // encoder self attention, decoder self attention, cross attention
};

struct RopeSpec {
  attune_rope_style style = ATTUNE_ROPE_LINEAR;
  int64_t dim = 0, offset = 0;
  bool interleaved = false;
  double theta = 10000, scale = 1, mscale = 1, beta_fast = 32, beta_slow = 1, low_freq_factor = 1, high_freq_factor = 4;
  int64_t max_position = 0;
};

struct Model {
  std::string name, title;
  ModelKind kind = ModelKind::kDecoder;
  int64_t num_layers = 0, num_heads_q = 0, num_heads_kv = 0, head_dim_qk = 0, head_dim_v = 0;
  int64_t max_context = 0;             // trained length
  double softmax_scale = 0;            // 0: 1 / sqrt(head_dim_qk)
  double softcap = 0;                  // 0: none
  std::vector<int64_t> windows = {0};  // of the layer kinds, in turn: keys that a query sees, itself included; 0: all
  bool alibi = false, sinks = false;
  std::optional<RopeSpec> rope;
  int64_t topk = 0;                             // kSparseMla
  int64_t index_heads = 0, index_head_dim = 0;  // of the indexer that chooses them; 0: the replay chooses by itself
  int64_t t5_num_buckets = 0, t5_max_distance = 0;
  KvDtype kv_dtype = KvDtype::kBf16;  // what the model is usually served with

  bool is_mla() const { return kind == ModelKind::kMla || kind == ModelKind::kSparseMla; }
  // softmax_scale with its default resolved.
  double scale() const;
  // Bytes that the cache of this layer holds for a token, scales included; what the indexer keeps beside it is not.
  int64_t kv_bytes_per_token(KvDtype dtype) const;
  // The indexer's: codes of a byte and a scale.
  int64_t index_bytes_per_token() const { return index_heads > 0 ? index_head_dim + 4 : 0; }
};

// Reads a model description; source is named in errors. Throws UserError.
Model parse_model(std::string_view json, const std::string& source);
// A built-in model by name, or a file (anything with a '/' or ending in ".json"). An unknown name lists the known ones.
Model load_model(const std::string& name_or_path);
// One of `ways` tensor-parallel parts: fewer heads. Throws UserError where the heads do not divide.
Model shard(const Model& model, int64_t ways);
// Throws UserError where the model cannot be served from such a cache.
void require_kv_dtype(const Model& model, KvDtype dtype);
// All built-in models by name.
std::vector<Model> builtin_models();
// "decoder", "mla", "sparse-mla", "encoder-decoder".
const char* model_kind_name(ModelKind kind);
const char* rope_style_name(attune_rope_style style);

}  // namespace attune::cli
