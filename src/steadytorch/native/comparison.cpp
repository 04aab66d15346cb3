// Whether a model is what it was: the comparison of `runtime.weights`, past the interpreter.
//
// Nothing is kept here: what is compared is given with each call, in objects of Python's own.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <exception>

#include <torch/csrc/autograd/python_variable.h>

namespace {

// What an edit (version), a move or a conversion (address) of a tensor changes.
struct Trait {
  std::uint64_t version;
  std::uintptr_t address;

  bool operator!=(const Trait& other) const {
    return version != other.version || address != other.address;
  }
};

PyObject* name_of_mode;

// False where there is none: the tensor counts no versions, or has no storage.
bool read(PyObject* object, Trait& trait) {
  auto* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
  if (tensor->is_inference() || !tensor->has_storage()) {
    return false;
  }
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  const auto start = reinterpret_cast<std::uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  trait.version = tensor->version_counter().current_version();
  trait.address = start + tensor->storage_offset() * tensor->itemsize();
  return true;
}

// traits(tensors: tuple[Tensor, ...]) -> bytes, or None where a tensor has none.
PyObject* traits(PyObject*, PyObject* tensors) try {
  if (!PyTuple_CheckExact(tensors)) {
    PyErr_SetString(PyExc_TypeError, "tensors must be a tuple");
    return nullptr;
  }
  const auto count = PyTuple_GET_SIZE(tensors);
  PyObject* made = PyBytes_FromStringAndSize(nullptr, count * Py_ssize_t{sizeof(Trait)});
  if (made == nullptr) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    Trait trait;
    if (!THPVariable_CheckExact(object) || !read(object, trait)) {
      Py_DECREF(made);
      Py_RETURN_NONE;
    }
    std::memcpy(PyBytes_AS_STRING(made) + i * sizeof(Trait), &trait, sizeof(Trait));
  }
  return made;
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

bool differ(PyObject* tensors, const char* known) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    Trait before, now;
    std::memcpy(&before, known + i * sizeof(Trait), sizeof(Trait));
    if (!read(PyTuple_GET_ITEM(tensors, i), now) || now != before) {
      return true;
    }
  }
  return false;
}

// Whether a dictionary holds anything but these, key by key and value by value.
bool differs(PyObject* dictionary, PyObject* held) {
  if (2 * PyDict_GET_SIZE(dictionary) != PyTuple_GET_SIZE(held)) {
    return true;
  }
  PyObject *key, *value;
  Py_ssize_t place = 0, i = 0;
  while (PyDict_Next(dictionary, &place, &key, &value)) {
    if (key != PyTuple_GET_ITEM(held, i) || value != PyTuple_GET_ITEM(held, i + 1)) {
      return true;
    }
    i += 2;
  }
  return false;
}

// changed(tensors: tuple[Tensor, ...], traits: bytes, dictionaries: tuple[dict, ...],
//         held: tuple[tuple, ...], attributes: tuple[dict, ...], modes: tuple[bool, ...]) -> bool
//
// `held` has keys and values by turns, for each dictionary; `modes` what `attributes` had under
// "training". Types are checked as deep as they must be for no call to crash: tensors were by
// `traits`, and dictionaries are at each call, which takes no time that could be measured.
PyObject* changed(PyObject*, PyObject* const* given, Py_ssize_t count) try {
  if (count != 6) {
    PyErr_SetString(PyExc_TypeError, "six arguments are needed");
    return nullptr;
  }
  PyObject *tensors = given[0], *known = given[1], *dictionaries = given[2], *held = given[3],
           *attributes = given[4], *modes = given[5];
  if (!PyTuple_CheckExact(tensors) || !PyBytes_CheckExact(known) ||
      !PyTuple_CheckExact(dictionaries) || !PyTuple_CheckExact(held) ||
      !PyTuple_CheckExact(attributes) || !PyTuple_CheckExact(modes) ||
      PyBytes_GET_SIZE(known) != PyTuple_GET_SIZE(tensors) * Py_ssize_t{sizeof(Trait)} ||
      PyTuple_GET_SIZE(dictionaries) != PyTuple_GET_SIZE(held) ||
      PyTuple_GET_SIZE(attributes) != PyTuple_GET_SIZE(modes)) {
    PyErr_SetString(PyExc_TypeError, "arguments do not belong together");
    return nullptr;
  }
  if (differ(tensors, PyBytes_AS_STRING(known))) {
    Py_RETURN_TRUE;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dictionaries); ++i) {
    PyObject *dictionary = PyTuple_GET_ITEM(dictionaries, i), *parts = PyTuple_GET_ITEM(held, i);
    if (!PyDict_Check(dictionary) || !PyTuple_CheckExact(parts) || differs(dictionary, parts)) {
      Py_RETURN_TRUE;
    }
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(attributes); ++i) {
    PyObject* found = PyTuple_GET_ITEM(attributes, i);
    if (!PyDict_Check(found)) {
      Py_RETURN_TRUE;
    }
    PyObject* mode = PyDict_GetItemWithError(found, name_of_mode);
    if (mode == nullptr && PyErr_Occurred()) {
      return nullptr;
    }
    if (mode != PyTuple_GET_ITEM(modes, i)) {
      Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

PyMethodDef methods[] = {
    {"traits", traits, METH_O, nullptr},
    {"changed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(changed)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "comparison", nullptr, -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_comparison() {
  name_of_mode = PyUnicode_InternFromString("training");
  return name_of_mode == nullptr ? nullptr : PyModule_Create(&definition);
}
