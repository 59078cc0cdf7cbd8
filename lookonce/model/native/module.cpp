// The Python module of the compiled CPU kernels: paged attention, the native decoder, window
// attention and some operators. It is built once for each variant of CPU, as MODULE_NAME (setup.py).
// Every call takes tensors, and refuses with ValueError what does not fit together.

#include <memory>

#include "../attention/arguments.h"
#include "rows.h"
#include "sampling.h"
#include "windows.h"

namespace {

using namespace native;
using arguments::Arguments;
using arguments::guarded;
using arguments::refuse;
using arguments::require;
using arguments::Tensor;
using arguments::WithoutGil;

constexpr const char* DECODER = "lookonce native decoder";

// Calls run(T{}) with the type of the tensor, float or BFloat16.
template <typename F>
void with_type_of(const Tensor& tensor, F run) {
    if (tensor.is<float>()) return run(float{});
    if (tensor.is<BFloat16>()) return run(BFloat16{});
    refuse(std::string(tensor.name) + " is neither float32 nor bfloat16");
}

// ---------------------------------------------------------------- paged attention

// Reads query_start, kv_lens, block_tables, slot_mapping and visible_end of a step of T tokens.
void read_metadata(Arguments& a, Problem& p, int64_t num_tokens) {
    const Tensor query_start = a.tensor("query_start").of_dimensions(1).contiguous();
    const Tensor kv_lens = a.tensor("kv_lens").of_dimensions(1).contiguous();
    const Tensor block_tables = a.tensor("block_tables").of_dimensions(2).rows_contiguous();
    const Tensor slots = a.tensor("slot_mapping").of_dimensions(1).contiguous();
    p.num_sequences = kv_lens.size(0);
    if (slots.size(0) != num_tokens)
        refuse(std::to_string(num_tokens) + " queries, " + std::to_string(slots.size(0)) +
               " tokens in the metadata");
    query_start.shaped({p.num_sequences + 1});
    p.visible_end = a.optional_tensor("visible_end").shaped({num_tokens}).contiguous()
                        .data<int32_t>();
    p.table_columns = block_tables.size(1), p.table_stride = block_tables.stride(0);
    block_tables.shaped({p.num_sequences, p.table_columns});
    p.query_start = query_start.data<int32_t>(), p.kv_lens = kv_lens.data<int32_t>();
    p.block_tables = block_tables.data<int32_t>(), p.slots = slots.data<int64_t>();
    require(p.num_tokens() == num_tokens, "the metadata tells another number of tokens");
}

// What of the problem stands in queries [T, Hq, D], keys and values [T, Hkv, D] and their pages.
void read_heads(Arguments& a, Problem& p, Tensor& query) {
    query = a.tensor("query").of_dimensions(3);
    const Tensor key = a.tensor("key").of_dimensions(3), value = a.tensor("value").of_dimensions(3);
    const Tensor output = a.tensor("output");
    const Tensor keys = a.tensor("key pages").of_dimensions(4).contiguous();
    const Tensor values = a.tensor("value pages").contiguous();
    p.num_heads = query.size(1), p.head_dim = query.size(2);
    p.num_blocks = keys.size(0), p.block_size = keys.size(1), p.num_kv_heads = keys.size(2);
    for (const Tensor* written : {&key, &value})
        written->shaped({query.size(0), p.num_kv_heads, keys.size(3)});
    query.shaped({query.size(0), p.num_heads, keys.size(3)});
    output.shaped({query.size(0), p.num_heads, p.head_dim}).contiguous();
    values.shaped({p.num_blocks, p.block_size, p.num_kv_heads, p.head_dim});
    const Tensor* const others[] = {&query, &key, &value, &output, &values};
    for (const Tensor* other : others)
        if (!other->same_type(keys))
            refuse("queries are " + std::string(query.type_name()) + ", " + other->name + " " +
                   other->type_name() + ", pages " + keys.type_name());
    query.rows_contiguous(), key.rows_contiguous(), value.rows_contiguous();
    p.query = query.any_data(), p.key = key.any_data(), p.value = value.any_data();
    p.output = output.any_data();
    p.key_pages = keys.any_data(), p.value_pages = values.any_data();
    p.query_token = query.stride(0), p.query_head = query.stride(1);
    p.key_token = key.stride(0), p.key_head = key.stride(1);
    p.value_token = value.stride(0), p.value_head = value.stride(1);
}

// paged_attention(query, key, value, output, key pages, value pages, query_start, kv_lens,
//                 block_tables, slot_mapping, visible_end, sinks, window, scale, softcap, threads)
PyObject* paged_attention(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 16);
    Problem p = {};
    Tensor query;
    read_heads(a, p, query);
    read_metadata(a, p, query.size(0));
    p.sinks = a.optional_tensor("sinks").shaped({p.num_heads}).contiguous().data<float>();
    p.window = a.integer(), p.scale = a.real(), p.softcap = a.real();
    p.num_threads = int(a.integer());
    if (const char* fault = find_fault(p)) refuse(fault);
    with_type_of(query, [&](auto typed) {
        const WithoutGil others_run;
        Parallel threads(p.num_threads);
        run_step<decltype(typed)>(p, threads);
    });
    Py_RETURN_NONE;
}

