// Inputs of a step that decodes one token of each sequence, in one call.
//
// The same in NumPy is some forty calls. They are quick in a loop, but between two model forwards
// none of their code and data is left in the CPU's caches: there they cost five times as much.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { NUM_ARRAYS = 10, NUM_ARGUMENTS = 3 + NUM_ARRAYS, MAX_AXES = 4 };

// Arrays of int32 or int64 with one or two dimensions, rows contiguous.
typedef struct {
    Py_buffer view;
    int64_t rows, columns, stride;  // stride in elements; one row for one dimension
} Array;

static const int64_t ITEM_SIZES[NUM_ARRAYS] = {4, 4, 8, 8, 8, 8, 4, 4, 4, 8};
static const int DIMENSIONS[NUM_ARRAYS] = {2, 2, 1, 1, 1, 2, 1, 1, 2, 1};
enum { TOKENS, TABLES, TAIL_STARTS, TAIL_DELTAS, TOKEN_IDS, POSITIONS, KV_START, KV_LENS,
       STEP_TABLES, SLOTS };

static int open_array(PyObject* object, int index, Array* array) {
    const int flags = index < TOKEN_IDS ? PyBUF_STRIDES : PyBUF_STRIDES | PyBUF_WRITABLE;
    if (PyObject_GetBuffer(object, &array->view, flags) < 0) return -1;
    const Py_buffer* v = &array->view;
    if (v->ndim != DIMENSIONS[index] || v->itemsize != ITEM_SIZES[index] ||
        v->strides[v->ndim - 1] != v->itemsize) {
        PyErr_Format(PyExc_ValueError, "array %d has another type or layout", index);
        PyBuffer_Release(&array->view);
        return -1;
    }
    array->columns = v->shape[v->ndim - 1];
    array->rows = v->ndim == 2 ? v->shape[0] : 1;
    array->stride = v->ndim == 2 ? v->strides[0] / v->itemsize : 0;
    return 0;
}

static int32_t* row32(const Array* a, int64_t row) {
    return (int32_t*)a->view.buf + row * a->stride;
}

static int64_t* row64(const Array* a, int64_t row) {
    return (int64_t*)a->view.buf + row * a->stride;
}

static int room_for(const Array* a, int64_t count) {
    const int64_t rows = a[STEP_TABLES].rows, axes = a[POSITIONS].rows;
    return a[TOKEN_IDS].columns >= count && a[POSITIONS].columns >= count &&
           a[KV_START].columns > count && a[KV_LENS].columns >= count && rows >= count &&
           a[SLOTS].columns >= count && axes >= 1 && axes <= MAX_AXES && axes != 2;
}

// One sequence: returns the columns of its block table, 0 if it is still within its media, or -1.
static int64_t fill(const Array* a, int64_t i, int64_t row, int64_t start, int64_t block_size) {
    const int64_t blocks = start / block_size + 1, axes = a[POSITIONS].rows;
    if (row < 0 || row >= a[TOKENS].rows || row >= a[TABLES].rows ||
        row >= a[TAIL_STARTS].columns || row >= a[TAIL_DELTAS].columns || start < 0 ||
        start >= a[TOKENS].columns || blocks > a[TABLES].columns || blocks > a[STEP_TABLES].columns)
        return -1;
    if (axes > 1 && start < row64(&a[TAIL_STARTS], 0)[row]) return 0;
    row64(&a[TOKEN_IDS], 0)[i] = row32(&a[TOKENS], row)[start];
    const int64_t position = start + row64(&a[TAIL_DELTAS], 0)[row];
    for (int64_t axis = 0; axis < axes; ++axis)
        row64(&a[POSITIONS], axis)[i] = axes == MAX_AXES && axis == 0 ? start : position;
    const int32_t* table = row32(&a[TABLES], row);
    memcpy(row32(&a[STEP_TABLES], i), table, blocks * sizeof *table);
    row64(&a[SLOTS], 0)[i] = table[blocks - 1] * block_size + start % block_size;
    row32(&a[KV_LENS], 0)[i] = (int32_t)(start + 1);
    row32(&a[KV_START], 0)[i + 1] = row32(&a[KV_START], 0)[i] + (int32_t)(start + 1);
    return blocks;
}

static PyObject* fill_all(PyObject* rows, PyObject* starts, int64_t block_size, const Array* a) {
    const Py_ssize_t count = PyList_GET_SIZE(rows);
    int64_t columns = 0;
    if (PyList_GET_SIZE(starts) != count || block_size < 1 || !room_for(a, count)) {
        PyErr_SetString(PyExc_ValueError, "more sequences than there is room for");
        return NULL;
    }
    row32(&a[KV_START], 0)[0] = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const int64_t row = PyLong_AsLongLong(PyList_GET_ITEM(rows, i));
        const int64_t start = PyLong_AsLongLong(PyList_GET_ITEM(starts, i));
        if (PyErr_Occurred()) return NULL;
        const int64_t blocks = fill(a, i, row, start, block_size);
        if (blocks < 0) return PyErr_Format(PyExc_IndexError, "sequence %zd is out of range", i);
        if (blocks == 0) return PyLong_FromLong(0);
        if (blocks > columns) columns = blocks;
    }
    return PyLong_FromLongLong(columns);
}

static PyObject* fill_decodes(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    (void)self;
    if (count != NUM_ARGUMENTS || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "expected two lists, a size, and arrays");
    const int64_t block_size = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    Array arrays[NUM_ARRAYS];
    int opened = 0;
    while (opened < NUM_ARRAYS && open_array(args[3 + opened], opened, &arrays[opened]) == 0)
        ++opened;
    PyObject* columns = NULL;
    if (opened == NUM_ARRAYS) columns = fill_all(args[0], args[1], block_size, arrays);
    while (opened-- > 0) PyBuffer_Release(&arrays[opened].view);
    return columns;
}

static PyMethodDef methods[] = {
    {"fill_decodes", (PyCFunction)(void (*)(void))fill_decodes, METH_FASTCALL,
     "Fill the arrays of a decode step; see step_inputs.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_decode_inputs", NULL, 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__decode_inputs(void) { return PyModule_Create(&module); }
