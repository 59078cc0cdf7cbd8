// Columns of many media features, and whether their items fit them, in one pass over the objects.
//
// In Python each column is a pass of its own, and ten thousands of objects do not stay in the CPU's
// caches from one pass to the next. Fields are read where their class's own descriptors say.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

enum { KEY_BYTES = 32 };
enum { KEY, MODALITY, OFFSET, LENGTH, NUM_EMBEDS, IS_EMBED, NUM_FEATURE_FIELDS };
static const char* const FEATURE_FIELDS[] = {"key",    "modality",   "offset",
                                             "length", "num_embeds", "is_embed"};

static struct {
    PyTypeObject *feature, *item, *expansion;
    Py_ssize_t of_feature[NUM_FEATURE_FIELDS], item_expansion, runs, embed_token_id;
} known;

// Where objects of a type keep a field; -1 with an exception set.
static Py_ssize_t place_of(PyTypeObject* type, const char* name) {
    PyObject* found = PyObject_GetAttrString((PyObject*)type, name);
    if (found == NULL) return -1;
    Py_ssize_t place = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        const PyMemberDef* member = ((PyMemberDescrObject*)found)->d_member;
        if (member->type == T_OBJECT_EX && PyDescr_TYPE(found) == type) place = member->offset;
    }
    Py_DECREF(found);
    if (place < 0) PyErr_Format(PyExc_TypeError, "%s has no plain field %s", type->tp_name, name);
    return place;
}

static PyObject* bind(PyObject* self, PyObject* args) {
    (void)self;
    PyTypeObject *feature, *item, *expansion;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyType_Type, &feature, &PyType_Type, &item, &PyType_Type,
                          &expansion))
        return NULL;
    for (int i = 0; i < NUM_FEATURE_FIELDS; ++i)
        if ((known.of_feature[i] = place_of(feature, FEATURE_FIELDS[i])) < 0) return NULL;
    if ((known.item_expansion = place_of(item, "expansion")) < 0) return NULL;
    if ((known.runs = place_of(expansion, "runs")) < 0) return NULL;
    if ((known.embed_token_id = place_of(expansion, "embed_token_id")) < 0) return NULL;
    Py_XSETREF(known.feature, (PyTypeObject*)Py_NewRef((PyObject*)feature));
    Py_XSETREF(known.item, (PyTypeObject*)Py_NewRef((PyObject*)item));
    Py_XSETREF(known.expansion, (PyTypeObject*)Py_NewRef((PyObject*)expansion));
    Py_RETURN_NONE;
}

static PyObject* field(PyObject* object, Py_ssize_t place) {
    return *(PyObject**)((char*)object + place);
}

// An int of up to 62 bits; anything else is -1, which fits nothing that is looked for here.
static int64_t number(PyObject* object) {
    if (object == NULL || !PyLong_CheckExact(object)) return -1;
    int overflow;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow || value > INT64_MAX / 2 ? -1 : value;
}

typedef struct {
    int64_t start, longest;
    int64_t *offsets, *ends;
    PyObject *keys, *modalities, *last_modality;
} Columns;

// Add one feature to the columns; 0 if it is not plain or not after the last one, -1 for an error.
static int take_in(PyObject* feature, Py_ssize_t index, Columns* columns) {
    if (!Py_IS_TYPE(feature, known.feature)) return 0;
    PyObject* fields[NUM_FEATURE_FIELDS];
    for (int i = 0; i < NUM_FEATURE_FIELDS; ++i)
        if ((fields[i] = field(feature, known.of_feature[i])) == NULL) return 0;
    const int64_t offset = number(fields[OFFSET]), length = number(fields[LENGTH]);
    if (!PyBytes_CheckExact(fields[KEY]) || PyBytes_GET_SIZE(fields[KEY]) != KEY_BYTES ||
        offset < columns->start || length < 1 || number(fields[NUM_EMBEDS]) != length ||
        fields[IS_EMBED] != Py_None)
        return 0;
    if (fields[MODALITY] != columns->last_modality) {
        columns->last_modality = fields[MODALITY];
        if (PySet_Add(columns->modalities, fields[MODALITY]) < 0) return -1;
    }
    PyList_SET_ITEM(columns->keys, index, Py_NewRef(fields[KEY]));
    columns->offsets[index] = offset;
    columns->ends[index] = columns->start = offset + length;
    if (length > columns->longest) columns->longest = length;
    return 1;
}

