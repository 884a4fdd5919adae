// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <algorithm>
#include <cstring>
#include <typeinfo>

#include "torch.h"

namespace attune::python {

struct Arrays::View {
  attune_tensor tensor{};
  attune_dtype as = ATTUNE_DTYPE_NONE;  // the dtype that an attune.View gives, where the framework has none for it
  int32_t device_type = dlpack::kCpu;
  int32_t device_id = 0;
  bool read_only = false;
  bool is_bool = false;  // uint8 to the library
};

namespace {

// How arrays of a type are read. Held for good: types are few.
enum class Protocol { kNone, kExchange, kStruct, kCapsule, kView, kSpec };
struct TypeEntry {
  PyObject* type;
  Protocol protocol;
  const dlpack::ExchangeApi* api;
  bool immutable = false;  // JAX, which exports without saying so
};

nb::object attribute(nb::handle object, const char* name) { return nb::getattr(object, name, nb::handle(Py_None)); }

const TypeEntry& entry_of(nb::handle array) {
  static std::vector<TypeEntry> known;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  for (const TypeEntry& entry : known)
    if (entry.type == type) return entry;

  TypeEntry entry{type, Protocol::kNone, nullptr};
  if (nb::object api = attribute(type, "__dlpack_c_exchange_api__"); !api.is_none()) {
    auto* table = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) PyErr_Clear();
    while (table != nullptr && table->version.major != 1) table = table->previous;
    if (table != nullptr && table->tensor_from_object != nullptr) entry = {type, Protocol::kExchange, table};
  }
  if (entry.protocol != Protocol::kNone) {
  } else if (type == classes().view.ptr()) {
    entry.protocol = Protocol::kView;
  } else if (type == classes().spec.ptr()) {
    entry.protocol = Protocol::kSpec;
  } else if (nb::hasattr(type, "__array_struct__")) {
    entry.protocol = Protocol::kStruct;
  } else if (nb::hasattr(type, "__dlpack__")) {
    entry.protocol = Protocol::kCapsule;
    entry.immutable = text(attribute(type, "__module__")).rfind("jax", 0) == 0;
  }
  constexpr size_t kMost = 64;  // subclasses made in a loop must not fill the table
  if (known.size() >= kMost) {
    Py_DECREF(known.front().type);
    known.erase(known.begin());
  }
  Py_INCREF(type);
  return known.emplace_back(entry);
}

struct DtypeName {
  attune_dtype dtype;
  const char* name;
};
constexpr DtypeName kDtypeNames[] = {
    {ATTUNE_FLOAT32, "float32"},
    {ATTUNE_FLOAT16, "float16"},
    {ATTUNE_BFLOAT16, "bfloat16"},
    {ATTUNE_FLOAT8_E4M3, "float8_e4m3fn"},
    {ATTUNE_FLOAT8_E5M2, "float8_e5m2"},
    {ATTUNE_INT8, "int8"},
    {ATTUNE_UINT8, "uint8"},
    {ATTUNE_UINT8, "bool"},
    {ATTUNE_INT32, "int32"},
    {ATTUNE_INT64, "int64"},
};

attune_dtype find_dtype(const char* name) {
  for (const DtypeName& known : kDtypeNames)
    if (std::strcmp(known.name, name) == 0) return known.dtype;
  return ATTUNE_DTYPE_NONE;
}

attune_dtype dtype_of(dlpack::DataType type) {
  if (type.lanes != 1) return ATTUNE_DTYPE_NONE;
  switch (type.code << 8 | type.bits) {
    case dlpack::kFloat << 8 | 32:
      return ATTUNE_FLOAT32;
    case dlpack::kFloat << 8 | 16:
      return ATTUNE_FLOAT16;
    case dlpack::kBfloat << 8 | 16:
      return ATTUNE_BFLOAT16;
    case dlpack::kFloat8E4m3fn << 8 | 8:
      return ATTUNE_FLOAT8_E4M3;
    case dlpack::kFloat8E5m2 << 8 | 8:
      return ATTUNE_FLOAT8_E5M2;
    case dlpack::kInt << 8 | 8:
      return ATTUNE_INT8;
    case dlpack::kUInt << 8 | 8:
    case dlpack::kBool << 8 | 8:
      return ATTUNE_UINT8;
    case dlpack::kInt << 8 | 32:
      return ATTUNE_INT32;
    case dlpack::kInt << 8 | 64:
      return ATTUNE_INT64;
    default:
      return ATTUNE_DTYPE_NONE;
  }
}

// What a framework said, without the stack that some add.
[[noreturn]] void unreadable(const Name& name, nb::handle array, nb::python_error& error) {
  refuse_transform(name, array);
  const std::string message = text(error.value());
  type_error(name.text() + " cannot be read: " + message.substr(0, message.find('\n')));
}

std::string dtype_text(nb::handle array) {
  nb::object dtype = attribute(array, "dtype");
  return dtype.is_none() ? "unknown" : text(dtype);
}

[[noreturn]] void wrong_dtype(const Name& name, nb::handle array) {
  const std::string argument = name.text();
  const bool of_tokens = argument == "q" || argument == "k" || argument == "v";
  type_error(argument + " has dtype " + dtype_text(array) +
             (of_tokens
                  ? "; allowed: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8"
                  : "; float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8, bool, int32 and int64 "
                    "are known"));
}

attune_dtype viewed(const Name& name, nb::handle array, int64_t bytes, attune_dtype as) {
  if (attune_dtype_size(as) != bytes)
    type_error(name.text() + " is a view of " + dtype_text(array) + " as " + dtype_name(as) +
               ": elements must be of one size");
  return as;
}

void require_rank(const Name& name, int64_t rank) {
  if (rank > ATTUNE_MAX_RANK)
    invalid_argument(name.text() + " has " + std::to_string(rank) + " axes; at most " +
                     std::to_string(ATTUNE_MAX_RANK));
}

// Rank 0 is one element: scales are often made as scalars.
void make_one_element(attune_tensor* tensor) {
  if (tensor->rank != 0) return;
  tensor->rank = 1;
  tensor->shape[0] = 1;
  tensor->stride[0] = 1;
}

void from_dlpack(const Name& name, nb::handle array, const dlpack::Tensor& from, attune_dtype as, attune_tensor* to) {
  require_rank(name, from.ndim);
  to->dtype = as == ATTUNE_DTYPE_NONE ? dtype_of(from.dtype) : viewed(name, array, from.dtype.bits / 8, as);
  if (to->dtype == ATTUNE_DTYPE_NONE) wrong_dtype(name, array);
  to->data = static_cast<char*>(from.data) + (from.data == nullptr ? 0 : from.byte_offset);
  to->rank = from.ndim;
  int64_t dense = 1;
  for (int i = from.ndim - 1; i >= 0; --i) {
    to->shape[i] = from.shape[i];
    to->stride[i] = from.strides != nullptr ? from.strides[i] : dense;
    dense *= from.shape[i];
  }
  make_one_element(to);
}

// The array interface of numpy, protocol version 3: https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two, nd;
  char kind;
  int itemsize, flags;
  Py_intptr_t *shape, *strides;
  void* data;
  PyObject* descr;
};

