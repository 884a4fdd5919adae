// SPDX-License-Identifier: Apache-2.0
// The calls that serving a model makes, as descriptors for planning: tensors have shapes and no data.
#pragma once

#include "attune/attune.h"
#include "popular.h"

namespace attune::bundle {

// One way to serve: dtypes, and how many sequences of which length.
struct Serving {
  attune_dtype activations, cache;
  int64_t batch, keys, queries;
};

// ragged: sequences by cu_seqlens, as engines with mixed batches pass them.
attune_attention cross_call(const PopularModel& m, const Serving& s, bool ragged);
attune_attention self_call(const PopularModel& m, const Serving& s, bool ragged);
// A chunk of a prompt: the tokens before it in the cache, its own beside it.
attune_attention chunk_call(const PopularModel& m, const Serving& s);
// The same over vLLM's x-packed pages.
attune_attention packed_chunk_call(const PopularModel& m, const Serving& s);
// A whole prompt, without a cache.
attune_attention prompt_call(const PopularModel& m, const Serving& s);
// A whole prompt whose queries, keys and values are e4m3 with scales.
attune_attention fp8_call(const PopularModel& m, const Serving& s);
// With RoPE and append inside.
attune_attention fused_call(const PopularModel& m, const Serving& s, bool ragged);
// The prologue of prompts: RoPE in place, and append.
attune_qkv_prepare prepare_call(const PopularModel& m, const Serving& s);
attune_cache_op append_call(const PopularModel& m, const Serving& s);
attune_qkv_prepare latent_prepare(const PopularModel& m, const Serving& s);
attune_cache_op latent_cache_op(const PopularModel& m, const Serving& s, attune_cache_op_kind kind);
// The index heads of DeepSeek V3.2, whose layers share their shapes; ragged: by cu_seqlens.
attune_indexer indexer_call(int64_t batch, int64_t queries, int64_t keys, bool ragged);
// Decoding over pages of a 16-bit cache, or prompts whose queries have lists of rows. Decoding of all heads over packed
// caches is compiled when it is asked for.
attune_attention latent_call(const PopularModel& m, const Serving& s);
// The same with the step's own tokens beside the cache, RoPE and append.
attune_attention fused_latent_call(const PopularModel& m, const Serving& s);
// One token a sequence, on one of so many GPUs that share the query heads.
attune_attention shard_call(const PopularModel& m, const Serving& s, int64_t shards);

}  // namespace attune::bundle
