// What a served call does on the host, past the interpreter: the key of its arguments
// (`runtime.dispatch`), and whether the model is what it was (`runtime.weights`).
//
// Nothing is kept here: what is compared is given with each call, in objects of Python's own.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// -- keys ----------------------------------------------------------------------------------------

// Whether it is a plain tensor with strides, and no class made of it.
bool is_plain(PyObject* object) {
  if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
    return false;
  }
  const auto& tensor = THPVariable_Unpack(object);
  // What is to be negated or conjugated when it is read goes the long way, where it is refused.
  return tensor.defined() && !tensor.is_neg() && !tensor.is_conj() && !tensor.is_nested() && tensor.layout() == c10::kStrided &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// The device and type of each tensor, its number of dimensions, sizes and strides, one after the
// other; without an error nullptr for arguments that are anything but tensors by their places, or
// that have no such things to tell.
PyObject* key_of(PyObject* args, PyObject* kwargs) try {
  if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs) || PyDict_GET_SIZE(kwargs) != 0) {
    return nullptr;
  }
  Py_ssize_t numbers = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    if (!is_plain(PyTuple_GET_ITEM(args, i))) {
      return nullptr;
    }
    numbers += 1 + 2 * THPVariable_Unpack(PyTuple_GET_ITEM(args, i)).dim();
  }
  if (numbers == 0) {
    return nullptr;
  }
  std::vector<std::int64_t> key;
  key.reserve(numbers);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    const auto& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(args, i));
    const auto device = tensor.device();
    key.push_back(std::int64_t{static_cast<std::uint8_t>(tensor.scalar_type())} << 48 |
                  std::int64_t{static_cast<std::uint8_t>(device.type())} << 40 |
                  std::int64_t{static_cast<std::uint8_t>(device.index())} << 32 | tensor.dim());
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
    key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(key.data()),
                                   key.size() * Py_ssize_t{sizeof(std::int64_t)});
} catch (const std::exception&) {
  return nullptr;
}

PyObject* or_none(PyObject* key) {
  if (key != nullptr || PyErr_Occurred()) {
    return key;
  }
  Py_RETURN_NONE;
}

bool are_two(Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "args and kwargs are needed");
  }
  return count == 2;
}

// key(args: tuple, kwargs: dict) -> bytes, or None: equal where shapes, strides, types and devices
// of the arguments are.
PyObject* key(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return are_two(count) ? or_none(key_of(given[0], given[1])) : nullptr;
}

// Whether nothing of PyTorch's stands between a call and its operators: autocast, dispatch modes,
// transformations of functions. What is not known to do no harm does stand there.
bool is_clear() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ - c10::default_included_set).empty() &&
         local.excluded_.has_all(c10::default_excluded_set);
}

bool needs_gradient(PyObject* args) {
  if (c10::GradMode::is_enabled()) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      if (THPVariable_Unpack(PyTuple_GET_ITEM(args, i)).requires_grad()) {
        return true;
      }
    }
  }
  return false;
}

// clear_key(args: tuple, kwargs: dict) -> bytes, or None: the key of a call that may be served
// without a further look at its arguments and at the modes that it is made in.
PyObject* clear_key(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!are_two(count)) {
    return nullptr;
  }
  PyObject* made = is_clear() ? key_of(given[0], given[1]) : nullptr;
  if (made != nullptr && needs_gradient(given[0])) {
    Py_CLEAR(made);
  }
  return or_none(made);
}

// -- what a model was ----------------------------------------------------------------------------

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
  std::vector<Trait> made(PyTuple_GET_SIZE(tensors));
  for (std::size_t i = 0; i < made.size(); ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    if (!THPVariable_CheckExact(object) || !read(object, made[i])) {
      Py_RETURN_NONE;
    }
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(made.data()),
                                   made.size() * Py_ssize_t{sizeof(Trait)});
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

// An element of a tensor on the CPU: where it stands, how wide it is (at most 8 bytes), its bits.
struct Sample {
  std::uintptr_t address;
  std::uint64_t width;
  std::uint64_t bits;

  std::uint64_t now() const {
    std::uint64_t found = 0;
    switch (width) {
      case 4:
        return *reinterpret_cast<const std::uint32_t*>(address);
      case 2:
        return *reinterpret_cast<const std::uint16_t*>(address);
      case 1:
        return *reinterpret_cast<const std::uint8_t*>(address);
      default:
        std::memcpy(&found, reinterpret_cast<const void*>(address), sizeof(found));
        return found;
    }
  }
};

// Appends samples at random places of a tensor; none where it is not on the CPU or has no elements.
void sample(const at::Tensor& tensor, std::uint64_t count, std::minstd_rand& random,
            std::vector<Sample>& made) {
  const auto width = std::min<std::uint64_t>(8, tensor.itemsize());
  const bool is_even = width == 1 || width == 2 || width == 4 || width == 8;
  if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided || tensor.is_nested() ||
      tensor.numel() == 0 || !is_even || tensor.data_ptr() == nullptr) {
    return;
  }
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(count, tensor.numel()); ++i) {
    std::int64_t place = 0;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      place += static_cast<std::int64_t>(random() % tensor.size(dim)) * tensor.stride(dim);
    }
    Sample found{reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) + place * tensor.itemsize(),
                 width, 0};
    found.bits = found.now();
    made.push_back(found);
  }
}