attune_dtype dtype_of(const ArrayInterface& from, nb::handle array) {
  switch (from.kind << 8 | from.itemsize) {
    case 'f' << 8 | 4:
      return ATTUNE_FLOAT32;
    case 'f' << 8 | 2:
      return ATTUNE_FLOAT16;
    case 'i' << 8 | 1:
      return ATTUNE_INT8;
    case 'u' << 8 | 1:
    case 'b' << 8 | 1:
      return ATTUNE_UINT8;
    case 'i' << 8 | 4:
      return ATTUNE_INT32;
    case 'i' << 8 | 8:
      return ATTUNE_INT64;
    default:  // ml_dtypes
      return find_dtype(text(array.attr("dtype").attr("name")).c_str());
  }
}

constexpr int kFlagAligned = 0x100, kFlagNotSwapped = 0x200, kFlagWriteable = 0x400;

// The first of what __dlpack_device__() returned.
int device_type_of(const Name& name, nb::handle device) {
  nb::object type = nb::steal(PySequence_Check(device.ptr()) ? PySequence_GetItem(device.ptr(), 0) : nullptr);
  int number = 0;
  if (type.is_valid() && nb::try_cast(type, number)) return number;
  PyErr_Clear();
  type_error(name.text() + " cannot be read: its __dlpack_device__() is " + text(nb::repr(device)) +
             "; (type, index) is expected");
}