// ---------------------------------------------------------------- the native decoder

// A decoder of some types, for Python to hold together with the tensors it computes with.
class Decoder {
  public:
    Decoder(PyObject* model, PyObject* layers) : model(Py_NewRef(model)), layers(Py_NewRef(layers)) {}
    virtual ~Decoder() { Py_DECREF(model), Py_DECREF(layers); }
    Decoder(const Decoder&) = delete;
    // Reads a step and checks it; see Pass::run for the answer.
    virtual int64_t run(Arguments& a) const = 0;
    // Reads LoRA adapters: for each layer a tuple of its products, each None or (a, b, layout).
    virtual std::unique_ptr<class Adapters> adapt(PyObject* layers) const = 0;

  private:
    PyObject *model, *layers;
};

constexpr const char* ADAPTERS = "lookonce adapters";

// Adapters of some decoder, for Python to hold together with their tensors.
class Adapters {
  public:
    const Decoder* const decoder;
    explicit Adapters(const Decoder* decoder, PyObject* tensors)
        : decoder(decoder), tensors(Py_NewRef(tensors)) {}
    virtual ~Adapters() { Py_DECREF(tensors); }
    Adapters(const Adapters&) = delete;
    std::vector<int64_t> ranks;  // of each layout, those of all adapters

  private:
    PyObject* tensors;
};

template <typename T>
class TypedAdapters : public Adapters {
  public:
    using Adapters::Adapters;
    std::vector<AdaptedLayer<T>> layers;

    // One product's adapters, or None.
    Adapted<T> read(PyObject* items, int64_t inputs, int64_t outputs) {
        Adapted<T> part = {nullptr, nullptr, inputs, outputs, 0};
        if (items == Py_None) return part;
        Arguments a(items, 3);
        const Tensor down = a.tensor("adapters' a").of_dimensions(2).contiguous();
        const int64_t rank = down.size(0);
        part.a = down.shaped({rank, inputs}).template data<T>();
        part.b = a.tensor("adapters' b").shaped({rank, outputs}).contiguous().template data<T>();
        part.layout = a.integer();
        const int64_t known = int64_t(ranks.size());
        require(part.layout >= 0 && part.layout <= known, "layouts are not numbered in order");
        if (part.layout == known) ranks.push_back(rank);
        require(ranks[part.layout] == rank, "products of one layout have different ranks");
        return part;
    }
};

template <typename T>
Norm<T> read_norm(Arguments& a, const char* name, int64_t width) {
    const T* weight = a.optional_tensor(name).shaped({width}).contiguous().data<T>();
    return {weight, a.real()};
}

