// SPDX-License-Identifier: Apache-2.0
// attune._core: the C ABI as Python sees it. Arguments come as dicts whose keys are the names of the C fields; what is
// convenient is made in Python, above.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <vector>

#include "backward.h"
#include "plan.h"

namespace attune::python {

Classes& classes() {
  static Classes known;
  return known;
}

namespace {

[[noreturn]] void raise(nb::handle type, const std::string& message, const char* status) {
  nb::object error = type(message);
  error.attr("status") = status;
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

// What the package hands over when it is imported; kept for good.
void configure(nb::kwargs objects) {
  Classes& to = classes();
  struct Slot {
    const char* name;
    nb::handle* to;
  };
  for (const Slot& slot : {Slot{"View", &to.view},
                           {"Spec", &to.spec},
                           {"KVCache", &to.kv_cache},
                           {"Prologue", &to.prologue},
                           {"Error", &to.error},
                           {"InvalidArgument", &to.invalid_argument},
                           {"WrongType", &to.wrong_type},
                           {"Unsupported", &to.unsupported},
                           {"OutOfMemory", &to.out_of_memory},
                           {"unknown_argument", &to.unknown_argument},
                           {"current_stream", &to.current_stream},
                           {"allocate", &to.allocate}})
    *slot.to = nb::object(objects[slot.name]).release();
}

attune_device device_from(nb::handle device, const Arrays& arrays) {
  if (device.is_none()) return arrays.device();
  return {nb::cast<int32_t>(device[0]), nb::cast<int32_t>(device[1])};
}

nb::tuple support(attune_status status) {
  if (status == ATTUNE_INVALID_ARGUMENT) check(status);
  return nb::make_tuple(status == ATTUNE_OK, status == ATTUNE_OK ? "" : attune_last_error());
}

nb::tuple supported(nb::dict arguments, nb::object device) {
  Values values;
  values.take(attention_table(), arguments);
  Arrays arrays;
  const attune_attention attention = read_attention(values, &arrays);
  return support(attune_supported(&attention, device_from(device, arrays)));
}

nb::tuple supported_by_capability(nb::dict arguments, int32_t capability) {
  Values values;
  values.take(attention_table(), arguments);
  Arrays arrays;
  const attune_attention attention = read_attention(values, &arrays);
  return support(attune_supported_by_capability(&attention, capability));
}

void validate(nb::dict arguments, nb::object stream) {
  Values values;
  values.take(attention_table(), arguments);
  Arrays arrays;
  const attune_attention attention = read_attention(values, &arrays);
  check(attune_validate(&attention, arrays.device(), arrays.stream(stream)));
}

void warm(nb::list descriptors, nb::object device) {
  std::vector<attune_attention> attentions;
  attune_device on{};
  for (nb::handle arguments : descriptors) {
    Values values;
    values.take(attention_table(), nb::cast<nb::dict>(arguments));
    Arrays arrays;
    attentions.push_back(read_attention(values, &arrays));
    on = device_from(device, arrays);
  }
  std::vector<const attune_attention*> pointers;
  for (const attune_attention& attention : attentions) pointers.push_back(&attention);
  attune_status status;
  {
    nb::gil_scoped_release release;
    status = attune_warm(pointers.data(), static_cast<int32_t>(pointers.size()), on);
  }
  check(status);
}

template <class Op>
using OpRun = attune_status (*)(const Op*, attune_device, void*);

template <class Op>
void run_op(const Op& op, OpRun<Op> run, const Arrays& arrays, nb::handle stream_given) {
  void* stream = arrays.stream(stream_given);
  attune_status status;
  {
    nb::gil_scoped_release release;
    status = run(&op, arrays.device(), stream);
  }
  check(status);
}

void qkv_prepare(nb::dict arguments, nb::object stream) {
  attune_qkv_prepare op;
  check(attune_qkv_prepare_init(&op, sizeof op));
  Arrays arrays;
  fill(&op, qkv_prepare_table(), arguments, &arrays);
  if (op.prologue.append != 0) arrays.require_writable_cache();
  run_op(op, attune_qkv_prepare_run, arrays, stream);
}

void merge(nb::dict arguments, nb::object stream) {
  attune_merge op;
  check(attune_merge_init(&op, sizeof op));
  Arrays arrays;
  fill(&op, merge_table(), arguments, &arrays);
  run_op(op, attune_merge_run, arrays, stream);
}

template <attune_cache_op_kind kKind>
void cache_op(nb::dict arguments, nb::object stream) {
  constexpr bool kWrites = kKind == ATTUNE_CACHE_APPEND || kKind == ATTUNE_CACHE_QUANTIZE;
  attune_cache_op op;
  check(attune_cache_op_init(&op, sizeof op));
  op.kind = kKind;
  Arrays arrays;
  fill(&op, kWrites ? cache_write_table() : cache_read_table(), arguments, &arrays);
  if (kWrites) arrays.require_writable_cache();
  run_op(op, attune_cache_op_run, arrays, stream);
}

template <attune_indexer_kind kKind>
void indexer(nb::dict arguments, nb::object workspace, nb::object stream_given) {
  attune_indexer op;
  check(attune_indexer_init(&op, sizeof op));
  op.kind = kKind;
  Arrays arrays;
  fill(&op, kKind == ATTUNE_INDEXER_SELECT ? indexer_select_table() : indexer_table(), arguments, &arrays);
  size_t bytes = 0;
  check(attune_indexer_workspace_size(&op, arrays.device(), &bytes));
  const Workspace own(bytes, arrays, workspace, stream_given);
  void* stream = arrays.stream(stream_given);
  attune_status status;
  {
    nb::gil_scoped_release release;
    status = attune_indexer_run(&op, arrays.device(), own.data(), own.size(), stream);
  }
  check(status);
}

// A dense fp32 array in host memory with at least count elements.
float* host_floats(nb::handle array, int64_t count) {
  Arrays arrays;
  const attune_tensor tensor = arrays.view({"", "out"}, array, Arrays::Use::kWrite);
  int64_t dense = 1;
  bool in_order = true;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    in_order &= tensor.stride[i] == dense || tensor.shape[i] == 1;
    dense *= tensor.shape[i];
  }
  if (!in_order && dense > 0) invalid_argument("out must be dense");  // strides of no elements may be anything
  if (arrays.device().type != ATTUNE_DEVICE_CPU || tensor.dtype != ATTUNE_FLOAT32 || dense < count)
    invalid_argument("out must be a float32 array in host memory of " + std::to_string(count) + " elements");
  return static_cast<float*>(tensor.data);
}

attune_rope rope_from(nb::dict arguments) {
  attune_rope rope;
  check(attune_rope_init(&rope, sizeof rope));
  fill(&rope, rope_table(), arguments, nullptr);
  return rope;
}

nb::list rope_frequencies(nb::dict arguments) {
  const attune_rope rope = rope_from(arguments);
  std::vector<double> frequencies(rope.dim > 0 ? static_cast<size_t>(rope.dim / 2) + 1 : 1);
  check(attune_rope_frequencies(&rope, frequencies.data()));
  nb::list list;
  for (int64_t i = 0; i < rope.dim / 2; ++i) list.append(frequencies[static_cast<size_t>(i)]);
  return list;
}

nb::list devices() {
  int32_t count = 0;
  check(attune_device_count(&count));
  nb::list list;
  for (int32_t i = 0; i < count; ++i) {
    attune_device_info info;
    info.struct_size = sizeof info;
    check(attune_get_device_info(i, &info));
    list.append(
        nb::make_tuple(info.device.type, info.device.index, info.name, info.isa, info.num_units, info.memory_bytes));
  }
  return list;
}

nb::list kernels() {
  int32_t count = 0;
  check(attune_kernel_count(&count));
  nb::list list;
  for (int32_t i = 0; i < count; ++i) {
    attune_kernel_info info;
    info.struct_size = sizeof info;
    check(attune_get_kernel_info(i, &info));
    list.append(nb::make_tuple(info.name, info.operation, info.device_type, info.coverage));
  }
  return list;
}

std::string describe_cuda() {
  size_t needed = 0;
  check(attune_describe_cuda(nullptr, 0, &needed));
  std::string text(needed, '\0');
  check(attune_describe_cuda(text.data(), text.size(), &needed));
  text.resize(needed - 1);
  return text;
}

// The library may log from any thread, and while the interpreter ends.
void set_log_callback(nb::object callback) {
  static PyObject* current = nullptr;
  auto forward = [](int32_t level, const char* message, void* user) {
    if (!Py_IsInitialized()) return;
    nb::gil_scoped_acquire acquire;
    try {
      nb::handle(static_cast<PyObject*>(user))(level, message);
    } catch (nb::python_error& e) {
      e.discard_as_unraisable("the log callback of attune");
    }
  };
  PyObject* next = callback.is_none() ? nullptr : callback.inc_ref().ptr();
  check(attune_set_log_callback(next == nullptr ? nullptr : +forward, next));
  current = next;  // the last one stays referenced: another thread may be inside it
  (void)current;
}

// Name -> kind of every field.
nb::dict describe(const Table& table) {
  nb::dict kinds;
  for (const Field& field : table.fields()) kinds[field.name] = kind_name(field.kind);
  return kinds;
}

}  // namespace

void type_error(const std::string& message) { raise(classes().wrong_type, message, "invalid argument"); }
void invalid_argument(const std::string& message) { raise(classes().invalid_argument, message, "invalid argument"); }
void workspace_too_small(const std::string& message) {
  raise(classes().error, message, attune_status_name(ATTUNE_WORKSPACE_TOO_SMALL));
}

void check(attune_status status) {
  if (status == ATTUNE_OK) return;
  const char* name = attune_status_name(status);
  const std::string message = attune_last_error()[0] != '\0' ? attune_last_error() : name;
  if (status == ATTUNE_INVALID_ARGUMENT) raise(classes().invalid_argument, message, name);
  if (status == ATTUNE_UNSUPPORTED) raise(classes().unsupported, message, name);
  if (status == ATTUNE_OUT_OF_MEMORY) raise(classes().out_of_memory, message, name);
  raise(classes().error, message, name);
}

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // objects handed to configure live as long as the process
  m.attr("__version__") = attune_version();
  m.def("configure", &configure);

