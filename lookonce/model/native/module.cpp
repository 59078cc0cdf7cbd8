// The Python module of the native decoder; what it computes is in decoder.h. Sizes and addresses
// come from decoder.py, which keeps the tensors alive and has checked their shapes.

#include "../attention/arguments.h"
#include "../attention/machine.h"
#include "rows.h"
#include "windows.h"

namespace {

using namespace native;

constexpr const char* NAME = "lookonce native decoder";
constexpr Py_ssize_t MODEL_NUMBERS = 13, LAYER_NUMBERS = 22, STEP_NUMBERS = 20;

template <typename T, typename W>
Linear<T, W> read_linear(Arguments& a, int64_t inputs, int64_t outputs) {
    Linear<T, W> linear;
    linear.weight = a.pointer<W>(), linear.bias = a.pointer<T>();
    linear.inputs = inputs, linear.outputs = outputs;
    return linear;
}

template <typename T>
Norm<T> read_norm(Arguments& a) {
    Norm<T> norm;
    norm.weight = a.pointer<T>(), norm.eps = a.real();
    return norm;
}

template <typename T, typename W>
Layer<T, W> read_layer(const Model<T, W>& m, PyObject* const* numbers) {
    Arguments a(numbers);
    Layer<T, W> layer;
    layer.before = read_norm<T>(a), layer.between = read_norm<T>(a);
    layer.query = read_norm<T>(a), layer.key = read_norm<T>(a);
    layer.qkv = read_linear<T, W>(a, m.hidden, m.qkv_width());
    layer.out = read_linear<T, W>(a, m.heads * m.head_dim, m.hidden);
    layer.gate_up = read_linear<T, W>(a, m.hidden, 2 * m.ffn);
    layer.down = read_linear<T, W>(a, m.ffn, m.hidden);
    layer.keys = a.pointer<T>(), layer.values = a.pointer<T>();
    layer.sinks = a.pointer<float>(), layer.window = a.integer();
    layer.scale = a.real(), layer.softcap = a.real();
    return layer;
}

// A decoder of some types, for Python to hold.
class Decoder {
  public:
    virtual ~Decoder() = default;
    // Fills in what the model knows of the step; what is wrong with it, or null.
    virtual const char* complete(Step& step, int64_t num_tokens) const = 0;
    virtual int64_t run(const Step& step) const = 0;
};

template <typename T, typename W>
class Typed : public Decoder {
  public:
    Typed(PyObject* const* numbers, PyObject* layers) {
        Arguments a(numbers);
        m.hidden = a.integer(), m.ffn = a.integer();
        m.heads = a.integer(), m.kv_heads = a.integer(), m.head_dim = a.integer();
        m.vocab = a.integer(), m.embedding = a.pointer<T>();
        m.num_blocks = a.integer(), m.block_size = a.integer();
        m.norm = read_norm<T>(a);
        const int64_t outputs = a.integer();
        m.head.weight = a.pointer<W>(), m.head.bias = nullptr;
        m.head.inputs = m.hidden, m.head.outputs = outputs;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layers); ++i) {
            PyObject* layer = PyTuple_GET_ITEM(layers, i);
            m.layers.push_back(read_layer(m, PySequence_Fast_ITEMS(layer)));
        }
    }

    const char* complete(Step& s, int64_t num_tokens) const override {
        Problem& p = s.attention;
        p.num_heads = m.heads, p.num_kv_heads = m.kv_heads, p.head_dim = m.head_dim;
        p.block_size = m.block_size, p.num_blocks = m.num_blocks;
        if (p.num_tokens() != num_tokens) return "the metadata tells another number of tokens";
        for (int64_t i = 0; i < s.num_samples; ++i)
            if (s.sample_rows && (s.sample_rows[i] < 0 || s.sample_rows[i] >= num_tokens))
                return "sample row outside the step";
        return find_fault(p);
    }

    int64_t run(const Step& step) const override { return Pass<T, W>(m, step).run(); }

  private:
    Model<T, W> m;
};

