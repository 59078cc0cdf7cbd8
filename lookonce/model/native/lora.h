// What LoRA adapters add to the products of a decoder, row by row: see model/lora.py.

#pragma once

#include <algorithm>
#include <array>

#include "../attention/vectors.h"

namespace native {

using namespace paged;

// The linear layers of a decoder layer, in the order in which `adapt` in module.cpp is given them.
// `ADAPTABLE` is their number.
enum Adaptable { QUERIES, KEYS, VALUES, OUT, GATE, UP, DOWN, ADAPTABLE };

// All adapters' parts in one linear layer, side by side; R is the sum of their ranks there.
template <typename T>
struct Adapted {
    const T *a, *b;  // [R][inputs], [R][outputs]; null where no adapter changes the layer
    int64_t inputs, outputs;
    int64_t layout;  // which of the step's spans
};

template <typename T>
using AdaptedLayer = std::array<Adapted<T>, ADAPTABLE>;

// Where the ranks of each token's adapter are, in each layout, and its scale.
struct Spans {
    const int32_t* bounds;  // [layouts][tokens][2]; an empty span: it has no part there
    const float* scales;    // [layouts][tokens]
};

constexpr int64_t ADAPTER_AHEAD = 1024;  // bytes after what is read that memory is asked for
constexpr int64_t ADAPTER_LINE = 64;     // bytes of a cache line

// Rows of an adapter come from memory one after the other, and are met once by each token.
template <typename T>
inline void ask_for(const T* from, int64_t bytes_later) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes_later);
}

// x . a
template <typename T>
inline float dot(const T* a, int64_t inputs, const float* x) {
    constexpr int64_t STEP = 4 * LANES;
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + STEP <= inputs; i += STEP) {
        for (int64_t at = 0; at < STEP * int64_t(sizeof(T)); at += ADAPTER_LINE)
            ask_for(a + i, ADAPTER_AHEAD + at);
        for (int p = 0; p < 4; ++p) sums[p] += load(x + i + p * LANES) * load(a + i + p * LANES);
    }
    for (; i + LANES <= inputs; i += LANES) sums[0] += load(x + i) * load(a + i);
    float sum = reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < inputs; ++i) sum += x[i] * widen(a[i]);
    return sum;
}

// y += down[r] * b[r], summed over RANKS rows of `b`; the rows after these are asked for.
template <int RANKS, typename T>
inline void add_rows(const T* b, int64_t outputs, const float* down, float* y) {
    int64_t i = 0;
    for (; i + LANES <= outputs; i += LANES) {
        Vec sum = load(y + i);
        for (int r = 0; r < RANKS; ++r) {
            ask_for(b + r * outputs + i, RANKS * outputs * int64_t(sizeof(T)));
            sum += splat(down[r]) * load(b + r * outputs + i);
        }
        store(y + i, sum);
    }
    for (; i < outputs; ++i)
        for (int r = 0; r < RANKS; ++r) y[i] += down[r] * widen(b[r * outputs + i]);
}

// y [outputs] += scale * B A x [inputs], of the adapter of one of `tokens`.
template <typename T>
void add_adapter(const Adapted<T>& layer, const Spans& spans, int64_t token, int64_t tokens,
                 const float* x, float* y) {
    if (!layer.a) return;
    constexpr int64_t MOST = 64, TOGETHER = 4;  // ranks
    const int64_t at = layer.layout * tokens + token, end = spans.bounds[2 * at + 1];
    float down[MOST];
    for (int64_t rank = spans.bounds[2 * at]; rank < end; rank += MOST) {
        const int64_t count = std::min(end - rank, MOST);
        const T *a = layer.a + rank * layer.inputs, *b = layer.b + rank * layer.outputs;
        const int64_t first_rows = std::min(count, TOGETHER) * layer.outputs * int64_t(sizeof(T));
        for (int64_t k = 0; k < first_rows; k += ADAPTER_LINE) ask_for(b, k);
        for (int64_t r = 0; r < count; ++r)
            down[r] = spans.scales[at] * dot(a + r * layer.inputs, layer.inputs, x);
        int64_t r = 0;
        for (; r + TOGETHER <= count; r += TOGETHER)
            add_rows<TOGETHER>(b + r * layer.outputs, layer.outputs, down + r, y);
        for (; r < count; ++r) add_rows<1>(b + r * layer.outputs, layer.outputs, down + r, y);
    }
}

}  // namespace native
