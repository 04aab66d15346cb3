// Compiled host code of a served call: the key of its arguments (`runtime.dispatch`), and the check
// for changes of the model (`runtime.weights`).
//
// The module keeps no state: each call passes the data to compare, as Python objects.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <random>
#include <vector>

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// -- keys ----------------------------------------------------------------------------------------

// Whether it is exactly a Tensor (no subclass or wrapper) whose memory holds its values: strided,
// with no pending conjugation or negation.
bool is_plain(PyObject* object) {
  if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
    return false;
  }
  const auto& tensor = THPVariable_Unpack(object);
  return tensor.defined() && !tensor.is_nested() && tensor.layout() == c10::kStrided &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// The highest byte at the start of a key item; lower bytes hold details.
enum class Kind : std::uint8_t { tensor, none, yes, no, integer, real, text, list, tuple, dict };

constexpr int most_nested = 32;

// Builds the key of a call. Each item begins with its kind and size, so that equal keys mean equal
// arguments.
class Key {
 public:
  bool needs_gradient = false;

  // False for objects without a key here; the Python fallback supports more.
  bool add(PyObject* object, int depth) {
    if (is_plain(object)) {
      add_tensor(THPVariable_Unpack(object));
    } else if (object == Py_None || object == Py_True || object == Py_False) {
      begin(object == Py_None ? Kind::none : object == Py_True ? Kind::yes : Kind::no, 0);
    } else if (PyLong_CheckExact(object)) {
      return add_integer(object);
    } else if (PyFloat_CheckExact(object)) {
      const double value = PyFloat_AS_DOUBLE(object);
      begin(Kind::real, 0);
      // One key for all NaNs.
      numbers_.push_back(std::bit_cast<std::int64_t>(
          std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value));
    } else if (PyUnicode_CheckExact(object)) {
      return add_text(object);
    } else {
      return depth < most_nested && add_items(object, depth + 1);
    }
    return true;
  }

  bool add_tuple(PyObject* items, int depth) {
    begin(Kind::tuple, PyTuple_GET_SIZE(items));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
      if (!add(PyTuple_GET_ITEM(items, i), depth)) {
        return false;
      }
    }
    return true;
  }

  bool add_dict(PyObject* items, int depth) {
    begin(Kind::dict, PyDict_GET_SIZE(items));
    PyObject *name, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(items, &place, &name, &value)) {
      if (!PyUnicode_CheckExact(name) || !add_text(name) || !add(value, depth)) {
        return false;
      }
    }
    return true;
  }

  PyObject* made() const {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers_.data()),
                                     numbers_.size() * Py_ssize_t{sizeof(std::int64_t)});
  }

 private:
  std::vector<std::int64_t> numbers_;

  void begin(Kind kind, std::int64_t rest) {
    numbers_.push_back(std::int64_t{static_cast<std::uint8_t>(kind)} << 56 | rest);
  }

  void add_tensor(const at::Tensor& tensor) {
    const auto device = tensor.device();
    begin(Kind::tensor, std::int64_t{static_cast<std::uint8_t>(tensor.scalar_type())} << 48 |
                            std::int64_t{static_cast<std::uint8_t>(device.type())} << 40 |
                            std::int64_t{static_cast<std::uint8_t>(device.index())} << 32 |
                            tensor.dim());
    numbers_.insert(numbers_.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers_.insert(numbers_.end(), tensor.strides().begin(), tensor.strides().end());
    needs_gradient = needs_gradient || tensor.requires_grad();
  }

  bool add_integer(PyObject* object) {
    int overflow = 0;
    const auto value = PyLong_AsLongLongAndOverflow(object, &overflow);
    begin(Kind::integer, 0);
    numbers_.push_back(value);
    return overflow == 0;
  }

  bool add_text(PyObject* object) {
    const auto length = PyUnicode_GET_LENGTH(object);
    const auto width = static_cast<std::int64_t>(PyUnicode_KIND(object));
    begin(Kind::text, width << 48 | length);
    const auto start = numbers_.size();
    numbers_.resize(start + (length * width + 7) / 8);
    if (length > 0) {
      std::memcpy(numbers_.data() + start, PyUnicode_DATA(object), length * width);
    }
    return true;
  }

  bool add_items(PyObject* object, int depth) {
    if (PyTuple_CheckExact(object)) {
      return add_tuple(object, depth);
    }
    if (PyDict_CheckExact(object)) {
      return add_dict(object, depth);
    }
    if (!PyList_CheckExact(object)) {
      return false;
    }
    begin(Kind::list, PyList_GET_SIZE(object));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
      if (!add(PyList_GET_ITEM(object, i), depth)) {
        return false;
      }
    }
    return true;
  }
};