template <typename T, typename W>
Linear<T, W> read_linear(Arguments& a, const char* name, int64_t inputs, int64_t outputs) {
    Linear<T, W> layer = {};
    layer.weight = a.tensor(name).shaped({outputs, inputs}).contiguous().data<W>();
    layer.scales = a.optional_tensor(name).shaped({outputs}).contiguous().data<float>();
    require(!std::is_same_v<W, int8_t> || layer.scales, "int8 weights have no scales");
    layer.bias = a.optional_tensor(name).shaped({outputs}).contiguous().data<T>();
    layer.inputs = inputs, layer.outputs = layer.width = outputs;
    return layer;
}

template <typename T, typename W>
class Typed : public Decoder {
  public:
    Typed(PyObject* model, PyObject* layers) : Decoder(model, layers) {
        Arguments a(model, MODEL_ITEMS);
        const Tensor embedding = a.tensor("embedding").of_dimensions(2).contiguous();
        m.vocab = embedding.size(0), m.hidden = embedding.size(1);
        m.embedding = embedding.data<T>();
        m.norm = read_norm<T>(a, "last norm", m.hidden);
        require(m.norm.weight, "the last norm has no weight");
        const int64_t outputs = a.integer();
        m.head = read_linear<T, W>(a, "head", m.hidden, outputs);
        m.heads = a.integer(), m.kv_heads = a.integer(), m.head_dim = a.integer();
        m.ffn = a.integer();
        require(m.kv_heads > 0 && m.heads > 0 && m.heads % m.kv_heads == 0 && m.head_dim > 0 &&
                    m.ffn > 0,
                "query heads must be a multiple of key-value heads, and sizes positive");
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layers); ++i)
            m.layers.push_back(read_layer(PyTuple_GET_ITEM(layers, i)));
    }

    int64_t run(Arguments& a) const override {
        Step s = {};
        Problem& p = s.attention;
        const Tensor ids = a.tensor("token_ids").of_dimensions(1).contiguous();
        const int64_t num_tokens = ids.size(0);
        s.token_ids = ids.data<int64_t>();
        s.embeds = a.optional_tensor("embeds").shaped({num_tokens, m.hidden}).contiguous()
                       .template data<T>();
        read_positions(a, s, num_tokens);
        read_samples(a, s, num_tokens);
        const Tensor cos = a.tensor("cos").of_dimensions(2).contiguous();
        s.num_positions = cos.shaped({cos.size(0), m.head_dim}).size(0);
        const Tensor sin = a.tensor("sin").shaped({s.num_positions, m.head_dim}).contiguous();
        s.cos = cos.data<float>(), s.sin = sin.data<float>();
        read_metadata(a, p, num_tokens);
        p.num_heads = m.heads, p.num_kv_heads = m.kv_heads, p.head_dim = m.head_dim;
        p.block_size = m.block_size, p.num_blocks = m.num_blocks;
        p.num_threads = int(a.integer());
        if (const char* fault = find_fault(p)) refuse(fault);
        read_adapters(a, s, num_tokens);
        const WithoutGil others_run;
        return Pass<T, W>(m, s).run();
    }

    std::unique_ptr<Adapters> adapt(PyObject* items) const override {
        auto adapters = std::make_unique<TypedAdapters<T>>(this, items);
        Arguments all(items, Py_ssize_t(m.layers.size()));
        const int64_t queries = m.heads * m.head_dim, keys = m.kv_heads * m.head_dim;
        for (size_t i = 0; i < m.layers.size(); ++i) {
            Arguments a(all.object(), ADAPTABLE);
            AdaptedLayer<T> layer;
            layer[QUERIES] = adapters->read(a.object(), m.hidden, queries);
            layer[KEYS] = adapters->read(a.object(), m.hidden, keys);
            layer[VALUES] = adapters->read(a.object(), m.hidden, keys);
            layer[OUT] = adapters->read(a.object(), queries, m.hidden);
            layer[GATE] = adapters->read(a.object(), m.hidden, m.ffn);
            layer[UP] = adapters->read(a.object(), m.hidden, m.ffn);
            layer[DOWN] = adapters->read(a.object(), m.ffn, m.hidden);
            adapters->layers.push_back(layer);
        }
        return adapters;
    }

  private:
    static constexpr Py_ssize_t MODEL_ITEMS = 11, LAYER_ITEMS = 25;
    Model<T, W> m = {};

    Layer<T, W> read_layer(PyObject* items) {
        Arguments a(items, LAYER_ITEMS);
        Layer<T, W> layer = {};
        layer.before = read_norm<T>(a, "norm before attention", m.hidden);
        layer.between = read_norm<T>(a, "norm after attention", m.hidden);
        require(layer.before.weight && layer.between.weight, "a layer's norm has no weight");
        layer.query = read_norm<T>(a, "norm of queries", m.head_dim);
        layer.key = read_norm<T>(a, "norm of keys", m.head_dim);
        layer.qkv = read_linear<T, W>(a, "qkv", m.hidden, m.qkv_width());
        layer.out = read_linear<T, W>(a, "attention output", m.heads * m.head_dim, m.hidden);
        layer.gate_up = read_linear<T, W>(a, "gate and up", m.hidden, 2 * m.ffn);
        layer.down = read_linear<T, W>(a, "down", m.ffn, m.hidden);
        read_pages(a, layer);
        layer.window = a.integer(), layer.scale = a.real(), layer.softcap = a.real();
        return layer;
    }

    void read_pages(Arguments& a, Layer<T, W>& layer) {
        const Tensor keys = a.tensor("key pages").of_dimensions(4).contiguous();
        if (m.layers.empty()) m.num_blocks = keys.size(0), m.block_size = keys.size(1);
        const auto sizes = {m.num_blocks, m.block_size, m.kv_heads, m.head_dim};
        layer.keys = keys.shaped(sizes).template data<T>();
        layer.values = a.tensor("value pages").shaped(sizes).contiguous().template data<T>();
    }

    void read_adapters(Arguments& a, Step& s, int64_t num_tokens) const {
        PyObject* capsule = a.object();
        if (capsule == Py_None) {
            a.object(), a.object();
            return;
        }
        auto* adapters = static_cast<Adapters*>(PyCapsule_GetPointer(capsule, ADAPTERS));
        if (!adapters) throw arguments::Raised();
        require(adapters->decoder == this, "these are adapters of another decoder");
        const int64_t layouts = int64_t(adapters->ranks.size());
        const Tensor bounds = a.tensor("spans").shaped({layouts, num_tokens, 2}).contiguous();
        const Tensor scales = a.tensor("scales").shaped({layouts, num_tokens}).contiguous();
        s.spans = {bounds.data<int32_t>(), scales.data<float>()};
        for (int64_t i = 0; i < layouts * num_tokens; ++i) {
            const int32_t start = s.spans.bounds[2 * i], end = s.spans.bounds[2 * i + 1];
            require(0 <= start && start <= end && end <= adapters->ranks[i / num_tokens],
                    "a token's adapter is outside of those that are loaded");
        }
        s.adapters = static_cast<TypedAdapters<T>*>(adapters)->layers.data();
    }

    void read_positions(Arguments& a, Step& s, int64_t num_tokens) const {
        const Tensor positions = a.tensor("position_ids").rows_contiguous();
        s.axes = positions.ndim() < 2 ? 0 : positions.size(0);
        if (positions.ndim() == 3)
            positions.shaped({s.axes, 1, num_tokens});
        else
            positions.shaped({1, num_tokens});
        s.axis_stride = positions.stride(0), s.positions = positions.data<int64_t>();
    }

    void read_samples(Arguments& a, Step& s, int64_t num_tokens) const {
        const Tensor rows = a.optional_tensor("sample_rows").of_dimensions(1).contiguous();
        s.num_samples = rows ? rows.size(0) : num_tokens;
        s.sample_rows = rows.data<int64_t>();
        for (int64_t i = 0; rows && i < s.num_samples; ++i)
            require(s.sample_rows[i] >= 0 && s.sample_rows[i] < num_tokens,
                    "sample row outside the step");
        const Tensor logits = a.tensor("logits").shaped({s.num_samples, m.head.outputs});
        s.logits = logits.contiguous().data<float>();
    }
};

