/* SPDX-License-Identifier: Apache-2.0
 *
 * Attune: attention for LLM inference. The C ABI, and the one stable surface of the library: attention here, the other
 * operations and the tables in ops.h, which this header includes.
 *
 * How it is used:
 *   1. attune_attention_init(&a), then fill in the tensors and fields that the layer needs. A tensor left zeroed is
 *      absent.
 *   2. attune_plan_create(&a, device, &plan). Planning reads shapes, dtypes and flags, never data pointers' contents.
 *   3. attune_plan_workspace_size(plan, &bytes); the caller allocates the workspace on the plan's device.
 *   4. attune_run(plan, &a, workspace, bytes, stream), as often as wanted, with other data and lengths in the same
 *      descriptor.
 *
 * Conventions, everywhere:
 *   - Every function returns attune_status. On failure attune_last_error() (thread-local) names the argument, its
 *     value and what is allowed. The library never prints, aborts or exits.
 *   - Sizes and strides are int64, strides count elements. Shapes are written in comments as [outer, ..., inner].
 *     There "float" is float32, float16 or bfloat16, each tensor for itself; fp32 is float32 alone.
 *   - lse is the natural logarithm, in fp32, without sinks. A row that sees nothing gives out = 0 and lse =
 *     max_logits = -inf.
 *   - What a row may not see never reaches it, whatever bytes are there. Table entries past a sequence's end are
 *     never read.
 *   - On CUDA, data and workspace are memory that the device reaches (device, managed or pinned), streams are of the
 *     device's primary context, and calls only enqueue: nothing is read back and nothing waits, so they may be
 *     captured into a graph.
 *   - Contents that only the device knows (lengths, page ids, indices) are masked by attune_run when they are out of
 *     range: a length is clamped to what its tensors hold, a bad page id, index or beam hides the tokens it names.
 *     attune_validate reports the same contents as errors and names the entry.
 *   - Structs with a struct_size grow at their end, and only there. Set it to sizeof of the struct that you compile
 *     with (the *_init functions do, and write exactly that many bytes). A smaller struct of an older header is
 *     taken, down to that of 0.1.0, and what it lacks is absent; a larger one of a newer header is taken if every
 *     byte that this library does not know is 0. In structs that the library fills, such bytes are set to 0.
 *     attune_device, attune_tensor, attune_kv_cache and attune_prologue are parts of others and never change.
 *   - Outputs (out, lse, ... and a cache that is appended to) lie apart from inputs, caches, the workspace and each
 *     other, else the call is INVALID_ARGUMENT; columns of one packed buffer are apart. Inputs may share memory. What
 *     may be done in place, some operations say.
 */
#ifndef ATTUNE_ATTUNE_H_
#define ATTUNE_ATTUNE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(ATTUNE_STATIC)
#define ATTUNE_API
#elif defined(_WIN32)
#define ATTUNE_API
#else
#define ATTUNE_API __attribute__((visibility("default")))
#endif

#define ATTUNE_VERSION_MAJOR 0
#define ATTUNE_VERSION_MINOR 2
#define ATTUNE_VERSION_PATCH 0
#define ATTUNE_VERSION_STRING "0.2.0"
#define ATTUNE_MAX_RANK 6

/* Laid out by hand from here on. */
/* clang-format off */

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------- status, log, version */

typedef enum attune_status {
  ATTUNE_OK = 0,
  ATTUNE_INVALID_ARGUMENT = 1,    /* a descriptor field, shape, dtype, stride or pointer is wrong */
  ATTUNE_UNSUPPORTED = 2,         /* well formed, but no kernel on this device covers it */
  ATTUNE_WORKSPACE_TOO_SMALL = 3, /* the message says by how much */
  ATTUNE_OUT_OF_MEMORY = 4,
  ATTUNE_BAD_DATA = 5,     /* attune_validate found a bad table entry, length or index */
  ATTUNE_DEVICE_ERROR = 6, /* the device or its driver failed, or is absent */
  ATTUNE_INTERNAL = 7      /* a defect of the library; please report it */
} attune_status;

