// SPDX-License-Identifier: Apache-2.0
// What tensors of torch are beside their memory.
#pragma once

#include "array.h"

namespace attune::python {

// Throws where reading the memory alone would be wrong: a gradient or a tangent would be lost, or signs.
void refuse_what_would_be_lost(const Name& name, nb::handle array);
// The last of these. DLPack cannot say it.
void refuse_negative_bit(const Name& name, nb::handle array);
// Throws where a transform of torch.func is why an array has no memory.
void refuse_transform(const Name& name, nb::handle array);

}  // namespace attune::python
