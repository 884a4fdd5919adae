// SPDX-License-Identifier: Apache-2.0
// Reports bad contents of tables and lengths, which attune_run masks, as errors that name the entry.
#include <vector>

#include "core/integers.h"
#include "core/problem.h"

namespace attune {
namespace {

template <class... Parts>
void expect(bool ok, const Parts&... parts) {
  if (!ok) fail(ATTUNE_BAD_DATA, parts...);
}

void validate_offsets(const char* name, const IntView& cu, int64_t batch, int64_t total) {
  if (!cu) return;
  expect(cu(0) >= 0, name, "[0] is ", cu(0), "; it must be >= 0");  // rows before cu[0] belong to no sequence
  for (int64_t b = 0; b < batch; ++b) {
    expect(cu(b + 1) >= cu(b), name, "[", b + 1, "] is ", cu(b + 1), ", less than ", name, "[", b, "] = ", cu(b));
  }
  expect(cu(batch) <= total, name, "[", batch, "] is ", cu(batch), "; the tensor has ", total, " row", plural_s(total));
}

void validate_lengths(const Problem& p) {
  if (!p.seqused) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t n = p.seqused(b);
    expect(n >= 0, "seqused_kv[", b, "] is ", n, "; it must be >= 0");
    if (p.dense_kv) {
      const int64_t extent = p.cu_kv ? p.cu_kv(b + 1) - p.cu_kv(b) : p.fixed_kv;
      expect(n <= extent, "seqused_kv[", b, "] is ", n, "; sequence ", b, " has ", extent, " key", plural_s(extent));
    } else if (p.cache.ring_capacity == 0) {
      expect(n <= p.cache.capacity(), "seqused_kv[", b, "] is ", n, "; the cache holds ", p.cache.capacity(), " token",
             plural_s(p.cache.capacity()), " of a sequence");
    }
  }
}

// Page ids (or rows) of the tokens [0, n) of table row b.
void validate_pages(const Problem& p, int64_t b, int64_t n) {
  const KvCache& c = p.cache;
  if (n <= 0) return;
  if (!c.paged) {
    if (!c.batch_index) return;
    const int64_t row = c.batch_index(b);
    expect(row >= 0 && row < c.num_pages, "cache.batch_index[", b, "] is ", row, "; the cache has ", c.num_pages,
           " row", plural_s(c.num_pages));
    return;
  }
  const int64_t pages = ceil_div(n, c.page_size);
  for (int64_t i = 0; i < pages && i < c.page_table.cols; ++i) {
    const int64_t k = c.page_table(b, i);
    expect(k >= 0 && k < c.num_pages, "cache.page_table[", b, "][", i, "] is ", k, "; the cache has ", c.num_pages,
           " page", plural_s(c.num_pages));
    if (!c.v_page_table) continue;
    const int64_t v = c.v_page_table(b, i);
    expect(v >= 0 && v < c.num_pages, "cache.v_page_table[", b, "][", i, "] is ", v, "; the cache has ", c.num_pages,
           " page", plural_s(c.num_pages));
  }
}

// A bias has a row for each position and a column for each key.
void validate_bias(const Problem& p, int64_t b, const Sequence& s) {
  if (!p.bias || s.num_q == 0 || p.is_finished(b) || (p.skip_decode && s.num_q == 1)) return;
  for (const int axis : {1, 2})
    expect(p.bias.shape[axis] >= s.seqlen_kv(), "sequence ", b, " has ", s.seqlen_kv(), " key", plural_s(s.seqlen_kv()),
           "; bias.shape[", axis, "] is ", p.bias.shape[axis], " and must be at least that");
}

void validate_sequences(const Problem& p) {
  std::vector<Sequence> sequences(static_cast<size_t>(p.batch));
  make_sequences(p, sequences.data());
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& s = sequences[static_cast<size_t>(b)];
    expect(s.num_q <= p.max_seqlen_q, "sequence ", b, " has ", s.num_q, s.num_q == 1 ? " query" : " queries",
           "; max_seqlen_q is ", p.max_seqlen_q);
    validate_bias(p, b, s);
    if (p.sparse || !p.cache) continue;
    int64_t tokens = s.num_cached;
    if (p.prologue.append && !p.is_finished(b) && !(p.skip_decode && s.num_q == 1)) {
      tokens += s.num_dense;
      expect(p.cache.ring_capacity > 0 || tokens <= p.cache.capacity(), "sequence ", b, " has ", s.num_cached,
             " cached and ", s.num_dense, " new token", plural_s(s.num_dense), " to append; the cache holds ",
             p.cache.capacity(), " token", plural_s(p.cache.capacity()), " of a sequence");
    }
    if (p.cache.ring_capacity > 0) tokens = std::min(tokens, p.cache.ring_capacity);
    validate_pages(p, b, tokens);
    if (p.cache_indirection) {
      const int64_t retained = p.cache.ring_capacity > 0 ? std::min(s.num_cached, p.cache.ring_capacity) : s.num_cached;
      const bool wrapped = p.cache.ring_capacity > 0 && s.num_cached > p.cache.ring_capacity;
      const int64_t shared = p.beam_prompt_length && !wrapped ? std::max<int64_t>(p.beam_prompt_length(b), 0) : 0;
      expect(retained <= p.cache_indirection.cols || shared >= retained, "cache_indirection has ",
             p.cache_indirection.cols, " column", plural_s(p.cache_indirection.cols), "; sequence ", b, " has ",
             retained, " cached token", plural_s(retained));
      for (int64_t t = shared; t < retained; ++t) {
        const int64_t beam = p.cache_indirection(b, t);
        expect(beam >= 0 && beam < p.beam_width, "cache_indirection[", b, "][", t, "] is ", beam, "; beam_width is ",
               p.beam_width);
      }
    }
  }
}

