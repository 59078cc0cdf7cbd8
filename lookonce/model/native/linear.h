// Products of a few tokens with a weight matrix as torch keeps it: [outputs, inputs], not packed.
//
// A tile is so many tokens by so many outputs that its lane-wise sums are LANES vectors: one
// transpose turns them into results. Weights are read from memory once, by the
// first tile; the others find them in a cache near by. Sums are in fp32 for fp32 and bf16 weights.

#pragma once

#include <vector>

#include "../attention/threads.h"
#include "../attention/units.h"

namespace native {

using namespace paged;

constexpr int MAX_TILE_TOKENS = 4;

// y[t][n] = x[t] . weight[n] + bias[n], and y[t][n] itself where `add`. T is the model's type; its
// weights may lie there as W, if they are the same numbers.
template <typename T, typename W>
struct Linear {
    const W* weight;  // [outputs][inputs]
    const T* bias;    // [outputs] or null
    int64_t inputs, outputs;
    int64_t width = outputs;  // of a row of y, of which these outputs are a part
};

// How weights meet tokens: as what (Input), and so many inputs (STEP) at a time.
template <typename T, typename W>
struct Meeting {
    using Input = float;
    using Vector = Vec;
    static constexpr int STEP = LANES;
    template <typename E>
    static Vec take(const E* from) {
        return load(from);
    }
    static Vec add_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
    static const float* inputs(const float* x, int64_t) { return x; }
};

#ifdef __AVX512BF16__
// Tokens are rounded to bf16 as well, as a model computed in bf16 does.
template <>
struct Meeting<BFloat16, BFloat16> {
    using Input = BFloat16;
    using Vector = UnitVec;
    static constexpr int STEP = 2 * LANES;
    static UnitVec take(const BFloat16* from) {
        UnitVec v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static Vec add_product(Vec sum, UnitVec a, UnitVec b) { return Pair::add_product(sum, a, b); }
    static const BFloat16* inputs(const float* x, int64_t count) {
        static thread_local std::vector<BFloat16> rounded;
        if (int64_t(rounded.size()) < count) rounded.resize(count);
        for (int64_t i = 0; i < count; ++i) narrow(x[i], &rounded[i]);
        return rounded.data();
    }
};
#endif

// The last inputs of a row, zero past its end.
template <typename T>
struct Rest {
    T elements[2 * LANES] = {};
    Rest(const T* from, int64_t count) { std::memcpy(elements, from, count * sizeof(T)); }
};

// How a tile's LANES sums are used: ROWS outputs by TOKENS tokens by SPLIT stretches of the inputs.
// With few tokens splitting keeps the rows read at a time few, which prefetching likes.
template <int TOKENS>
struct Shape {
    static constexpr int SPLIT = TOKENS < 4 ? 4 / TOKENS : 1;
    static constexpr int ROWS = LANES / (TOKENS * SPLIT);
};

// Lane (t * ROWS + r) * SPLIT + j is part j of x[t] . rows[r].
template <typename M, int TOKENS, typename W, typename X>
inline Vec tile(const X* const* x, const W* const* rows, int64_t inputs) {
    constexpr int ROWS = Shape<TOKENS>::ROWS, SPLIT = Shape<TOKENS>::SPLIT;
    Vec sum[LANES] = {};
    int64_t k = 0;
    for (; k + SPLIT * M::STEP <= inputs; k += SPLIT * M::STEP)
#pragma GCC unroll 4
        for (int j = 0; j < SPLIT; ++j) {
            const int64_t at = k + j * M::STEP;
            typename M::Vector left[TOKENS];
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) left[t] = in_register(M::take(x[t] + at));
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const typename M::Vector right = in_register(M::take(rows[r] + at));
                __builtin_prefetch(rows[r] + ROWS * inputs + at);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) {
                    Vec& to = sum[(t * ROWS + r) * SPLIT + j];
                    to = M::add_product(to, left[t], right);
                }
            }
        }
    for (; k < inputs; k += M::STEP) {
        const int64_t rest = std::min<int64_t>(M::STEP, inputs - k);
        for (int t = 0; t < TOKENS; ++t) {
            const auto left = M::take(Rest<X>(x[t] + k, rest).elements);
            for (int r = 0; r < ROWS; ++r) {
                Vec& to = sum[(t * ROWS + r) * SPLIT];
                to = M::add_product(to, left, M::take(Rest<W>(rows[r] + k, rest).elements));
            }
        }
    }
    return transpose_sum(sum);
}

// One token's results of a tile, `count` of them.
template <int ROWS, int SPLIT>
inline void put(const float* sums, const float* bias, int64_t count, float* y, bool add) {
    float results[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        results[r] = bias[r];
        for (int j = 0; j < SPLIT; ++j) results[r] += sums[r * SPLIT + j];
    }
    for (int64_t r = 0; r < count; ++r) y[r] = add ? y[r] + results[r] : results[r];
}

