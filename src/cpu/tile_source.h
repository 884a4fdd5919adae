// SPDX-License-Identifier: Apache-2.0
// Brings a tile of keys and values to where the kernels can read it: in place where the bytes are right, else converted
// into scratch.
#pragma once

#include "core/problem.h"
#include "cpu/tile.h"

namespace attune::cpu {

// Keys that are not in a cache: the tensors themselves, or the outputs of the prologue.
struct DenseRows {
  RowView k, v;
};

class TileSource {
 public:
  // codes_in_place: tiles of 8-bit rows may stay codes, for the kernels that read them.
  TileSource(const Problem& p, const DenseRows& dense, TileType row_type, bool codes_in_place,
             const KernelTable& kernels)
      : p_(p), dense_(dense), row_type_(row_type), codes_in_place_(codes_in_place), kernels_(kernels) {}

  // Loads columns [first, first + n) of the keys of sequence b. Those below `begin` are masked and not read. In sparse
  // mode the columns are entries of the lists of query row q_row.
  void load(const Sequence& s, int64_t b, int64_t q_row, int64_t kv_head, int64_t first, int64_t begin, int n,
            Scratch& scratch) const;
  // Moves the tile from the item's KV head h - 1 to head h > 0. Returns false if it must be loaded instead.
  bool next_head(const Item& item, int h, int64_t first, Scratch& scratch) const;
  // Finds the addresses of those rows of columns [first, first + n) for which that is cheap: cached ones, or dense ones
  // where there is no cache.
  void look_ahead(const Sequence& s, int64_t b, int64_t q_row, int64_t kv_head, int64_t first, int n,
                  AheadRows& a) const;

 private:
  void look_ahead_dense(const Sequence& s, int64_t kv_head, int64_t first, int n, AheadRows& a) const;
  void load_sparse(const Sequence& s, int64_t b, int64_t q_row, int64_t kv_head, int64_t first, int n,
                   Scratch& scratch) const;
  void load_factors(int64_t b, int64_t kv_head, int64_t first, int begin, int end, Scratch& scratch) const;
  void gather_factors(const Item& item, int64_t first, int n, float* factors) const;
  int load_runs(const Sequence& s, int64_t b, int64_t kv_head, int64_t first, int i, int n, Scratch& scratch) const;
  void put_dense(int64_t row, int64_t kv_head, int i, Scratch& scratch) const;
  void put_slot(const KvCache& c, KvSlot k, KvSlot v, int64_t kv_head, int i, Scratch& scratch) const;
  void hide(int i, Scratch& scratch) const;
  const void* stage(const std::byte* row, int32_t dtype, int64_t n, std::byte* to, float* temporary) const;
  template <class Element>
  const void* place(const std::byte* row, int32_t dtype, bool contiguous, int64_t n, std::byte* to, Scratch& scratch,
                    const Element& element) const;
  int64_t table_row(const Sequence& s, int64_t b, int64_t t) const;

  const Problem& p_;
  const DenseRows& dense_;
  TileType row_type_;
  bool codes_in_place_;
  const KernelTable& kernels_;
};

}  // namespace attune::cpu