void destroy(PyObject* capsule) {
    delete static_cast<Decoder*>(PyCapsule_GetPointer(capsule, NAME));
}

bool has_count(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    return false;
}

bool is_tuple_of(PyObject* object, Py_ssize_t length) {
    if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == length) return true;
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zd numbers", length);
    return false;
}

// make(model numbers, layers' numbers, half, half weights) → capsule
PyObject* make(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 4 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a model, a tuple of layers and two flags");
        return nullptr;
    }
    if (!is_tuple_of(args[0], MODEL_NUMBERS)) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i)
        if (!is_tuple_of(PyTuple_GET_ITEM(args[1], i), LAYER_NUMBERS)) return nullptr;
    PyObject* const* numbers = PySequence_Fast_ITEMS(args[0]);
    std::unique_ptr<Decoder> decoder;
    if (PyObject_IsTrue(args[2]))
        decoder = std::make_unique<Typed<BFloat16, BFloat16>>(numbers, args[1]);
    else if (PyObject_IsTrue(args[3]))
        decoder = std::make_unique<Typed<float, BFloat16>>(numbers, args[1]);
    else
        decoder = std::make_unique<Typed<float, float>>(numbers, args[1]);
    if (PyErr_Occurred()) return nullptr;
    return PyCapsule_New(decoder.release(), NAME, destroy);
}

Step read_step(PyObject* const* numbers) {
    Arguments a(numbers);
    Step s = {};
    s.embeds = a.pointer<void>(), s.token_ids = a.pointer<int64_t>();
    s.positions = a.pointer<int64_t>(), s.axes = a.integer(), s.axis_stride = a.integer();
    s.sample_rows = a.pointer<int64_t>(), s.num_samples = a.integer();
    s.logits = a.pointer<float>();
    s.cos = a.pointer<float>(), s.sin = a.pointer<float>(), s.num_positions = a.integer();
    Problem& p = s.attention;
    p.query_start = a.pointer<int32_t>(), p.kv_lens = a.pointer<int32_t>();
    p.block_tables = a.pointer<int32_t>(), p.slots = a.pointer<int64_t>();
    p.visible_end = a.pointer<int32_t>();
    p.table_stride = a.integer(), p.num_sequences = a.integer();
    p.num_threads = int(a.integer());
    return s;
}

// run(capsule, step numbers...) → what Pass::run says
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_count(count, 1 + STEP_NUMBERS)) return nullptr;
    auto* decoder = static_cast<Decoder*>(PyCapsule_GetPointer(args[0], NAME));
    if (!decoder) return nullptr;
    Step step = read_step(args + 1);
    const int64_t num_tokens = PyLong_AsLongLong(args[STEP_NUMBERS]);
    if (PyErr_Occurred()) return nullptr;
    if (const char* fault = decoder->complete(step, num_tokens)) {
        PyErr_SetString(PyExc_ValueError, fault);
        return nullptr;
    }
    int64_t outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = decoder->run(step);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(outcome);
}

// The largest score's index; -1 where a score is NaN, or the largest infinite.
int64_t best_of(const float* scores, int64_t count) {
    Vec highest = splat(-INFINITY), nothing = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vec score = load(scores + i);
        highest = max_vec(score, highest);
        nothing += score != score ? splat(1.0f) : splat(0.0f);
    }
    float best = reduce_max(highest), num_nan = reduce_sum(nothing);
    for (; i < count; ++i) best = std::max(best, scores[i]), num_nan += scores[i] != scores[i];
    if (num_nan > 0 || !std::isfinite(best)) return -1;
    return std::find(scores, scores + count, best) - scores;
}

// argmax(scores, rows, columns) → a list
PyObject* argmax(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_count(count, 3)) return nullptr;
    Arguments a(args);
    const float* scores = a.pointer<float>();
    const int64_t rows = a.integer(), columns = a.integer();
    if (PyErr_Occurred()) return nullptr;
    PyObject* best = PyList_New(rows);
    for (int64_t i = 0; best && i < rows; ++i) {
        PyObject* token = PyLong_FromLongLong(best_of(scores + i * columns, columns));
        if (!token) Py_CLEAR(best);
        else PyList_SET_ITEM(best, i, token);
    }
    return best;
}