typedef enum attune_log_level {
  ATTUNE_LOG_DEBUG = 0,
  ATTUNE_LOG_INFO = 1,
  ATTUNE_LOG_WARNING = 2,
  ATTUNE_LOG_ERROR = 3
} attune_log_level;
typedef void (*attune_log_callback)(int32_t level, const char* message, void* user);

/* "0.2.0". */
ATTUNE_API const char* attune_version(void);
/* Name of a status, e.g. "invalid argument". Never NULL. */
ATTUNE_API const char* attune_status_name(attune_status status);
/* Message of the last failed call of this thread; "" after none. Valid until the thread's next failing call. */
ATTUNE_API const char* attune_last_error(void);
/* Receives the library's log messages; NULL (the default) drops them. May be called from any thread. */
ATTUNE_API attune_status attune_set_log_callback(attune_log_callback callback, void* user);

/* -------------------------------------------------------------------------------------------------------- devices */

typedef enum attune_device_type { ATTUNE_DEVICE_CPU = 0, ATTUNE_DEVICE_CUDA = 1 } attune_device_type;

typedef struct attune_device {
  int32_t type;  /* attune_device_type */
  int32_t index; /* 0 for the CPU; the CUDA ordinal otherwise */
} attune_device;

typedef struct attune_device_info {
  uint64_t struct_size; /* sizeof(attune_device_info), set by the caller */
  attune_device device;
  char name[128];    /* e.g. "NVIDIA H200" */
  char isa[64];      /* instruction set in use, e.g. "AVX3_DL+AVX512BF16" or "sm_90a" */
  int32_t num_units; /* threads of the pool, or streaming multiprocessors */
  int64_t memory_bytes;
} attune_device_info;

/* Number of usable devices; the CPU is always device 0 of the list. */
ATTUNE_API attune_status attune_device_count(int32_t* count);
/* Describes entry i of the list. Set info->struct_size before the call. */
ATTUNE_API attune_status attune_get_device_info(int32_t i, attune_device_info* info);
/* Text about the CUDA runtime, a line each: driver, every GPU and why one is not used, bundle, disk cache, compiler.
 * Writes at most capacity bytes with the final 0; *needed (may be NULL) gets the size of the whole text. Opens driver
 * and compiler. */
ATTUNE_API attune_status attune_describe_cuda(char* text, size_t capacity, size_t* needed);
/* Threads of the CPU backend's pool, up to 4096; 0 restores the default: OMP_NUM_THREADS where that is a whole number
 * of 1 to 4096, else all cores. Plans made later use it. Planning starts the threads that are missing; operations
 * without a plan start them at their first call. */
ATTUNE_API attune_status attune_set_num_threads(int32_t num_threads);
ATTUNE_API attune_status attune_get_num_threads(int32_t* num_threads);

/* -------------------------------------------------------------------------------------------------------- tensors */

typedef enum attune_dtype {
  ATTUNE_DTYPE_NONE = 0,
  ATTUNE_FLOAT32 = 1,
  ATTUNE_FLOAT16 = 2,
  ATTUNE_BFLOAT16 = 3,
  ATTUNE_FLOAT8_E4M3 = 4, /* e4m3fn: no infinity, NaN is 0x7f and 0xff, largest 448 */
  ATTUNE_FLOAT8_E5M2 = 5,
  ATTUNE_INT8 = 6,
  ATTUNE_UINT8 = 7,
  ATTUNE_INT32 = 8,
  ATTUNE_INT64 = 9
} attune_dtype;

/* A view. dtype NONE (all zero) means the tensor is absent. Shapes and strides are read up to rank. Data may be NULL
 * while planning, and where the tensor has no elements. Data must be aligned to its element. */
