// SPDX-License-Identifier: Apache-2.0
// Arrays of any framework as attune_tensor views. Nothing is copied; views are read anew in every call, so that an
// array which its owner resized or replaced is never used through an old address.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "attune/attune.h"
#include "dlpack.h"
#include "torch.h"

namespace attune::python {

namespace nb = nanobind;

// Raised as TypeError and attune.InvalidArgument.
[[noreturn]] void type_error(const std::string& message);
[[noreturn]] void invalid_argument(const std::string& message);
// Raised as attune.Error, whose status is that of the C call.
[[noreturn]] void workspace_too_small(const std::string& message);
// Throws the Python exception of a failed status, with the library's message.
void check(attune_status status);

// str(object).
std::string text(nb::handle object);

// "float32" and so on, as numpy, ml_dtypes and torch call them.
attune_dtype dtype_from_name(const char* argument, nb::handle name);
const char* dtype_name(int32_t dtype);

// The full name of an argument, for messages: "cache." and "k".
struct Name {
  const char* scope;
  const char* name;
  std::string text() const { return std::string(scope) + name; }
};

// The arrays of one call: they must be on one device, and stay exported until the call has returned.
class Arrays {
 public:
  Arrays() = default;
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  enum class Use { kRead, kBits, kWrite, kCache };  // kBits: no bool; kCache: written only by operations that append
  attune_tensor view(const Name& name, nb::handle array, Use use);
  // From now on outputs may be read-only: the backward reads those of the forward.
  void read_outputs(bool only) { reads_outputs_ = only; }
  // Keeps what another thread could replace while a call runs without the lock.
  void hold(nb::object object) {
    if (held_.empty()) held_.reserve(16);
    held_.push_back(std::move(object));
  }

  attune_device device() const { return device_; }
  // Throws where a tensor of the cache is read-only.
  void require_writable_cache() const;
  // Bytes on the device, of the framework of the first array that has an exchange API, for work on the current stream.
  // Null: ask allocate.
  dlpack::ManagedTensorVersioned* allocate_directly(size_t bytes) const;
  // An array of uint8 on the device, of the framework of the first array, for work on a stream: given by the caller, or
  // None for the current one. Throws the framework's own error.
  nb::object allocate(size_t bytes, nb::handle given_stream) const;
  // The stream to run on: given by the caller, or the current one of the framework of the first array. CPU: null.
  void* stream(nb::handle given) const;

 private:
  struct View;
  void read(const Name& name, nb::handle array, View* view);
  void read_struct(const Name& name, nb::handle array, View* view);
  void read_capsule(const Name& name, nb::handle array, View* view);
  void read_spec(const Name& name, nb::handle array, View* view);
  void agree(const Name& name, const View& view);

  attune_device device_{ATTUNE_DEVICE_CPU, 0};
  std::string device_name_;  // of the array that decided the device; empty while none has
  bool decided_ = false, reads_outputs_ = false;
  const dlpack::ExchangeApi* api_ = nullptr;  // of the first array that has one
  nb::object first_;                          // the array that decided the device
  std::string read_only_cache_;
  Differentiation differentiation_;
  std::vector<nb::object> held_;
};

// Python's side of the package, set when it is imported. current_stream(array, device index) -> address;
// allocate(array, device index, bytes, stream or None) -> a uint8 array of the same framework.
struct Classes {
  nb::handle view, spec, kv_cache, prologue, current_stream, allocate;
  nb::handle error, invalid_argument, wrong_type, unsupported, out_of_memory;
  nb::handle unknown_argument;  // the sentence about a name that is no argument, from it and a list of those that are
};
Classes& classes();

}  // namespace attune::python
