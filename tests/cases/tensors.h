// SPDX-License-Identifier: Apache-2.0
// Tensors over owned buffers, and the list of tensors of every descriptor.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor_fields.h"
#include "memory.h"
#include "number.h"

namespace attune::cases {

// How a tensor lies in memory. order: its axes from outermost to innermost (empty: as they are). padding: elements left
// unused after the extent of each axis (empty: none). offset: bytes by which the data miss a 256-byte boundary.
struct Layout {
  std::vector<int> order;
  std::vector<int64_t> padding;
  size_t offset = 0;
};

// Element (indices...) of a view.
void* element_at(const attune_tensor& t, std::initializer_list<int64_t> index);
int64_t num_elements(const attune_tensor& t);
// Calls f(index, element) for every element in row-major order of the indices. index has t.rank entries.
template <typename F>
void for_each_element(const attune_tensor& t, F&& f) {
  int64_t index[ATTUNE_MAX_RANK] = {};
  const int64_t size = element_size(static_cast<attune_dtype>(t.dtype));
  for (int64_t n = num_elements(t); n > 0; --n) {
    int64_t offset = 0;
    for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
    f(static_cast<const int64_t*>(index), static_cast<std::byte*>(t.data) + offset * size);
    for (int axis = t.rank - 1; axis >= 0 && ++index[axis] == t.shape[axis]; --axis) index[axis] = 0;
  }
}

using NamedTensor = std::pair<const char*, attune_tensor*>;
// Every tensor of a descriptor with its name in error messages ("cache.k", "prologue.q_bias").
template <class Op>
std::vector<NamedTensor> tensors_of(Op& op) {
  std::vector<NamedTensor> all;
  for (const TensorField& field : TensorFields<Op>::kAll) all.emplace_back(field.name, &tensor_at(op, field));
  return all;
}

// Owns buffers and makes tensors in them. Everything starts as poison, or as another filler.
class Arena {
 public:
  explicit Arena(Memory& memory, std::byte filler = kPoison) : memory_(memory), filler_(filler) {}
  Memory& memory() const { return memory_; }
  // Of what is added from here on.
  void fill_with(std::byte filler) { filler_ = filler; }

  attune_tensor add(const std::string& name, attune_dtype dtype, const std::vector<int64_t>& shape,
                    const Layout& layout = {});
  // A buffer without a tensor.
  Buffer& add_bytes(const std::string& name, size_t bytes, size_t offset = 0);
  const std::vector<std::unique_ptr<Buffer>>& buffers() const { return buffers_; }
  // The buffer whose host bytes hold p; null if none does.
  Buffer* owner(const void* p) const;

  // Copies all host bytes to the device.
  void upload();
  // The descriptor with host pointers, translated to device pointers.
  template <typename Descriptor>
  Descriptor on_device(Descriptor descriptor) const {
    for (auto& [name, tensor] : tensors_of(descriptor)) tensor->data = device_pointer(tensor->data);
    return descriptor;
  }
  void* device_pointer(const void* host) const;
  // "" while all guards stand.
  std::string check_guards() const;

 private:
  Memory& memory_;
  std::byte filler_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace attune::cases