static PyObject* plain_columns(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
    (void)self;
    if (num_args != 2 || !PyTuple_CheckExact(args[0]) || known.feature == NULL)
        return PyErr_Format(PyExc_TypeError, "expected a tuple of features and a position");
    const Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
    const int64_t start = number(args[1]);
    PyObject* offsets = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    PyObject* ends = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    PyObject *keys = PyList_New(count), *modalities = PySet_New(NULL), *answer = NULL;
    if (offsets != NULL && ends != NULL && keys != NULL && modalities != NULL) {
        Columns columns = {.start = start < 0 ? 0 : start, .keys = keys, .modalities = modalities,
                           .offsets = (int64_t*)PyBytes_AS_STRING(offsets),
                           .ends = (int64_t*)PyBytes_AS_STRING(ends)};
        int taken = 1;
        for (Py_ssize_t i = 0; i < count && taken == 1; ++i)
            taken = take_in(PyTuple_GET_ITEM(args[0], i), i, &columns);
        if (taken == 1)
            answer = Py_BuildValue("OOOLO", keys, offsets, ends, (long long)columns.longest,
                                   modalities);
        else if (taken == 0)
            answer = Py_NewRef(Py_None);
    }
    Py_XDECREF(offsets);
    Py_XDECREF(ends);
    Py_XDECREF(keys);
    Py_XDECREF(modalities);
    return answer;
}

// Whether an item expands to one run of `rows` embed tokens and nothing else.
static int is_one_run(PyObject* item, int64_t rows) {
    if (!Py_IS_TYPE(item, known.item)) return 0;
    PyObject* expansion = field(item, known.item_expansion);
    if (expansion == NULL || !Py_IS_TYPE(expansion, known.expansion)) return 0;
    PyObject* runs = field(expansion, known.runs);
    if (runs == NULL || !PyTuple_CheckExact(runs) || PyTuple_GET_SIZE(runs) != 1) return 0;
    PyObject* run = PyTuple_GET_ITEM(runs, 0);
    if (!PyTuple_CheckExact(run) || PyTuple_GET_SIZE(run) != 2) return 0;
    const int64_t token = number(PyTuple_GET_ITEM(run, 0));
    return token >= 0 && number(field(expansion, known.embed_token_id)) == token &&
           number(PyTuple_GET_ITEM(run, 1)) == rows;
}

static int same_key(PyObject* a, PyObject* b) {
    return a == b || (PyBytes_CheckExact(a) && PyBytes_CheckExact(b) &&
                      PyBytes_GET_SIZE(a) == PyBytes_GET_SIZE(b) &&
                      memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), PyBytes_GET_SIZE(a)) == 0);
}

// The items of the keys, in their order; None unless each is there and fits its rows.
static PyObject* find_items(PyObject* keys, PyObject* items, const int64_t* offsets,
                            const int64_t* ends) {
    const Py_ssize_t count = PyList_GET_SIZE(keys);
    PyObject* found = PyList_New(count);
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; found != NULL && i < count; ++i) {
        PyObject *key = PyList_GET_ITEM(keys, i), *next = NULL, *item = NULL;
        // they come in order, as most do: then none is looked up
        if (!PyDict_Next(items, &at, &next, &item) || !same_key(next, key))
            item = PyDict_GetItemWithError(items, key);
        if (item == NULL && PyErr_Occurred()) {
            Py_CLEAR(found);
        } else if (item == NULL || !is_one_run(item, ends[i] - offsets[i])) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        } else {
            PyList_SET_ITEM(found, i, Py_NewRef(item));
        }
    }
    return found;
}

static PyObject* one_run_items(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
    (void)self;
    if (num_args != 4 || !PyList_CheckExact(args[0]) || !PyDict_Check(args[1]) ||
        known.item == NULL)
        return PyErr_Format(PyExc_TypeError, "expected keys, items, offsets and ends");
    Py_buffer offsets, ends;
    if (PyObject_GetBuffer(args[2], &offsets, PyBUF_SIMPLE) < 0) return NULL;
    PyObject* answer = NULL;
    if (PyObject_GetBuffer(args[3], &ends, PyBUF_SIMPLE) == 0) {
        const Py_ssize_t size = PyList_GET_SIZE(args[0]) * (Py_ssize_t)sizeof(int64_t);
        if (offsets.len != size || ends.len != size)
            PyErr_SetString(PyExc_ValueError, "keys, offsets and ends are of different lengths");
        else
            answer = find_items(args[0], args[1], offsets.buf, ends.buf);
        PyBuffer_Release(&ends);
    }
    PyBuffer_Release(&offsets);
    return answer;
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, "The classes of features, items and expansions; before all else."},
    {"plain_columns", (PyCFunction)(void (*)(void))plain_columns, METH_FASTCALL,
     "Columns of plain features; see mm_features.py."},
    {"one_run_items", (PyCFunction)(void (*)(void))one_run_items, METH_FASTCALL,
     "Items that fit their features; see mm_features.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_columns", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__columns(void) { return PyModule_Create(&module); }
