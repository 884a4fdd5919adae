// SPDX-License-Identifier: Apache-2.0
#include "fields.h"

#include <cmath>
#include <cstring>

#include "common/attention_fields.h"

namespace attune::python {
namespace {

// The names of a C enumeration, in order.
constexpr const char* kFormats[] = {"plain", "mla_656", "mla_584"};
constexpr const char* kLayouts[] = {"nhd", "hnd", "xpacked", "bytes"};
constexpr const char* kRopeStyles[] = {"none", "linear", "glm2", "dynamic_ntk", "qwen_dynamic_ntk",
                                       "yarn", "llama3", "mrope"};
constexpr const char* kIndexForms[] = {"slots", "positions"};

int32_t from_name(const std::string& argument, nb::handle value, std::span<const char* const> names) {
  const std::string wanted = text(value);
  std::string all;
  for (size_t i = 0; i < names.size(); ++i) {
    if (wanted == names[i]) return static_cast<int32_t>(i);
    all += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  invalid_argument(argument + " is '" + wanted + "'; known are " + all);
}

int64_t to_int(const Name& name, nb::handle value, int64_t least, int64_t most) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    type_error(name.text() + " is " + text(nb::repr(value)) + "; an int is expected");
  }
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || number < least || number > most)
    invalid_argument(name.text() + " is " + text(index) + "; " + std::to_string(least) + ".." + std::to_string(most) +
                     " is allowed");
  return number;
}

// A bool, one element of a framework's own bools, or 0 or 1. Other things have a truth value, too, which their caller
// may not mean.
int32_t to_bool(const Name& name, nb::handle value) {
  if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  int64_t number = -1;
  if (index.is_valid()) {
    int overflow = 0;
    number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0) number = -1;
  } else {
    PyErr_Clear();
    const nb::object dtype = nb::getattr(value, "dtype", nb::none());  // of numpy "bool", of torch "torch.bool"
    const std::string kind = dtype.is_none() ? "" : text(dtype);
    if (kind == "bool" || kind == "torch.bool") number = PyObject_IsTrue(value.ptr());
  }
  if (number != 0 && number != 1) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // an interrupt
    PyErr_Clear();
    type_error(name.text() + " is " + text(nb::repr(value)) + "; a bool is expected");
  }
  return static_cast<int32_t>(number);
}

double to_double(const Name& name, nb::handle value) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    type_error(name.text() + " is " + text(nb::repr(value)) + "; a float is expected");
  }
  return number;
}

// A number that float32 stores as 0 is refused: 0 stands for a default in many fields. So is one that it cannot hold.
float to_float(const Name& name, nb::handle value) {
  const double number = to_double(name, value);
  const float stored = static_cast<float>(number);
  if (stored == 0 && number != 0)
    invalid_argument(name.text() + " is " + text(nb::repr(value)) +
                     ", which is 0 as a float32; the least that it stores is 1.4e-45");
  if (std::isinf(stored) && !std::isinf(number))
    invalid_argument(name.text() + " is " + text(nb::repr(value)) +
                     ", which is infinite as a float32; the most that it stores is 3.4e38");
  return stored;
}

void fill_from_record(void* to, const Table& table, nb::handle type, const char* scope, nb::handle record,
                      Arrays* arrays);