typedef struct attune_tensor {
  void* data;
  int32_t dtype; /* attune_dtype */
  int32_t rank;  /* 1..ATTUNE_MAX_RANK */
  int64_t shape[ATTUNE_MAX_RANK];
  int64_t stride[ATTUNE_MAX_RANK]; /* in elements; >= 0, or anything where the extent is 1 */
} attune_tensor;

/* A dense row-major view; rank 1..ATTUNE_MAX_RANK, else an absent tensor. */
ATTUNE_API attune_tensor attune_dense_tensor(void* data, attune_dtype dtype, int32_t rank, const int64_t* shape);
/* Bytes of one element; 0 for NONE. */
ATTUNE_API int64_t attune_dtype_size(attune_dtype dtype);
ATTUNE_API const char* attune_dtype_name(attune_dtype dtype);

/* ------------------------------------------------------------------------------------------------------- KV cache */

/* Order of the axes of a cache tensor; strides are free in each. "pages" is the batch for a contiguous cache. */
typedef enum attune_kv_layout {
  ATTUNE_KV_NHD = 0,     /* k, v [pages, page_size, num_heads_kv, head_dim]; scales [pages, page_size, num_heads_kv] */
  ATTUNE_KV_HND = 1,     /* k, v [pages, num_heads_kv, page_size, head_dim]; scales [pages, num_heads_kv, page_size] */
  ATTUNE_KV_XPACKED = 2, /* vLLM: k [pages, num_heads_kv, head_dim / x, page_size, x], v [pages, num_heads_kv, head_dim,
                            page_size]; scales as HND */
  ATTUNE_KV_BYTES = 3    /* MLA formats: k uint8 [pages, page_size, 656], or [pages, bytes of a page] for MLA_584 */
} attune_kv_layout;

typedef enum attune_kv_format {
  ATTUNE_KV_PLAIN = 0, /* elements of k's dtype: float32, float16, bfloat16, e4m3, e5m2 or int8, with optional scales */
  ATTUNE_KV_MLA_656 = 1, /* a token: 512 e4m3 | 4 fp32 scales, one per 128 | 64 bf16; d_qk 576, d_v 512, one KV head */
  ATTUNE_KV_MLA_584 = 2  /* a page: page_size x (448 e4m3 | 64 bf16), then page_size x (7 e8m0 scales, one per 64 | 1
                            pad); d_qk 512, d_v 512, one KV head */
} attune_kv_format;

/* A paged cache (page_table present), a contiguous one (absent: sequence b owns row b, or row batch_index[b]), or,
 * with attune_attention.indices, a pool of slots. */
typedef struct attune_kv_cache {
  attune_tensor k;       /* see layout */
  attune_tensor v;       /* absent: V is the first head_dim_v columns of K (MLA) */
  attune_tensor k_scale; /* fp32: [1] per tensor, [num_heads_kv] per head, or per token and head (see layout);
                            absent: 1. x = code * scale. Only for 8-bit dtypes */
  attune_tensor v_scale;
  attune_tensor page_table;   /* int32 [batch, max_pages]: page of token t is entry t / page_size */
  attune_tensor v_page_table; /* int32 [batch, max_pages]; absent: page_table serves both */
  attune_tensor batch_index;  /* int32 [batch], contiguous caches: the row of each sequence */
  int32_t format;             /* attune_kv_format */
  int32_t layout;             /* attune_kv_layout */
  int64_t page_size;          /* tokens a page; 0: taken from the shape (MLA_584 must set it) */
  int64_t ring_capacity;      /* > 0: token t lives in slot t mod ring_capacity, older ones are overwritten */
} attune_kv_cache;

/* ------------------------------------------------------------------------------------------------------- prologue */

/* Applied to q, k and v of the new tokens, in this order, in fp32: dequantise, bias, IA3, RoPE, log-n, append. Cached
 * keys already carry all of it: nothing is applied to them again. */