// samples(tensors: tuple[Tensor, ...], count: int, seed: int) -> bytes: up to `count` elements of
// each, with what stands there now.
PyObject* samples(PyObject*, PyObject* const* given, Py_ssize_t number) try {
  if (number != 3 || !PyTuple_CheckExact(given[0])) {
    PyErr_SetString(PyExc_TypeError, "a tuple of tensors, a count and a seed are needed");
    return nullptr;
  }
  const auto count = PyLong_AsUnsignedLong(given[1]), seed = PyLong_AsUnsignedLong(given[2]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  std::minstd_rand random(seed);
  std::vector<Sample> made;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[0]); ++i) {
    PyObject* object = PyTuple_GET_ITEM(given[0], i);
    if (!THPVariable_CheckExact(object)) {
      PyErr_SetString(PyExc_TypeError, "samples are of plain tensors");
      return nullptr;
    }
    sample(THPVariable_Unpack(object), count, random, made);
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(made.data()),
                                   made.size() * Py_ssize_t{sizeof(Sample)});
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

// Whether the samples of one of the rounds, which take turns, are other values now. The memory that
// they stand in must be known to be there.
bool has_new_values(PyObject* rounds) {
  const auto count = PyTuple_GET_SIZE(rounds);
  if (count == 0) {
    return false;
  }
  const auto time = std::chrono::steady_clock::now().time_since_epoch().count();
  PyObject* round = PyTuple_GET_ITEM(rounds, static_cast<std::uint64_t>(time) / 64 % count);
  const auto* samples = reinterpret_cast<const Sample*>(PyBytes_AS_STRING(round));
  std::uint64_t difference = 0;
  for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(round) / Py_ssize_t{sizeof(Sample)}; ++i) {
    difference |= samples[i].now() ^ samples[i].bits;
  }
  return difference != 0;
}

bool are_rounds(PyObject* rounds) {
  if (!PyTuple_CheckExact(rounds)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rounds); ++i) {
    PyObject* round = PyTuple_GET_ITEM(rounds, i);
    if (!PyBytes_CheckExact(round) || PyBytes_GET_SIZE(round) % Py_ssize_t{sizeof(Sample)} != 0) {
      return false;
    }
  }
  return true;
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

// changed(tensors: tuple[Tensor, ...], traits: bytes, rounds: tuple[bytes, ...],
//         dictionaries: tuple[dict, ...], held: tuple[tuple, ...], attributes: tuple[dict, ...],
//         modes: tuple[bool, ...]) -> bool
//
// `rounds` are of `samples`, of these tensors; `held` has keys and values by turns, for each dictionary; `modes` what `attributes` had under
// "training". Types are checked as deep as they must be for no call to crash: tensors were by
// `traits`, and dictionaries are at each call, which takes no time that could be measured.
PyObject* changed(PyObject*, PyObject* const* given, Py_ssize_t count) try {
  if (count != 7) {
    PyErr_SetString(PyExc_TypeError, "seven arguments are needed");
    return nullptr;
  }
  PyObject *tensors = given[0], *known = given[1], *rounds = given[2], *dictionaries = given[3],
           *held = given[4], *attributes = given[5], *modes = given[6];
  if (!PyTuple_CheckExact(tensors) || !PyBytes_CheckExact(known) || !are_rounds(rounds) ||
      !PyTuple_CheckExact(dictionaries) || !PyTuple_CheckExact(held) ||
      !PyTuple_CheckExact(attributes) || !PyTuple_CheckExact(modes) ||
      PyBytes_GET_SIZE(known) != PyTuple_GET_SIZE(tensors) * Py_ssize_t{sizeof(Trait)} ||
      PyTuple_GET_SIZE(dictionaries) != PyTuple_GET_SIZE(held) ||
      PyTuple_GET_SIZE(attributes) != PyTuple_GET_SIZE(modes)) {
    PyErr_SetString(PyExc_TypeError, "arguments do not belong together");
    return nullptr;
  }
  // Addresses before values: memory that was freed must not be read.
  if (differ(tensors, PyBytes_AS_STRING(known)) || has_new_values(rounds)) {
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

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef fast(const char* name, Fast function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    fast("key", key),
    fast("clear_key", clear_key),
    {"traits", traits, METH_O, nullptr},
    fast("samples", samples),
    fast("changed", changed),
    {nullptr, nullptr, 0, nullptr},
};

int set_up(PyObject*) {
  name_of_mode = PyUnicode_InternFromString("training");
  return name_of_mode == nullptr ? -1 : 0;
}

// In several phases, as one that is made at once enters itself into `sys.modules`.
PyModuleDef_Slot phases[] = {
    {Py_mod_exec, reinterpret_cast<void*>(set_up)},
    {0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "host", nullptr, 0, methods, phases,
                          nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_host() { return PyModuleDef_Init(&definition); }
