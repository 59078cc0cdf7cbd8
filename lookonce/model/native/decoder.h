// A plain decoder (see decoder.py) over the few tokens of a decode step, embedding to logits.
//
// Weights and KV pages are of one type T, fp32 or bf16; everything between them is fp32. Matrices may
// be of another type (W): bf16 of an fp32 model whose numbers are all bf16 numbers, half as much to
// read, or int8 with a scale for each output.

#pragma once

#include <cmath>

#include "../attention/step.h"
#include "linear.h"
#include "lora.h"

namespace native {

// An RMS norm; no weight: none is applied.
template <typename T>
struct Norm {
    const T* weight;
    float eps;
};

template <typename T, typename W>
struct Layer {
    Norm<T> before, between, query, key;
    Linear<T, W> qkv, out, gate_up, down;
    T *keys, *values;  // pages, as in attention/step.h
    const float* sinks;
    int64_t window;
    float scale, softcap;
};

template <typename T, typename W>
struct Model {
    int64_t hidden, ffn, heads, kv_heads, head_dim, vocab, num_blocks, block_size;
    const T* embedding;  // [vocab][hidden]
    Norm<T> norm;
    Linear<T, W> head;   // to logits
    std::vector<Layer<T, W>> layers;

    int64_t rotated() const { return heads + kv_heads; }
    int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
};

// What one step asks.
struct Step {
    const void* embeds;          // T [tokens][hidden], or null: those of `token_ids`
    const int64_t* token_ids;    // [tokens]
    const int64_t* positions;    // [axes][tokens], rows `axis_stride` apart
    const int64_t* sample_rows;  // [num_samples], or null: every token is one
    float* logits;               // [num_samples][head.outputs]
    const float *cos, *sin;      // [num_positions][head_dim]; the first half of sin is negated
    int64_t axes, axis_stride, num_samples, num_positions;
    Problem attention;           // sizes and metadata; tensors are filled in here
    const void* adapters;        // AdaptedLayer<T> [layers], or null: no token has an adapter
    Spans spans;                 // of its tokens
};

constexpr int64_t VALUES_FOR_THREADS = 8192;  // are worth sharing out

constexpr int64_t FEW_TOKENS = 64;  // as many sequences as usually decode together

constexpr int64_t DONE = 0, AXES_DIFFER = -1, UNKNOWN_TOKEN = -2;

inline void store_as(float* to, Vec v) { store(to, v); }

inline void store_as(BFloat16* to, Vec v) {
#ifdef __AVX512BF16__
    Pair::store_units(to, v);
#else
    store(to, v);
#endif
}

// One norm of `width` values, of either type; `to` may be `from`.
template <typename T, typename X>
inline void normalise(const Norm<T>& norm, const X* from, int64_t width, X* to) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(from + i) * load(from + i);
    float sum = reduce_sum(squares);
    for (; i < width; ++i) sum += widen(from[i]) * widen(from[i]);
    const float factor = 1.0f / std::sqrt(sum / float(width) + norm.eps);
    for (i = 0; i + LANES <= width; i += LANES)
        store_as(to + i, load(norm.weight + i) * (load(from + i) * factor));
    for (; i < width; ++i) narrow(widen(norm.weight[i]) * (widen(from[i]) * factor), to + i);
}

// `width` values of one type as another.
template <typename X, typename Y>
inline void convert(const X* from, int64_t width, Y* to) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_as(to + i, load(from + i));
    for (; i < width; ++i) narrow(widen(from[i]), to + i);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) {
    Vec negated = -x;
    negated = negated > 87.0f ? splat(87.0f) : negated;
    return x / (1.0f + exp_vec(negated));
}

// silu(gate) * up of one row: `width` gates, then as many ups.
template <typename X>
inline void gated(const X* gate, int64_t width, X* to) {
    const X* up = gate + width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_as(to + i, silu(load(gate + i)) * load(up + i));
    for (; i < width; ++i) {
        const float x = widen(gate[i]);
        narrow(x / (1.0f + std::exp(-x)) * widen(up[i]), to + i);
    }
}