  nb::class_<Plan>(m, "Plan")
      .def(nb::init<nb::dict, nb::object>(), nb::arg("arguments"), nb::arg("workspace").none())
      .def("run", [](Plan& plan, nb::kwargs changes) { return plan.call(attune_run, changes); })
      .def("schedule", [](Plan& plan, nb::kwargs changes) { plan.call(attune_schedule, changes); })
      .def("run_scheduled", [](Plan& plan, nb::kwargs changes) { return plan.run_scheduled(changes); })
      .def("describe", &Plan::describe)
      .def_prop_ro("workspace_size", &Plan::workspace_size)
      .def_prop_ro("device", &Plan::device);
  m.def("attention", &run_attention, nb::arg("arguments"), nb::arg("workspace").none(), nb::arg("stream").none());
  m.def("supported", &supported, nb::arg("arguments"), nb::arg("device").none());
  m.def("supported_by_capability", &supported_by_capability);
  m.def("check_values", [](nb::dict arguments) { check_values(attention_table(), arguments); });
  m.def("validate", &validate, nb::arg("arguments"), nb::arg("stream").none());
  m.def("warm", &warm, nb::arg("descriptors"), nb::arg("device").none());
  m.def("attention_backward", &attention_backward, nb::arg("attention"), nb::arg("arguments"),
        nb::arg("workspace").none(), nb::arg("stream").none());
  m.def("attention_backward_supported", &attention_backward_supported, nb::arg("attention"), nb::arg("arguments"),
        nb::arg("device").none());

