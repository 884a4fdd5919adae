// SPDX-License-Identifier: Apache-2.0
#include "cuda/indexer/config.h"

#include <algorithm>
#include <bit>
#include <string>

#include "core/dtype.h"
#include "core/integers.h"

namespace attune::cuda::indexer {
namespace {

constexpr size_t kSharedBytes = 232448;              // the most that a block of Hopper may have
constexpr int64_t kScoreBytes = int64_t{128} << 20;  // of a launch's scores; more only if a single row has more
constexpr int64_t kPanel = 64;                       // channels
constexpr int kConsumerThreads = 256;

bool is_8bit_or(int32_t dtype, int32_t other) { return is_8bit(dtype) || dtype == other; }

template <class... Strides>
bool aligned(const void* data, int64_t element_size, Strides... strides) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ((strides * element_size % 16 == 0) && ...);
}

// True if rows are whole, aligned runs of 16 channels.
bool has_vectors(const RowView& q, int64_t head_dim) {
  return head_dim % 16 == 0 && q.dim_stride == 1 &&
         aligned(q.data, q.element_size, q.batch_stride, q.row_stride, q.head_stride);
}
bool has_vectors(const KvPlane& k, int64_t head_dim) {
  return head_dim % 16 == 0 && k.contiguous && aligned(k.data, k.element_size, k.page_stride, k.slot_stride);
}

// Chooses as many stages as fit shared memory. False: not even the fewest do.
bool fit_stages(bool staged_keys, ScoresConfig& c) {
  constexpr int kMostKeyStages = 3, kMostQueryStages = 4, kLeastQueryStages = 2;
  for (c.key_stages = staged_keys ? kMostKeyStages : 0; c.key_stages >= (staged_keys ? 1 : 0); --c.key_stages) {
    for (c.q_stages = kMostQueryStages; c.q_stages >= kLeastQueryStages; --c.q_stages) {
      if (c.shared_bytes() <= kSharedBytes) return true;
    }
  }
  return false;
}

}  // namespace

size_t ScoresConfig::shared_bytes() const {
  if (exact) return 0;
  constexpr size_t kWorkSlots = 8, kWorkTileBytes = 32, kAlignment = 16;
  const auto n = [](int x) { return static_cast<size_t>(x); };
  const size_t key_slots = n(std::max(key_stages, 1)), q_slots = n(q_stages);
  const size_t chunks = n(2 * key_tiles) * n(channels / 64) * n(static_cast<int>(dtype_size(k_type)));
  size_t bytes = q_slots * n(pass_heads) * n(channels) * 2;
  bytes += key_stages > 0 ? key_slots * chunks * kConsumerThreads * 16 : kAlignment;
  bytes += key_slots * kConsumerThreads * 8;
  bytes += q_slots * (n(pass_heads) * 4 + 8) + kWorkSlots * kWorkTileBytes;
  bytes += (2 * q_slots + 2 * kWorkSlots) * 8;
  return bytes + kAlignment;
}

KernelSpec ScoresConfig::kernel() const {
  if (exact) return {"indexer/scores_exact.cu", "attune_index_scores_exact", {}, 0};
  return {"indexer/scores.cu",
          "attune_index_scores",
          {define("ATTUNE_BF16", bf16 ? 1 : 0), define("ATTUNE_Q_TYPE", q_type), define("ATTUNE_K_TYPE", k_type),
           define("ATTUNE_HEADS", heads), define("ATTUNE_PASS_HEADS", pass_heads), define("ATTUNE_CHANNELS", channels),
           define("ATTUNE_KEY_TILES", key_tiles), define("ATTUNE_KEY_STAGES", key_stages),
           define("ATTUNE_Q_STAGES", q_stages), define("ATTUNE_Q_VECTORS", q_vectors ? 1 : 0),
           define("ATTUNE_SHARED_BYTES", static_cast<int64_t>(shared_bytes()))},
          shared_bytes()};
}

std::array<int, 12> ScoresConfig::key() const {
  return {exact ? 1 : 0, bf16 ? 1 : 0,      q_type, k_type, heads, pass_heads, channels, key_tiles, key_stages,
          q_stages,      q_vectors ? 1 : 0, 0};
}

size_t SelectConfig::shared_bytes() const {
  constexpr int kFewWords = 64;
  const int shared = cluster > 1 ? (1 << bits) + candidates : 0;  // with the other blocks
  const int words = (1 << bits) + 2 * candidates + shared + 2 * mark_words + threads / 16 + kFewWords;
  return static_cast<size_t>(words) * 4;
}

