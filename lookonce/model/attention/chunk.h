// The arithmetic of one chunk of keys: scores, softmax, weighted values. Rows are (token, query
// head) pairs; `scores` and `weights` are [rows][CHUNK], `query` and `output` [rows][depth], where
// depth is the head dimension padded to whole vectors.

#pragma once

#include "problem.h"

namespace paged {

constexpr int DIRECT_ROWS = 16;                  // up to this many rows read pages directly
constexpr int BLOCK_ROWS = 6;                    // rows of the matrix product's register block
constexpr int BLOCK_VECS = LANES == 16 ? 4 : 2;  // and its width
constexpr float LOWEST = -1e30f;  // below every score, and finite: differences stay finite

// ---------------------------------------------------------------- few rows: straight from pages

// The product of a query and a key, not yet summed over lanes. VECS is the head dimension in
// vectors, 0 where it is not one of the sizes compiled for.
template <int VECS, typename T>
inline Vec lane_products(const float* query, const T* key, int64_t dim) {
    Vec sum = {};
    if constexpr (VECS > 0) {
        for (int j = 0; j < VECS; ++j) sum += load(query + j * LANES) * load(key + j * LANES);
    } else {
        int64_t j = 0;
        for (; j + LANES <= dim; j += LANES) sum += load(query + j) * load(key + j);
        if (j < dim) sum += load(query + j) * load_part(key + j, int(dim - j));
    }
    return sum;
}

// scores[r][i] = query[r] . keys[i]
template <int VECS, typename T>
void direct_scores(const float* query, int rows, int64_t dim, int64_t depth,
                   const KeyChunk<T>& chunk, float* scores) {
    Vec products[DIRECT_ROWS][LANES];
    for (int start = 0; start < chunk.count; start += LANES) {
        for (int i = 0; i < LANES; ++i) {
            const T* key = chunk.keys[std::min(start + i, chunk.count - 1)];
            for (int r = 0; r < rows; ++r)
                products[r][i] = lane_products<VECS>(query + r * depth, key, dim);
        }
        for (int r = 0; r < rows; ++r)
            store(scores + r * CHUNK + start, transpose_sum(products[r]));
    }
}

// output += sum over i in [begin, end) of weights[i] * values[i], VECS vectors of columns.
template <int VECS, typename T>
inline void direct_columns(const float* weights, int begin, int end, const KeyChunk<T>& chunk,
                           int64_t column, float* output) {
    Vec sum[VECS];
    for (int j = 0; j < VECS; ++j) sum[j] = load(output + column + j * LANES);
    for (int i = begin; i < end; ++i) {
        const T* value = chunk.values[i] + column;
        for (int j = 0; j < VECS; ++j) sum[j] += weights[i] * load(value + j * LANES);
    }
    for (int j = 0; j < VECS; ++j) store(output + column + j * LANES, sum[j]);
}

// One row's weighted values, all columns.
template <typename T>
void direct_values(const float* weights, int begin, int end, int64_t dim,
                   const KeyChunk<T>& chunk, float* output) {
    int64_t column = 0;
    for (; column + 4 * LANES <= dim; column += 4 * LANES)
        direct_columns<4>(weights, begin, end, chunk, column, output);
    for (; column + LANES <= dim; column += LANES)
        direct_columns<1>(weights, begin, end, chunk, column, output);
    if (column == dim) return;
    Vec sum = load(output + column);
    for (int i = begin; i < end; ++i)
        sum += weights[i] * load_part(chunk.values[i] + column, int(dim - column));
    store(output + column, sum);
}

// ---------------------------------------------------------------- many rows: matrix products

// c[BLOCK_ROWS][VECS vectors] (+)= a[BLOCK_ROWS][inner] * b[inner][VECS vectors]
template <int VECS>
inline void block_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          int64_t inner, float* c, int64_t c_stride, bool add) {
    Vec sum[BLOCK_ROWS][VECS] = {};
    for (int64_t k = 0; k < inner; ++k) {
        Vec right[VECS];
        for (int j = 0; j < VECS; ++j) right[j] = load(b + k * b_stride + j * LANES);
        for (int r = 0; r < BLOCK_ROWS; ++r)
            for (int j = 0; j < VECS; ++j) sum[r][j] += a[r * a_stride + k] * right[j];
    }
    for (int r = 0; r < BLOCK_ROWS; ++r)
        for (int j = 0; j < VECS; ++j) {
            float* to = c + r * c_stride + j * LANES;
            store(to, add ? load(to) + sum[r][j] : sum[r][j]);
        }
}

