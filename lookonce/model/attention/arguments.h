// Reading a Python call's arguments: tensors, whose type, device and layout are checked here, and
// numbers. Tensors are looked into through torch's DLPack exchange functions, so neither building
// nor calling needs torch's headers or raw addresses.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "vectors.h"

namespace arguments {

using paged::BFloat16;

// ---------------------------------------------------------------- DLPack 1, as its specification has it

struct DLVersion {
    uint32_t major, minor;
};

struct DLDevice {
    int32_t type, id;
};

struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLExchange {
    DLVersion version;
    void *previous, *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* tensor);  // lends; -1 with an exception set
    void* current_stream;
};

constexpr int32_t CPU = 1;
constexpr uint8_t INT = 0, FLOAT = 2, BFLOAT = 4;

// ---------------------------------------------------------------- faults

// A Python exception is set already.
struct Raised {};

// Becomes Python's ValueError.
[[noreturn]] inline void refuse(const std::string& why) { throw std::invalid_argument(why); }

inline void require(bool condition, const char* otherwise) {
    if (!condition) refuse(otherwise);
}

// ---------------------------------------------------------------- tensors

template <typename T>
struct Type;
template <>
struct Type<float> {
    static constexpr uint8_t code = FLOAT, bits = 32;
    static constexpr const char* name = "float32";
};
template <>
struct Type<double> {
    static constexpr uint8_t code = FLOAT, bits = 64;
    static constexpr const char* name = "float64";
};
template <>
struct Type<BFloat16> {
    static constexpr uint8_t code = BFLOAT, bits = 16;
    static constexpr const char* name = "bfloat16";
};
template <>
struct Type<int8_t> {
    static constexpr uint8_t code = INT, bits = 8;
    static constexpr const char* name = "int8";
};
template <>
struct Type<int32_t> {
    static constexpr uint8_t code = INT, bits = 32;
    static constexpr const char* name = "int32";
};
template <>
struct Type<int64_t> {
    static constexpr uint8_t code = INT, bits = 64;
    static constexpr const char* name = "int64";
};

// Of one call: what it looks into is the caller's.
class Tensor {
  public:
    const char* name = "";

    explicit operator bool() const { return given; }
    int64_t size(int axis) const { return t.shape[axis]; }
    int64_t stride(int axis) const { return t.strides[axis]; }
    int ndim() const { return t.ndim; }

    template <typename T>
    bool is() const {
        return t.dtype.code == Type<T>::code && t.dtype.bits == Type<T>::bits && t.dtype.lanes == 1;
    }

    bool same_type(const Tensor& other) const {
        return t.dtype.code == other.t.dtype.code && t.dtype.bits == other.t.dtype.bits;
    }

    // The elements, or null for an optional tensor that is None.
    template <typename T>
    T* data() const {
        if (!given) return nullptr;
        if (!is<T>()) refuse(std::string(name) + " is not of " + Type<T>::name);
        return reinterpret_cast<T*>(static_cast<char*>(t.data) + t.byte_offset);
    }

    void* any_data() const { return static_cast<char*>(t.data) + t.byte_offset; }

    // Refuses other sizes; nothing is asked of a tensor that is None.
    const Tensor& shaped(std::initializer_list<int64_t> sizes) const {
        if (!given) return *this;
        bool fits = t.ndim == int(sizes.size());
        int axis = 0;
        for (int64_t expected : sizes) fits = fits && t.shape[axis++] == expected;
        if (!fits) refuse_sizes();
        return *this;
    }

    const Tensor& of_dimensions(int expected) const {
        if (given && t.ndim != expected)
            refuse_sizes();
        return *this;
    }

    const Tensor& contiguous() const {
        if (!given) return *this;
        int64_t expected = 1;
        for (int axis = t.ndim - 1; axis >= 0; --axis) {
            if (t.shape[axis] != 1 && t.strides[axis] != expected)
                refuse(std::string(name) + " must be contiguous");
            expected *= t.shape[axis];
        }
        return *this;
    }

    // Its last dimension alone.
    const Tensor& rows_contiguous() const {
        if (given && t.shape[t.ndim - 1] > 1 && t.strides[t.ndim - 1] != 1)
            refuse(std::string(name) + " must be contiguous in its last dimension");
        return *this;
    }