KernelSpec SelectConfig::kernel() const {
  return {"indexer/select.cu",
          "attune_index_select",
          {define("ATTUNE_THREADS", threads), define("ATTUNE_BLOCKS_PER_SM", blocks_per_sm),
           define("ATTUNE_CLUSTER", cluster), define("ATTUNE_VECTORS", vectors), define("ATTUNE_BITS", bits),
           define("ATTUNE_CANDIDATES", candidates), define("ATTUNE_MARK_WORDS", mark_words),
           define("ATTUNE_SHARED_BYTES", static_cast<int64_t>(shared_bytes()))},
          shared_bytes()};
}

std::array<int, 12> SelectConfig::key() const {
  return {threads, blocks_per_sm, cluster, vectors, bits, candidates, mark_words};
}

KernelSpec owners_kernel() {
  return {"indexer/owners.cu", "attune_index_owners", {define("ATTUNE_THREADS", kOwnersThreads)}, 0};
}

ScoresConfig choose_scores(const IndexerProblem& op, const Target& target) {
  ScoresConfig c;
  const int32_t q = op.q.dtype, k = op.cache.k.dtype;
  c.bf16 = q == ATTUNE_BFLOAT16 || k == ATTUNE_BFLOAT16;
  const int32_t product = c.bf16 ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT16;
  c.exact = !is_8bit_or(q, product) || !is_8bit_or(k, product) || !target.has(ptx::kWgmma);
  if (c.exact) return {.exact = true};
  c.q_type = q, c.k_type = k;
  c.heads = static_cast<int>(op.num_heads);
  c.channels = static_cast<int>(round_up(op.head_dim, kPanel));
  c.key_tiles = c.channels <= 128 ? 2 : 1;  // registers hold no more
  c.q_vectors = has_vectors(op.q, op.head_dim);
  const bool staged_keys = has_vectors(op.cache.k, op.head_dim);
  c.pass_heads = static_cast<int>(std::clamp<uint64_t>(std::bit_ceil(static_cast<uint64_t>(c.heads)), 8, 64));
  while (!fit_stages(staged_keys, c)) c.pass_heads /= 2;
  return c;
}

SelectConfig choose_select(const IndexerProblem& op, int64_t rows, int num_sms, const Target& target) {
  constexpr int kMostBlocks = 8;        // of a cluster
  constexpr int64_t kLeastKeys = 8192;  // of a block: below, a cluster's barriers cost more than they save
  if (!target.has(ptx::kClusters)) return {.threads = 512};  // with more threads, code for sm_80 spills
  if (rows > num_sms) return {.threads = 512, .blocks_per_sm = 2};
  SelectConfig c;
  while (c.cluster < kMostBlocks && 2 * c.cluster * rows <= num_sms && op.max_seqlen_kv >= 2 * c.cluster * kLeastKeys)
    c.cluster *= 2;
  if (c.cluster > 1) c.threads = 512, c.vectors = 8;  // which need more registers
  return c;
}

Layout make_layout(const IndexerProblem& op) {
  constexpr int64_t kAlignment = 256;
  const auto aligned_bytes = [](int64_t n) { return static_cast<size_t>(round_up(n, kAlignment)); };
  constexpr int64_t kMaxTiles = int64_t{1} << 30, kLeastBlock = 128;  // of a launch; keys
  Layout l;
  const int64_t most_columns = std::max(op.max_seqlen_kv, op.num_columns);
  l.rows = std::min(std::max<int64_t>(op.total_q, 1), kMaxTiles / (most_columns / kLeastBlock + 1));
  if (op.cu) {
    l.owners = aligned_bytes((op.batch + 1) * 4);
    l.scores = l.total = l.owners + aligned_bytes(op.total_q * 4);
  }
  if (op.kind != ATTUNE_INDEXER_TOPK) return l;
  l.columns = std::max<int64_t>((op.max_seqlen_kv + 63) / 64 * 64, 64);
  l.rows = std::clamp<int64_t>(kScoreBytes / (l.columns * 4), 1, l.rows);
  if (l.rows > 32 && l.rows < op.total_q) l.rows = l.rows / 32 * 32;  // whole tiles
  l.total = l.scores + static_cast<size_t>(l.rows * l.columns * 4);
  return l;
}

}  // namespace attune::cuda::indexer