// False, without setting an error, for arguments of other kinds.
bool add_call(Key& key, PyObject* args, PyObject* kwargs) try {
  return PyTuple_CheckExact(args) && PyDict_CheckExact(kwargs) && key.add_tuple(args, 0) &&
         key.add_dict(kwargs, 0);
} catch (const std::exception&) {
  return false;
}

PyObject* or_none(PyObject* key) {
  if (key != nullptr || PyErr_Occurred()) {
    return key;
  }
  Py_RETURN_NONE;
}

bool are_two(Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "expected two arguments: args and kwargs");
  }
  return count == 2;
}

// key(args: tuple, kwargs: dict) -> bytes, or None. Keys are equal if the nesting, the plain values
// and the shapes, strides, dtypes and devices of tensors are equal.
PyObject* key(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!are_two(count)) {
    return nullptr;
  }
  Key made;
  return or_none(add_call(made, given[0], given[1]) ? made.made() : nullptr);
}

// Whether no PyTorch mode is active: autocast, dispatch modes, function transforms. Unknown
// dispatch keys count as active.
bool is_clear() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ - c10::default_included_set).empty() &&
         local.excluded_.has_all(c10::default_excluded_set);
}

// clear_key(args: tuple, kwargs: dict) -> bytes, or None: the key of a call that may be served
// without further checks of its arguments or of active modes.
PyObject* clear_key(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!are_two(count)) {
    return nullptr;
  }
  Key made;
  const bool is_served = is_clear() && add_call(made, given[0], given[1]) &&
                         !(made.needs_gradient && c10::GradMode::is_enabled());
  return or_none(is_served ? made.made() : nullptr);
}

// -- changes of a model ---------------------------------------------------------------------------

// Detects changes of a tensor: edits change the version, moves and conversions the address. The
// version of an inference tensor is 0: it counts no edits.
struct Trait {
  std::uint64_t version;
  std::uintptr_t address;

  bool operator!=(const Trait& other) const {
    return version != other.version || address != other.address;
  }
};

PyObject* name_of_mode;

// False if the tensor has no storage.
bool read(PyObject* object, Trait& trait) {
  auto* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
  if (!tensor->has_storage()) {
    return false;
  }
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  const auto start = reinterpret_cast<std::uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
  trait.version = tensor->is_inference() ? 0 : tensor->version_counter().current_version();
  trait.address = start + tensor->storage_offset() * tensor->itemsize();
  return true;
}

// traits(tensors: tuple[Tensor, ...]) -> bytes, or None if a tensor has no traits.
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

// An element of a CPU tensor: its address, its width in bytes (at most 8), and its bits.
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

// Appends samples at random places of a tensor; none if it is empty or not on the CPU.
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
// each tensor, with their current values.
PyObject* samples(PyObject*, PyObject* const* given, Py_ssize_t number) try {
  if (number != 3 || !PyTuple_CheckExact(given[0])) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of tensors, a count and a seed");
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
      PyErr_SetString(PyExc_TypeError, "samples needs plain tensors");
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

// Whether the samples of one round, chosen by the clock, have changed. The caller must have checked
// that their memory is still allocated.
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

// Whether a dictionary differs from the known keys and values, compared by identity and in order.
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
// `rounds` are results of `samples` for these tensors. `held` alternates keys and values, one tuple
// per dictionary. `modes` are the values of "training" in `attributes`. Types are checked as far as
// needed to avoid a crash: `traits` checked the tensors, and each call checks the dictionaries, at
// no measurable cost.
PyObject* changed(PyObject*, PyObject* const* given, Py_ssize_t count) try {
  if (count != 7) {
    PyErr_SetString(PyExc_TypeError, "expected seven arguments");
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
    PyErr_SetString(PyExc_TypeError, "arguments have inconsistent types or lengths");
    return nullptr;
  }
  // Addresses first: freed memory must not be read.
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

// Multi-phase initialisation, because single-phase modules enter themselves into `sys.modules`.
PyModuleDef_Slot phases[] = {
    {Py_mod_exec, reinterpret_cast<void*>(set_up)},
    {0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "host", nullptr, 0, methods, phases,
                          nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_host() { return PyModuleDef_Init(&definition); }
