// SPDX-License-Identifier: Apache-2.0
#include "torch.h"

#include "array.h"

namespace attune::python {
namespace {

// torch's attribute of that name, held for good; null as long as torch is not loaded.
PyObject* attribute_of_torch(const char* name) {
  nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
  nb::object found = nb::getattr(torch, name, nb::handle(Py_None));  // none, either, while torch is being loaded
  return found.is_none() ? nullptr : found.release().ptr();
}

// Whether torch records what gradients need.
bool records_gradients() {
  static PyObject* is_grad_enabled = nullptr;
  if (is_grad_enabled == nullptr) is_grad_enabled = attribute_of_torch("is_grad_enabled");
  return is_grad_enabled != nullptr && nb::cast<bool>(nb::handle(is_grad_enabled)());
}
void refuse_gradient(const Name& name, nb::handle array) {
  static PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* wanted = PyObject_GetAttr(array.ptr(), requires_grad);
  if (wanted == nullptr) PyErr_Clear();
  const bool grad = wanted == Py_True;
  Py_XDECREF(wanted);
  if (grad)
    invalid_argument(name.text() +
                     " requires grad, and this operation has no backward: call it under torch.no_grad(), or " +
                     "pass " + name.text() + ".detach()");
}

// Whether torch's forward mode differentiates now.
bool in_forward_mode() {
  static PyObject* module = nullptr;  // held for good
  if (module == nullptr) {
    nb::object loaded = nb::module_::import_("sys").attr("modules").attr("get")("torch.autograd.forward_ad");
    if (loaded.is_none()) return false;
    module = loaded.release().ptr();
  }
  int level = -1;
  return nb::try_cast(nb::getattr(module, "_current_level", nb::handle(Py_None)), level) && level >= 0;
}
void refuse_tangent(const Name& name, nb::handle array) {
  nb::object pair = nb::module_::import_("torch.autograd.forward_ad").attr("unpack_dual")(array);
  if (!pair.attr("tangent").is_none())
    invalid_argument(name.text() +
                     " has a tangent of forward-mode differentiation, and this operation has no forward " +
                     "derivative: pass torch.autograd.forward_ad.unpack_dual(" + name.text() + ").primal");
}

}  // namespace

void refuse_negative_bit(const Name& name, nb::handle array) {
  static PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* negative = PyObject_CallMethodObjArgs(array.ptr(), is_neg, nullptr);
  if (negative == nullptr) PyErr_Clear();  // not torch's
  const bool stored_negated = negative == Py_True;
  Py_XDECREF(negative);
  if (stored_negated)
    invalid_argument(name.text() + " has the negative bit, as torch.imag(z.conj()) has: pass " + name.text() +
                     ".resolve_neg()");
}

void refuse_transform(const Name& name, nb::handle array) {
  nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
  if (torch.is_none() || !nb::isinstance(array, torch.attr("Tensor"))) return;
  if (nb::cast<bool>(torch.attr("_C").attr("_functorch").attr("is_functorch_wrapped_tensor")(array)))
    invalid_argument(name.text() + " is under a transform of torch.func (vmap, say), which this operation does not " +
                     "serve: call it outside, once for the whole batch");
}

void Differentiation::refuse_loss(const Name& name, nb::handle array) {
  if (!asked_) {
    gradients_ = records_gradients();
    tangents_ = in_forward_mode();
    asked_ = true;
  }
  if (gradients_) refuse_gradient(name, array);
  if (tangents_) refuse_tangent(name, array);
}

}  // namespace attune::python
