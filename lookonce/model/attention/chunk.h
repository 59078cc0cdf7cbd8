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

// The same of a query that is elements like the key, multiplied in units; whole vectors of them.
template <int VECS, typename T>
inline Vec unit_products(const float* query, const T* key, int64_t dim) {
    static_assert(LIES_IN_UNITS<T>);
    using U = typename Arithmetic<T>::U;
    constexpr int STEP = LANES * U::PER_UNIT;
    const T* elements = reinterpret_cast<const T*>(query);
    const int64_t count = VECS > 0 ? VECS * LANES : dim;
    Vec sum = {};
    for (int64_t j = 0; j < count; j += STEP)
        sum = U::add_product(sum, load_units(elements + j), load_units(key + j));
    return sum;
}

// scores[r][i] = query[r] . keys[i]
template <int VECS, bool IN_UNITS, typename T>
void direct_scores(const float* query, int rows, int64_t dim, int64_t depth,
                   const KeyChunk<T>& chunk, float* scores) {
    Vec products[DIRECT_ROWS][LANES];
    for (int start = 0; start < chunk.count; start += LANES) {
        for (int i = 0; i < LANES; ++i) {
            const T* key = chunk.keys[std::min(start + i, chunk.count - 1)];
            for (int r = 0; r < rows; ++r)
                if constexpr (IN_UNITS)
                    products[r][i] = unit_products<VECS>(query + r * depth, key, dim);
                else
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

// c[BLOCK_ROWS][VECS vectors] (+)= a[BLOCK_ROWS][inner] * b[inner][VECS vectors], a and b in units
template <typename U, int VECS>
inline void block_product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                          int64_t inner, float* c, int64_t c_stride, bool add) {
    Vec sum[BLOCK_ROWS][VECS] = {};
    for (int64_t k = 0; k < inner; ++k) {
        UnitVec right[VECS];
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j) right[j] = load_units(b + k * b_stride + j * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < BLOCK_ROWS; ++r) {
            int32_t left;
            std::memcpy(&left, a + r * a_stride + k, sizeof left);
#pragma GCC unroll 4
            for (int j = 0; j < VECS; ++j)
                sum[r][j] = U::add_product(sum[r][j], UnitVec{} + left, right[j]);
        }
    }
    for (int r = 0; r < BLOCK_ROWS; ++r)
        for (int j = 0; j < VECS; ++j) {
            float* to = c + r * c_stride + j * LANES;
            store(to, add ? load(to) + sum[r][j] : sum[r][j]);
        }
}

// Rows padded to BLOCK_ROWS, columns to LANES; inner and strides of a and b count units.
template <typename U>
void product(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t a_stride,
             const void* b, int64_t b_stride, float* c, int64_t c_stride, bool add) {
    const uint32_t* right = static_cast<const uint32_t*>(b);
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
        const uint32_t* left = static_cast<const uint32_t*>(a) + r * a_stride;
        float* to = c + r * c_stride;
        int64_t j = 0;
        for (; j + BLOCK_VECS * LANES <= columns; j += BLOCK_VECS * LANES)
            block_product<U, BLOCK_VECS>(left, a_stride, right + j, b_stride, inner, to + j,
                                         c_stride, add);
        for (; j < columns; j += LANES)
            block_product<U, 1>(left, a_stride, right + j, b_stride, inner, to + j, c_stride, add);
    }
}

// Elements [column, column + LANES) of a row, zero past its end.
template <typename T>
inline Vec load_within(const T* row, int64_t column, int64_t dim) {
    return column + LANES <= dim ? load(row + column) : load_part(row + column, int(dim - column));
}

// Units [column, column + LANES) of a row that has `count` of them, zero past its end.
template <typename T>
inline Vec load_units_within(const T* row, int64_t column, int64_t count) {
    static_assert(LIES_IN_UNITS<T>);
    constexpr int PER_UNIT = Arithmetic<T>::U::PER_UNIT;
    Vec units = {};
    const int64_t size = std::min<int64_t>(LANES, count - column) * sizeof(float);
    std::memcpy(&units, row + column * PER_UNIT, size);
    return units;
}

// keys_out [columns][CHUNK]; keys past the chunk's end repeat its last. `load(key, column)` gives
// LANES columns of one key.
template <typename T, typename F>
void pack_keys(const KeyChunk<T>& chunk, int64_t columns, float* keys_out, F load) {
    for (int first = 0; first < chunk.count; first += LANES)
        for (int64_t column = 0; column < columns; column += LANES) {
            Vec tile[LANES];
            for (int i = 0; i < LANES; ++i)
                tile[i] = load(chunk.keys[std::min(first + i, chunk.count - 1)], column);
            transpose(tile);
            const int64_t limit = std::min<int64_t>(LANES, columns - column);
            float* to = keys_out + column * CHUNK + first;
            for (int64_t i = 0; i < limit; ++i) store(to + i * CHUNK, tile[i]);
        }
}

// values_out [CHUNK / PER_UNIT][depth] units. Returns whether all values are finite.
template <typename T>
bool pack_values(const KeyChunk<T>& chunk, int64_t dim, int64_t depth, float* values_out) {
    using U = typename Arithmetic<T>::U;
    Vec nothing = {};
    for (int i = 0; i < chunk.count; i += U::PER_UNIT)
        for (int64_t column = 0; column < dim; column += LANES) {
            const Vec first = load_within(chunk.values[i], column, dim);
            Vec second = {};
            if (U::PER_UNIT > 1 && i + 1 < chunk.count)
                second = load_within(chunk.values[i + 1], column, dim);
            const Vec units = U::units(first, second);
            store(values_out + i / U::PER_UNIT * depth + column, units);
            nothing += first * 0.0f + second * 0.0f;
        }
    return reduce_sum(nothing) == 0.0f;
}

// ---------------------------------------------------------------- softmax

// Turns one row's scores of keys [begin, end) of a chunk into weights, zero for the chunk's other
// keys, and rescales what was summed before.
template <typename U>
inline void soften(float* scores, int begin, int end, int count, float scale, float softcap,
                   float* maximum, float* total, float* output, int64_t depth) {
    const int first = begin / LANES * LANES, last = int(pad(end, LANES));
    for (int i = first; i < last; i += LANES) store(scores + i, scale * load(scores + i));
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
        Vec weight = U::exp(load(scores + i) - now);
        store(scores + i, weight);
        sum += weight;
    }
    for (int i = 0; i < first; i += LANES) store(scores + i, Vec{});
    for (int i = last; i < count; i += LANES) store(scores + i, Vec{});
    if (now != *maximum) {
        const float before = U::exp(splat(*maximum - now))[0];
        *total *= before;
        for (int64_t d = 0; d < depth; d += LANES) store(output + d, before * load(output + d));
        *maximum = now;
    }
    *total += reduce_sum(sum);
}

// A row of weights [0, count) becomes units, in place.
template <typename U>
inline void to_units(float* weights, int count) {
    if constexpr (U::PER_UNIT > 1)
        for (int i = 0; i < count; i += LANES)
            U::store_units(weights + i / U::PER_UNIT, load(weights + i));
}

}  // namespace paged