template <typename T, typename W>
class Pass {
  public:
    Pass(const Model<T, W>& model, const Step& step)
        : m(model), s(step), tokens(step.attention.num_tokens()),
          threads(worthwhile(step.attention.num_threads)) {}

    // DONE, or why nothing was computed: AXES_DIFFER, UNKNOWN_TOKEN, or above 0 the number of
    // positions that the tables of cos and sin must hold.
    int64_t run() {
        if (const int64_t fault = check()) return fault;
        prepare();
        embed();
        for (const Layer<T, W>& layer : m.layers) {
            attend(layer);
            feed_forward(layer);
        }
        predict();
        return DONE;
    }

  private:
    const Model<T, W>& m;
    const Step& s;
    const int64_t tokens;
    Parallel threads;
    float *x, *normed, *wide, *attended;  // residual; [tokens] rows of the widest each needs
    T *qkv, *answer;
    std::vector<float> many_floats;
    std::vector<T> many_halves;

    // As many of the threads as find enough to read or to multiply in a product of average size: the
    // more there are, the more often they wait for each other.
    int worthwhile(int num_threads) const {
        constexpr int64_t BYTES = 128 << 10;  // are worth one more thread, as THREAD_WORK is
        int64_t weights = m.head.weights();
        for (const Layer<T, W>& layer : m.layers)
            weights += layer.qkv.weights() + layer.out.weights() + layer.gate_up.weights() +
                       layer.down.weights();
        const int64_t average = weights / int64_t(4 * m.layers.size() + 1);
        const int64_t most = std::max<int64_t>(average * sizeof(W) / BYTES,
                                               average * tokens / THREAD_WORK);
        return int(std::clamp<int64_t>(most, 1, std::max(num_threads, 1)));
    }