void destroy(PyObject* capsule) {
    delete static_cast<Decoder*>(PyCapsule_GetPointer(capsule, DECODER));
}

// make(model, layers) → capsule; the tuples are those of decoder.py
PyObject* make(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 2);
    PyObject *model = a.object(), *layers = a.object();
    if (!PyTuple_Check(model) || PyTuple_GET_SIZE(model) < 5 || !PyTuple_Check(layers)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of the model and one of its layers");
        throw arguments::Raised();
    }
    Arguments types(model, PyTuple_GET_SIZE(model));
    const Tensor embedding = types.tensor("embedding");
    types.object(), types.object(), types.object();
    const Tensor head = types.tensor("head");
    std::unique_ptr<Decoder> decoder;
    if (head.is<int8_t>() && embedding.is<BFloat16>())
        decoder = std::make_unique<Typed<BFloat16, int8_t>>(model, layers);
    else if (head.is<int8_t>())
        decoder = std::make_unique<Typed<float, int8_t>>(model, layers);
    else if (embedding.is<BFloat16>())
        decoder = std::make_unique<Typed<BFloat16, BFloat16>>(model, layers);
    else if (head.is<BFloat16>())
        decoder = std::make_unique<Typed<float, BFloat16>>(model, layers);
    else
        decoder = std::make_unique<Typed<float, float>>(model, layers);
    PyObject* capsule = PyCapsule_New(decoder.get(), DECODER, destroy);
    if (capsule) decoder.release();
    return capsule;
}

