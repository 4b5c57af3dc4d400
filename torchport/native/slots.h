// Slots of Python classes (``__slots__``), which C++ reads and writes in place.
#pragma once
#include <Python.h>
#include <structmember.h>

#include <torch/csrc/utils/object_ptr.h>

namespace torchport {

struct Slot {
  Py_ssize_t offset = 0;
  PyObject*& of(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }
};

inline bool find_slot(PyObject* type, const char* name, Slot& slot) {
  THPObjectPtr member(PyObject_GetAttrString(type, name));
  if (!member) {
    return false;
  }
  if (Py_TYPE(member.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    return false;
  }
  slot.offset = reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
  return true;
}

} // namespace torchport