void validate_list(const Problem& p, const char* name, const char* length_name, const SparseList& list, int64_t limit,
                   const Sequence* sequences) {
  if (list.indices == nullptr) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t most = limit >= 0 ? limit : sequences[b].num_dense;
    for (int64_t row = sequences[b].q_begin; row < sequences[b].q_begin + sequences[b].num_q; ++row) {
      if (list.length) {
        const int64_t n = list.length(list.length_by_row ? row : b);
        expect(n >= 0 && n <= list.topk, length_name, "[", list.length_by_row ? row : b, "] is ", n, "; it must be 0..",
               list.topk);
      }
      const int64_t heads = list.head_stride != 0 ? p.heads_kv : 1;
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < list.used(row, b); ++i) {
          const int64_t x = list.at(row, h, i);
          // -1 is the customary way to leave an entry out.
          expect(x == -1 || (x >= 0 && x < most), name, "[", row, "][", i, "] is ", x, "; it must be -1 or 0..",
                 most - 1);
        }
      }
    }
  }
}

void validate_prologue(const Problem& p, const std::vector<Sequence>& sequences) {
  const Prologue& g = p.prologue;
  if (g.ia3_task) {
    const int64_t tasks = g.ia3_k ? g.ia3_k.shape[0] : g.ia3_v.shape[0];
    for (int64_t b = 0; b < p.batch; ++b) {
      expect(g.ia3_task(b) >= -1 && g.ia3_task(b) < tasks, "prologue.ia3_task[", b, "] is ", g.ia3_task(b),
             "; it must be -1 (none) or 0..", tasks - 1);
    }
  }
  if (g.cos_sin == nullptr) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (g.rope_table_index) {
      const int64_t t = g.rope_table_index(b);
      expect(t >= 0 && t < g.num_tables, "prologue.rope_table_index[", b, "] is ", t, "; there are ", g.num_tables,
             " tables");
    }
    const Sequence& s = sequences[static_cast<size_t>(b)];
    for (int64_t i = 0; i < s.num_q; ++i) {
      if (!g.has_positions) {
        const int64_t position = s.position(i);
        expect(position < g.num_positions, "query ", i, " of sequence ", b, " is at position ", position,
               "; prologue.rope_cos_sin has ", g.num_positions, " position", plural_s(g.num_positions));
        continue;
      }
      for (int64_t c = 0; c < g.positions.cols; ++c) {
        const int64_t row = s.q_begin + i;
        const int64_t position = g.positions(row, c);
        expect(position >= 0 && position < g.num_positions, "prologue.positions[", row, "] is ", position,
               "; prologue.rope_cos_sin has ", g.num_positions, " position", plural_s(g.num_positions));
      }
    }
  }
}

}  // namespace

void validate_contents(const Problem& p) {
  validate_offsets("cu_seqlens_q", p.cu_q, p.batch, p.total_q);
  if (p.dense_kv) validate_offsets("cu_seqlens_kv", p.cu_kv, p.batch, p.k.rows);
  validate_lengths(p);
  validate_sequences(p);
  std::vector<Sequence> sequences(static_cast<size_t>(p.batch));
  make_sequences(p, sequences.data());
  if (p.sparse) {
    validate_list(p, "indices", "topk_length", p.list, p.cache ? p.cache.num_slots() : -1, sequences.data());
    if (p.extra_cache) {
      validate_list(p, "extra_indices", "extra_topk_length", p.extra_list, p.extra_cache.num_slots(), sequences.data());
    }
  }
  validate_prologue(p, sequences);
}

}  // namespace attune
