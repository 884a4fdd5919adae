// SPDX-License-Identifier: Apache-2.0
// One row of the table of cases: what to build, in the words of the descriptor. Rows are JSON (tests/cases/*.json),
// embedded at build time; tests/cases/README.md describes every key.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "attune/attune.h"
#include "cache_rows.h"
#include "mask.h"

namespace attune::cases {

enum class KvSource { kDense, kContiguous, kPaged, kSlots };
// kRagged: rank 3 with cu_seqlens_q. kFixed: rank 4. kFlat: rank 3 without cu_seqlens_q.
enum class QueryShape { kRagged, kFixed, kFlat };
enum class StrideMode { kDense, kOdd, kTransposed, kPacked, kSpread };  // kSpread: elements of out lie two apart
enum class Lengths { kNone, kBatch, kToken };

struct CacheSpec {
  attune_dtype dtype = ATTUNE_DTYPE_NONE;  // NONE: as q
  attune_kv_format format = ATTUNE_KV_PLAIN;
  attune_kv_layout layout = ATTUNE_KV_NHD;
  ScaleMode scales = ScaleMode::kNone;
  int64_t page_size = 16;
  int64_t ring_capacity = 0;
  int64_t slack = 3;         // pages beyond what is needed (contiguous: slots of each row)
  int64_t x = 0;             // x-packed: elements of a pack; 0: 16 bytes
  bool batch_index = false;  // contiguous: rows permuted
  bool separate_v_table = false;
  bool share_prefix = false;  // full pages of the first sequence serve the others too
  bool one_pool = false;      // K and V interleaved page by page in one allocation
  bool page_padding = false;  // pages are apart by more than their size
  int64_t row_padding = 0;    // elements behind each row (nhd, hnd)

  // Whether who writes rows computes their scales.
  bool writes_scales() const { return format != ATTUNE_KV_PLAIN || scales_by_token(scales); }
};

struct SparseSpec {
  int64_t topk = 0;
  bool per_head = false;
  Lengths lengths = Lengths::kNone;
  double invalid = 0.1;  // share of entries that name no slot
  int64_t slots = 64;    // size of the pool
};

struct RopeSpec {
  int32_t style = ATTUNE_ROPE_NONE;
  int64_t dim = 0;
  int64_t offset = 0;
  bool interleaved = false;
  double theta = 10000;
  double scale = 1;
  int64_t max_position = 64;
  double mscale = 1;
  int64_t tables = 1;  // > 1: rope_table_index
  int positions = 0;   // 0 absent, 1 [total_q], 3 [total_q, 3]
  std::vector<int64_t> mrope_section;
  bool mrope_interleaved = false;
};

struct PrologueSpec {
  bool qkv_scale = false;
  bool q_bias = false, k_bias = false, v_bias = false;
  int64_t ia3_tasks = 0;     // > 0: ia3_k and ia3_v
  bool ia3_no_task = false;  // the last sequence names no task
  RopeSpec rope;
  int64_t logn = 0;  // > 0: max_position of the table
  bool append = false, power_of_two_scales = false;
  bool any() const {
    return qkv_scale || q_bias || k_bias || v_bias || ia3_tasks > 0 || rope.dim > 0 || logn > 0 || append;
  }
};

struct IndexerSpec {
  int64_t topk = 0;            // > 0: a case of the indexer
  bool positions = false;      // indices hold positions, not slots
  int64_t slot_page_size = 0;  // > 0: slots of another cache, with pages of this size
  bool bad_pages = false;      // some pages of that cache are out of range
  bool q_scale = false, clear = false, lengths = true;
  std::string weights = "f32";
};

struct BackwardSpec {
  bool on = false;                         // a case of the backward of attention
  attune_dtype dtype = ATTUNE_DTYPE_NONE;  // of dq, dk and dv; NONE: as the inputs
  bool dlse = false;
  std::vector<std::string> outputs;  // empty: all that there are
  std::string plant;                 // "nan_q", "inf_dout", "no_lse": one bad row
};

// An operation beside attention, over the tokens and the cache of a case.
enum class Operation { kAttention, kPrepare, kCacheOp, kMerge };
enum class Outputs { kElsewhere, kInPlace, kOnlyQInPlace };  // of qkv_prepare

struct OpSpec {
  Operation operation = Operation::kAttention;
  Outputs outputs = Outputs::kElsewhere;
  int64_t parts = 1;  // of a merge
  // Of a cache operation. Its dense rows are seqlens_q, what the cache holds seqlens_kv; kv kSlots: by slots.
  attune_cache_op_kind cache_op = ATTUNE_CACHE_APPEND;
  int64_t pages = 0, columns = 0;  // of the pool and of the table; 0: as many as are needed
  bool any_contents = false;       // tables, lengths and offsets may say anything
  bool infinities = false;         // among dense rows
};

struct ScoreSpec {
  double softmax_scale = 0, softcap = 0;
  int alibi = 0;  // 0 none, 1 [num_heads_q], 2 [batch, num_heads_q]
  bool alibi_sqrt = false, alibi_negative = false;
  int bias = 0;                 // 0 none, 1 shared by the heads, 2 one for each head
  bool new_token_bias = false;  // a random tree: 0 or -inf
  int64_t t5_buckets = 0, t5_max_distance = 128;
  bool t5_bidirectional = false;
  std::string sinks;  // "", "normal", "mixed" (some -inf, some large)
};

struct Case : MaskSpec, ScoreSpec {
  std::string name;
  std::string area;
  int64_t num_heads_q = 1, num_heads_kv = 1, head_dim_qk = 64, head_dim_v = 64;
  int64_t q_rope = 0;  // the last channels of the queries, in a tensor of their own
  attune_dtype dtype = ATTUNE_FLOAT32;
  attune_dtype out_dtype = ATTUNE_DTYPE_NONE;  // NONE: as q, fp32 for 8-bit q
  QueryShape queries = QueryShape::kRagged;
  StrideMode strides = StrideMode::kDense;
  std::vector<int64_t> seqlens_q;
  std::vector<int64_t> seqlens_kv;  // tokens in the cache, or keys of dense kv; empty: as seqlens_q
  KvSource kv = KvSource::kDense;
  bool new_tokens = false;    // k and v beside the cache
  bool shared_kv = false;     // V is the first columns of K
  bool seqused = false;       // dense kv: keys in use are fewer than the extent
  bool cu_seqlens_kv = true;  // dense rank 3 kv
  CacheSpec cache;
  SparseSpec sparse;
  SparseSpec extra;  // topk > 0: a second pool
  int64_t extra_page_size = 8;
  IndexerSpec indexer;
  BackwardSpec backward;
  OpSpec op;
  int64_t beam_width = 0;
  std::vector<int64_t> beam_prompt;

  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  std::vector<int64_t> finished;
  bool skip_decode = false, zero_finished = false;

