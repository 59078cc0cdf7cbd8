// Products of tokens with a weight matrix as torch keeps it: [outputs, inputs], not packed.
//
// Up to 8 tokens meet a weight when it comes from memory, in tiles of some tokens by some outputs, each
// with a vector of sums or several, which one transpose turns into results. With more tokens weights
// are transposed instead, a panel at a time, which all tokens meet while it stays in a core's cache.
//
// Tokens are prepared once for each product, as the weights want to meet them (Meeting). Sums are
// in fp32 for fp32 and bf16 weights. int8 weights have a scale for each output, and meet tokens of
// 16 bits with a scale each: products and sums are exact integers.

#pragma once

#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

#include <cmath>
#include <vector>

#include "../attention/threads.h"
#include "../attention/units.h"

namespace native {

using namespace paged;

constexpr int MAX_TILE_TOKENS = 8;

// y[t][n] = x[t] . weight[n] * scales[n] + bias[n], and y[t][n] itself where `add`. T is the model's
// type; its weights may lie there as W, if they are the same numbers.
template <typename T, typename W>
struct Linear {
    const W* weight;  // [outputs][inputs]
    const T* bias;    // [outputs] or null
    int64_t inputs, outputs;
    int64_t width = outputs;        // of a row of y, of which these outputs are a part
    const float* scales = nullptr;  // [outputs], or null: all are 1
    int64_t weights() const { return inputs * outputs; }
};

// Tokens prepared for some weights: rows of whole steps, zero past their inputs.
template <typename E>
struct Tokens {
    const E* rows;
    int64_t stride;
    const float* scales = nullptr;  // [tokens], or null: all are 1
    const E* row(int64_t token) const { return rows + token * stride; }
};

inline int64_t whole_steps(int64_t inputs, int64_t step) { return (inputs + step - 1) / step * step; }

template <typename E, int PLACE = 0>
E* room(int64_t size) {
    static thread_local std::vector<E> kept;
    if (int64_t(kept.size()) < size) kept.resize(size);
    return kept.data();
}

// The last inputs of a row, zero past its end.
template <typename W>
struct Rest {
    W elements[2 * LANES] = {};
    Rest(const W* from, int64_t count) { std::memcpy(elements, from, count * sizeof(W)); }
};

// How weights meet tokens: STEP inputs at a time, in PARTS products of a vector of each.
template <typename T, typename W>
struct Meeting;

// float weights.
template <typename T>
struct Meeting<T, float> {
    using Element = float;
    using Sum = Vec;
    static constexpr int STEP = LANES, PARTS = 1, PART = LANES;
    template <int>
    static Vec weights(const float* from) {
        return load(from);
    }
    static Vec tokens(const float* from) { return load(from); }
    static Vec add_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
    static Vec as_floats(Vec sum) { return sum; }
    static constexpr bool AS_THEY_LIE = true;  // tokens of whole steps are met where they are
    static float prepare(const float* x, int64_t inputs, int64_t stride, float* to) {
        std::memcpy(to, x, inputs * sizeof(float));
        std::fill(to + inputs, to + stride, 0.0f);
        return 1.0f;
    }
};

// bf16 weights that are widened: a vector of 32-bit units holds two each, which one operation
// separates into those of even and of odd places. Tokens lie in that order.
template <typename T>
struct Meeting<T, BFloat16> {
    using Element = float;
    using Sum = Vec;
    static constexpr int STEP = 2 * LANES, PARTS = 2, PART = LANES;
    template <int ODD>
    static Vec weights(const BFloat16* from) {
        const UnitVec both = load_units(from);
        return ODD ? (Vec)((IntVec)both & 0xffff0000) : (Vec)((IntVec)both << 16);
    }
    static Vec tokens(const float* from) { return load(from); }
    static Vec add_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
    static Vec as_floats(Vec sum) { return sum; }
    template <size_t... LANE>
    static void separate(const float* from, float* to, std::index_sequence<LANE...>) {
        const Vec low = load(from), high = load(from + LANES);
        store(to, __builtin_shufflevector(low, high, int(2 * LANE)...));
        store(to + LANES, __builtin_shufflevector(low, high, int(2 * LANE + 1)...));
    }
    static void separate(const float* from, float* to) { separate(from, to, LANE_INDEX); }
    static constexpr bool AS_THEY_LIE = false;
    static float prepare(const float* x, int64_t inputs, int64_t, float* to) {
        int64_t k = 0;
        for (; k + STEP <= inputs; k += STEP) separate(x + k, to + k);
        if (k < inputs) separate(Rest<float>(x + k, inputs - k).elements, to + k);
        return 1.0f;
    }
};

#ifdef __AVX512BF16__
// bf16 weights of a bf16 model where the CPU multiplies them: tokens are rounded to bf16 as well.
template <>
struct Meeting<BFloat16, BFloat16> {
    using Element = BFloat16;
    using Sum = Vec;
    static constexpr int STEP = 2 * LANES, PARTS = 1, PART = STEP;
    template <int>
    static UnitVec weights(const BFloat16* from) {
        return load_units(from);
    }
    static UnitVec tokens(const BFloat16* from) { return load_units(from); }
    static Vec add_product(Vec sum, UnitVec a, UnitVec b) { return Pair::add_product(sum, a, b); }
    static Vec as_floats(Vec sum) { return sum; }
    static constexpr bool AS_THEY_LIE = false;
    static float prepare(const float* x, int64_t inputs, int64_t stride, BFloat16* to) {
        for (int64_t k = 0; k < stride; ++k) narrow(k < inputs ? x[k] : 0.0f, to + k);
        return 1.0f;
    }
};
#endif

// int8 weights and tokens of 16 bits: neighbours are multiplied and added as 32-bit integers.
template <typename T>
struct Meeting<T, int8_t> {
    using Element = int16_t;
    using Sum = UnitVec;
    typedef int16_t ShortVec __attribute__((vector_size(LANES * 4)));
    static constexpr int STEP = 2 * LANES, PARTS = 1, PART = STEP;
    template <int>
    static ShortVec weights(const int8_t* from) {
        typedef int8_t Bytes __attribute__((vector_size(LANES * 2)));
        Bytes bytes;
        std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512BW__)
        return (ShortVec)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
        return (ShortVec)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
        return __builtin_convertvector(bytes, ShortVec);
#endif
    }
    static ShortVec tokens(const int16_t* from) {
        ShortVec v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static UnitVec add_product(UnitVec sum, ShortVec a, ShortVec b) {
#if defined(__AVX512BW__)
        return sum + (UnitVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return sum + (UnitVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE4_1__)
        return sum + (UnitVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
        // The even and the odd places of both; units are little-endian.
        const UnitVec left = (UnitVec)a, right = (UnitVec)b;
        return sum + (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
    }
    static Vec as_floats(UnitVec sum) { return __builtin_convertvector(sum, Vec); }

    // The largest number of a token: no sum of `inputs` products may leave 32 bits.
    static float largest(int64_t inputs) {
        const int64_t added = whole_steps(inputs, STEP) / LANES;  // products in a lane of sums
        return float(std::min<int64_t>(INT16_MAX, INT32_MAX / (128 * added)));
    }

    // To the nearest integers, by an addition after which they are the low bits: of 1.5 * 2^23.
    static void store_rounded(Vec v, int16_t* to) {
        typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
        const Shorts shorts = __builtin_convertvector((UnitVec)(v + 12582912.0f), Shorts);
        std::memcpy(to, &shorts, sizeof shorts);
    }

    // The scale of the token. What is not finite makes all its results NaN.
    static constexpr bool AS_THEY_LIE = false;
    static float prepare(const float* x, int64_t inputs, int64_t, int16_t* to) {
        const float most = largest(inputs);
        const auto step = [&](int64_t k, auto take) {
            const int64_t rest = std::min<int64_t>(inputs - k, STEP);
            if (rest == STEP) return take(x + k);
            take(Rest<float>(x + k, rest).elements);
        };
        Vec most_of = {}, faults = {};
        for (int64_t k = 0; k < inputs; k += STEP)
            step(k, [&](const float* from) {
                for (int i = 0; i < STEP; i += LANES) {
                    const Vec v = load(from + i);
                    most_of = max_vec(max_vec(v, -v), most_of);
                    faults += v * 0.0f;  // NaN of what is not finite
                }
            });
        const float highest = reduce_max(most_of), fault = reduce_sum(faults);
        const bool is_finite = fault == 0.0f;
        const float factor = is_finite && highest > 0.0f ? most / highest : 0.0f;
        for (int64_t k = 0; k < inputs; k += STEP)
            step(k, [&](const float* from) {
                for (int i = 0; i < STEP; i += LANES) store_rounded(load(from + i) * factor, to + k + i);
            });
        return is_finite ? highest / most : fault;
    }
};

// Values of tokens that are worth preparing by more than one thread.
constexpr int64_t PREPARED_BY_THREADS = 8192;

// x [count][inputs] as a Meeting wants them, in memory of the calling thread.
template <typename M>
Tokens<typename M::Element> prepared(const float* x, int64_t count, int64_t inputs,
                                     Parallel& threads) {
    using E = typename M::Element;
    const int64_t stride = whole_steps(inputs, M::STEP);
    if constexpr (M::AS_THEY_LIE)
        if (stride == inputs) return {x, stride};
    E* rows = room<E>(count * stride);
    float* scales = room<float, 1>(count);
    const auto some = [=](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            scales[t] = M::prepare(x + t * inputs, inputs, stride, rows + t * stride);
    };
    if (count * inputs < PREPARED_BY_THREADS)
        some(0, count);
    else
        threads.ranges(count, some);
    return {rows, stride, scales};
}

// How the sums of a tile are used: ROWS outputs by TOKENS tokens by SPLIT stretches of the inputs.
// SPLIT keeps so many sums under way that an addition need not wait for the one before it.
template <int TOKENS>
struct Shape {
    static constexpr int WIDE = LANES == 16 ? 2 : 1;  // there are twice the registers then
    static constexpr int ROWS = TOKENS > 4 ? WIDE : TOKENS > 2 ? 2 * WIDE : 1;
    static constexpr int SPLIT = TOKENS > 1 ? 1 : 2;
};

// Rows in so many places of a matrix at once: a core has more memory under way than with rows that
// lie one after the other, as it looks ahead in each of them by itself.
template <int TOKENS>
struct Streams {
    static constexpr int ROWS = 4, SPLIT = Shape<TOKENS>::SPLIT;
};

constexpr int CACHE_LINE = 64;

// S is a Shape or Streams. sums(t, r) is set to a vector whose lanes add up to x[t] . rows[r]. What
// lies `ahead` weights further is asked for, unless that is 0.
template <typename M, int TOKENS, typename S, typename W, typename F>
inline void tile(const typename M::Element* const* x, const W* const* rows, int64_t inputs,
                 int64_t ahead, F sums) {
    constexpr int LINE = CACHE_LINE / int(M::STEP * sizeof(W)), STEPS = std::max(S::SPLIT, LINE);
    typename M::Sum sum[TOKENS][S::ROWS][S::SPLIT] = {};
    const auto meet = [&](const W* const* from, int64_t at, int j) {
        const auto part = [&](auto odd) {
            constexpr int ODD = decltype(odd)::value;
            decltype(M::template weights<ODD>(from[0])) right[S::ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < S::ROWS; ++r)
                right[r] = in_register(M::template weights<ODD>(from[r]));
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                auto left = M::tokens(x[t] + at + ODD * M::PART);
                if (S::ROWS > 1) left = in_register(left);  // else it is read by the multiplication
#pragma GCC unroll 4
                for (int r = 0; r < S::ROWS; ++r) {
                    auto& to = sum[t][r][j];
                    to = M::add_product(to, left, right[r]);
                }
            }
        };
        part(std::integral_constant<int, 0>());
        if constexpr (M::PARTS > 1) part(std::integral_constant<int, 1>());
    };
    const W* at_rows[S::ROWS];
    const auto move_to = [&](int64_t k) {
#pragma GCC unroll 4
        for (int r = 0; r < S::ROWS; ++r) at_rows[r] = rows[r] + k;
    };
    int64_t k = 0;
    for (; k + STEPS * M::STEP <= inputs; k += STEPS * M::STEP) {
        if (ahead)
#pragma GCC unroll 4
            for (int r = 0; r < S::ROWS; ++r)
#pragma GCC unroll 4
                for (int i = 0; i < STEPS * M::STEP; i += CACHE_LINE / int(sizeof(W)))
                    __builtin_prefetch(rows[r] + ahead + k + i, 0, 2);  // for the second cache
#pragma GCC unroll 4
        for (int j = 0; j < STEPS; ++j) {
            move_to(k + j * M::STEP);
            meet(at_rows, k + j * M::STEP, j % S::SPLIT);
        }
    }
    for (; k + M::STEP <= inputs; k += M::STEP) {
        move_to(k);
        meet(at_rows, k, 0);
    }
    if (k < inputs) {
        W rest[S::ROWS][M::STEP];
        for (int r = 0; r < S::ROWS; ++r) {
            const Rest<W> last(rows[r] + k, inputs - k);
            std::memcpy(rest[r], last.elements, sizeof rest[r]);
            at_rows[r] = rest[r];
        }
        meet(at_rows, k, 0);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < S::ROWS; ++r) {
#pragma GCC unroll 4
            for (int j = 1; j < S::SPLIT; ++j) sum[t][r][0] += sum[t][r][j];
            sums(t, r) = M::as_floats(sum[t][r][0]);
        }
}

// One product: what is multiplied, and where to.
template <typename T, typename W, typename E>
struct Product {
    const Linear<T, W>& layer;
    Tokens<E> x;
    float* y;
    bool add;
};

// A part of a product: some outputs, and some inputs.
struct Part {
    int64_t begin, end, first_input, inputs;
    int64_t ahead;  // weights from those that are read to those that are asked for; 0: none are
};

// Outputs [n, n + limit), at most LANES, of tokens [first, first + count) from their sums; `is_rest`:
// these are of inputs that others came before.
template <typename T, typename W, typename E>
inline void write(const Product<T, W, E>& p, int64_t first, int64_t count, int64_t n, int64_t limit,
                  const Vec* sums, bool is_rest) {
    const Linear<T, W>& layer = p.layer;
    const auto some = [limit](const auto* from) {
        return limit == LANES ? load(from) : load_part(from, int(limit));
    };
    const Vec scales = layer.scales ? some(layer.scales + n) : splat(1.0f);
    const Vec more = layer.bias && !is_rest ? some(layer.bias + n) : Vec{};
    for (int64_t t = 0; t < count; ++t) {
        float* to = p.y + (first + t) * layer.width + n;
        Vec sum = sums[t] * (p.x.scales ? scales * p.x.scales[first + t] : scales) + more;
        if (p.add || is_rest) sum += some(to);
        if (limit == LANES)
            store(to, sum);
        else
            std::memcpy(to, &sum, limit * sizeof(float));
    }
}

// What is met to get the results of tokens [first, first + count), of which there are at most TOKENS.
template <typename M, int TOKENS, typename T, typename W>
struct Results {
    const Product<T, W, typename M::Element>& p;
    const int64_t first, count;
    const typename M::Element* tokens[TOKENS];

    Results(const Product<T, W, typename M::Element>& product, int64_t first, int64_t count,
            int64_t first_input)
        : p(product), first(first), count(count) {
        for (int t = 0; t < TOKENS; ++t) {
            const int64_t token = first + std::min<int64_t>(t, count - 1);
            tokens[t] = p.x.row(token) + first_input;
        }
    }

    // Outputs [n, n + limit), at most LANES, from sums[t][output].
    void write(int64_t n, int64_t limit, Vec (*sums)[LANES], bool is_rest) const {
        Vec results[TOKENS];
        for (int64_t t = 0; t < count; ++t) results[t] = transpose_sum(sums[t]);
        native::write(p, first, count, n, limit, results, is_rest);
    }
};

// Tokens [first, first + count); count is at most TOKENS.
template <typename M, int TOKENS, typename T, typename W>
inline void tiles(const Product<T, W, typename M::Element>& p, int64_t first, int64_t count,
                  const Part& part) {
    using S = Shape<TOKENS>;
    const Results<M, TOKENS, T, W> results(p, first, count, part.first_input);
    const W* weight = p.layer.weight + part.first_input;
    for (int64_t n = part.begin; n < part.end; n += LANES) {
        const int64_t limit = std::min<int64_t>(LANES, part.end - n);
        Vec sums[TOKENS][LANES] = {};
        for (int64_t r = 0; r < limit; r += S::ROWS) {
            const W* rows[S::ROWS];
            for (int i = 0; i < S::ROWS; ++i)
                rows[i] = weight + (n + std::min(r + i, limit - 1)) * p.layer.inputs;
            tile<M, TOKENS, S>(results.tokens, rows, part.inputs, part.ahead,
                               [&](int t, int i) -> Vec& { return sums[t][r + i]; });
        }
        results.write(n, limit, sums, part.first_input > 0);
    }
}

// Outputs of a whole unit of `streams`.
template <int TOKENS>
constexpr int64_t STREAMED = Streams<TOKENS>::ROWS * LANES;

// The same of all inputs and whole units of outputs: every ROWS-th of the part is a stream.
template <typename M, int TOKENS, typename T, typename W>
inline void streams(const Product<T, W, typename M::Element>& p, int64_t first, int64_t count,
                    const Part& part) {
    using S = Streams<TOKENS>;
    const Results<M, TOKENS, T, W> results(p, first, count, 0);
    const int64_t apart = (part.end - part.begin) / S::ROWS;
    for (int64_t n = part.begin; n < part.begin + apart; n += LANES) {
        Vec sums[S::ROWS][TOKENS][LANES];
        for (int r = 0; r < LANES; ++r) {
            const W* rows[S::ROWS];
            for (int i = 0; i < S::ROWS; ++i)
                rows[i] = p.layer.weight + (n + r + i * apart) * p.layer.inputs;
            tile<M, TOKENS, S>(results.tokens, rows, part.inputs, part.ahead,
                               [&](int t, int i) -> Vec& { return sums[i][t][r]; });
        }
        for (int i = 0; i < S::ROWS; ++i) results.write(n + i * apart, LANES, sums[i], false);
    }
}

// Bytes ahead that are asked for in each stream.
constexpr int64_t AHEAD_BYTES = 512;
// Bytes of a token's inputs that are met at a time: those of a tile stay in the nearest cache.
constexpr int64_t BLOCK_BYTES = 2304;

// Outputs [begin, end) for one or two tokens.
template <typename M, int TOKENS, typename T, typename W>
void few(const Product<T, W, typename M::Element>& p, int64_t begin, int64_t end) {
    Part part = {begin, end, 0, p.layer.inputs, AHEAD_BYTES / int64_t(sizeof(W))};
    part.end = begin + (end - begin) / STREAMED<TOKENS> * STREAMED<TOKENS>;
    streams<M, TOKENS>(p, 0, TOKENS, part);
    part.begin = part.end, part.end = end;
    tiles<M, TOKENS>(p, 0, TOKENS, part);
}

// Outputs [begin, end) for three to eight tokens, a block of inputs at a time; the next tile's weights
// are asked for.
template <typename M, typename T, typename W>
void some_tokens(const Product<T, W, typename M::Element>& p, int64_t num_tokens, int64_t begin,
                 int64_t end) {
    constexpr int64_t BLOCK = BLOCK_BYTES / int64_t(sizeof(typename M::Element));
    const int64_t row = p.layer.inputs;
    for (int64_t at = 0; at < row; at += BLOCK) {
        Part part = {begin, end, at, std::min(BLOCK, row - at), Shape<8>::ROWS * row};
        if (num_tokens > 4) {
            tiles<M, 8>(p, 0, num_tokens, part);
        } else {
            part.ahead = Shape<4>::ROWS * row;
            tiles<M, 4>(p, 0, num_tokens, part);
        }
    }
}

// ---------------------------------------------------------------- many tokens
//
// A panel is the weights of some outputs for a block of inputs, transposed into [units][PANEL], where
// a unit is 32 bits of a prepared token: all tokens meet it while it lies in a core's nearest cache.
// A unit of a token, in all lanes, meets vectors of outputs, so no sums are transposed.

constexpr int PANEL_VECS = 2, PANEL = PANEL_VECS * LANES;
constexpr int64_t PANEL_TOKENS = LANES == 16 ? 12 : 6;  // whose sums fit into registers
constexpr int64_t PANEL_UNITS = 288;                // at most

// Asks for what the next panel is made of, some cache lines at a time.
struct Ahead {
    const char* row = nullptr;  // null: nothing is asked for
    int64_t stride = 0, lines = 0, num_rows = 0;  // of the rows; lines of each
    int64_t line = 0;
    void ask(int64_t count) {
        for (; count > 0 && num_rows > 0; --count) {
            __builtin_prefetch(row + line * CACHE_LINE, 0, 2);  // for the second cache
            if (++line == lines) line = 0, row += stride, --num_rows;
        }
    }
};

// Inputs [first, first + count) of a panel's outputs, of which there are `limit` in the matrix.
template <typename M, typename W>
void pack(const W* weight, int64_t stride, int64_t limit, int64_t first, int64_t count,
          float* panel) {
    const auto step = [&](const W* const* rows, int64_t at, float* to) {
        const auto part = [&](auto odd) {
            constexpr int ODD = decltype(odd)::value;
            Vec units[LANES];
            for (int i = 0; i < LANES; ++i)
                units[i] = (Vec)M::template weights<ODD>(rows[i] + at);
            transpose(units);
            for (int i = 0; i < LANES; ++i) store(to + (ODD * LANES + i) * PANEL, units[i]);
        };
        part(std::integral_constant<int, 0>());
        if constexpr (M::PARTS > 1) part(std::integral_constant<int, 1>());
    };
    constexpr int UNITS = M::PARTS * LANES;  // of a step
    for (int v = 0; v < PANEL_VECS; ++v) {
        const W* rows[LANES];
        for (int i = 0; i < LANES; ++i)
            rows[i] = weight + std::min<int64_t>(v * LANES + i, limit - 1) * stride + first;
        float* to = panel + v * LANES;
        int64_t k = 0;
        for (; k + M::STEP <= count; k += M::STEP, to += UNITS * PANEL) step(rows, k, to);
        if (k == count) continue;
        W rest[LANES][M::STEP];
        for (int i = 0; i < LANES; ++i) {
            const Rest<W> last(rows[i] + k, count - k);
            std::memcpy(rest[i], last.elements, sizeof rest[i]);
            rows[i] = rest[i];
        }
        step(rows, 0, to);
    }
}

// The sums of TOKENS tokens with one panel.
template <typename M, int TOKENS>
inline void meet_panel(const typename M::Element* const* x, const float* panel, int64_t units,
                       Ahead& ahead, int64_t asked, Vec (*results)[TOKENS]) {
    constexpr int64_t ELEMENTS = 4 / sizeof(typename M::Element);  // of a unit
    using V = decltype(M::tokens(nullptr));
    typename M::Sum sum[TOKENS][PANEL_VECS] = {};
    for (int64_t block = 0; block < units; block += LANES) {
        ahead.ask(asked);
#pragma GCC unroll 2
        for (int64_t k = block; k < block + LANES; ++k) {
            V right[PANEL_VECS];
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; ++v)
                right[v] = in_register((V)load_units(panel + k * PANEL + v * LANES));
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; ++t) {
                int32_t unit;
                std::memcpy(&unit, x[t] + k * ELEMENTS, sizeof unit);
                const V left = in_register((V)(UnitVec{} + unit));
#pragma GCC unroll 2
                for (int v = 0; v < PANEL_VECS; ++v)
                    sum[t][v] = M::add_product(sum[t][v], left, right[v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; ++v) results[v][t] = M::as_floats(sum[t][v]);
}

// Outputs [begin, end), whole panels but for the last, for all tokens.
template <typename M, typename T, typename W>
void many_tokens(const Product<T, W, typename M::Element>& p, int64_t num_tokens, int64_t begin,
                 int64_t end) {
    constexpr int64_t STEP = M::STEP, UNITS = M::PARTS * LANES;  // of a step
    const Linear<T, W>& layer = p.layer;
    const int64_t row = layer.inputs, steps = whole_steps(row, STEP) / STEP;
    const int64_t blocks = (steps * UNITS + PANEL_UNITS - 1) / PANEL_UNITS;
    const int64_t block = (steps + blocks - 1) / blocks * STEP;  // inputs
    const int64_t groups = (num_tokens + PANEL_TOKENS - 1) / PANEL_TOKENS;
    float* panel = room<float, 2>(block / STEP * UNITS * PANEL);
    for (int64_t n = begin; n < end; n += PANEL)
        for (int64_t first = 0; first < row; first += block) {
            const int64_t limit = std::min<int64_t>(PANEL, end - n);
            const int64_t count = std::min(block, row - first);
            const int64_t units = whole_steps(count, STEP) / STEP * UNITS;
            pack<M>(layer.weight + n * row, row, limit, first, count, panel);
            Ahead ahead;
            const bool is_last = first + block >= row;
            if (!is_last || n + PANEL < end) {
                const W* next = layer.weight + (is_last ? (n + PANEL) * row : n * row + first + block);
                ahead.row = reinterpret_cast<const char*>(next), ahead.stride = row * sizeof(W);
                ahead.lines = (block * int64_t(sizeof(W)) + CACHE_LINE - 1) / CACHE_LINE;
                ahead.num_rows = PANEL;
            }
            const int64_t asks = groups * units / LANES;
            const int64_t asked = (ahead.lines * ahead.num_rows + asks - 1) / asks;
            const auto meet = [&](int64_t token, int64_t together, auto number) {
                constexpr int TOKENS = decltype(number)::value;
                const Results<M, TOKENS, T, W> results(p, token, together, first);
                Vec sums[PANEL_VECS][TOKENS];
                meet_panel<M, TOKENS>(results.tokens, panel, units, ahead, asked, sums);
                for (int64_t v = 0; v * LANES < limit; ++v)
                    write(p, token, together, n + v * LANES, std::min<int64_t>(LANES, limit - v * LANES),
                          sums[v], first > 0);
            };
            for (int64_t token = 0; token < num_tokens; token += PANEL_TOKENS) {
                const int64_t together = std::min(PANEL_TOKENS, num_tokens - token);
                if (3 * together > 2 * PANEL_TOKENS)
                    meet(token, together, std::integral_constant<int, PANEL_TOKENS>());
                else if (3 * together > PANEL_TOKENS)
                    meet(token, together, std::integral_constant<int, PANEL_TOKENS / 3 * 2>());
                else
                    meet(token, together, std::integral_constant<int, PANEL_TOKENS / 3>());
            }
        }
}

// Multiplications that are worth sharing out.
constexpr int64_t THREAD_WORK = 250'000;

// Tokens whose prepared inputs a core's second cache holds, so that each panel finds them there.
constexpr int64_t MOST_TOGETHER = 256;

// x [num_tokens][inputs] → y [num_tokens][outputs], added to what is there with `add`.
template <typename T, typename W>
void apply(const Linear<T, W>& layer, const float* x, int64_t num_tokens, float* y, bool add,
           Parallel& threads) {
    using M = Meeting<T, W>;
    const int64_t unit = num_tokens == 1   ? STREAMED<1>
                         : num_tokens == 2 ? STREAMED<2>
                                           : PANEL;
    const int64_t units = (layer.outputs + unit - 1) / unit;
    const int64_t groups = (num_tokens + MOST_TOGETHER - 1) / MOST_TOGETHER;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * num_tokens / groups;
        const int64_t count = (group + 1) * num_tokens / groups - first;
        const Product<T, W, typename M::Element> p = {
            layer, prepared<M>(x + first * layer.inputs, count, layer.inputs, threads),
            y + first * layer.width, add};
        const auto some = [&](int64_t begin, int64_t end) {
            begin *= unit, end = std::min(end * unit, layer.outputs);
            if (count == 1) return few<M, 1>(p, begin, end);
            if (count == 2) return few<M, 2>(p, begin, end);
            if (count <= MAX_TILE_TOKENS) return some_tokens<M>(p, count, begin, end);
            many_tokens<M>(p, count, begin, end);
        };
        if (layer.outputs * layer.inputs * count < THREAD_WORK)
            some(0, units);
        else
            threads.ranges(units, some);
    }
}

}  // namespace native
