// Reading a Python call's numbers, one after the other; addresses and sizes alike.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

class Arguments {
  public:
    explicit Arguments(PyObject* const* args) : next(args) {}
    int64_t integer() { return PyLong_AsLongLong(*next++); }
    float real() { return float(PyFloat_AsDouble(*next++)); }
    template <typename P>
    P* pointer() { return reinterpret_cast<P*>(integer()); }

  private:
    PyObject* const* next;
};
