// SPDX-License-Identifier: Apache-2.0
// score = k_scale * sum over h of w[h] * max(<q[h], k>, 0): one matrix product of heads by keys, and a sum over heads.
// A score's bits depend on its own row and key alone: sums over channels and heads have one order in every tile.
#include "cpu/index_scores.h"

#include <algorithm>

#include "core/dtype.h"
#include "cpu/rows.h"

namespace attune::cpu {
namespace {

constexpr int64_t kHeads = 64;  // heads of a matrix product: its result stays in L1

// True if every number of the type is exact in bfloat16.
bool fits_bf16(int32_t dtype) { return dtype == ATTUNE_BFLOAT16 || is_8bit(dtype); }

// Calls f(first, count, page) for the parts of [begin, begin + n) that lie in one page of a table.
template <class F>
void for_each_page(int64_t begin, int n, int64_t page_size, F f) {
  for (int i = 0; i < n;) {
    const int64_t left = page_size - (begin + i) % page_size;
    const int count = static_cast<int>(std::min<int64_t>(left, n - i));
    f(i, count);
    i += count;
  }
}

}  // namespace

bool find_masked(const IndexerProblem& op, int64_t b, int64_t begin, int n, bool* masked) {
  std::fill(masked, masked + n, false);
  bool any = false;
  const auto hide = [&](int i, int count) {
    std::fill(masked + i, masked + i + count, true);
    any = true;
  };
  if (op.cache) {
    for_each_page(begin, n, op.cache.page_size, [&](int i, int count) {
      if (op.cache.find(b, begin + i, false).page < 0) hide(i, count);
    });
  }
  if (op.slot_table) {
    for_each_page(begin, n, op.slot_page_size, [&](int i, int count) {
      const int64_t page = op.slot_table(b, (begin + i) / op.slot_page_size);
      if (page < 0 || page >= op.slot_pages) hide(i, count);
    });
  }
  return any;
}

IndexScorer::IndexScorer(const IndexerProblem& op, const KernelTable& kernels, int64_t rows, Workspace& workspace)
    : op_(op),
      kernels_(kernels),
      bf16_(kernels.native_bf16 && fits_bf16(op.q.dtype) && fits_bf16(op.cache.k.dtype)),
      ld_(round_up(op.head_dim, 16)) {
  // 4 bytes an element for bf16 tiles too: the size must not depend on the instruction set.
  q_ = workspace.take<float>(rows * op.num_heads * ld_);
  weights_ = workspace.take<float>(rows * op.num_heads);
  row_ = workspace.take<float>(std::max(ld_, op.num_heads));
  staged_ = workspace.take<std::byte>(kIndexTile * ld_ * 4);
  packed_ = workspace.take<float>(ld_ * kIndexTile);
  dots_ = workspace.take<float>(kHeads * kIndexTile);
  scores_ = workspace.take<float>(rows * kIndexTile);
  factor_ = workspace.take<float>(kIndexTile);
  masked_ = workspace.take<bool>(kIndexTile);
  rows_ = workspace.take<const void*>(kIndexTile);
}

int64_t IndexScorer::rows_at_once() const { return std::max<int64_t>(1, kHeads / op_.num_heads); }

void IndexScorer::load_queries(int64_t first, int64_t count) {
  const int64_t heads = op_.num_heads;
  for (int64_t r = 0; r < count; ++r) {
    float* weights = weights_ + r * heads;
    read_elements(op_.weights.dtype, op_.weights.at(first + r, 0), op_.weights.head_stride, heads, weights);
    if (op_.q_scale) {
      read_elements(op_.q_scale.dtype, op_.q_scale.at(first + r, 0), op_.q_scale.head_stride, heads, row_);
      for (int64_t h = 0; h < heads; ++h) weights[h] *= row_[h];
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = (r * heads + h) * ld_;
      float* to = bf16_ ? row_ : static_cast<float*>(q_) + at;
      read_row(op_.q, first + r, h, op_.head_dim, to);
      std::fill(to + op_.head_dim, to + ld_, 0.0f);
      if (bf16_) kernels_.to_bf16(ATTUNE_FLOAT32, row_, ld_, static_cast<bf16_t*>(q_) + at);
    }
  }
}

// Makes `row` key i of the tile: in place if it has the type of the tile, else converted.
void IndexScorer::load_key(const std::byte* row, int i) {
  const KvPlane& plane = op_.cache.k;
  if (plane.contiguous && plane.dtype == (bf16_ ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT32)) {
    rows_[i] = row;
    return;
  }
  std::byte* to = staged_ + i * ld_ * (bf16_ ? 2 : 4);
  rows_[i] = to;
  const auto dtype = static_cast<attune_dtype>(plane.dtype);
  if (plane.contiguous && bf16_) return kernels_.to_bf16(dtype, row, op_.head_dim, reinterpret_cast<bf16_t*>(to));
  float* numbers = bf16_ ? row_ : reinterpret_cast<float*>(to);
  const int64_t run = plane.contiguous ? op_.head_dim : plane.pack;
  for (int64_t d = 0; d < op_.head_dim; d += run) {
    read_elements(plane.dtype, row + plane.element(d) * plane.element_size, plane.contiguous ? 1 : plane.inner_stride,
                  std::min(run, op_.head_dim - d), numbers + d);
  }
  if (bf16_) kernels_.to_bf16(ATTUNE_FLOAT32, row_, op_.head_dim, reinterpret_cast<bf16_t*>(to));
}

void IndexScorer::load_keys(int64_t b, int64_t begin, int n) {
  const KvCache& cache = op_.cache;
  n_ = n;
  any_masked_ = find_masked(op_, b, begin, n, masked_);
  for_each_page(begin, n, cache.page_size, [&](int i, int count) {
    KvSlot slot = cache.find(b, begin + i, false);
    for (int end = i + count; i < end; ++i, ++slot.offset) {
      factor_[i] = 1.0f;
      rows_[i] = nullptr;
      if (masked_[i]) continue;  // its bytes may be anything, or out of bounds
      load_key(cache.k.row(slot.page, slot.offset, 0), i);
      if (cache.k_scale.mode != KvScale::Mode::kNone) factor_[i] = *cache.k_scale.at(slot.page, slot.offset, 0);
    }
  });
  const int d = static_cast<int>(op_.head_dim);
  if (bf16_) {
    kernels_.pack_k_bf16(reinterpret_cast<const bf16_t* const*>(rows_), n, d, static_cast<bf16_t*>(packed_),
                         kIndexTile);
  } else {
    kernels_.pack_k_f32(reinterpret_cast<const float* const*>(rows_), n, d, static_cast<float*>(packed_), kIndexTile);
  }
}

// The products of m rows of q, from row `first` on (row * num_heads + head), with the keys.
void IndexScorer::multiply(int64_t first, int64_t m, float* to) {
  const int rows = static_cast<int>(m), d = static_cast<int>(op_.head_dim), ld = static_cast<int>(ld_);
  if (bf16_) {
    kernels_.gemm_bf16(rows, n_, d, static_cast<bf16_t*>(q_) + first * ld_, ld, static_cast<bf16_t*>(packed_),
                       kIndexTile, to, kIndexTile, false);
  } else {
    kernels_.gemm_f32(rows, n_, d, static_cast<float*>(q_) + first * ld_, ld, static_cast<float*>(packed_), kIndexTile,
                      to, kIndexTile, false);
  }
}

void IndexScorer::compute(int64_t first, int64_t count) {
  const int64_t heads = op_.num_heads;
  const auto sum = [&](int64_t row, int64_t head, int64_t m, const float* dots) {
    kernels_.relu_sum(static_cast<int>(m), n_, dots, kIndexTile, weights_ + row * heads + head,
                      scores_ + row * kIndexTile, head > 0);
  };
  if (heads <= kHeads) {
    for (int64_t r = first; r < first + count; r += rows_at_once()) {
      const int64_t rows = std::min(rows_at_once(), first + count - r);
      multiply(r * heads, rows * heads, dots_);
      for (int64_t i = 0; i < rows; ++i) sum(r + i, 0, heads, dots_ + i * heads * kIndexTile);
    }
  } else {
    for (int64_t r = first; r < first + count; ++r) {
      for (int64_t h = 0; h < heads; h += kHeads) {
        const int64_t m = std::min(kHeads, heads - h);
        multiply(r * heads + h, m, dots_);
        sum(r, h, m, dots_);
      }
    }
  }
  if (op_.cache.k_scale.mode == KvScale::Mode::kNone) return;
  kernels_.scale_columns(static_cast<int>(count), n_, scores_ + first * kIndexTile, kIndexTile, 1.0f, factor_);
}

}  // namespace attune::cpu