    int64_t check() const {
        int64_t highest = -1;
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t axis = 1; axis < s.axes; ++axis)
                if (s.positions[axis * s.axis_stride + t] != s.positions[t]) return AXES_DIFFER;
            if (s.positions[t] < 0) return AXES_DIFFER;
            highest = std::max(highest, s.positions[t]);
            if (!s.embeds && (s.token_ids[t] < 0 || s.token_ids[t] >= m.vocab))
                return UNKNOWN_TOKEN;
        }
        return highest < s.num_positions ? DONE : highest + 1;
    }

    // Room for this step: that of few tokens stays with its thread, for the next step.
    void prepare() {
        static thread_local std::vector<float> few_floats;
        static thread_local std::vector<T> few_halves;
        std::vector<float>& floats = tokens > FEW_TOKENS ? many_floats : few_floats;
        std::vector<T>& halves = tokens > FEW_TOKENS ? many_halves : few_halves;
        const int64_t widest = std::max(m.qkv_width(), 2 * m.ffn), answers = m.heads * m.head_dim;
        const int64_t sizes[] = {m.hidden, std::max(m.hidden, m.ffn), widest, answers};
        float** parts[] = {&x, &normed, &wide, &attended};
        int64_t sum = 0;
        for (int64_t size : sizes) sum += tokens * size;
        if (int64_t(floats.size()) < sum) floats.resize(sum);
        float* next = floats.data();
        for (int i = 0; i < 4; ++i) *parts[i] = next, next += tokens * sizes[i];
        const int64_t typed = tokens * (m.qkv_width() + answers);
        if (int64_t(halves.size()) < typed) halves.resize(typed);
        qkv = halves.data(), answer = qkv + tokens * m.qkv_width();
    }

    void embed() {
        const T* given = static_cast<const T*>(s.embeds);
        for (int64_t t = 0; t < tokens; ++t) {
            const T* from = given ? given + t * m.hidden : m.embedding + s.token_ids[t] * m.hidden;
            convert(from, m.hidden, x + t * m.hidden);
        }
    }

    // part(token) of all, each of which touches so many values.
    template <typename F>
    void each_token(int64_t values, F part) {
        const auto some = [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) part(t);
        };
        if (tokens * values < VALUES_FOR_THREADS) return some(0, tokens);
        threads.ranges(tokens, some);
    }

    void norm_all(const Norm<T>& norm) {
        each_token(m.hidden, [&](int64_t t) {
            normalise(norm, x + t * m.hidden, m.hidden, normed + t * m.hidden);
        });
    }

    void attend(const Layer<T, W>& layer) {
        norm_all(layer.before);
        apply(layer.qkv, normed, tokens, wide, false, threads);
        adapt(layer, QUERIES, VALUES, normed, wide);
        each_token(m.qkv_width(), [&](int64_t t) { turn(layer, t); });
        Problem p = s.attention;
        const int64_t row = m.qkv_width();
        p.query = qkv, p.key = qkv + m.heads * m.head_dim;
        p.value = qkv + m.rotated() * m.head_dim, p.output = answer;
        p.key_pages = layer.keys, p.value_pages = layer.values, p.sinks = layer.sinks;
        p.query_token = p.key_token = p.value_token = row;
        p.query_head = p.key_head = p.value_head = m.head_dim;
        p.window = layer.window, p.scale = layer.scale, p.softcap = layer.softcap;
        run_step<T>(p, threads);
        const int64_t width = layer.out.inputs;
        each_token(width, [&](int64_t t) { convert(answer + t * width, width, attended + t * width); });
        apply(layer.out, attended, tokens, x, true, threads);
        adapt(layer, OUT, OUT, attended, x);
    }

    // Adds what adapters add to the products from `first` to `last`, whose outputs lie side by side.
    void adapt(const Layer<T, W>& layer, int first, int last, const float* from, float* to) {
        if (!s.adapters) return;
        const int64_t index = &layer - m.layers.data();
        const AdaptedLayer<T>& parts = static_cast<const AdaptedLayer<T>*>(s.adapters)[index];
        int64_t width = 0;
        for (int p = first; p <= last; ++p) width += parts[p].outputs;
        each_token(width, [&](int64_t t) {
            float* row = to + t * width;
            for (int p = first; p <= last; row += parts[p++].outputs)
                add_adapter(parts[p], s.spans, t, tokens, from + t * parts[p].inputs, row);
        });
    }

    // Queries and keys normed where the model does that, turned by their position, and narrowed.
    void turn(const Layer<T, W>& layer, int64_t token) {
        float* from = wide + token * m.qkv_width();
        T* to = qkv + token * m.qkv_width();
        const int64_t at = s.positions[token] * m.head_dim, half = m.head_dim / 2;
        const float *cos = s.cos + at, *sin = s.sin + at;
        for (int64_t h = 0; h < m.rotated(); ++h, from += m.head_dim, to += m.head_dim) {
            const Norm<T>& norm = h < m.heads ? layer.query : layer.key;
            if (norm.weight) normalise(norm, from, m.head_dim, from);
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                const Vec low = load(from + i), high = load(from + i + half);
                store_as(to + i, low * load(cos + i) + high * load(sin + i));
                store_as(to + i + half, high * load(cos + i + half) + low * load(sin + i + half));
            }
            for (; i < half; ++i) {
                const float low = from[i], high = from[i + half];
                narrow(low * cos[i] + high * sin[i], to + i);
                narrow(high * cos[i + half] + low * sin[i + half], to + i + half);
            }
        }
        convert(from, m.kv_heads * m.head_dim, to);
    }

    void feed_forward(const Layer<T, W>& layer) {
        norm_all(layer.between);
        apply(layer.gate_up, normed, tokens, wide, false, threads);
        adapt(layer, GATE, UP, normed, wide);
        each_token(m.ffn, [&](int64_t t) {
            gated(wide + t * 2 * m.ffn, m.ffn, normed + t * m.ffn);
        });
        apply(layer.down, normed, tokens, x, true, threads);
        adapt(layer, DOWN, DOWN, normed, x);
    }

    void predict() {
        for (int64_t i = 0; i < s.num_samples; ++i) {
            const int64_t row = s.sample_rows ? s.sample_rows[i] : i;
            normalise(m.norm, x + row * m.hidden, m.hidden, normed + i * m.hidden);
        }
        apply(m.head, normed, s.num_samples, s.logits, false, threads);
    }
};

}  // namespace native