void destroy_adapters(PyObject* capsule) {
    Py_DECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule)));
    delete static_cast<Adapters*>(PyCapsule_GetPointer(capsule, ADAPTERS));
}

// adapt(capsule of a decoder, its adapters) → capsule, which keeps the decoder's; the tuples are those
// of decoder.py
PyObject* adapt(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 2);
    PyObject* of = a.object();
    auto* decoder = static_cast<Decoder*>(PyCapsule_GetPointer(of, DECODER));
    if (!decoder) throw arguments::Raised();
    auto adapters = decoder->adapt(a.object());
    PyObject* capsule = PyCapsule_New(adapters.get(), ADAPTERS, nullptr);
    if (!capsule) throw arguments::Raised();
    adapters.release();
    PyCapsule_SetContext(capsule, Py_NewRef(of));
    PyCapsule_SetDestructor(capsule, destroy_adapters);
    return capsule;
}

// run(capsule, token_ids, embeds, position_ids, sample_rows, logits, cos, sin, query_start, kv_lens,
//     block_tables, slot_mapping, visible_end, threads, adapters or None, spans, scales)
//     → what Pass::run says
PyObject* run(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 17);
    auto* decoder = static_cast<Decoder*>(PyCapsule_GetPointer(a.object(), DECODER));
    if (!decoder) throw arguments::Raised();
    return PyLong_FromLongLong(decoder->run(a));
}

// ---------------------------------------------------------------- window attention