std::string device_text(int32_t type, int32_t id) {
  if (type == dlpack::kCpu) return "the CPU";
  if (type == dlpack::kCuda) return "cuda:" + std::to_string(id);
  return "a device of DLPack type " + std::to_string(type);
}

}  // namespace

std::string text(nb::handle object) {
  nb::object string = nb::steal(PyObject_Str(object.ptr()));
  Py_ssize_t size = 0;
  const char* bytes = string.is_valid() ? PyUnicode_AsUTF8AndSize(string.ptr(), &size) : nullptr;
  if (bytes == nullptr) throw nb::python_error();
  return std::string(bytes, static_cast<size_t>(size));
}

attune_dtype dtype_from_name(const char* argument, nb::handle name) {
  nb::object last = nb::str(name);  // "float32", or "torch.float32"
  std::string string = text(last);
  if (nb::object of_numpy = attribute(name, "name"); !of_numpy.is_none()) string = text(of_numpy);
  if (const size_t dot = string.rfind('.'); dot != std::string::npos) string = string.substr(dot + 1);
  const attune_dtype dtype = find_dtype(string.c_str());
  if (dtype == ATTUNE_DTYPE_NONE)
    type_error(std::string(argument) + " is " + text(last) + "; known are float32, float16, bfloat16, float8_e4m3fn, " +
               "float8_e5m2, int8, uint8, int32 and int64");
  return dtype;
}

const char* dtype_name(int32_t dtype) {
  for (const DtypeName& known : kDtypeNames)
    if (known.dtype == dtype) return known.name;
  return "none";
}

attune_tensor Arrays::view(const Name& name, nb::handle array, Use use) {
  View view;
  // An array may be of any class, whose attributes may be and raise anything.
  try {
    read(name, array, &view);
  } catch (nb::python_error& e) {
    if (e.matches(classes().error) || e.matches(PyExc_MemoryError) || !e.matches(PyExc_Exception)) throw;
    unreadable(name, array, e);
  } catch (const std::bad_cast&) {
    type_error(name.text() + " cannot be read: an attribute of " + text(nb::repr(nb::handle(Py_TYPE(array.ptr())))) +
               " is no int that fits");
  }
  if (use == Use::kBits && view.is_bool && view.as == ATTUNE_DTYPE_NONE)
    type_error(name.text() + " is bool; uint8 with a bit for each key is expected, as of " +
               "numpy.packbits(mask, axis=-1, bitorder=\"little\")");
  if (use == Use::kWrite && view.read_only && !reads_outputs_)
    invalid_argument(name.text() + " is read-only; an output must be writable");
  if (use == Use::kCache && view.read_only && read_only_cache_.empty()) read_only_cache_ = name.text();
  agree(name, view);
  if (!first_.is_valid()) first_ = nb::borrow(array);
  return view.tensor;
}

void Arrays::read(const Name& name, nb::handle array, View* view) {
  const TypeEntry entry = entry_of(array);
  switch (entry.protocol) {
    case Protocol::kExchange: {
      dlpack::Tensor tensor{};
      if (entry.api->tensor_from_object(array.ptr(), &tensor) != 0) {
        nb::python_error cause;
        unreadable(name, array, cause);
      }
      // Of torch only parts of complex numbers have the negative bit, but for what its own _neg_view makes; and only
      // floats have gradients.
      if (tensor.dtype.code == dlpack::kFloat) refuse_negative_bit(name, array);
      if (dlpack::is_float(tensor.dtype.code)) differentiation_.refuse_loss(name, array);
      if (tensor.data == nullptr) refuse_transform(name, array);
      from_dlpack(name, array, tensor, view->as, &view->tensor);
      view->device_type = tensor.device.type;
      view->device_id = tensor.device.id;
      view->is_bool = tensor.dtype.code == dlpack::kBool;
      if (api_ == nullptr) api_ = entry.api;
      return;
    }
    case Protocol::kStruct:
      return read_struct(name, array, view);
    case Protocol::kCapsule:
      read_capsule(name, array, view);
      view->read_only |= entry.immutable;
      return;
    case Protocol::kSpec:
      return read_spec(name, array, view);
    case Protocol::kView: {
      view->as = dtype_from_name("dtype", array.attr("dtype"));
      nb::object inner = array.attr("array");
      read(name, inner, view);
      return hold(std::move(inner));
    }
    case Protocol::kNone:
      break;
  }
  type_error(name.text() + " is " + text(nb::repr(nb::handle(entry.type))) +
             "; an array is expected: torch, numpy, CuPy, JAX, or anything else with __dlpack__");
}

