// What happens to rows between matrix products: RMS norms and gated activations, one pass each.

#pragma once

#include "decoder.h"

namespace native {

constexpr int64_t ROWS_FOR_THREADS = 256;

template <typename F>
void each_row(int64_t rows, int num_threads, F part) {
    for_each<false>(rows, rows < ROWS_FOR_THREADS ? 1 : num_threads, part);
}

// from [rows][width] → to [rows][width]
template <typename T>
void norm_rows(const Norm<T>& norm, const T* from, int64_t rows, int64_t width, T* to,
               int num_threads) {
    each_row(rows, num_threads,
             [&](int64_t row) { normalise(norm, from + row * width, width, to + row * width); });
}

// gate_up [rows][2 * width], the gates first → to [rows][width] of silu(gate) * up
template <typename T>
void gate_rows(const T* gate_up, int64_t rows, int64_t width, T* to, int num_threads) {
    each_row(rows, num_threads,
             [&](int64_t row) { gated(gate_up + row * 2 * width, width, to + row * width); });
}

}  // namespace native