// attend_windows(qkv [S, 3, heads, D], cos and sin [S, D], bounds [windows + 1],
//                output [S, heads * D], scale, threads)
PyObject* attend_windows(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 7);
    Windows w = {};
    const Tensor qkv = a.tensor("qkv").of_dimensions(4).contiguous();
    const int64_t rows = qkv.size(0);
    w.heads = qkv.size(2), w.dim = qkv.size(3);
    qkv.shaped({rows, 3, w.heads, w.dim});
    w.cos = a.tensor("cos").shaped({rows, w.dim}).contiguous().data<float>();
    w.sin = a.tensor("sin").shaped({rows, w.dim}).contiguous().data<float>();
    const Tensor bounds = a.tensor("bounds").of_dimensions(1).contiguous();
    const Tensor output = a.tensor("output").shaped({rows, w.heads * w.dim}).contiguous();
    require(output.same_type(qkv), "output is of another type than qkv");
    w.scale = a.real(), w.num_threads = int(a.integer());
    w.qkv = qkv.any_data(), w.bounds = bounds.data<int32_t>(), w.output = output.any_data();
    w.count = bounds.size(0) - 1;
    bool fits = w.count >= 0 && w.bounds[0] == 0 && w.bounds[w.count] == rows;
    for (int64_t i = 0; fits && i < w.count; ++i) fits = w.bounds[i] <= w.bounds[i + 1];
    require(fits, "windows do not cover the rows");
    with_type_of(qkv, [&](auto typed) {
        const WithoutGil others_run;
        WindowAttention<decltype(typed)>(w).run();
    });
    Py_RETURN_NONE;
}

// ---------------------------------------------------------------- operators

// A Python list of number(i) for i in [0, count); null with an exception set.
template <typename F>
PyObject* list_of(int64_t count, F number) {
    PyObject* list = PyList_New(count);
    for (int64_t i = 0; list && i < count; ++i) {
        PyObject* item = PyLong_FromLongLong(number(i));
        if (!item) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, item);
    }
    return list;
}

// argmax(scores [rows, columns]) → a list
PyObject* argmax(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 1);
    const Tensor tensor = a.tensor("scores").of_dimensions(2).contiguous();
    const float* scores = tensor.data<float>();
    const int64_t rows = tensor.size(0), columns = tensor.size(1);
    return list_of(rows, [&](int64_t i) { return best_of(scores + i * columns, columns); });
}

// draw(scores [rows, columns], parameters [rows, 4] of `native::Draw`, places [rows, 2] of
//      `native::Place`) → a list of tokens
PyObject* draw(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 3);
    const Tensor tensor = a.tensor("scores").of_dimensions(2).contiguous();
    const int64_t rows = tensor.size(0), columns = tensor.size(1);
    const Tensor wanted = a.tensor("parameters").shaped({rows, 4}).contiguous();
    const Tensor where = a.tensor("places").shaped({rows, 2}).contiguous();
    const float* scores = tensor.data<float>();
    const Draw* draws = reinterpret_cast<const Draw*>(wanted.data<double>());
    const Place* places = reinterpret_cast<const Place*>(where.data<int64_t>());
    require(columns > 0, "there are no scores");
    for (int64_t i = 0; i < rows; ++i) require(draws[i].top_k >= 1, "top-k is less than 1");
    std::vector<int64_t> tokens(rows);
    {
        const WithoutGil others_run;
        Drawing drawing(columns);
        for (int64_t i = 0; i < rows; ++i)
            tokens[i] = drawing.token(scores + i * columns, draws[i], places[i]);
    }
    return list_of(rows, [&](int64_t i) { return tokens[i]; });
}

// The number of rows of a contiguous tensor whose last dimension has `width` entries.
int64_t count_rows(const Tensor& tensor, int64_t width) {
    int64_t rows = 1;
    for (int axis = 0; axis + 1 < tensor.ndim(); ++axis) rows *= tensor.size(axis);
    if (tensor.ndim() < 1 || tensor.size(tensor.ndim() - 1) != width)
        tensor.refuse_sizes();
    tensor.contiguous();
    return rows;
}

// norm_rows(from [..., width], weight [width], to [..., width], eps, threads)
PyObject* norm_rows(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 5);
    const Tensor from = a.tensor("hidden"), weight = a.tensor("weight").of_dimensions(1);
    const Tensor to = a.tensor("output");
    const int64_t width = weight.contiguous().size(0), rows = count_rows(from, width);
    require(count_rows(to, width) == rows, "the output is of another size");
    const float eps = a.real();
    const int num_threads = int(a.integer());
    with_type_of(from, [&](auto typed) {
        using T = decltype(typed);
        const Norm<T> norm = {weight.data<T>(), eps};
        const T* input = from.data<T>();
        T* output = to.data<T>();
        const WithoutGil others_run;
        native::norm_rows(norm, input, rows, width, output, num_threads);
    });
    Py_RETURN_NONE;
}