void Arrays::read_struct(const Name& name, nb::handle array, View* view) {
  nb::object capsule = array.attr("__array_struct__");
  auto* from = static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (from == nullptr) {
    nb::python_error cause;
    unreadable(name, array, cause);
  }
  require_rank(name, from->nd);
  attune_tensor& to = view->tensor;
  to.dtype = view->as == ATTUNE_DTYPE_NONE ? dtype_of(*from, array) : viewed(name, array, from->itemsize, view->as);
  if (to.dtype == ATTUNE_DTYPE_NONE || !(from->flags & kFlagNotSwapped) || from->itemsize == 0)
    wrong_dtype(name, array);
  if (!(from->flags & kFlagAligned)) invalid_argument(name.text() + " is not aligned to its elements");
  to.data = from->data;
  to.rank = from->nd;
  for (int i = 0; i < from->nd; ++i) {
    if (from->strides[i] % from->itemsize != 0)
      invalid_argument(name.text() + " has a stride of " + std::to_string(from->strides[i]) + " bytes on axis " +
                       std::to_string(i) + "; it must be a multiple of the element, " + std::to_string(from->itemsize));
    to.shape[i] = from->shape[i];
    to.stride[i] = from->strides[i] / from->itemsize;
  }
  make_one_element(&to);
  view->read_only = !(from->flags & kFlagWriteable);
  view->is_bool = from->kind == 'b';
}

void Arrays::read_capsule(const Name& name, nb::handle array, View* view) {
  // The call runs on the framework's own current stream, so nobody needs to wait: stream -1 where there are streams.
  nb::dict arguments;
  nb::object exporter, capsule;
  try {
    nb::object device = array.attr("__dlpack_device__")();
    if (device_type_of(name, device) == dlpack::kCuda) arguments["stream"] = -1;
    exporter = array.attr("__dlpack__");
  } catch (nb::python_error& e) {  // an array that was deleted, say
    unreadable(name, array, e);
  }
  refuse_negative_bit(name, array);
  try {
    arguments["max_version"] = nb::make_tuple(1, 0);
    capsule = exporter(**arguments);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_TypeError)) unreadable(name, array, e);
    nb::del(arguments["max_version"]);  // older than DLPack 1.0
    try {
      capsule = exporter(**arguments);
    } catch (nb::python_error& again) {
      unreadable(name, array, again);
    }
  }
  const dlpack::Tensor* tensor;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed =
        static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1)
      type_error(name.text() + " exports DLPack " + std::to_string(managed->version.major));
    view->read_only = (managed->flags & dlpack::kFlagReadOnly) != 0;
    tensor = &managed->tensor;
  } else {
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (managed == nullptr) {
      nb::python_error cause;
      unreadable(name, array, cause);
    }
    tensor = &managed->tensor;
  }
  // The capsule is not consumed: its own destructor releases the export, when this call has returned.
  hold(capsule);
  from_dlpack(name, array, *tensor, view->as, &view->tensor);
  view->device_type = tensor->device.type;
  view->device_id = tensor->device.id;
  view->is_bool = tensor->dtype.code == dlpack::kBool;
}

void Arrays::read_spec(const Name& name, nb::handle array, View* view) {
  nb::object shape = array.attr("shape");
  const size_t rank = nb::len(shape);
  require_rank(name, static_cast<int64_t>(rank));
  int64_t extents[ATTUNE_MAX_RANK] = {};
  for (size_t i = 0; i < rank; ++i) extents[i] = nb::cast<int64_t>(shape[i]);
  view->tensor = attune_dense_tensor(nullptr, dtype_from_name("dtype", array.attr("dtype")),
                                     static_cast<int32_t>(std::max<size_t>(rank, 1)), extents);
  if (rank == 0) view->tensor.shape[0] = 1;
  view->device_type = nb::cast<bool>(array.attr("cuda")) ? dlpack::kCuda : dlpack::kCpu;
  view->device_id = nb::cast<int32_t>(array.attr("index"));
}