// Rows padded to BLOCK_ROWS, columns to LANES.
void product(int64_t rows, int64_t columns, int64_t inner, const float* a, int64_t a_stride,
             const float* b, int64_t b_stride, float* c, int64_t c_stride, bool add) {
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
        const float* x = a + r * a_stride;
        float* to = c + r * c_stride;
        int64_t j = 0;
        for (; j + BLOCK_VECS * LANES <= columns; j += BLOCK_VECS * LANES)
            block_product<BLOCK_VECS>(x, a_stride, b + j, b_stride, inner, to + j, c_stride, add);
        for (; j < columns; j += LANES)
            block_product<1>(x, a_stride, b + j, b_stride, inner, to + j, c_stride, add);
    }
}

// Elements [column, column + LANES) of a row, zero past its end.
template <typename T>
inline Vec load_within(const T* row, int64_t column, int64_t dim) {
    return column + LANES <= dim ? load(row + column) : load_part(row + column, int(dim - column));
}

// keys_out [D][CHUNK]; columns past the chunk's end repeat its last key.
template <typename T>
void pack_keys(const KeyChunk<T>& chunk, int64_t dim, float* keys_out) {
    for (int first = 0; first < chunk.count; first += LANES)
        for (int64_t column = 0; column < dim; column += LANES) {
            Vec tile[LANES];
            for (int i = 0; i < LANES; ++i) {
                const T* key = chunk.keys[std::min(first + i, chunk.count - 1)];
                tile[i] = load_within(key, column, dim);
            }
            transpose(tile);
            const int64_t limit = std::min<int64_t>(LANES, dim - column);
            float* to = keys_out + column * CHUNK + first;
            for (int64_t i = 0; i < limit; ++i) store(to + i * CHUNK, tile[i]);
        }
}

// values_out [CHUNK][depth]. Returns whether all values are finite.
template <typename T>
bool pack_values(const KeyChunk<T>& chunk, int64_t dim, int64_t depth, float* values_out) {
    Vec nothing = {};
    for (int i = 0; i < chunk.count; ++i)
        for (int64_t column = 0; column < dim; column += LANES) {
            const Vec v = load_within(chunk.values[i], column, dim);
            store(values_out + i * depth + column, v);
            nothing += v * 0.0f;
        }
    return reduce_sum(nothing) == 0.0f;
}

// ---------------------------------------------------------------- softmax

// Turns one row's scores of keys [begin, end) of a chunk into weights, zero for the chunk's other
// keys, and rescales what was summed before.
inline void soften(float* scores, int begin, int end, int count, float softcap, float* maximum,
                   float* total, float* output, int64_t depth) {
    const int first = begin / LANES * LANES, last = int(pad(end, LANES));
    if (softcap > 0)
        for (int i = first; i < last; i += LANES)
            store(scores + i, softcap * tanh_vec(load(scores + i) / softcap));
    for (int i = first; i < begin; ++i) scores[i] = LOWEST;
    for (int i = end; i < last; ++i) scores[i] = LOWEST;
    Vec highest = splat(*maximum);
    for (int i = first; i < last; i += LANES) highest = max_vec(load(scores + i), highest);
    const float now = reduce_max(highest);
    Vec sum = {};
    for (int i = first; i < last; i += LANES) {
        Vec weight = exp_vec(load(scores + i) - now);
        store(scores + i, weight);
        sum += weight;
    }
    for (int i = 0; i < first; i += LANES) store(scores + i, Vec{});
    for (int i = last; i < count; i += LANES) store(scores + i, Vec{});
    if (now != *maximum) {
        const float before = exp_vec(splat(*maximum - now))[0];
        *total *= before;
        for (int64_t d = 0; d < depth; d += LANES) store(output + d, before * load(output + d));
        *maximum = now;
    }
    *total += reduce_sum(sum);
}

}  // namespace paged
