// The arithmetic of one chunk of keys: scores, softmax, weighted values. Rows are (token, query
// head) pairs; `scores` and `weights` are [rows][CHUNK], `query` and `output` [rows][depth], where
// depth is the head dimension padded to whole vectors.

#pragma once

#include "problem.h"

namespace paged {

// Up to this many rows read pages directly, as measured (`lookonce bench attention`): each row reads
// them again, and widens again what must be widened.
template <typename T>
constexpr int DIRECT_ROWS = LIES_IN_UNITS<T> ? 4 : 1;
constexpr int BLOCK_ROWS = 6;                    // rows of the matrix product's register block
constexpr int BLOCK_VECS = LANES == 16 ? 4 : 2;  // and its width
template <int N>
using Count = std::integral_constant<int, N>;
constexpr float LOWEST = -1e30f;  // below every score, and finite: differences stay finite

// ---------------------------------------------------------------- few rows: straight from pages

// How queries that lie as floats meet keys: lane by lane, in vectors of floats.
template <typename T>
struct FloatQueries {
    static constexpr int STEP = LANES;
    using Vector = Vec;
    static Vec query(const float* row, int64_t at) { return load(row + at); }
    static Vec key(const T* row, int64_t at) { return load(row + at); }
    static Vec add_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
};

// The same of queries that are elements like the keys, multiplied in units; whole vectors of them.
template <typename T>
struct UnitQueries {
    static_assert(LIES_IN_UNITS<T>);
    using U = typename Arithmetic<T>::U;
    static constexpr int STEP = LANES * U::PER_UNIT;
    using Vector = UnitVec;
    static UnitVec query(const float* row, int64_t at) {
        return load_units(reinterpret_cast<const T*>(row) + at);
    }
    static UnitVec key(const T* row, int64_t at) { return load_units(row + at); }
    static Vec add_product(Vec sum, UnitVec a, UnitVec b) { return U::add_product(sum, a, b); }
};

// scores[r][i] = query[r] . keys[i]. One row after the other: the keys are in a cache near by for the
// second, and sums of a vector's number of keys fit into registers.
template <typename Q, typename T>
void direct_scores(const float* query, int rows, int64_t dim, int64_t depth,
                   const KeyChunk<T>& chunk, float* scores) {
    for (int start = 0; start < chunk.count; start += LANES) {
        const T* keys[LANES];
        for (int i = 0; i < LANES; ++i) keys[i] = chunk.keys[std::min(start + i, chunk.count - 1)];
        for (int r = 0; r < rows; ++r) {
            const float* row = query + r * depth;
            Vec sum[LANES] = {};
            int64_t j = 0;
            for (; j + Q::STEP <= dim; j += Q::STEP) {
                const auto left = in_register(Q::query(row, j));
#pragma GCC unroll 16
                for (int i = 0; i < LANES; ++i)
                    sum[i] = Q::add_product(sum[i], left, Q::key(keys[i], j));
            }
            if (j < dim)  // queries are padded with zeros
                for (int i = 0; i < LANES; ++i)
                    sum[i] += load(row + j) * load_part(keys[i] + j, int(dim - j));
            store(scores + r * CHUNK + start, transpose_sum(sum));
        }
    }
}

// output += sum over i in [begin, end) of weights[i] * values[i], VECS vectors of columns.
template <int VECS, typename T>
inline void direct_columns(const float* weights, int begin, int end, const KeyChunk<T>& chunk,
                           int64_t column, float* output) {
    Vec sum[VECS];
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) sum[j] = load(output + column + j * LANES);
    for (int i = begin; i < end; ++i) {
        const T* value = chunk.values[i] + column;
        const Vec weight = splat(weights[i]);
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) sum[j] += weight * load(value + j * LANES);
    }
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) store(output + column + j * LANES, sum[j]);
}

// One row's weighted values, all columns.
template <typename T>
void direct_values(const float* weights, int begin, int end, int64_t dim,
                   const KeyChunk<T>& chunk, float* output) {
    int64_t column = 0;
    for (; column + 8 * LANES <= dim; column += 8 * LANES)
        direct_columns<8>(weights, begin, end, chunk, column, output);
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

// c[ROWS][VECS vectors] (+)= a[ROWS][inner] * b[inner][VECS vectors], a and b in units
template <typename U, int ROWS, int VECS>
inline void block_product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                          int64_t inner, float* c, int64_t c_stride, bool add) {
    Vec sum[ROWS][VECS] = {};
    for (int64_t k = 0; k < inner; ++k) {
        UnitVec right[VECS];
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) right[j] = in_register(load_units(b + k * b_stride + j * LANES));
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            int32_t left;
            std::memcpy(&left, a + r * a_stride + k, sizeof left);
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j)
                sum[r][j] = U::add_product(sum[r][j], UnitVec{} + left, right[j]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) {
            float* to = c + r * c_stride + j * LANES;
            store(to, add ? load(to) + sum[r][j] : sum[r][j]);
        }
}

