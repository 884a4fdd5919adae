// SPDX-License-Identifier: Apache-2.0
// What tensors of torch are beside their memory.
#pragma once

#include <nanobind/nanobind.h>

namespace attune::python {

namespace nb = nanobind;
struct Name;

// Whether torch differentiates now. Asked once for all arrays of a call, as each answer costs a tenth of a microsecond.
class Differentiation {
 public:
  // Throws where reading the memory of an array of floats alone would be wrong: a gradient or a tangent would be lost.
  void refuse_loss(const Name& name, nb::handle array);

 private:
  bool asked_ = false, gradients_ = false, tangents_ = false;
};

// Throws where signs would be lost. DLPack cannot say it.
void refuse_negative_bit(const Name& name, nb::handle array);
// Throws where a transform of torch.func is why an array has no memory.
void refuse_transform(const Name& name, nb::handle array);

}  // namespace attune::python