typedef struct attune_prologue {
  attune_tensor qkv_scale; /* fp32 [3]: scale of q, k, v when they are int8 (required) or fp8 (optional) */
  attune_tensor q_bias;    /* float [num_heads_q, head_dim_qk] */
  attune_tensor k_bias;    /* float [num_heads_kv, head_dim_qk] */
  attune_tensor v_bias;    /* float [num_heads_kv, head_dim_v] */
  attune_tensor ia3_k;     /* float [num_tasks, num_heads_kv, head_dim_qk] */
  attune_tensor ia3_v;     /* float [num_tasks, num_heads_kv, head_dim_v] */
  attune_tensor ia3_task;  /* int32 [batch]; -1: no IA3 for that sequence. Other numbers out of 0..num_tasks-1 do the
                              same, and fail validation. Absent: task 0 */
  /* fp32 [positions, R] or [num_tables, positions, R]: R/2 cosines, then R/2 sines, of each position
     (attune_rope_table builds it). A position past the end uses no rotation and fails validation */
  attune_tensor rope_cos_sin;
  attune_tensor rope_table_index; /* int32 [batch]: the table of each sequence (dynamic NTK); absent: table 0 */
  attune_tensor positions;   /* int32 [total_q] or [total_q, 3] (mRoPE): rope position of each new token. Absent: the
                                token's absolute position (needed where indices name slots). 0 is a position like any
                                other */
  int64_t rope_offset;       /* first rotated channel */
  int32_t rope_interleaved;  /* 0: pairs (o+j, o+j+R/2), NeoX; 1: pairs (o+2j, o+2j+1), GLM, GPT-J */
  int32_t mrope_section[3];  /* pairs of each of the three position components; all 0: no mRoPE */
  int32_t mrope_interleaved; /* 0: sections one after the other, repeated; 1: j mod 3 chooses, see docs/semantics.md */
  int32_t append;            /* 1: write k and v of the new tokens to the cache at positions seqused_kv.. */
  /* fp32 [positions]: q of absolute position p is multiplied by logn[p]; past the end: last entry */
  attune_tensor logn;
  int32_t power_of_two_scales; /* 1: the scales that append writes are powers of two, as attune_cache_op's */
} attune_prologue;

/* ------------------------------------------------------------------------------------------------------ attention */

/* The one operation. Sequence b has n_q(b) queries and s(b) keys; its query i is at absolute position s - n_q + i.
 * Keys and values come from
 *   - dense: k, v and no cache
 *   - cache: cache and no k, v; s = seqused_kv
 *   - both: cache and k, v, which are the new tokens (those of the queries); s = seqused_kv + n_q. They attend
 *     unquantised, and the cache is never read for them; prologue.append also writes them to it
 *   - sparse: indices; the listed slots (or dense tokens) only */