void Arrays::agree(const Name& name, const View& view) {
  // Pinned and managed memory are at home on both sides.
  if (view.device_type == dlpack::kCudaHost || view.device_type == dlpack::kCudaManaged) return;
  if (view.device_type != dlpack::kCpu && view.device_type != dlpack::kCuda)
    invalid_argument(name.text() + " is on " + device_text(view.device_type, view.device_id) +
                     "; the CPU and CUDA are known");
  const bool is_cuda = view.device_type == dlpack::kCuda;
  const attune_device device{is_cuda ? ATTUNE_DEVICE_CUDA : ATTUNE_DEVICE_CPU, is_cuda ? view.device_id : 0};
  if (!decided_) {
    device_ = device;
    device_name_ = name.text();
    decided_ = true;
    return;
  }
  if (device.type == device_.type && device.index == device_.index) return;
  invalid_argument(name.text() + " is on " + device_text(view.device_type, view.device_id) + ", but " + device_name_ +
                   " is on " +
                   device_text(device_.type == ATTUNE_DEVICE_CUDA ? dlpack::kCuda : dlpack::kCpu, device_.index) +
                   "; all arrays of a call must be on one device");
}

void Arrays::require_writable_cache() const {
  if (!read_only_cache_.empty())
    invalid_argument(read_only_cache_ + " is read-only, and this call writes to the cache");
}

dlpack::ManagedTensorVersioned* Arrays::allocate_directly(size_t bytes) const {
  if (api_ == nullptr || api_->allocate == nullptr) return nullptr;
  auto extent = static_cast<int64_t>(std::max<size_t>(bytes, 1));
  dlpack::Tensor prototype{};
  prototype.device = {dlpack::kCuda, device_.index};
  prototype.ndim = 1;
  prototype.dtype = {dlpack::kUInt, 8, 1};
  prototype.shape = &extent;
  dlpack::ManagedTensorVersioned* made = nullptr;
  const auto be_silent = [](void*, const char*, const char*) {};
  if (api_->allocate(&prototype, &made, nullptr, be_silent) == 0) return made;
  PyErr_Clear();  // allocate() tells
  return nullptr;
}

nb::object Arrays::allocate(size_t bytes, nb::handle given_stream) const {
  nb::object address = nb::none();
  if (!given_stream.is_none()) address = nb::int_(reinterpret_cast<uintptr_t>(stream(given_stream)));
  return classes().allocate(first_, device_.index, bytes, address);
}

void* Arrays::stream(nb::handle given) const {
  if (device_.type != ATTUNE_DEVICE_CUDA) {
    if (given.is_none() || (PyLong_Check(given.ptr()) && PyObject_Not(given.ptr()) == 1)) return nullptr;
    invalid_argument("stream is " + text(nb::repr(given)) + ", but the arrays are on the CPU, which has no streams");
  }
  if (!given.is_none()) {
    nb::object address = nb::borrow(given);
    for (const char* name : {"cuda_stream", "ptr"})  // torch, CuPy
      if (nb::hasattr(given, name)) {
        address = given.attr(name);
        break;
      }
    if (!PyLong_Check(address.ptr()))
      type_error("stream is " + text(nb::repr(given)) +
                 "; an address, a torch.cuda.Stream or a cupy.cuda.Stream is expected");
    void* found = PyLong_AsVoidPtr(address.ptr());
    if (PyErr_Occurred() == nullptr) return found;
    PyErr_Clear();
    invalid_argument("stream is " + text(address) + ", which is no address");
  }
  if (api_ != nullptr) {
    void* current = nullptr;
    if (api_->current_stream(dlpack::kCuda, device_.index, &current) != 0) throw nb::python_error();
    return current;
  }
  return PyLong_AsVoidPtr(classes().current_stream(first_, device_.index).ptr());
}

}  // namespace attune::python