    [[noreturn]] void refuse_sizes() const {
        refuse(std::string(name) + " of " + shape_text() + ": its sizes do not fit the others");
    }

    std::string shape_text() const {
        std::string text = "[";
        for (int axis = 0; axis < t.ndim; ++axis)
            text += (axis ? ", " : "") + std::to_string(t.shape[axis]);
        return text + "]";
    }

    const char* type_name() const {
        return is<float>() ? "float32" : is<BFloat16>() ? "bfloat16" : "another type";
    }

  private:
    friend class Arguments;
    DLTensor t = {};
    bool given = false;
};

// torch's class of tensors and its exchange functions; filled in when the module is imported.
struct Torch {
    PyTypeObject* tensor_type = nullptr;
    const DLExchange* exchange = nullptr;
};
inline Torch torch;

// -1 with an exception set where torch is missing or lacks what is needed.
inline int find_torch() {
    PyObject* module = PyImport_ImportModule("torch");
    if (!module) return -1;
    PyObject* type = PyObject_GetAttrString(module, "Tensor");
    Py_DECREF(module);
    PyObject* capsule = type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : nullptr;
    if (!capsule) {
        Py_XDECREF(type);
        PyErr_SetString(PyExc_ImportError, "this torch does not exchange tensors by DLPack 1");
        return -1;
    }
    auto* exchange =
        static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);  // its functions live as long as torch
    if (!exchange || exchange->version.major != 1 || !exchange->tensor_from_object) {
        Py_DECREF(type);
        PyErr_SetString(PyExc_ImportError, "this torch exchanges tensors by another DLPack");
        return -1;
    }
    torch = {reinterpret_cast<PyTypeObject*>(type), exchange};
    return 0;
}

// The arguments of one call, one after the other.
class Arguments {
  public:
    Arguments(PyObject* const* args, Py_ssize_t count, Py_ssize_t expected) : next(args) {
        if (count == expected) return;
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        throw Raised();
    }

    // The items of a tuple.
    Arguments(PyObject* tuple, Py_ssize_t expected) : next(nullptr) {
        if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != expected) {
            PyErr_Format(PyExc_TypeError, "expected a tuple of %zd", expected);
            throw Raised();
        }
        next = PySequence_Fast_ITEMS(tuple);
    }

    PyObject* object() { return *next++; }

    Tensor tensor(const char* name) {
        PyObject* object = *next++;
        if (!PyObject_TypeCheck(object, torch.tensor_type)) {
            PyErr_Format(PyExc_TypeError, "%s is not a tensor", name);
            throw Raised();
        }
        Tensor found;
        found.name = name, found.given = true;
        if (torch.exchange->tensor_from_object(object, &found.t) != 0) throw Raised();
        if (found.t.device.type != CPU) refuse(std::string(name) + " is not on the CPU");
        return found;
    }

    Tensor optional_tensor(const char* name) {
        if (*next != Py_None) return tensor(name);
        ++next;
        Tensor none;
        none.name = name;
        return none;
    }

    int64_t integer() {
        const int64_t value = PyLong_AsLongLong(*next++);
        if (value == -1 && PyErr_Occurred()) throw Raised();
        return value;
    }

    float real() {
        const double value = PyFloat_AsDouble(*next++);
        if (value == -1.0 && PyErr_Occurred()) throw Raised();
        return float(value);
    }

  private:
    PyObject* const* next;
};

// ---------------------------------------------------------------- calls

// Other Python threads run while this lives; exceptions may pass through.
class WithoutGil {
  public:
    WithoutGil() : state(PyEval_SaveThread()) {}
    ~WithoutGil() { PyEval_RestoreThread(state); }
    WithoutGil(const WithoutGil&) = delete;

  private:
    PyThreadState* state;
};

// A function for Python whose C++ exceptions become Python's.
template <PyObject* (*CALL)(PyObject* const* args, Py_ssize_t count)>
PyObject* guarded(PyObject*, PyObject* const* args, Py_ssize_t count) {
    try {
        return CALL(args, count);
    } catch (const Raised&) {
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "compiled code threw something unknown");
    }
    return nullptr;
}

}  // namespace arguments