  m.def("qkv_prepare", &qkv_prepare, nb::arg("arguments"), nb::arg("stream").none());
  m.def("merge", &merge, nb::arg("arguments"), nb::arg("stream").none());
  m.def("cache_append", &cache_op<ATTUNE_CACHE_APPEND>, nb::arg("arguments"), nb::arg("stream").none());
  m.def("cache_quantize", &cache_op<ATTUNE_CACHE_QUANTIZE>, nb::arg("arguments"), nb::arg("stream").none());
  m.def("cache_dequantize", &cache_op<ATTUNE_CACHE_DEQUANTIZE>, nb::arg("arguments"), nb::arg("stream").none());
  m.def("cache_gather", &cache_op<ATTUNE_CACHE_GATHER>, nb::arg("arguments"), nb::arg("stream").none());

  m.def("indexer_topk", &indexer<ATTUNE_INDEXER_TOPK>, nb::arg("arguments"), nb::arg("workspace").none(),
        nb::arg("stream").none());
  m.def("indexer_scores", &indexer<ATTUNE_INDEXER_SCORES>, nb::arg("arguments"), nb::arg("workspace").none(),
        nb::arg("stream").none());
  m.def("indexer_select", &indexer<ATTUNE_INDEXER_SELECT>, nb::arg("arguments"), nb::arg("workspace").none(),
        nb::arg("stream").none());

