// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/config.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/dtype.h"
#include "core/integers.h"
#include "cuda/attention/params.h"
#include "cuda/ops/params.h"

namespace attune::cuda::decode {
namespace {

using kernels::kKeysOfWarp;

constexpr int64_t kReservedSharedBytes = 1024;  // of each block, by the driver
constexpr int kMaxStages = 8;

// Largest power of two, at most 16, that divides every address of a row of the plane.
int64_t row_alignment(const KvPlane& plane, int64_t head_dim) {
  const int64_t size = plane.element_size;
  int64_t unit = std::gcd<int64_t>(16, head_dim * size);
  for (const int64_t stride : {plane.page_stride, plane.slot_stride, plane.head_stride})
    unit = std::gcd(unit, stride * size);
  return std::gcd(unit, static_cast<int64_t>(reinterpret_cast<uintptr_t>(plane.data)));  // null: any
}

int64_t cache_alignment(const Problem& p) {
  return std::min(row_alignment(p.cache.k, p.head_dim_qk), row_alignment(p.cache.v, p.head_dim_v));
}

// How many 16-bit numbers a number of Q or P is split into (bf16x3), to keep the precision of the queries.
int parts_of(int32_t q_dtype, int32_t kv_dtype) {
  if (q_dtype == ATTUNE_FLOAT32) return kv_dtype == ATTUNE_FLOAT16 ? 2 : 3;  // of fp16, else of bf16
  const bool bf16 = kv_dtype == ATTUNE_BFLOAT16 || kv_dtype == ATTUNE_FLOAT32;
  return bf16 && q_dtype == ATTUNE_FLOAT16 ? 2 : 1;
}

Load choose_load(const Problem& p, int64_t alignment) {
  if (p.cache.k.inner_stride != 1 || p.cache.v.inner_stride != 1 || !p.cache.k.contiguous || !p.cache.v.contiguous ||
      alignment < 4) {
    return Load::kElements;
  }
  const bool by_tile = !p.cache.paged || p.cache.page_size % kKeysOfWarp == 0;
  return by_tile && p.cache.ring_capacity == 0 && p.beam_width <= 1 ? Load::kTiles : Load::kRows;
}

size_t shared_bytes_with(const Config& c, int stages) {
  return static_cast<size_t>(kernels::decode_shared_bytes(c.warps, stages, static_cast<int>(dtype_size(c.kv_dtype)),
                                                          c.head_dim_qk, c.head_dim_v, c.row_tiles, c.parts,
                                                          c.token_scales));
}

// The stages of a warp with which a multiprocessor has enough copies in flight; more of them slow memory down.
int stages_that_help(const Config& c) {
  constexpr int64_t kInFlight = 48 << 10;  // bytes
  const int64_t of_stage =
      kernels::stage_bytes(static_cast<int>(dtype_size(c.kv_dtype)), c.head_dim_qk, c.head_dim_v, c.token_scales);
  return static_cast<int>(1 + std::max<int64_t>(1, ceil_div(kInFlight, c.blocks_per_sm * c.warps * of_stage)));
}

// The most pipeline stages that fit shared memory; 0 if not even two do.
int stages_that_fit(const Config& c, const DeviceShape& device) {
  const int64_t most =
      std::min(device.shared_bytes_per_sm / c.blocks_per_sm - kReservedSharedBytes, device.shared_bytes_per_block);
  int stages = kMaxStages;
  while (stages > 1 && static_cast<int64_t>(shared_bytes_with(c, stages)) > most) --stages;
  return stages >= 2 ? stages : 0;
}

// Channels that a lane holds of a row (kernels/decode/prologue.cuh).
int64_t lane_channels(int64_t head_dim) { return head_dim <= 128 ? 4 : 8; }

// Why copies of `unit` bytes cannot read an array, although the plan's could; strides in bytes. "" if they can.
std::string misplaced(const char* name, const void* data, std::initializer_list<int64_t> strides, bool side_by_side,
                      int64_t unit) {
  constexpr const char* kAsPlanned = ", as they did when the plan was made; plan with such rows";
  if (const uintptr_t over = reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(unit); over != 0) {
    return cat(name, ".data is ", over, " bytes beyond a multiple of ", unit,
               "; kernel cuda_decode needs a multiple of ", unit, ", or a plan made for such data");
  }
  if (!side_by_side) return cat("channels of a row of ", name, " do not lie side by side", kAsPlanned);
  for (const int64_t stride : strides)
    if (stride % unit != 0) return cat("rows of ", name, " do not lie at multiples of ", unit, " bytes", kAsPlanned);
  return "";
}

std::string misplaced(const char* name, const KvPlane& v, int64_t unit) {
  const int64_t size = v.element_size;
  return misplaced(name, v.data, {v.page_stride * size, v.slot_stride * size, v.head_stride * size},
                   v.contiguous && v.inner_stride == 1, unit);
}

std::string no_vectors(const char* name, const RowView& v, int64_t head_dim) {
  const int64_t size = v.element_size, unit = std::min<int64_t>(16, lane_channels(head_dim) * size);
  return misplaced(name, v.data, {v.row_stride * size, v.head_stride * size, v.batch_stride * size}, v.dim_stride == 1,
                   unit);
}

// Why lanes cannot use vector loads for queries, new tokens and the tables of the prologue; "" if they can.
std::string no_vectors(const Problem& p) {
  constexpr int64_t kVector = 16, kFloat = sizeof(float);
  if (std::string why = no_vectors("q", p.q, p.head_dim_qk); !why.empty()) return why;
  if (p.new_tokens) {
    if (std::string why = no_vectors("k", p.k, p.head_dim_qk); !why.empty()) return why;
    if (std::string why = p.v_aliases_k ? "" : no_vectors("v", p.v, p.head_dim_v); !why.empty()) return why;
  }
  const Prologue& g = p.prologue;
  if (!g.any) return "";
  for (const auto& [name, v] : {std::pair{"prologue.q_bias", &g.q_bias},
                                {"prologue.k_bias", &g.k_bias},
                                {"prologue.v_bias", &g.v_bias},
                                {"prologue.ia3_k", &g.ia3_k},
                                {"prologue.ia3_v", &g.ia3_v}}) {
    if (!*v || ops::float_table(*v).vector != 0) continue;
    const std::string why =
        misplaced(name, v->data, {v->stride[0], v->stride[1]}, v->stride[2] == dtype_size(v->dtype), kVector);
    return why.empty() ? cat(name, " has ", v->shape[2], " columns; the plan was made for multiples of 8") : why;
  }
  if (g.rotary_dim == 0) return "";
  if (ops::prologue_params(g).cos_sin_vector == 0) {
    const std::string why =
        misplaced("prologue.rope_cos_sin", g.cos_sin, {g.table_stride * kFloat, g.position_stride * kFloat},
                  g.channel_stride == 1, kVector);
    return why.empty()
               ? cat("prologue.rope_cos_sin has ", g.rotary_dim, " columns; the plan was made for multiples of 16")
               : why;
  }
  if (const int64_t unit = lane_channels(p.head_dim_qk); g.rope_offset % unit != 0)
    return cat("prologue.rope_offset is ", g.rope_offset, "; the plan was made for multiples of ", unit);
  if (g.has_positions && g.positions.cols == 3) return "prologue.positions has 3 columns; the plan was made for one";
  return "";
}

// Why the blocks of an output tile do not form a cluster, which would save a launch; "" if they do.
std::string no_clusters(const Problem& p, const DeviceShape& device, int64_t output_tiles) {
  constexpr int64_t kClusterKeys =
      16384;  // beyond, the multiprocessors that clusters leave idle cost more than a launch less saves
  if (!device.clusters) return "the GPU has none";
  if (p.cu_q) return "cu_seqlens_q is given";
  if (p.batch_invariant) return "batch_invariant";
  if (p.max_seqlen_kv > kClusterKeys) return cat("max_seqlen_kv is ", p.max_seqlen_kv, ", more than ", kClusterKeys);
  if (2 * output_tiles > device.num_sms)
    return cat(output_tiles, " output tile", plural_s(output_tiles), " on ", device.num_sms,
               " multiprocessors, two for each are needed");
  return "";
}

// Warps, blocks a multiprocessor and clusters, by measurement (docs/kernels/decode.md).
void choose_blocks(const Problem& p, const DeviceShape& device, int64_t blocks_of_rows, Config& c) {
  constexpr int64_t kLongBlock = 1024;  // keys of each block of a cluster
  constexpr int64_t kShort = 512;       // keys of a sequence
  // With batch invariance, how a sequence is split must not depend on the rest of the batch.
  const int64_t output_tiles = (p.batch_invariant ? 1 : p.batch) * p.heads_kv * blocks_of_rows, sms = device.num_sms;
  const bool wide = std::max(p.head_dim_qk, p.head_dim_v) > 128, light = dtype_size(c.kv_dtype) == 1;
  // A cluster is as large as the multiprocessors allow, up to 8 blocks, the most that every device takes. Short blocks
  // share a multiprocessor in pairs: then clusters fit anywhere on the device, and none waits for another. Long blocks
  // have eight warps and a multiprocessor each: pairs would leave some multiprocessors with two and some with none.
  // DecodePlan halves clusters that do not all fit.
  if (const std::string why = no_clusters(p, device, output_tiles); !why.empty()) c.no_clusters = why;
  for (const int size : {2, 4, 8}) {
    if (c.no_clusters.empty() && output_tiles * size <= sms) c.cluster = size;
  }
  c.warps = wide && dtype_size(c.kv_dtype) == 4 ? 2 : 4;  // no more fit shared memory with 256 channels of fp32
  c.blocks_per_sm = 2;
  const bool long_blocks = c.cluster > 0 && p.max_seqlen_kv >= kLongBlock * c.cluster;
  if (wide) {
    // Wide rows: registers allow no more.
  } else if (light && c.row_tiles == 1) {
    // Half the bytes but all the arithmetic: more warps hide its latency. New tokens take the registers of a block.
    c.blocks_per_sm = c.cluster > 0 || c.new_tokens || c.parts > 1 ? 3 : 4;
  } else if (long_blocks && dtype_size(c.kv_dtype) == 2) {
    c.warps = 8, c.blocks_per_sm = 1;
  } else if (c.cluster > 0 || light) {
    // Clusters and 8-bit rows keep four warps and two blocks.
  } else if (dtype_size(c.kv_dtype) == 4) {
    // fp32 rows keep them too: they fill shared memory.
  } else if (p.max_seqlen_kv <= kShort && output_tiles >= 2 * sms && c.row_tiles == 1) {
    c.warps = 2, c.blocks_per_sm = 4;  // more sequences at a time, a cheaper epilogue of each
  } else if (c.row_tiles == 2 || (c.row_tiles == 1 && output_tiles < 2 * sms)) {
    c.warps = 8, c.blocks_per_sm = 1;  // fewer, larger splits of each output tile
  }
  // 8-bit rows have work to hide: more warps with two stages are faster than fewer with three.
  const int fewest_stages = light ? 2 : 3;
  for (;; --c.blocks_per_sm) {
    c.stages = stages_that_fit(c, device);
    if (c.stages >= fewest_stages || c.blocks_per_sm == 1) break;
  }
  for (; c.stages == 0 && c.warps > 1; c.stages = stages_that_fit(c, device))
    c.warps /= 2;  // wide rows where blocks have 99 KiB
  if (light && c.row_tiles == 1 && c.cluster == 0) c.stages = std::min(c.stages, stages_that_help(c));
  if (c.cluster > 0) c.blocks = static_cast<int>(output_tiles) * c.cluster;
}

// How many neighbouring heads, whose rows are adjacent in memory (NHD), are read together.
int choose_head_lanes(const Problem& p, int blocks) {
  constexpr int kMost = 8;
  const KvPlane& k = p.cache.k;
  if (k.head_stride >= k.slot_stride) return 1;
  int lanes = 1;
  while (lanes * 2 <= kMost && p.heads_kv % (lanes * 2) == 0 && blocks >= 4 * lanes) lanes *= 2;
  return lanes;
}

int64_t rows_of_sequence(const Problem& p) { return std::max<int64_t>(1, p.max_seqlen_q) * p.group; }

// Sets the number of blocks, one a key tile, at most `most`, and the threads that schedule them: one for each sequence
// and each range, as far as registers go.
void choose_grid(const Problem& p, int most, Config& c) {
  const int64_t key_tiles = std::max<int64_t>(1, ceil_div(p.max_seqlen_kv, c.warps * kKeysOfWarp));
  const double tiles = static_cast<double>(p.batch) * static_cast<double>(p.heads_kv) *
                       static_cast<double>(ceil_div(rows_of_sequence(p), c.rows()) * key_tiles);
  c.blocks = static_cast<int>(std::clamp(tiles, 1.0, static_cast<double>(most)));
  c.head_lanes = choose_head_lanes(p, c.blocks);
  c.blocks -= c.blocks % c.head_lanes;
  c.schedule_threads = std::max<int64_t>(p.batch, c.blocks / c.head_lanes) <= 256 ? 256 : 768;
}

}  // namespace

size_t Config::shared_bytes() const { return shared_bytes_with(*this, stages); }

// In clusters the grid's axes replace divisions: kernels/decode/decode_cluster.cu.
Grid Config::grid(const kernels::AttentionParams& params) const {
  if (cluster == 0) return {static_cast<uint32_t>(blocks), 1, 1};
  return {static_cast<uint32_t>(cluster * params.row_blocks), static_cast<uint32_t>(params.num_heads_kv),
          static_cast<uint32_t>(params.batch)};
}

KernelSpec Config::main_kernel() const {
  KernelSpec spec{"decode/decode.cu", "attune_decode", {}, shared_bytes()};
  if (cluster > 0) spec.source = "decode/decode_cluster.cu", spec.entry = "attune_decode_cluster";
  spec.defines = {define("ATTUNE_HEAD_DIM_QK", head_dim_qk),
                  define("ATTUNE_HEAD_DIM_V", head_dim_v),
                  define("ATTUNE_Q_TYPE", q_dtype),
                  define("ATTUNE_KV_TYPE", kv_dtype),
                  define("ATTUNE_OUT_TYPE", out_dtype),
                  define("ATTUNE_ROW_TILES", row_tiles),
                  define("ATTUNE_PARTS", parts),
                  define("ATTUNE_WARPS", warps),
                  define("ATTUNE_STAGES", stages),
                  define("ATTUNE_BLOCKS_PER_SM", blocks_per_sm),
                  define("ATTUNE_LOAD", static_cast<int>(load)),
                  define("ATTUNE_COPY_BYTES", copy_bytes),
                  define("ATTUNE_TOKEN_SCALES", token_scales),
                  define("ATTUNE_SCORE", score),
                  define("ATTUNE_MASK", mask),
                  define("ATTUNE_NEW_TOKENS", new_tokens ? 1 : 0),
                  define("ATTUNE_PROLOGUE", prologue ? 1 : 0),
                  define("ATTUNE_VECTORS", vectors ? 1 : 0)};
  return spec;
}

KernelSpec Config::schedule_kernel() const {
  return {"scheduler/stream_k.cu",
          "attune_schedule_decode",
          {define("ATTUNE_THREADS", schedule_threads), define("ATTUNE_WARPS", warps),
           define("ATTUNE_ROW_TILES", row_tiles)},
          0};
}

std::string refusal(const Problem& p) {
  const KvCache& c = p.cache;
  if (c.k.dtype != c.v.dtype) return "K and V of different dtypes";
  if (p.head_dim_qk % 8 != 0 || p.head_dim_v % 8 != 0) return "head dims that are no multiples of 8";
  if (p.new_tokens && (p.k.dtype != p.q.dtype || p.v.dtype != p.q.dtype)) return "q, k and v of different dtypes";
  return attention::table_refusal(p);
}

Config choose_config(const Problem& p, const DeviceShape& device, const std::string& no_clusters) {
  Config c;
  c.no_clusters = no_clusters;
  c.head_dim_qk = static_cast<int>(p.head_dim_qk);
  c.head_dim_v = static_cast<int>(p.head_dim_v);
  c.q_dtype = p.q.dtype;
  c.kv_dtype = p.cache.k.dtype;
  c.out_dtype = p.out.dtype;
  c.parts = parts_of(p.q.dtype, c.kv_dtype);
  c.token_scales = p.cache.token_scales();
  c.score = attention::score_kinds(p);
  c.mask = attention::mask_kinds(p);
  c.t5 = attention::t5_buckets(p);
  c.new_tokens = p.new_tokens;
  c.prologue = p.prologue.any;
  // A prologue on rows of more than 128 channels needs more registers than there are.
  const bool roomy = std::max(p.head_dim_qk, p.head_dim_v) <= 128;
  c.vectors = (!c.prologue || roomy) && no_vectors(p).empty();
  const int64_t alignment = cache_alignment(p);
  c.load = choose_load(p, alignment);
  c.copy_bytes = c.load == Load::kElements ? 16 : static_cast<int>(alignment);

  // The smallest row block that holds the rows of a sequence: rows take registers, which copies in flight need too.
  const int64_t rows = rows_of_sequence(p);
  const bool wide = std::max(p.head_dim_qk, p.head_dim_v) > 128;
  // Scales by token, mask bits, score tables and bf16x3 take registers too.
  const bool busy = c.mask != 0 || (c.score & use::kTables) != 0 || dtype_size(c.kv_dtype) == 4;
  c.row_tiles = rows <= 8 || (wide && busy) ? 1 : rows <= 16 || wide || c.token_scales != 0 || busy ? 2 : 4;
  const int64_t blocks_of_rows = std::max<int64_t>(1, ceil_div(rows, c.rows()));
  if (p.prologue.append && (p.cache.ring_capacity > 0 || p.beam_width > 1)) {
    c.append_counters = p.batch / p.beam_width * p.heads_kv;
    // A cluster counts its own readers only.
    if (blocks_of_rows > 1 || p.beam_width > 1) c.no_clusters = "several clusters read slots that are appended to";
  }
  // Vector loads take registers, which large row blocks, masks and scores, and ranges over 8-bit rows need themselves.
  const bool ranges = (c.mask & use::kRanges) != 0 && dtype_size(c.kv_dtype) == 1;
  if (c.prologue && (c.row_tiles == 4 || ranges || (c.row_tiles == 2 && (c.mask != 0 || c.score != 0))))
    c.vectors = false;
  choose_blocks(p, device, blocks_of_rows, c);
  if (c.cluster > 0) return c;
  choose_grid(p, device.num_sms * c.blocks_per_sm, c);
  return c;
}

Config choose_config_beside(const Problem& p, const DeviceShape& device, const Beside& beside) {
  constexpr int kMostWarps = 8;
  Problem steps = p;
  steps.max_seqlen_q = std::min<int64_t>(p.max_seqlen_q, beside.max_decode_q);
  // Clusters take all sequences, whatever their lengths.
  Config c = choose_config(steps, device, "another kernel serves longer sequences");
  c.beside = beside;
  // One block a multiprocessor, so that the schedule leaves whole multiprocessors to the other kernel.
  c.warps = std::min(kMostWarps, c.warps * c.blocks_per_sm), c.blocks_per_sm = 1;
  c.stages = stages_that_fit(c, device);
  choose_grid(steps, device.num_sms, c);
  return c;
}

void check_alignment(const Problem& p, const Config& c) {
  std::string why = c.vectors ? no_vectors(p) : "";
  if (c.load != Load::kElements && why.empty()) why = misplaced("cache.k", p.cache.k, c.copy_bytes);
  if (c.load != Load::kElements && why.empty()) why = misplaced("cache.v", p.cache.v, c.copy_bytes);
  require(why.empty(), why);
}

void check_run(const Problem& p, const Config& c) {
  check_alignment(p, c);
  attention::require_still_taken("cuda_decode", refusal(p));
  attention::check_ranges(p, c.mask);
  require(c.load != Load::kTiles || choose_load(p, cache_alignment(p)) == Load::kTiles, "cache.page_size is ",
          p.cache.page_size, "; the plan was made for pages of multiples of ", kKeysOfWarp, " tokens");
}

}  // namespace attune::cuda::decode