typedef struct attune_attention {
  uint64_t struct_size; /* sizeof(attune_attention), set by attune_attention_init */

  attune_tensor q;            /* [total_q, num_heads_q, head_dim_qk], or [batch, seqlen_q, num_heads_q, head_dim_qk];
                                 float32, float16, bfloat16; int8, e4m3, e5m2 with prologue.qkv_scale. Its last
                                 channels may be apart, in q_rope */
  attune_tensor cu_seqlens_q; /* int32 [batch + 1], rank 3 q only: first row of each sequence, and the end. Rows outside
                                 belong to no sequence. Absent with rank 3 q: one sequence, or, with a cache, one query
                                 for each sequence */
  attune_tensor k; /* [total_kv, num_heads_kv, head_dim_qk] or [batch, seqlen_kv, num_heads_kv, head_dim_qk] */
  attune_tensor v; /* [.., num_heads_kv, head_dim_v]; absent: the first head_dim_v columns of k */
  attune_tensor cu_seqlens_kv; /* int32 [batch + 1], dense rank 3 k without cache; absent: as cu_seqlens_q (with
                                  total_kv == total_q), or one sequence */
  attune_kv_cache cache;
  attune_tensor seqused_kv; /* int32 [batch]: tokens in the cache, new ones not counted (with dense kv: keys in use of
                               each sequence, at most its extent). Required with a cache unless indices are given */

  /* int32 [total_q, topk], [total_q, num_heads_kv, topk], or with rank 4 q [batch, seqlen_q, topk]; without
     num_heads_kv every KV head reads the same entries. Cache: slot = page * page_size + offset. Dense kv: token
     number in the sequence. Out of range: ignored. Causality and windows do not apply */
  attune_tensor indices;
  attune_tensor topk_length;   /* int32 [batch] or [total_q]: entries in use of each row of indices */
  attune_kv_cache extra_cache; /* a second pool of slots in the same softmax */
  attune_tensor extra_indices;
  attune_tensor extra_topk_length;

  /* int32 [batch, max_seqlen]: beam (0..beam_width-1) whose row holds position t (the slot, in a ring), for t >=
     beam_prompt_length; batch rows are request * beam_width + beam */
  attune_tensor cache_indirection;
  /* int32 [batch]: positions below it are read from beam 0. A wrapped ring ignores it */
  attune_tensor beam_prompt_length;
  int32_t beam_width;     /* 0 or 1: no beams */

  /* mask */
  int32_t causal;           /* 1: query at position P sees keys <= P */
  int64_t window_left;      /* >= 0: sees keys >= P - window_left; -1: no limit */
  int64_t window_right;     /* >= 0: sees keys <= P + window_right; -1: no limit */
  attune_tensor mask_bits;  /* uint8 [total_q, bytes] or [total_q, num_heads_q, bytes]: bit j%8 of byte j/8 set: key
                               mask_start + j is visible (and the other masks allow it). Keys not covered: visible */
  attune_tensor mask_start; /* int32 [batch]; absent: 0 */
  attune_tensor bidirectional_ranges; /* int32 [batch, ranges, 2]: inclusive [first, last], first < last; a query and a
                                      key both inside one range see each other whatever causal and window say */
  attune_tensor finished;             /* uint8 [batch]: non-zero: no output, no append for that sequence */
  int32_t skip_decode;                /* 1: sequences with one query are left untouched: no output, no append */
  int32_t zero_finished;              /* 1: finished and skipped rows get out = 0, lse = max_logits = -inf instead */

  /* score: z = softcap(scale * <q, k>) + ALiBi + bias + T5 */
  float softmax_scale;        /* 0: 1 / sqrt(head_dim_qk) */
  float softcap;              /* > 0: cap * tanh(z / cap), before every additive term */
  attune_tensor alibi_slopes; /* fp32 [num_heads_q] or [batch, num_heads_q]: + slope * (j - P); any sign */
  int32_t alibi_sqrt;         /* 1: - slope * sqrt(P - j) for j <= P, 0 for later keys, instead */
  attune_tensor bias;         /* float [num_heads_q or 1, rows, cols]: + bias[h, P, j]; must cover every P and j */
  /* float [rows, cols]: + bias[i, j - (s - n_q)] where j >= s - n_q; i = query in sequence */
  attune_tensor new_token_bias;
  attune_tensor t5_bias; /* float [num_heads_q, num_buckets]: + bias[h, bucket(j - P)] */
  int64_t t5_max_distance;
  int32_t t5_bidirectional; /* 0: decoder self attention, 1: encoder */
  attune_tensor sinks;      /* float [num_heads_q]: one more logit in the denominator, neither scaled nor capped */

  attune_prologue prologue;

  /* outputs: apart from every input and from each other, so not in place of q */
  attune_tensor out;        /* as q, last axis head_dim_v; float32, float16, bfloat16, e4m3 */
  attune_tensor out_scale;  /* fp32 [1]: e4m3 out = saturate(o * out_scale); absent: 1 */
  attune_tensor lse;        /* fp32 [total_q, num_heads_q] or [batch, seqlen_q, num_heads_q]; any strides; optional */
  attune_tensor max_logits; /* as lse: the largest z of the row, sinks not counted; optional */
  int64_t head_dim_v;       /* where V aliases K; 0: taken from v */

  /* planning */
  int64_t max_seqlen_q;    /* most queries of one sequence; 0: derived from shapes (total_q at worst) */
  int64_t max_seqlen_kv;   /* most keys of one sequence; 0: derived from shapes (the capacity) */
  int32_t batch_invariant; /* 1: a sequence's bits do not depend on the rest of the batch, for the same max_seqlen_*,
                              nor, on the CPU, on the number of threads */
  int32_t allow_tf32;      /* 1: fp32 inputs may be rounded to TF32 on devices that gain from it */

  /* later than 0.2.0 */
  attune_tensor q_rope; /* the last channels of the queries, apart from the others: as q but for the last axis, of q's
                           dtype, floats only. head_dim_qk is then what q and q_rope have together. Latent attention
                           computes the two apart, and need not join them. No prologue */
} attune_attention;