  m.def("rope_table", [](nb::dict arguments, int64_t first_position, int64_t num_positions, nb::object out) {
    const attune_rope rope = rope_from(arguments);
    check(attune_rope_table(&rope, first_position, num_positions, host_floats(out, num_positions * rope.dim)));
  });
  m.def("rope_frequencies", &rope_frequencies);
  m.def("logn_table", [](int64_t max_position, int64_t num_positions, nb::object out) {
    check(attune_logn_table(max_position, num_positions, host_floats(out, num_positions)));
  });
  m.def("alibi_slopes",
        [](int64_t num_heads, nb::object out) { check(attune_alibi_slopes(num_heads, host_floats(out, num_heads))); });
  m.def("t5_bucket", [](int64_t relative_position, int64_t num_buckets, int64_t max_distance, bool bidirectional) {
    int64_t bucket = 0;
    check(attune_t5_bucket(relative_position, num_buckets, max_distance, bidirectional, &bucket));
    return bucket;
  });
  m.def("kv_page_bytes", [](nb::object format, int64_t page_size) {
    int64_t bytes = 0;
    check(attune_kv_page_bytes(format_from_name(format), page_size, &bytes));
    return bytes;
  });

  m.def("devices", &devices);
  m.def("kernels", &kernels);
  m.def("describe_cuda", &describe_cuda);
  m.def("set_num_threads", [](int32_t count) { check(attune_set_num_threads(count)); });
  m.def("get_num_threads", [] {
    int32_t count = 0;
    check(attune_get_num_threads(&count));
    return count;
  });
  m.def("set_log_callback", &set_log_callback, nb::arg("callback").none());

  // The fields of each struct, for operators of torch and for tests.
  nb::dict tables;
  tables["attune_attention"] = describe(attention_table());
  tables["attune_kv_cache"] = describe(kv_cache_table());
  tables["attune_prologue"] = describe(prologue_table());
  tables["attune_qkv_prepare"] = describe(qkv_prepare_table());
  tables["attune_merge"] = describe(merge_table());
  tables["attune_cache_op"] = describe(cache_write_table());
  tables["attune_indexer"] = describe(indexer_table());
  tables["attune_rope"] = describe(rope_table());
  m.attr("fields") = tables;
}

}  // namespace attune::python
