/* SPDX-License-Identifier: Apache-2.0
 *
 * Attune: the operations beside attention, and the tables that it reads. attune.h has what they share (status, devices,
 * tensors, caches, the prologue) and the conventions, and includes this header.
 */
#ifndef ATTUNE_OPS_H_
#define ATTUNE_OPS_H_

#include "attune.h"

/* Laid out by hand from here on. */
/* clang-format off */

#ifdef __cplusplus
extern "C" {
#endif

/* ----------------------------------------------------------------------------------------------- other operations */
/* They need no workspace, but for the indexer. On CUDA they only enqueue work on the stream. */

/* The prologue on its own: q, k, v of new tokens to q_out, k_out, v_out, and into the cache if prologue.append. An
 * output may take its own input's place: the same rows at the same addresses. */
typedef struct attune_qkv_prepare {
  uint64_t struct_size;
  attune_tensor q, k, v;      /* as in attune_attention; each optional */
  attune_tensor cu_seqlens_q; /* as in attune_attention, for q, k and v alike */
  attune_tensor seqused_kv;   /* int32 [batch]: position of the first new token; absent: 0 */
  attune_tensor finished;     /* uint8 [batch] */
  attune_kv_cache cache;
  attune_prologue prologue;
  /* float32, float16 or bfloat16, same shapes; each optional; each may be its input, in place */
  attune_tensor q_out, k_out, v_out;
} attune_qkv_prepare;
ATTUNE_API attune_status attune_qkv_prepare_init(attune_qkv_prepare* op, uint64_t struct_size);
ATTUNE_API attune_status attune_qkv_prepare_run(const attune_qkv_prepare* op, attune_device device, void* stream);

/* Merges partial results over disjoint sets of keys: lse = log sum exp lse_i, out = sum exp(lse_i - lse) out_i. Parts
 * with lse -inf count for nothing, whatever their out holds. Fixed order: the same bits every time. */
typedef struct attune_merge {
  uint64_t struct_size;
  attune_tensor partial_out; /* [parts, rows, heads, head_dim_v]; float32, float16, bfloat16 */
  attune_tensor partial_lse; /* fp32 [parts, rows, heads] */
  attune_tensor sinks;       /* float [heads]; optional; added once */
  attune_tensor out;         /* [rows, heads, head_dim_v]; float32, float16, bfloat16, e4m3 */
  attune_tensor out_scale;   /* fp32 [1], e4m3 out; absent: 1 */
  attune_tensor lse;         /* fp32 [rows, heads]; optional */
} attune_merge;
ATTUNE_API attune_status attune_merge_init(attune_merge* op, uint64_t struct_size);
ATTUNE_API attune_status attune_merge_run(const attune_merge* op, attune_device device, void* stream);

/* Cache operations. The dense side is k, v [tokens, num_heads_kv, head_dim] (v absent where V aliases K).
 *   - append: dense -> cache. Token i goes to slot slots[i] (negative: skipped), or, with page_table or a contiguous
 *     cache, token i of sequence b to position seqused_kv[b] + i
 *   - quantize: dense token i -> slot i, the whole cache at once
 *   - dequantize: slot i -> dense token i
 *   - gather: tokens 0..seqused_kv[b]-1 of each sequence -> dense rows cu_seqlens[b].., or slots[i] -> dense row i
 *     (out of range: a row of zeros)
 *
 * Writing 8-bit codes: code = saturate(round(x / scale)), NaN stays NaN (int8: 0). Scales per tensor and per head are
 * read; scales per token and head are computed from the row, amax / 127 (int8), 448 (e4m3) or 57344 (e5m2), and
 * written; those of the MLA formats too, by docs/semantics.md. */
typedef enum attune_cache_op_kind {
  ATTUNE_CACHE_APPEND = 0,
  ATTUNE_CACHE_QUANTIZE = 1,
  ATTUNE_CACHE_DEQUANTIZE = 2,
  ATTUNE_CACHE_GATHER = 3
} attune_cache_op_kind;

typedef struct attune_cache_op {
  uint64_t struct_size;
  int32_t kind;                /* attune_cache_op_kind */
  int32_t power_of_two_scales; /* 1: scales rounded up to powers of two: MLA_656, and 8-bit caches with scales per token
                                  and head, as the index caches of DeepSeek V3.2 are written */
  attune_kv_cache cache;
  attune_tensor k, v;       /* dense [tokens, num_heads_kv, head_dim]; float32, float16, bfloat16 */
  attune_tensor slots;      /* int64 [tokens] */
  attune_tensor cu_seqlens; /* int32 [batch + 1]: dense rows of each sequence */
  attune_tensor seqused_kv; /* int32 [batch] */
  attune_tensor finished;   /* uint8 [batch], append */
} attune_cache_op;
ATTUNE_API attune_status attune_cache_op_init(attune_cache_op* op, uint64_t struct_size);
ATTUNE_API attune_status attune_cache_op_run(const attune_cache_op* op, attune_device device, void* stream);
/* Bytes of one page of an MLA format (page_size tokens), padding included. */
ATTUNE_API attune_status attune_kv_page_bytes(attune_kv_format format, int64_t page_size, int64_t* bytes);

/* The indexer of sparse attention (DeepSeek V3.2): cheap scores of every key, and the topk best of each query in the
 * form that attune_attention.indices takes. Sequence b has n_q(b) queries and s(b) = seqused_kv[b] keys, those of its
 * queries among them: append first (attune_cache_op, or attune_qkv_prepare with RoPE). Query i is at position P = s -
 * n_q + i.
 *
 *   score(row, j) = k_scale(j) * sum over h of weights[row, h] * q_scale[row, h] * max(<q[row, h], k_j>, 0)
 *
 * A row sees the keys key_begin..key_end - 1 below s, of those up to P if causal, whose pages are in range. Chosen
 * are the topk largest scores; of equal ones the lower positions; NaN counts as larger than any number. A row that
 * sees no more than topk keys takes them all, unread. Entries are in the order of their positions, -1 behind the
 * last. Rows that no sequence owns are not written. */
typedef enum attune_indexer_kind {
  ATTUNE_INDEXER_TOPK = 0,   /* q and keys to indices; scores stay in the workspace */
  ATTUNE_INDEXER_SCORES = 1, /* q and keys to scores */
  ATTUNE_INDEXER_SELECT = 2  /* scores to indices: the second half of TOPK */
} attune_indexer_kind;

typedef enum attune_index_form {
  ATTUNE_INDEX_SLOTS = 0,    /* page * page_size + offset in the cache that attention reads */
  ATTUNE_INDEX_POSITIONS = 1 /* token numbers in the sequence */
} attune_index_form;

typedef struct attune_indexer {
  uint64_t struct_size;
  int32_t kind;   /* attune_indexer_kind */
  int32_t causal; /* 1: the query at position P sees keys <= P */

  attune_tensor q;            /* [total_q, num_heads, head_dim] or [batch, seqlen_q, num_heads, head_dim]; float32,
                                 float16, bfloat16, e4m3, e5m2 or int8 */
  attune_tensor q_scale;      /* fp32 [total_q, num_heads] or [batch, seqlen_q, num_heads]; absent: 1 */
  attune_tensor weights;      /* float, as q_scale; required with q. A softmax scale belongs in here */
  attune_tensor cu_seqlens_q; /* int32 [batch + 1]; absent, and rows without a batch axis: one row for each sequence */
  attune_kv_cache cache;      /* index keys: a plain format, one head, v absent, no ring; k_scale as ever. SELECT reads
                                 its tables only, and may do without */
  attune_tensor seqused_kv;   /* int32 [batch]: keys of each sequence */
  attune_tensor key_begin;    /* int32 [total_q]: first key that a row may see; absent: 0 */
  attune_tensor key_end;      /* int32 [total_q]: past the last one; absent: s */

  attune_tensor scores;  /* fp32 [total_q, columns] or [batch, seqlen_q, columns], column j for key j: written by SCORES
                            where a row sees the key, read by SELECT there and nowhere else */
  int32_t clear_scores;  /* 1: SCORES writes -inf to the columns that a row does not see */
  int32_t form;          /* attune_index_form */
  attune_tensor indices; /* int32 [total_q, topk] or [batch, seqlen_q, topk], any topk >= 1: written */
  attune_tensor topk_length; /* int32 [total_q]: entries of each row that are not -1: written; optional */
  attune_tensor slot_table;  /* int32 [batch, max_pages]: pages of the cache that attention reads; absent: those of
                                cache, slot for slot */
  int64_t slot_page_size;    /* with slot_table: tokens a page */
  int64_t slot_pages;        /* with slot_table: pages of that cache */

  int64_t max_seqlen_kv; /* most keys of one sequence; 0: what the tables hold. Lengths are clamped to it */
} attune_indexer;
ATTUNE_API attune_status attune_indexer_init(attune_indexer* op, uint64_t struct_size);
/* Bytes of the workspace that a run of these shapes needs on the device; it is aligned to 256 bytes. Data may be
 * NULL. On the CPU it grows with the number of threads. */
ATTUNE_API attune_status attune_indexer_workspace_size(const attune_indexer* op, attune_device device, size_t* bytes);
ATTUNE_API attune_status attune_indexer_run(const attune_indexer* op, attune_device device, void* workspace,
                                            size_t workspace_bytes, void* stream);

/* ---------------------------------------------------------------------------------------- tables, built in double */

typedef enum attune_rope_style {
  ATTUNE_ROPE_NONE = 0,
  ATTUNE_ROPE_LINEAR = 1, /* f / scale */
  ATTUNE_ROPE_GLM2 = 2,   /* f / scale over half the width: use dim = rotary width, interleaved pairs */
  ATTUNE_ROPE_DYNAMIC_NTK = 3,
  ATTUNE_ROPE_QWEN_DYNAMIC_NTK = 4,
  ATTUNE_ROPE_YARN = 5,
  ATTUNE_ROPE_LLAMA3 = 6,
  ATTUNE_ROPE_MROPE = 7 /* as LINEAR; sections are applied by the prologue */
} attune_rope_style;

typedef struct attune_rope {
  uint64_t struct_size;
  int32_t style;                            /* attune_rope_style */
  int64_t dim;                              /* rotary width R, even */
  double theta;                             /* base, e.g. 10000 */
  double scale;                             /* 1 by default */
  int64_t max_position;                     /* original context length: NTK, YaRN, Llama3 */
  int64_t seqlen;                           /* NTK styles: the length the table is for */
  double beta_fast, beta_slow;              /* YaRN, 32 and 1 by default */
  double extrapolation_factor;              /* YaRN, 1 by default */
  double mscale;                            /* multiplies cosines and sines; 1 by default */
  double low_freq_factor, high_freq_factor; /* Llama3, 1 and 4 by default */
} attune_rope;
ATTUNE_API attune_status attune_rope_init(attune_rope* rope, uint64_t struct_size);
/* Writes fp32 cos_sin [num_positions, dim] for positions first_position... */
ATTUNE_API attune_status attune_rope_table(const attune_rope* rope, int64_t first_position, int64_t num_positions,
                                           float* cos_sin);
/* Writes the dim / 2 inverse frequencies (radians per position), in double. */
ATTUNE_API attune_status attune_rope_frequencies(const attune_rope* rope, double* frequencies);
/* logn[p] = ln(p + 1) / ln(max_position) for p > max_position, else 1. max_position >= 2. */
ATTUNE_API attune_status attune_logn_table(int64_t max_position, int64_t num_positions, float* logn);
/* The slopes of the ALiBi paper, for any number of heads. */
ATTUNE_API attune_status attune_alibi_slopes(int64_t num_heads, float* slopes);
/* T5 bucket of relative position key - query. */
ATTUNE_API attune_status attune_t5_bucket(int64_t relative_position, int64_t num_buckets, int64_t max_distance,
                                          int32_t bidirectional, int64_t* bucket);

#ifdef __cplusplus
}
#endif
#endif /* ATTUNE_OPS_H_ */
