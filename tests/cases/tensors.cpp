// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <stdexcept>

namespace attune::cases {
void* element_at(const attune_tensor& t, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int axis = 0;
  for (const int64_t i : index) offset += i * t.stride[axis++];
  return static_cast<std::byte*>(t.data) + offset * element_size(static_cast<attune_dtype>(t.dtype));
}

int64_t num_elements(const attune_tensor& t) {
  if (t.dtype == ATTUNE_DTYPE_NONE) return 0;
  int64_t n = 1;
  for (int axis = 0; axis < t.rank; ++axis) n *= t.shape[axis];
  return n;
}

attune_tensor Arena::add(const std::string& name, attune_dtype dtype, const std::vector<int64_t>& shape,
                         const Layout& layout) {
  attune_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int64_t extent = 1;
  for (int position = t.rank - 1; position >= 0; --position) {
    const int axis = layout.order.empty() ? position : layout.order[static_cast<size_t>(position)];
    const int64_t padding = layout.padding.empty() ? 0 : layout.padding[static_cast<size_t>(axis)];
    t.shape[axis] = shape[static_cast<size_t>(axis)];
    t.stride[axis] = extent;
    extent *= t.shape[axis];
    extent += padding;
  }
  Buffer& buffer = add_bytes(name, static_cast<size_t>(extent * element_size(dtype)), layout.offset);
  t.data = buffer.host();
  if (dtype == ATTUNE_INT8 && filler_ == kPoison) poison(dtype, buffer.host(), extent);
  return t;
}

Buffer& Arena::add_bytes(const std::string& name, size_t bytes, size_t offset) {
  buffers_.push_back(std::make_unique<Buffer>(memory_, name, bytes, offset, filler_));
  return *buffers_.back();
}

Buffer* Arena::owner(const void* p) const {
  for (const auto& buffer : buffers_) {
    if (buffer->contains(p)) return buffer.get();
  }
  return nullptr;
}

void Arena::upload() {
  for (const auto& buffer : buffers_) buffer->upload();
}

void* Arena::device_pointer(const void* host) const {
  if (host == nullptr) return nullptr;
  Buffer* buffer = owner(host);
  if (buffer == nullptr) throw std::logic_error("a tensor points outside of its arena");
  return static_cast<std::byte*>(buffer->device()) + (static_cast<const std::byte*>(host) - buffer->host());
}

std::string Arena::check_guards() const {
  for (const auto& buffer : buffers_) {
    if (std::string wrong = buffer->check_guards(); !wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace attune::cases