// linear_rows(from [rows, inputs], weight [outputs, inputs] int8, scales [outputs], bias [outputs] or
//             None, to [rows, outputs], threads)
PyObject* linear_rows(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 6);
    const Tensor from = a.tensor("hidden").of_dimensions(2).contiguous();
    PyObject* const* weights = args + 1;
    const Tensor weight = a.tensor("weight").of_dimensions(2);
    const int64_t rows = from.size(0), inputs = from.size(1), outputs = weight.size(0);
    require(inputs > 0 && outputs > 0, "a weight has no elements");
    a.optional_tensor("scales"), a.optional_tensor("bias");
    const Tensor to = a.tensor("output").shaped({rows, outputs}).contiguous();
    const int num_threads = int(a.integer());
    with_type_of(from, [&](auto typed) {
        using T = decltype(typed);
        Arguments again(weights, 3, 3);
        const auto layer = read_linear<T, int8_t>(again, "weight", inputs, outputs);
        const T* input = from.data<T>();
        T* output = to.data<T>();
        const WithoutGil others_run;
        native::linear_rows(layer, input, rows, output, num_threads);
    });
    Py_RETURN_NONE;
}

// gate_rows(gate_up [..., 2 * width], to [..., width], threads)
PyObject* gate_rows(PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count, 3);
    const Tensor from = a.tensor("gate_up"), to = a.tensor("output");
    const int num_threads = int(a.integer());
    require(to.ndim() > 0, "the output has no dimensions");
    const int64_t width = to.size(to.ndim() - 1), rows = count_rows(to, width);
    require(count_rows(from, 2 * width) == rows, "the output is of another size");
    with_type_of(from, [&](auto typed) {
        using T = decltype(typed);
        const T* input = from.data<T>();
        T* output = to.data<T>();
        const WithoutGil others_run;
        native::gate_rows(input, rows, width, output, num_threads);
    });
    Py_RETURN_NONE;
}

template <typename F>
PyCFunction as_method(F function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"paged_attention", as_method(guarded<paged_attention>), METH_FASTCALL,
     "Write new keys and values and attend over the pages; see attention/cpu.py."},
    {"make", as_method(guarded<make>), METH_FASTCALL, "A decoder of these weights; see decoder.py."},
    {"adapt", as_method(guarded<adapt>), METH_FASTCALL,
     "LoRA adapters for a decoder's steps; see decoder.py."},
    {"run", as_method(guarded<run>), METH_FASTCALL,
     "One step from embedding to logits; see decoder.py."},
    {"argmax", as_method(guarded<argmax>), METH_FASTCALL, "Of each row; see logits_processors.py."},
    {"draw", as_method(guarded<draw>), METH_FASTCALL, "Of each row; see logits_processors.py."},
    {"norm_rows", as_method(guarded<norm_rows>), METH_FASTCALL, "See layers.py."},
    {"linear_rows", as_method(guarded<linear_rows>), METH_FASTCALL, "See int8_weights.py."},
    {"gate_rows", as_method(guarded<gate_rows>), METH_FASTCALL, "See layers.py."},
    {"attend_windows", as_method(guarded<attend_windows>), METH_FASTCALL, "See layers.py."},
    {nullptr, nullptr, 0, nullptr},
};

#define AS_TEXT(name) #name
#define TEXT_OF(name) AS_TEXT(name)
#define JOINED(first, second) first##second
#define INIT_OF(name) JOINED(PyInit_, name)

PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT_OF(MODULE_NAME), nullptr, 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC INIT_OF(MODULE_NAME)() {
    if (arguments::find_torch() < 0) return nullptr;
    PyObject* made = PyModule_Create(&module);
    if (made) PyModule_AddIntConstant(made, "multiplies_bf16", LIES_IN_UNITS<BFloat16>);
    return made;
}