  std::string aux_dtype = "f32";  // of bias, t5, sinks and the prologue's vectors

  PrologueSpec prologue;
  bool out_scale = false, lse = true, max_logits = false;
  bool batch_invariant = false;
  bool max_seqlens = false;     // max_seqlen_q and max_seqlen_kv are given
  std::string plant;            // "nan_k", "nan_v", "inf_v": one bad key that is visible
  std::string data = "normal";  // "equal" (all scores equal), "spread" (scores apart by hundreds), "far" (by ten
                                // thousands), "huge" (by 1e10, but fp16's), "ones_v" (V = 1)
  bool poison = true;

  int64_t batch() const { return static_cast<int64_t>(seqlens_q.size()); }
  int64_t total_q() const;
  int64_t max_seqlen_q() const;
  bool has_cache() const { return kv != KvSource::kDense; }
  attune_dtype resolved_out_dtype() const;
  attune_dtype cache_dtype() const { return cache.dtype == ATTUNE_DTYPE_NONE ? dtype : cache.dtype; }
  // Tokens of sequence b that the cache or dense kv holds before the run.
  int64_t stored(int64_t b) const { return seqlens_kv[static_cast<size_t>(b)]; }
  // Keys of sequence b: stored, and the new ones.
  int64_t keys(int64_t b) const { return stored(b) + (new_tokens ? seqlens_q[static_cast<size_t>(b)] : 0); }
};

// The case with some of its sequences only.
Case with_sequences(const Case& whole, const std::vector<size_t>& kept);

// Expands one area's JSON text ({"area": ..., "cases": [...]}). Throws std::runtime_error naming the case and the key.
std::vector<Case> parse_cases(std::string_view json);
// All embedded cases of attention but the bench's, in a fixed order, with unique names.
const std::vector<Case>& all_cases();
// The cases of the indexer, and random ones. run_case takes them too.
const std::vector<Case>& indexer_cases();
Case random_indexer_case(uint64_t seed);
// The cases of the backward, and random ones. run_case takes them too.
const std::vector<Case>& backward_cases();
Case random_backward_case(uint64_t seed);
// Small cases that between them have every tensor and every mode of the descriptor: for tests that spoil one at a time.
const std::vector<Case>& every_tensor_cases();
// The bench sets of the CPU and of CUDA devices.
const std::vector<Case>& bench_cases();
const std::vector<Case>& cuda_bench_cases();
// Random valid cases, the same for the same seed; and of latent caches.
Case random_case(uint64_t seed);
Case random_mla_case(uint64_t seed);
// A random cache operation, small, of every format or of packed ones, whose tables may say anything.
enum class Formats { kAll, kPacked };
Case random_cache_op_case(uint64_t seed, Formats formats = Formats::kAll);
// A batch as servers have it, of one of so many configurations, with about `budget` keys, and rows of so many, in all.
Case serving_case(uint64_t seed, uint64_t index, int configurations, int64_t budget);
// What is run: "attention", "attention_backward" (which have plans), or one of the operations beside them.
inline constexpr const char* kOperations[] = {"indexer", "qkv_prepare", "cache_op", "merge"};
const char* operation_name(const Case& c);
bool is_planned(const Case& c);

}  // namespace attune::cases