/* Zeroes the struct and sets its defaults: no windows, no mask. struct_size is sizeof(attune_attention). */
ATTUNE_API attune_status attune_attention_init(attune_attention* attention, uint64_t struct_size);

/* ----------------------------------------------------------------------------------------------------------- plan */

typedef struct attune_plan attune_plan;

/* OK when a kernel covers the descriptor on the device. UNSUPPORTED: attune_last_error() names the nearest kernel and
 * what differs. INVALID_ARGUMENT: the descriptor is wrong on every device. Data pointers may be NULL. */
ATTUNE_API attune_status attune_supported(const attune_attention* attention, attune_device device);
/* The same for any NVIDIA GPU of a compute capability, 10 * major + minor, 0 to 999. Neither GPU nor driver need be
 * there. */
ATTUNE_API attune_status attune_supported_by_capability(const attune_attention* attention, int32_t capability);
/* Chooses a kernel and fixes sizes. What this descriptor has is the most that later runs may have: batch, total_q,
 * seqlen_q of rank 4, dense keys, topk, and max_seqlen_q and max_seqlen_kv, given or derived. Heads, head dims,
 * beam_width and which features are in use stay the same. A run that is larger or other is INVALID_ARGUMENT. */
ATTUNE_API attune_status attune_plan_create(const attune_attention* attention, attune_device device,
                                            attune_plan** plan);
ATTUNE_API attune_status attune_plan_destroy(attune_plan* plan); /* NULL is allowed */
/* Makes sure that plans of these descriptors find their kernels ready: compiles or loads them now, side by side.
 * Blocks, for seconds where nothing is in the bundle or the disk cache. The first failure is returned after all were
 * tried. */
ATTUNE_API attune_status attune_warm(const attune_attention* const* attentions, int32_t count, attune_device device);
/* Bytes of the workspace that every run of this plan needs; it is aligned to 256 bytes. */
ATTUNE_API attune_status attune_plan_workspace_size(const attune_plan* plan, size_t* bytes);
/* Human-readable text: kernel, tiles, splits, workspace. Writes at most capacity bytes with the final 0; *needed (may
 * be NULL) gets the size of the whole text. */
ATTUNE_API attune_status attune_plan_describe(const attune_plan* plan, char* text, size_t capacity, size_t* needed);
/* Schedules and runs. Thread-safe while each call has its own workspace and outputs. stream: CUstream, or NULL on the
 * CPU. */
ATTUNE_API attune_status attune_run(const attune_plan* plan, const attune_attention* attention, void* workspace,
                                    size_t workspace_bytes, void* stream);
/* The two halves of attune_run. One schedule serves every layer of a step that has the same lengths, in the same
 * workspace: attune_run_scheduled needs that attune_schedule or attune_run of the same plan was the last to write to
 * it, on the same stream, with the same shapes, windows, ranges, lengths, offsets, finished and topk_length. On the
 * CPU anything else is INVALID_ARGUMENT. On CUDA only the device can know: it writes NaN, unless the kernel needs no
 * schedule. A workspace without any schedule is undefined behaviour there. */
