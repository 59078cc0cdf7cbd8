// The Python module of paged attention; what it computes is in step.h.

#include "arguments.h"
#include "machine.h"
#include "step.h"

namespace {

using namespace paged;

constexpr Py_ssize_t NUM_ARGUMENTS = 30;

PyObject* paged_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != NUM_ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", NUM_ARGUMENTS, count);
        return nullptr;
    }
    Arguments a(args);
    Problem p;
    p.query = a.pointer<void>(), p.key = a.pointer<void>(), p.value = a.pointer<void>();
    p.output = a.pointer<void>();
    p.key_pages = a.pointer<void>(), p.value_pages = a.pointer<void>();
    p.query_start = a.pointer<int32_t>(), p.kv_lens = a.pointer<int32_t>();
    p.block_tables = a.pointer<int32_t>(), p.slots = a.pointer<int64_t>();
    p.visible_end = a.pointer<int32_t>(), p.sinks = a.pointer<float>();
    p.query_token = a.integer(), p.query_head = a.integer();
    p.key_token = a.integer(), p.key_head = a.integer();
    p.value_token = a.integer(), p.value_head = a.integer();
    p.table_stride = a.integer(), p.num_sequences = a.integer();
    p.num_heads = a.integer(), p.num_kv_heads = a.integer(), p.head_dim = a.integer();
    p.block_size = a.integer(), p.num_blocks = a.integer();
    p.window = a.integer();
    p.scale = a.real(), p.softcap = a.real();
    p.num_threads = int(a.integer());
    const bool half = a.integer() != 0;
    if (PyErr_Occurred()) return nullptr;
    if (const char* fault = find_fault(p)) {
        PyErr_SetString(PyExc_ValueError, fault);
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS;
    half ? run_step<BFloat16>(p) : run_step<float>(p);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"paged_attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(paged_attention)),
     METH_FASTCALL, "Write new keys and values and attend over the pages; see cpu.py."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_paged", nullptr, 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__paged() {
    if (!runs_here()) {
        PyErr_SetString(PyExc_ImportError, "built for another CPU");
        return nullptr;
    }
    return PyModule_Create(&module);
}