void fill_field(std::byte* base, const Field& field, const char* scope, nb::handle value, Arrays* arrays) {
  void* to = base + field.offset;
  const Name name{scope, field.name};
  switch (field.kind) {
    case Kind::kInput:
      *static_cast<attune_tensor*>(to) = arrays->view(name, value, Arrays::Use::kRead);
      return;
    case Kind::kBits:
      *static_cast<attune_tensor*>(to) = arrays->view(name, value, Arrays::Use::kBits);
      return;
    case Kind::kOutput:
      *static_cast<attune_tensor*>(to) = arrays->view(name, value, Arrays::Use::kWrite);
      return;
    case Kind::kPool:
      *static_cast<attune_tensor*>(to) = arrays->view(name, value, Arrays::Use::kCache);
      return;
    case Kind::kBool: {
      *static_cast<int32_t*>(to) = to_bool(name, value);
      return;
    }
    case Kind::kInt32:
      *static_cast<int32_t*>(to) = static_cast<int32_t>(to_int(name, value, INT32_MIN, INT32_MAX));
      return;
    case Kind::kInt64:
      *static_cast<int64_t*>(to) = to_int(name, value, INT64_MIN, INT64_MAX);
      return;
    case Kind::kFloat:
      *static_cast<float*>(to) = to_float(name, value);
      return;
    case Kind::kDouble:
      *static_cast<double*>(to) = to_double(name, value);
      return;
    case Kind::kInt32x3:
      if (!PySequence_Check(value.ptr()) || nb::len(value) != 3)
        type_error(name.text() + " is " + text(nb::repr(value)) + "; three ints are expected");
      for (size_t i = 0; i < 3; ++i)
        static_cast<int32_t*>(to)[i] = static_cast<int32_t>(to_int(name, nb::object(value[i]), INT32_MIN, INT32_MAX));
      return;
    case Kind::kFormat:
      *static_cast<int32_t*>(to) = from_name(name.text(), value, kFormats);
      return;
    case Kind::kLayout:
      *static_cast<int32_t*>(to) = from_name(name.text(), value, kLayouts);
      return;
    case Kind::kRopeStyle:
      *static_cast<int32_t*>(to) = from_name(name.text(), value, kRopeStyles);
      return;
    case Kind::kIndexForm:
      *static_cast<int32_t*>(to) = from_name(name.text(), value, kIndexForms);
      return;
    case Kind::kCache:
    case Kind::kReadCache:
      if (!nb::isinstance(value, classes().kv_cache))
        type_error(name.text() + " is " + text(nb::repr(value.type())) + "; an attune.KVCache is expected");
      return fill_from_record(to, kv_cache_table(), classes().kv_cache,
                              field.kind == Kind::kCache ? "cache." : "extra_cache.", value, arrays);
    case Kind::kPrologue:
      if (!nb::isinstance(value, classes().prologue))
        type_error(name.text() + " is " + text(nb::repr(value.type())) + "; an attune.Prologue is expected");
      return fill_from_record(to, prologue_table(), classes().prologue, "prologue.", value, arrays);
  }
}

// type: the class whose slots the table names; the record may be of a class derived from it.
void fill_from_record(void* to, const Table& table, nb::handle type, const char* scope, nb::handle record,
                      Arrays* arrays) {
  const bool slots = reinterpret_cast<PyObject*>(Py_TYPE(record.ptr())) == type.ptr();
  for (size_t i = 0; i < table.fields().size(); ++i) {
    nb::object value =
        slots ? table.slot(i, type, record) : nb::steal(PyObject_GetAttr(record.ptr(), table.key(i).ptr()));
    if (!value.is_valid()) throw nb::python_error();
    if (value.is_none()) continue;
    fill_field(static_cast<std::byte*>(to), table.fields()[i], scope, value, arrays);
    arrays->hold(std::move(value));
  }
}

}  // namespace

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kInput:
    case Kind::kBits:
      return "array";
    case Kind::kOutput:
      return "output";
    case Kind::kPool:
      return "pool";
    case Kind::kBool:
      return "bool";
    case Kind::kInt32:
    case Kind::kInt64:
      return "int";
    case Kind::kFloat:
    case Kind::kDouble:
      return "float";
    case Kind::kInt32x3:
      return "ints";
    case Kind::kCache:
    case Kind::kReadCache:
      return "cache";
    case Kind::kPrologue:
      return "prologue";
    default:
      return "str";
  }
}

Table::Table(std::span<const Field> fields) : fields_(fields) {
  for (size_t i = 0; i < fields.size(); ++i) {
    keys_.emplace_back(PyUnicode_InternFromString(fields[i].name));
    index_[keys_.back()] = i;
  }
}