ATTUNE_API attune_status attune_schedule(const attune_plan* plan, const attune_attention* attention, void* workspace,
                                         size_t workspace_bytes, void* stream);
ATTUNE_API attune_status attune_run_scheduled(const attune_plan* plan, const attune_attention* attention,
                                              void* workspace, size_t workspace_bytes, void* stream);
/* Reads lengths, page tables and indices and returns BAD_DATA with the first wrong entry. Blocks; for debugging and
 * tests. */
ATTUNE_API attune_status attune_validate(const attune_attention* attention, attune_device device, void* stream);

/* ------------------------------------------------------------------------------------------- backward of attention */

/* The gradients of attention over dense keys: of sum(dout * out) + sum(dlse * lse) for the forward's inputs. Planned and
 * run like attention, and by the same rules: attune_plan_workspace_size, attune_plan_describe and attune_plan_destroy
 * serve its plans, too.
 *
 * attention is the forward's descriptor, as it ran: out and lse, which must be there, are read, max_logits is not looked
 * at. Caches, indices, a prologue, 8-bit inputs, finished and skip_decode have no backward.
 *
 * Gradients repeat bit for bit; with batch_invariant a sequence's dq, dk and dv do not depend on its batch, nor, on the
 * CPU, on the number of threads. dk and dv are summed over the query heads of a KV head. Rows that see nothing (lse
 * -inf) get dq = 0 and give nothing to others, whatever their dout holds; keys that nobody sees get dk = dv = 0. Rows
 * that no sequence owns are not written. */
typedef struct attune_attention_backward {
  uint64_t struct_size;
  const attune_attention* attention; /* the forward; not kept */
  attune_tensor dout; /* as out, of its dtype */
  attune_tensor dlse; /* as lse, fp32; absent: 0 */

  /* outputs, each optional, at least one; each row is rounded once. Apart from all inputs and from each other */
  attune_tensor dq, dk, dv; /* as q, k, v: of the input's dtype, or float32; any strides */
  attune_tensor dsinks;     /* fp32 [num_heads_q], where sinks are given */
  attune_tensor dbias;      /* fp32, of the shape of bias, where that is given */
  attune_tensor dt5_bias;   /* fp32 [num_heads_q, num_buckets], where t5_bias is given */
} attune_attention_backward;
ATTUNE_API attune_status attune_attention_backward_init(attune_attention_backward* op, uint64_t struct_size);
/* As attune_supported. */
ATTUNE_API attune_status attune_attention_backward_supported(const attune_attention_backward* op,
                                                             attune_device device);
/* As attune_plan_create; a run has the same outputs as its plan, of the same dtypes. */
ATTUNE_API attune_status attune_attention_backward_plan(const attune_attention_backward* op, attune_device device,
                                                        attune_plan** plan);
/* As attune_run. */
ATTUNE_API attune_status attune_attention_backward_run(const attune_plan* plan, const attune_attention_backward* op,
                                                       void* workspace, size_t workspace_bytes, void* stream);

/* ------------------------------------------------------------------------------------------------ kernel registry */

typedef struct attune_kernel_info {
  uint64_t struct_size; /* sizeof(attune_kernel_info), set by the caller */
  char name[64];        /* as accepted by the environment variable ATTUNE_KERNEL */
  char operation[32];
  int32_t device_type; /* attune_device_type */
  char coverage[1024]; /* "axis: value, value; axis: ..." */
} attune_kernel_info;
ATTUNE_API attune_status attune_kernel_count(int32_t* count);
ATTUNE_API attune_status attune_get_kernel_info(int32_t i, attune_kernel_info* info);

#ifdef __cplusplus
}
#endif

#include "ops.h"

#endif /* ATTUNE_ATTUNE_H_ */
