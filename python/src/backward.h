// SPDX-License-Identifier: Apache-2.0
// attune_attention_backward over arrays.
#pragma once

#include "fields.h"

namespace attune::python {

// Plans and runs. attention: the arguments of the forward, with its out and lse; arguments: the other fields.
void attention_backward(nb::dict attention, nb::dict arguments, nb::object workspace, nb::object stream);
// (whether a kernel takes it, why not)
nb::tuple attention_backward_supported(nb::dict attention, nb::dict arguments, nb::object device);

}  // namespace attune::python