int Table::find(nb::handle name) const {
  PyObject* found = PyDict_GetItemWithError(index_.ptr(), name.ptr());
  return found == nullptr ? -1 : static_cast<int>(PyLong_AsLong(found));
}

nb::list Table::names() const {
  nb::list names;
  for (const nb::handle key : keys_) names.append(key);
  return names;
}

nb::object Table::slot(size_t i, nb::handle type, nb::handle record) const {
  if (slots_.empty()) {
    std::vector<Slot> found;
    for (const nb::handle key : keys_) {
      PyObject* descriptor = PyObject_GetAttr(type.ptr(), key.ptr());
      if (descriptor == nullptr) throw nb::python_error();
      found.push_back(
          {descriptor, reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get))});
    }
    slots_ = std::move(found);
  }
  if (slots_[i].get == nullptr) return nb::steal(PyObject_GetAttr(record.ptr(), keys_[i].ptr()));
  return nb::steal(slots_[i].get(slots_[i].descriptor, record.ptr(), type.ptr()));
}

void Values::take(const Table& table, nb::dict arguments) {
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(arguments.ptr(), &at, &key, &value);) {
    const int i = table.find(key);
    if (i < 0) type_error(text(classes().unknown_argument(nb::handle(key), table.names())));
    items[i] = value == Py_None ? nullptr : value;
  }
}

void fill(void* to, const Table& table, const Values& values, Arrays* arrays) {
  for (size_t i = 0; i < table.fields().size(); ++i)
    if (values.items[i] != nullptr)
      fill_field(static_cast<std::byte*>(to), table.fields()[i], "", values.items[i], arrays);
}

void fill(void* to, const Table& table, nb::dict arguments, Arrays* arrays) {
  Values values;
  values.take(table, arguments);
  fill(to, table, values, arrays);
}

void check_values(const Table& table, nb::dict arguments) {
  std::byte scratch[sizeof(int64_t) * 3];
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(arguments.ptr(), &at, &key, &value);) {
    const int i = table.find(key);
    if (i < 0 || value == Py_None) continue;
    Field field = table.fields()[static_cast<size_t>(i)];
    field.offset = 0;
    switch (field.kind) {
      case Kind::kBool:
      case Kind::kInt32:
      case Kind::kInt64:
      case Kind::kFloat:
        fill_field(scratch, field, "", value, nullptr);
        break;
      default:
        break;
    }
  }
}

attune_kv_format format_from_name(nb::handle name) {
  return static_cast<attune_kv_format>(from_name("format", name, kFormats));
}

// tables