// ROWS rows, all columns, in blocks of VECS vectors of columns.
template <typename U, int ROWS, int VECS>
inline void row_product(int64_t columns, int64_t inner, const uint32_t* a, int64_t a_stride,
                        const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride, bool add) {
    int64_t j = 0;
    for (; j + VECS * LANES <= columns; j += VECS * LANES)
        block_product<U, ROWS, VECS>(a, a_stride, b + j, b_stride, inner, c + j, c_stride, add);
    for (; j < columns; j += LANES)
        block_product<U, ROWS, 1>(a, a_stride, b + j, b_stride, inner, c + j, c_stride, add);
}

// Columns padded to LANES; inner and strides of a and b count units.
template <typename U>
void product(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t a_stride,
             const void* b, int64_t b_stride, float* c, int64_t c_stride, bool add) {
    const uint32_t* right = static_cast<const uint32_t*>(b);
    const uint32_t* left = static_cast<const uint32_t*>(a);
    // As wide as sums fit into registers, and enough sums to hide their latency.
    const auto rest = [&](auto rows_of, auto vecs) {
        row_product<U, decltype(rows_of)::value, decltype(vecs)::value>(
            columns, inner, left, a_stride, right, b_stride, c, c_stride, add);
    };
    for (; rows >= BLOCK_ROWS; rows -= BLOCK_ROWS) {
        rest(Count<BLOCK_ROWS>(), Count<BLOCK_VECS>());
        left += BLOCK_ROWS * a_stride, c += BLOCK_ROWS * c_stride;
    }
    switch (rows) {
        case 5: return rest(Count<5>(), Count<BLOCK_VECS>());
        case 4: return rest(Count<4>(), Count<BLOCK_VECS>());
        case 3: return rest(Count<3>(), Count<4>());
        case 2: return rest(Count<2>(), Count<4>());
        case 1: return rest(Count<1>(), Count<LANES == 16 ? 4 : 8>());
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
// LANES columns of one key; `prefetch(begin, end)` is called on the way.
template <typename T, typename F, typename P>
void pack_keys(const KeyChunk<T>& chunk, int64_t columns, float* keys_out, F load, P prefetch) {
    for (int first = 0; first < chunk.count; first += LANES) {
        prefetch(first, first + LANES);
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
}

// values_out [CHUNK / PER_UNIT][depth] units. Returns whether all values are finite.
template <typename T, typename P>
bool pack_values(const KeyChunk<T>& chunk, int64_t dim, int64_t depth, float* values_out,
                 P prefetch) {
    using U = typename Arithmetic<T>::U;
    Vec nothing = {};
    for (int i = 0; i < chunk.count; i += U::PER_UNIT) {
        prefetch(i, i + U::PER_UNIT);
        for (int64_t column = 0; column < dim; column += LANES) {
            const Vec first = load_within(chunk.values[i], column, dim);
            Vec second = {};
            if (U::PER_UNIT > 1 && i + 1 < chunk.count)
                second = load_within(chunk.values[i + 1], column, dim);
            const Vec units = U::units(first, second);
            store(values_out + i / U::PER_UNIT * depth + column, units);
            nothing += first * 0.0f + second * 0.0f;
        }
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

// ---------------------------------------------------------------- some rows: keys as they lie
//
// Scores lie as [CHUNK][columns] here, a column for each row, `columns` padded to whole vectors: an
// element of a key meets a vector of rows and an element of a weight a vector of values, so nothing
// is transposed and values are read in place.

// One float in all lanes, as one load. (As integers: 0 + x is no addition there.)
inline Vec load_splat(const float* from) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return in_register((Vec)(UnitVec{} + bits));
}

// Keys that meet VECS vectors of rows at once: as many as sums, and pointers to keys, fit into
// registers.
template <int VECS>
constexpr int KEYS_AT_ONCE = std::min((LANES == 16 ? 24 : 12) / VECS, 8);

// scores[i][column] = query[..][column] . keys[i], KEYS keys and VECS vectors of columns; `query` is
// [dim][columns].
template <int KEYS, int VECS>
inline void column_scores(const float* query, int64_t columns, int64_t dim,
                          const float* const* keys, float* scores) {
    Vec sum[KEYS][VECS] = {};
    for (int64_t d = 0; d < dim; ++d) {
        Vec right[VECS];
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) right[j] = in_register(load(query + d * columns + j * LANES));
#pragma GCC unroll 24
        for (int i = 0; i < KEYS; ++i) {
            const Vec left = load_splat(keys[i] + d);
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < KEYS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) store(scores + i * columns + j * LANES, sum[i][j]);
}

// The same of `count` keys; `prefetch(begin, end)` is called on the way.
template <int VECS, typename P>
void column_scores_of(const float* query, int64_t columns, int64_t dim, const float* const* keys,
                      int count, float* scores, P prefetch) {
    constexpr int KEYS = KEYS_AT_ONCE<VECS>;
    int i = 0;
    for (; i + KEYS <= count; i += KEYS) {
        prefetch(i, i + KEYS);
        column_scores<KEYS, VECS>(query, columns, dim, keys + i, scores + i * columns);
    }
    for (; i < count; ++i) {
        prefetch(i, i + 1);
        column_scores<1, VECS>(query, columns, dim, keys + i, scores + i * columns);
    }
}

// All columns.
template <typename P>
void all_column_scores(const float* query, int64_t columns, int64_t dim, const float* const* keys,
                       int count, float* scores, P prefetch) {
    const auto nothing = [](int, int) {};
    int64_t column = 0;
    if (columns >= 3 * LANES) {
        column_scores_of<3>(query, columns, dim, keys, count, scores, prefetch);
        for (column = 3 * LANES; column + 3 * LANES <= columns; column += 3 * LANES)
            column_scores_of<3>(query + column, columns, dim, keys, count, scores + column, nothing);
    }
    const auto rest = [&](auto ask) {
        if (columns - column == 2 * LANES)
            column_scores_of<2>(query + column, columns, dim, keys, count, scores + column, ask);
        else if (columns - column == LANES)
            column_scores_of<1>(query + column, columns, dim, keys, count, scores + column, ask);
    };
    if (column)
        rest(nothing);
    else
        rest(prefetch);
}

// output[ROWS][VECS vectors] += sum over keys of weights[key][row] * values[key]; `prefetch(key, at)`
// is called on the way.
template <int ROWS, int VECS, typename P>
inline void row_values(const float* weights, int64_t columns, const float* const* values, int count,
                       int64_t at, float* output, int64_t depth, P prefetch) {
    Vec sum[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) sum[r][j] = load(output + r * depth + at + j * LANES);
    for (int i = 0; i < count; ++i) {
        prefetch(i, at);
        Vec right[VECS];
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) right[j] = in_register(load(values[i] + at + j * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const Vec left = load_splat(weights + i * columns + r);
#pragma GCC unroll 8
            for (int j = 0; j < VECS; ++j) sum[r][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) store(output + r * depth + at + j * LANES, sum[r][j]);
}

// All rows and all of `dim`, which is whole vectors; the first rows prefetch.
template <typename P>
void column_values(const float* weights, int64_t columns, int64_t rows, const float* const* values,
                   int count, int64_t dim, float* output, int64_t depth, P prefetch) {
    const auto block = [&](auto rows_of, auto vecs_of, auto ask) {
        constexpr int ROWS = decltype(rows_of)::value, VECS = decltype(vecs_of)::value;
        int64_t at = 0;
        for (; at + VECS * LANES <= dim; at += VECS * LANES)
            row_values<ROWS, VECS>(weights, columns, values, count, at, output, depth, ask);
        for (; at < dim; at += LANES)
            row_values<ROWS, 1>(weights, columns, values, count, at, output, depth, ask);
    };
    const auto rest = [&](auto ask) {
        switch (rows) {
            case 5: return block(Count<5>(), Count<BLOCK_VECS>(), ask);
            case 4: return block(Count<4>(), Count<BLOCK_VECS>(), ask);
            case 3: return block(Count<3>(), Count<4>(), ask);
            case 2: return block(Count<2>(), Count<4>(), ask);
            case 1: return block(Count<1>(), Count<LANES == 16 ? 4 : 8>(), ask);
        }
    };
    const auto nothing = [](int, int64_t) {};
    if (rows < BLOCK_ROWS) return rest(prefetch);
    block(Count<BLOCK_ROWS>(), Count<BLOCK_VECS>(), prefetch);
    for (;;) {
        weights += BLOCK_ROWS, output += BLOCK_ROWS * depth, rows -= BLOCK_ROWS;
        if (rows < BLOCK_ROWS) return rest(nothing);
        block(Count<BLOCK_ROWS>(), Count<BLOCK_VECS>(), nothing);
    }
}

// Turns scores of whole columns of a chunk into weights and rescales what was summed before, as
// `soften` does for one row. `rows` of the columns are rows.
template <typename U>
inline void soften_columns(float* scores, int64_t columns, int64_t rows, int count, float scale,
                           float softcap, float* maximum, float* total, float* output,
                           int64_t depth) {
    for (int64_t column = 0; column < rows; column += LANES) {
        const int lanes = int(std::min<int64_t>(LANES, rows - column));
        float* first = scores + column;
        const Vec before = lanes == LANES ? load(maximum + column) : load_part(maximum + column, lanes);
        Vec highest = before;
        for (int i = 0; i < count; ++i) {
            Vec score = scale * load(first + i * columns);
            if (softcap > 0) score = softcap * tanh_vec(score / softcap);
            store(first + i * columns, score);
            highest = max_vec(score, highest);
        }
        Vec sum = {};
        for (int i = 0; i < count; ++i) {
            const Vec weight = U::exp(load(first + i * columns) - highest);
            store(first + i * columns, weight);
            sum += weight;
        }
        const Vec worth = U::exp(before - highest);
        for (int r = 0; r < lanes; ++r) {
            const int64_t row = column + r;
            if (highest[r] != before[r]) {
                total[row] *= worth[r];
                float* to = output + row * depth;
                for (int64_t d = 0; d < depth; d += LANES) store(to + d, worth[r] * load(to + d));
                maximum[row] = highest[r];
            }
            total[row] += sum[r];
        }
    }
}

}  // namespace paged