// Tokens [first, first + count) by outputs [begin, end); count is at most TOKENS.
template <int TOKENS, typename T, typename W, typename X>
inline void tiles(const Linear<T, W>& layer, const X* x, int64_t first, int64_t count, int64_t begin,
                  int64_t end, float* y, bool add) {
    constexpr int ROWS = Shape<TOKENS>::ROWS, SPLIT = Shape<TOKENS>::SPLIT;
    const X* tokens[TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        tokens[t] = x + (first + std::min<int64_t>(t, count - 1)) * layer.inputs;
    for (int64_t n = begin; n < end; n += ROWS) {
        const W* rows[ROWS];
        const int64_t limit = std::min<int64_t>(ROWS, end - n);
        for (int r = 0; r < ROWS; ++r)
            rows[r] = layer.weight + (n + std::min<int64_t>(r, limit - 1)) * layer.inputs;
        float sums[LANES], bias[ROWS] = {};
        store(sums, tile<Meeting<T, W>, TOKENS>(tokens, rows, layer.inputs));
        if (layer.bias)
            for (int64_t r = 0; r < limit; ++r) bias[r] = widen(layer.bias[n + r]);
        for (int64_t t = 0; t < count; ++t) {
            const float* from = sums + t * ROWS * SPLIT;
            float* to = y + (first + t) * layer.width + n;
            if (limit == ROWS)
                put<ROWS, SPLIT>(from, bias, ROWS, to, add);
            else
                put<ROWS, SPLIT>(from, bias, limit, to, add);
        }
    }
}

// A stretch of outputs for all tokens, in the widest tiles that are not mostly padding.
template <typename T, typename W, typename X>
void stretch(const Linear<T, W>& layer, const X* x, int64_t num_tokens, int64_t begin, int64_t end,
             float* y, bool add) {
    for (int64_t first = 0; first < num_tokens;) {
        const int64_t count = std::min<int64_t>(num_tokens - first, MAX_TILE_TOKENS);
        if (count > 2)
            tiles<4>(layer, x, first, count, begin, end, y, add);
        else if (count == 2)
            tiles<2>(layer, x, first, count, begin, end, y, add);
        else
            tiles<1>(layer, x, first, count, begin, end, y, add);
        first += count;
    }
}

// Whether weights are widened before they are multiplied.
template <typename T, typename W>
constexpr bool IS_WIDENED = std::is_same_v<W, BFloat16> &&
                            std::is_same_v<typename Meeting<T, W>::Input, float>;

// The same with weights that are widened once for all tiles of tokens.
template <typename T>
void widened_stretch(const Linear<T, BFloat16>& layer, const float* x, int64_t num_tokens,
                     int64_t begin, int64_t end, float* y, bool add) {
    static thread_local std::vector<float> wide;
    const int64_t size = (end - begin) * layer.inputs;
    if (int64_t(wide.size()) < size) wide.resize(size);
    const BFloat16* from = layer.weight + begin * layer.inputs;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(wide.data() + i, load(from + i));
    for (; i < size; ++i) wide[i] = widen(from[i]);
    const Linear<T, float> rows = {wide.data(), layer.bias ? layer.bias + begin : nullptr,
                                   layer.inputs, end - begin, layer.width};
    stretch(rows, x, num_tokens, 0, end - begin, y + begin, add);
}

// Multiplications that are worth waking one more thread.
constexpr int64_t THREAD_WORK = 250'000;

// x [num_tokens][inputs] → y [num_tokens][outputs], added to what is there with `add`.
template <typename T, typename W>
void apply(const Linear<T, W>& layer, const float* x, int64_t num_tokens, float* y, bool add,
           int num_threads) {
    constexpr int64_t STRETCH = 16;  // outputs: whole tiles, of every width
    const int64_t count = (layer.outputs + STRETCH - 1) / STRETCH;
    const auto* inputs = Meeting<T, W>::inputs(x, num_tokens * layer.inputs);
    auto part = [&](int64_t i) {
        const int64_t begin = i * STRETCH, end = std::min(layer.outputs, begin + STRETCH);
        if constexpr (IS_WIDENED<T, W>)
            if (num_tokens > MAX_TILE_TOKENS)
                return widened_stretch(layer, inputs, num_tokens, begin, end, y, add);
        stretch(layer, inputs, num_tokens, begin, end, y, add);
    };
    const int64_t work = layer.outputs * layer.inputs * num_tokens / THREAD_WORK;
    for_each<false>(count, int(std::min<int64_t>(num_threads, work)), part);
}

}  // namespace native