#define FIELD(type, name, kind) \
  { #name, Kind::kind, offsetof(type, name) }

const Table& attention_table() {
#define A(name, kind) FIELD(attune_attention, name, k##kind),
  static constexpr Field kFields[] = {ATTUNE_ATTENTION_FIELDS(A)};
#undef A
  static const Table* table = new Table(kFields);
  return *table;
}

const Table& kv_cache_table() {
#define C(name, kind) FIELD(attune_kv_cache, name, kind)
  static constexpr Field kFields[] = {
      C(k, kPool),
      C(v, kPool),
      C(k_scale, kPool),
      C(v_scale, kPool),
      C(page_table, kInput),
      C(v_page_table, kInput),
      C(batch_index, kInput),
      C(format, kFormat),
      C(layout, kLayout),
      C(page_size, kInt64),
      C(ring_capacity, kInt64),
  };
#undef C
  static const Table* table = new Table(kFields);
  return *table;
}

const Table& prologue_table() {
#define P(name, kind) FIELD(attune_prologue, name, kind)
  static constexpr Field kFields[] = {
      P(qkv_scale, kInput),
      P(q_bias, kInput),
      P(k_bias, kInput),
      P(v_bias, kInput),
      P(ia3_k, kInput),
      P(ia3_v, kInput),
      P(ia3_task, kInput),
      P(rope_cos_sin, kInput),
      P(rope_table_index, kInput),
      P(positions, kInput),
      P(rope_offset, kInt64),
      P(rope_interleaved, kBool),
      P(mrope_section, kInt32x3),
      P(mrope_interleaved, kBool),
      P(append, kBool),
      P(logn, kInput),
      P(power_of_two_scales, kBool),
  };
#undef P
  static const Table* table = new Table(kFields);
  return *table;
}

const Table& qkv_prepare_table() {
#define Q(name, kind) FIELD(attune_qkv_prepare, name, kind)
  static constexpr Field kFields[] = {
      Q(q, kInput),          Q(k, kInput),        Q(v, kInput),      Q(cu_seqlens_q, kInput),
      Q(seqused_kv, kInput), Q(finished, kInput), Q(cache, kCache),  Q(prologue, kPrologue),
      Q(q_out, kOutput),     Q(k_out, kOutput),   Q(v_out, kOutput),
  };
#undef Q
  static const Table* table = new Table(kFields);
  return *table;
}

const Table& merge_table() {
#define M(name, kind) FIELD(attune_merge, name, kind)
  static constexpr Field kFields[] = {
      M(partial_out, kInput), M(partial_lse, kInput), M(sinks, kInput),
      M(out, kOutput),        M(out_scale, kInput),   M(lse, kOutput),
  };
#undef M
  static const Table* table = new Table(kFields);
  return *table;
}

// The dense side is read where the cache is written, and written where it is read.
#define O(name, kind) FIELD(attune_cache_op, name, kind)
#define CACHE_OP_FIELDS(dense)                                                                   \
  {                                                                                              \
    O(power_of_two_scales, kBool), O(cache, kCache), O(k, dense), O(v, dense), O(slots, kInput), \
        O(cu_seqlens, kInput), O(seqused_kv, kInput), O(finished, kInput),                       \
  }
const Table& cache_write_table() {
  static constexpr Field kFields[] = CACHE_OP_FIELDS(kInput);
  static const Table* table = new Table(kFields);
  return *table;
}
const Table& cache_read_table() {
  static constexpr Field kFields[] = CACHE_OP_FIELDS(kOutput);
  static const Table* table = new Table(kFields);
  return *table;
}
#undef CACHE_OP_FIELDS
#undef O

#define X(name, kind) FIELD(attune_indexer, name, kind)
#define INDEXER_FIELDS(scores_kind)                                                                                    \
  {                                                                                                                    \
    X(causal, kBool), X(q, kInput), X(q_scale, kInput), X(weights, kInput), X(cu_seqlens_q, kInput), X(cache, kCache), \
        X(seqused_kv, kInput), X(key_begin, kInput), X(key_end, kInput), X(scores, scores_kind),                       \
        X(clear_scores, kBool), X(form, kIndexForm), X(indices, kOutput), X(topk_length, kOutput),                     \
        X(slot_table, kInput), X(slot_page_size, kInt64), X(slot_pages, kInt64), X(max_seqlen_kv, kInt64),             \
  }
const Table& indexer_table() {
  static constexpr Field kFields[] = INDEXER_FIELDS(kOutput);
  static const Table* table = new Table(kFields);
  return *table;
}
const Table& indexer_select_table() {
  static constexpr Field kFields[] = INDEXER_FIELDS(kInput);
  static const Table* table = new Table(kFields);
  return *table;
}
#undef INDEXER_FIELDS
#undef X

const Table& rope_table() {
#define R(name, kind) FIELD(attune_rope, name, kind)
  static constexpr Field kFields[] = {
      R(style, kRopeStyle),
      R(dim, kInt64),
      R(theta, kDouble),
      R(scale, kDouble),
      R(max_position, kInt64),
      R(seqlen, kInt64),
      R(beta_fast, kDouble),
      R(beta_slow, kDouble),
      R(extrapolation_factor, kDouble),
      R(mscale, kDouble),
      R(low_freq_factor, kDouble),
      R(high_freq_factor, kDouble),
  };
#undef R
  static const Table* table = new Table(kFields);
  return *table;
}

}  // namespace attune::python
