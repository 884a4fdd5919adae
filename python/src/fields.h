// SPDX-License-Identifier: Apache-2.0
// The structs of the C ABI as tables of fields: a keyword argument has the name of its field, and that is all the
// binding knows about it. Those of attune_attention: common/attention_fields.h. tests/test_surface.py holds the tables
// against attune.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "array.h"

namespace attune::python {

enum class Kind : uint8_t {
  kInput,   // attune_tensor, read
  kBits,    // attune_tensor, read: bytes of eight flags
  kOutput,  // attune_tensor, written
  kPool,    // attune_tensor of a cache, written where the operation appends
  kBool,    // int32_t, 0 or 1
  kInt32,
  kInt64,
  kFloat,
  kDouble,
  kInt32x3,
  kFormat,     // attune_kv_format by name
  kLayout,     // attune_kv_layout by name
  kRopeStyle,  // attune_rope_style by name
  kIndexForm,  // attune_index_form by name
  kCache,      // attune_kv_cache from the attributes of a KVCache
  kReadCache,  // the same for extra_cache, which nothing writes
  kPrologue,   // attune_prologue from the attributes of a Prologue
};

// "array", "output", "pool", "bool", "int", "float", "ints", "str", "cache" or "prologue".
const char* kind_name(Kind kind);

struct Field {
  const char* name;
  Kind kind;
  size_t offset;
};

// A struct's fields with interned names.
class Table {
 public:
  explicit Table(std::span<const Field> fields);
  std::span<const Field> fields() const { return fields_; }
  nb::handle key(size_t i) const { return keys_[i]; }
  // The index of a name; -1 if there is none.
  int find(nb::handle name) const;
  nb::list names() const;
  // The slot of that name in an object of a Python class that has one for each field; null: an exception is set. A
  // third of the time of a search by name. One class a table.
  nb::object slot(size_t i, nb::handle type, nb::handle record) const;

 private:
  struct Slot {
    PyObject* descriptor;
    descrgetfunc get;
  };

  std::span<const Field> fields_;
  std::vector<nb::handle> keys_;
  nb::dict index_;
  mutable std::vector<Slot> slots_;
};

inline constexpr size_t kMaxFields = 64;

// The Python values of a struct's fields, borrowed; null: not given.
struct Values {
  PyObject* items[kMaxFields] = {};
  // Takes the items of a dict whose value is not None. Throws TypeError for a name that the table lacks.
  void take(const Table& table, nb::dict arguments);
};

// Writes the given values into the struct.
void fill(void* to, const Table& table, const Values& values, Arrays* arrays);
void fill(void* to, const Table& table, nb::dict arguments, Arrays* arrays);

// Throws as fill does for numbers and flags; arrays are left alone. For operators of torch, which say less.
void check_values(const Table& table, nb::dict arguments);

const Table& attention_table();
const Table& qkv_prepare_table();
const Table& merge_table();
const Table& cache_write_table();     // append, quantize
const Table& cache_read_table();      // dequantize, gather
const Table& indexer_table();         // topk, scores
const Table& indexer_select_table();  // scores are read
const Table& rope_table();
const Table& kv_cache_table();
const Table& prologue_table();

attune_kv_format format_from_name(nb::handle name);

}  // namespace attune::python
