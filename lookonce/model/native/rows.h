// What happens to rows outside of the decoder: RMS norms and gated activations, one pass each, and
// products with int8 weights.

#pragma once

#include "decoder.h"

namespace native {

constexpr int64_t ROWS_FOR_THREADS = 256;

template <typename F>
void each_row(int64_t rows, Parallel& threads, F part) {
    const auto some = [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) part(row);
    };
    if (rows < ROWS_FOR_THREADS) return some(0, rows);
    threads.ranges(rows, some);
}

// from [rows][width] → to [rows][width]
template <typename T>
void norm_rows(const Norm<T>& norm, const T* from, int64_t rows, int64_t width, T* to,
               int num_threads) {
    Parallel threads(num_threads);
    each_row(rows, threads,
             [&](int64_t row) { normalise(norm, from + row * width, width, to + row * width); });
}

// gate_up [rows][2 * width], the gates first → to [rows][width] of silu(gate) * up
template <typename T>
void gate_rows(const T* gate_up, int64_t rows, int64_t width, T* to, int num_threads) {
    Parallel threads(num_threads);
    each_row(rows, threads,
             [&](int64_t row) { gated(gate_up + row * 2 * width, width, to + row * width); });
}

// from [rows][inputs] → to [rows][outputs]
template <typename T>
void linear_rows(const Linear<T, int8_t>& layer, const T* from, int64_t rows, T* to,
                 int num_threads) {
    constexpr int64_t AT_ONCE = MOST_TOGETHER;
    Parallel threads(num_threads);
    if constexpr (std::is_same_v<T, float>) return apply(layer, from, rows, to, false, threads);
    std::vector<float> wide(std::min(rows, AT_ONCE) * layer.inputs);
    std::vector<float> results(std::min(rows, AT_ONCE) * layer.outputs);
    for (int64_t first = 0; first < rows; first += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, rows - first);
        each_row(count, threads, [&](int64_t row) {
            convert(from + (first + row) * layer.inputs, layer.inputs,
                    wide.data() + row * layer.inputs);
        });
        apply(layer, wide.data(), count, results.data(), false, threads);
        each_row(count, threads, [&](int64_t row) {
            convert(results.data() + row * layer.outputs, layer.outputs,
                    to + (first + row) * layer.outputs);
        });
    }
}

}  // namespace native