// Windows are kept in units, so only of types whose rows are units.
template <typename T>
void run_windows(const Windows& windows) {
    if constexpr (LIES_IN_UNITS<T>) WindowAttention<typename Arithmetic<T>::U>(windows).run();
}

// attend_windows(numbers...) → None
PyObject* attend_windows(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_count(count, 12)) return nullptr;
    Arguments a(args);
    Windows w;
    w.qkv = a.pointer<void>(), w.cos = a.pointer<float>(), w.sin = a.pointer<float>();
    w.bounds = a.pointer<int32_t>(), w.output = a.pointer<void>();
    w.count = a.integer(), w.heads = a.integer(), w.dim = a.integer();
    const int64_t rows = a.integer();
    w.scale = a.real(), w.num_threads = int(a.integer());
    const bool half = a.integer() != 0;
    if (PyErr_Occurred()) return nullptr;
    bool fits = w.bounds[0] == 0 && w.bounds[w.count] == rows;
    for (int64_t i = 0; i < w.count; ++i) fits = fits && w.bounds[i] <= w.bounds[i + 1];
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "windows do not cover the rows");
        return nullptr;
    }
    if (half && !LIES_IN_UNITS<BFloat16>) {
        PyErr_SetString(PyExc_ValueError, "windows of bf16 are not compiled for this CPU");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS;
    half ? run_windows<BFloat16>(w) : run_windows<float>(w);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// norm_rows(from, weight, to, rows, width, eps, threads, half)
PyObject* norm_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_count(count, 8)) return nullptr;
    Arguments a(args);
    void *from = a.pointer<void>(), *weight = a.pointer<void>(), *to = a.pointer<void>();
    const int64_t rows = a.integer(), width = a.integer();
    const float eps = a.real();
    const int num_threads = int(a.integer());
    const bool half = a.integer() != 0;
    if (PyErr_Occurred()) return nullptr;
    auto run = [&](auto typed) {
        using T = decltype(typed);
        const Norm<T> norm = {static_cast<const T*>(weight), eps};
        native::norm_rows(norm, static_cast<const T*>(from), rows, width, static_cast<T*>(to),
                          num_threads);
    };
    Py_BEGIN_ALLOW_THREADS;
    half ? run(BFloat16{}) : run(0.0f);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// gate_rows(gate_up, to, rows, width, threads, half)
PyObject* gate_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_count(count, 6)) return nullptr;
    Arguments a(args);
    void *from = a.pointer<void>(), *to = a.pointer<void>();
    const int64_t rows = a.integer(), width = a.integer();
    const int num_threads = int(a.integer());
    const bool half = a.integer() != 0;
    if (PyErr_Occurred()) return nullptr;
    auto run = [&](auto typed) {
        using T = decltype(typed);
        native::gate_rows(static_cast<const T*>(from), rows, width, static_cast<T*>(to),
                          num_threads);
    };
    Py_BEGIN_ALLOW_THREADS;
    half ? run(BFloat16{}) : run(0.0f);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

template <typename F>
PyCFunction as_method(F function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"make", as_method(make), METH_FASTCALL, "A decoder of these weights; see decoder.py."},
    {"run", as_method(run), METH_FASTCALL, "One step from embedding to logits; see decoder.py."},
    {"argmax", as_method(argmax), METH_FASTCALL, "Of each row; see logits_processors.py."},
    {"norm_rows", as_method(norm_rows), METH_FASTCALL, "See rows.py."},
    {"gate_rows", as_method(gate_rows), METH_FASTCALL, "See rows.py."},
    {"attend_windows", as_method(attend_windows), METH_FASTCALL, "See windows.py."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    if (!runs_here()) {
        PyErr_SetString(PyExc_ImportError, "built for another CPU");
        return nullptr;
    }
    PyObject* made = PyModule_Create(&module);
    if (made) PyModule_AddIntConstant(made, "multiplies_bf16", LIES_IN_UNITS<BFloat16>);
    return made;
}
