// What happens to rows between matrix products: RMS norms and gated activations, one pass each.

#pragma once

#include "decoder.h"

namespace native {

constexpr int64_t ROWS_FOR_THREADS = 256;

template <typename F>
void each_row(int64_t rows, int num_threads, F part) {
#ifdef _OPENMP
    if (num_threads > 1 && rows >= ROWS_FOR_THREADS) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
        for (int64_t i = 0; i < rows; ++i) part(i);
        return;
    }
#endif
    for (int64_t i = 0; i < rows; ++i) part(i);
}

inline void store_as(float* to, Vec v) { store(to, v); }

inline void store_as(BFloat16* to, Vec v) {
#ifdef __AVX512BF16__
    Pair::store_units(to, v);
#else
    for (int i = 0; i < LANES; ++i) narrow(v[i], to + i);
#endif
}

// from [rows][width] → to [rows][width]
template <typename T>
void norm_rows(const Norm<T>& norm, const T* from, int64_t rows, int64_t width, T* to,
               int num_threads) {
    each_row(rows, num_threads, [&](int64_t row) {
        const T* x = from + row * width;
        T* y = to + row * width;
        Vec squares = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
        float sum = reduce_sum(squares);
        for (; i < width; ++i) sum += widen(x[i]) * widen(x[i]);
        const float factor = 1.0f / std::sqrt(sum / float(width) + norm.eps);
        for (i = 0; i + LANES <= width; i += LANES)
            store_as(y + i, load(norm.weight + i) * (load(x + i) * factor));
        for (; i < width; ++i) narrow(widen(norm.weight[i]) * (widen(x[i]) * factor), y + i);
    });
}

// gate_up [rows][2 * width], the gates first → to [rows][width] of silu(gate) * up
template <typename T>
void gate_rows(const T* gate_up, int64_t rows, int64_t width, T* to, int num_threads) {
    each_row(rows, num_threads, [&](int64_t row) {
        const T *gate = gate_up + row * 2 * width, *up = gate + width;
        T* y = to + row * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store_as(y + i, silu(load(gate + i)) * load(up + i));
        for (; i < width; ++i) {
            const float x = widen(gate[i]);
            narrow(x / (1.0f + std::exp(-x)) * widen(up[i]), y + i);
        }
    });
}

}  // namespace native
