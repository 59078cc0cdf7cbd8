// Paged attention on the CPU, in place over the KV pages: nothing is gathered or copied.
//
// One call writes the step's keys and values into their slots and attends, for fp32 and bf16 pages,
// accumulating in fp32. A unit of work (Task) is one KV head of one sequence and a tile of its query
// tokens; the rows of a task are its (token, query head of the group) pairs, so each key and value is
// read once for the whole group. Keys come in chunks of CHUNK with an online softmax. Few rows
// (decode) read pages directly; many rows (prefill) copy a chunk into a transposed buffer first and
// run a register-blocked matrix product. Every row sees one interval of keys [low, high): causality,
// sliding window and bidirectional items are all such intervals. What a row does not see cannot reach
// it, be it NaN: not only is its weight zero, it is never multiplied.
//
// Only the stable CPython API and compiler vectors are used: no torch headers, no fast-math (NaN must
// come out where NaN went in). Sizes are checked in cpu.py; what is cheap is checked again here.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

constexpr int CHUNK = 64;         // keys per online-softmax step
constexpr int BLOCK_ROWS = 6;     // rows of the register block of the matrix product
constexpr int BLOCK_VECS = LANES == 16 ? 4 : 2;  // and its width
constexpr int MAX_TILE_ROWS = 96; // rows of one prefill task
constexpr int DIRECT_ROWS = 8;    // up to this many rows read pages directly
constexpr float LOWEST = -1e30f;  // below every score, and finite: differences stay finite

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

struct BFloat16 {
    uint16_t bits;
};

// ---------------------------------------------------------------- vectors

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline Vec load(const BFloat16* from) {
    HalfVec half;
    std::memcpy(&half, from, sizeof half);
    IntVec wide = __builtin_convertvector(half, IntVec) << 16;
    Vec v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void narrow(float value, float* to) { *to = value; }

inline void narrow(float value, BFloat16* to) {  // round to nearest even, NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
inline Vec load_part(const T* from, int count) {
    float lanes[LANES] = {};
    for (int i = 0; i < count; ++i) lanes[i] = widen(from[i]);
    return load(lanes);
}

// e^x to 1e-7 relative, 0 below -87; NaN gives NaN.
inline Vec exp_vec(Vec x) {
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec rounded = x * 1.44269504088896341f + shift;
    IntVec exponent;
    std::memcpy(&exponent, &rounded, sizeof exponent);
    Vec n = rounded - shift;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    exponent = (exponent << 23) + (127 << 23);  // the shift's own bits fall off the top
    Vec scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -87.0f ? splat(0.0f) : p * scale;
}

inline Vec tanh_vec(Vec x) {
    x = x > 15.0f ? splat(15.0f) : x;
    x = x < -15.0f ? splat(-15.0f) : x;
    return 1.0f - 2.0f / (exp_vec(x + x) + 1.0f);
}

inline Vec max_vec(Vec a, Vec b) { return a > b ? a : b; }

inline float reduce_max(Vec v) {
    float result = v[0];
    for (int i = 1; i < LANES; ++i) result = v[i] > result ? v[i] : result;
    return result;
}

inline float reduce_sum(Vec v) {
    float result = 0;
    for (int i = 0; i < LANES; ++i) result += v[i];
    return result;
}

// Lane i of the result is the sum of the lanes of v[i]: a transpose folded into the additions.
// At each level pairs of vectors are halved side by side: [a.low b.low] + [a.high b.high].
template <int HALF>
constexpr int low_half(int lane) {
    return (lane / HALF % 2) * LANES + (lane / HALF / 2) * 2 * HALF + lane % HALF;
}

template <int HALF, size_t... LANE>
inline Vec fold(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, low_half<HALF>(LANE)...) +
           __builtin_shufflevector(a, b, (low_half<HALF>(LANE) + HALF)...);
}

template <int HALF>
inline void fold_all(Vec* v) {
    for (int i = 0; i < HALF; ++i) v[i] = fold<HALF>(v[i], v[i + HALF], std::make_index_sequence<LANES>());
    if constexpr (HALF > 1) fold_all<HALF / 2>(v);
}

inline Vec transpose_sum(Vec* v) {
    fold_all<LANES / 2>(v);
    return v[0];
}

// ---------------------------------------------------------------- the problem

struct Problem {
    const void *query, *key, *value;  // [T, heads, D], strides below, D contiguous
    void *output;                     // [T, Hq, D], contiguous
    void *key_pages, *value_pages;    // [blocks, block_size, Hkv, D], contiguous
    const int32_t *query_start;       // [B + 1]
    const int32_t *kv_lens;           // [B]
    const int32_t *block_tables;      // [B, table_stride]
    const int64_t *slots;             // [T]
    const int32_t *visible_end;       // [T] or null
    const float *sinks;               // [Hq] or null
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // in elements
    int64_t table_stride, num_sequences, num_heads, num_kv_heads, head_dim, block_size, num_blocks;
    int64_t window;                   // 0: none
    float scale, softcap;             // softcap 0: none
    int num_threads;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t num_tokens() const { return query_start[num_sequences]; }
};

struct Task {
    int32_t sequence, kv_head;
    int32_t first, count;  // query tokens within the sequence
};

inline int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What one thread needs; grows to the largest task it has met.
struct Scratch {
    std::vector<float> memory;
    float *query, *scores, *output, *keys, *values, *maximum, *total;
    std::vector<int32_t> low, high;

    void prepare(int64_t rows, int64_t depth, bool packed) {
        int64_t chunk_floats = packed ? depth * CHUNK : 0;
        int64_t sizes[] = {rows * depth, rows * CHUNK, rows * depth, chunk_floats,
                           chunk_floats, rows,         rows};
        float** parts[] = {&query, &scores, &output, &keys, &values, &maximum, &total};
        int64_t sum = 0;
        for (int64_t size : sizes) sum += pad(size, LANES);
        if (int64_t(memory.size()) < sum) memory.resize(sum);
        float* next = memory.data();
        for (int i = 0; i < 7; ++i) {
            *parts[i] = next;
            next += pad(sizes[i], LANES);
        }
        if (int64_t(low.size()) < rows) low.resize(rows), high.resize(rows);
    }
};

// Keys [first, first + count) of one head as pointers to their rows, wherever their pages are.
template <typename T>
struct KeyChunk {
    const T *keys[CHUNK], *values[CHUNK];
    int64_t first;
    int count;

    void locate(const Problem& p, const Task& task, int64_t begin, int64_t end) {
        const int32_t* table = p.block_tables + task.sequence * p.table_stride;
        const int64_t row = p.num_kv_heads * p.head_dim;
        first = begin;
        count = int(std::min<int64_t>(end - begin, CHUNK));
        int64_t block = begin / p.block_size, inside = begin % p.block_size;
        for (int i = 0; i < count; ++i) {
            int64_t at = (table[block] * p.block_size + inside) * row + task.kv_head * p.head_dim;
            keys[i] = static_cast<const T*>(p.key_pages) + at;
            values[i] = static_cast<const T*>(p.value_pages) + at;
            if (++inside == p.block_size) inside = 0, ++block;
        }
    }
};

// ---------------------------------------------------------------- few rows: straight from pages

// scores[r][i] = query[r] . keys[i]. VECS is the head dimension in vectors, 0 where it is no
// multiple known at compile time.
template <int VECS, typename T>
void direct_scores(const float* query, int rows, int64_t dim, int64_t depth,
                   const KeyChunk<T>& chunk, float* scores) {
    Vec parts[DIRECT_ROWS][LANES];
    for (int start = 0; start < chunk.count; start += LANES) {
        const int limit = std::min(LANES, chunk.count - start);
        for (int i = 0; i < LANES; ++i) {
            const T* key = chunk.keys[start + std::min(i, limit - 1)];
            if constexpr (VECS > 0) {
                Vec k[VECS];
                for (int j = 0; j < VECS; ++j) k[j] = load(key + j * LANES);
                for (int r = 0; r < rows; ++r) {
                    Vec sum = load(query + r * depth) * k[0];
                    for (int j = 1; j < VECS; ++j) sum += load(query + r * depth + j * LANES) * k[j];
                    parts[r][i] = sum;
                }
            } else {
                for (int r = 0; r < rows; ++r) {
                    Vec sum = {};
                    int64_t j = 0;
                    for (; j + LANES <= dim; j += LANES) sum += load(query + r * depth + j) * load(key + j);
                    if (j < dim) sum += load(query + r * depth + j) * load_part(key + j, int(dim - j));
                    parts[r][i] = sum;
                }
            }
        }
        for (int r = 0; r < rows; ++r) store(scores + r * CHUNK + start, transpose_sum(parts[r]));
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
        const float* left = a + r * a_stride;
        float* to = c + r * c_stride;
        int64_t j = 0;
        for (; j + BLOCK_VECS * LANES <= columns; j += BLOCK_VECS * LANES)
            block_product<BLOCK_VECS>(left, a_stride, b + j, b_stride, inner, to + j, c_stride, add);
        for (; j < columns; j += LANES)
            block_product<1>(left, a_stride, b + j, b_stride, inner, to + j, c_stride, add);
    }
}

// keys_out [D][CHUNK], values_out [CHUNK][depth]; key columns past the chunk's end are zero. Returns
// whether all values are finite.
template <typename T>
bool pack(const KeyChunk<T>& chunk, int64_t dim, int64_t depth, float* keys_out, float* values_out) {
    for (int64_t i = 0; i < pad(chunk.count, LANES); ++i)
        for (int64_t d = 0; d < dim; ++d)
            keys_out[d * CHUNK + i] = i < chunk.count ? widen(chunk.keys[i][d]) : 0.0f;
    Vec nothing = {};
    for (int i = 0; i < chunk.count; ++i) {
        for (int64_t d = 0; d < depth; ++d)
            values_out[i * depth + d] = d < dim ? widen(chunk.values[i][d]) : 0.0f;
        for (int64_t d = 0; d < depth; d += LANES) nothing += load(values_out + i * depth + d) * 0.0f;
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

// ---------------------------------------------------------------- one task

template <typename T>
class Attention {
  public:
    Attention(const Problem& problem, const Task& task, Scratch& scratch)
        : p(problem), t(task), s(scratch), group(p.group()), rows(int(task.count * group)),
          packed(rows > DIRECT_ROWS), depth(pad(p.head_dim, LANES)),
          start(p.query_start[task.sequence] + task.first) {
        s.prepare(pad(rows, BLOCK_ROWS), depth, packed);
    }

    void run() {
        load_queries();
        find_ranges();
        KeyChunk<T> chunk;
        for (int64_t key = lowest; key < highest; key += CHUNK) {
            chunk.locate(p, t, key, highest);
            const bool finite = !packed || pack(chunk, p.head_dim, depth, s.keys, s.values);
            score(chunk);
            for (int r = 0; r < rows; ++r) soften_row(chunk, r);
            packed && finite ? add_packed_values(chunk) : add_direct_values(chunk);
        }
        write_output();
    }

  private:
    const Problem& p;
    const Task& t;
    Scratch& s;
    const int64_t group;
    const int rows;
    const bool packed;
    const int64_t depth, start;  // start: the task's first row of the query tensor
    int64_t lowest, highest;     // keys that any row sees

    void load_queries() {
        const int64_t padded = pad(rows, BLOCK_ROWS);
        std::fill(s.query, s.query + padded * depth, 0.0f);
        std::fill(s.output, s.output + padded * depth, 0.0f);
        const T* query = static_cast<const T*>(p.query);
        for (int r = 0; r < rows; ++r) {
            const int64_t head = t.kv_head * group + r % group;
            const T* from = query + (start + r / group) * p.query_token + head * p.query_head;
            for (int64_t d = 0; d < p.head_dim; ++d) s.query[r * depth + d] = widen(from[d]) * p.scale;
            s.maximum[r] = p.sinks ? p.sinks[head] : LOWEST;
            s.total[r] = p.sinks ? 1.0f : 0.0f;
        }
    }

    void find_ranges() {
        const int64_t length = p.kv_lens[t.sequence];
        const int64_t chunk = p.query_start[t.sequence + 1] - p.query_start[t.sequence];
        lowest = length, highest = 0;
        for (int r = 0; r < rows; ++r) {
            const int64_t token = r / group, position = length - chunk + t.first + token;
            int64_t high = p.visible_end ? p.visible_end[start + token] : position + 1;
            high = std::min(std::max(high, position + 1), length);
            const int64_t low = p.window ? std::max<int64_t>(0, position - p.window + 1) : 0;
            s.low[r] = int32_t(low), s.high[r] = int32_t(high);
            lowest = std::min(lowest, low), highest = std::max(highest, high);
        }
    }

    void score(const KeyChunk<T>& chunk) {
        if (packed)
            return product(rows, pad(chunk.count, LANES), p.head_dim, s.query, depth, s.keys, CHUNK,
                           s.scores, CHUNK, false);
        switch (p.head_dim % LANES ? 0 : p.head_dim / LANES) {
            case 1: return direct<1>(chunk);
            case 2: return direct<2>(chunk);
            case 4: return direct<4>(chunk);
            case 5: return direct<5>(chunk);
            case 6: return direct<6>(chunk);
            case 8: return direct<8>(chunk);
            default: return direct<0>(chunk);
        }
    }

    template <int VECS>
    void direct(const KeyChunk<T>& chunk) {
        direct_scores<VECS>(s.query, rows, p.head_dim, depth, chunk, s.scores);
    }

    // The keys of the chunk that row r sees: [begin, end), empty where begin >= end.
    int begin_of(const KeyChunk<T>& chunk, int r) const {
        return int(std::max<int64_t>(s.low[r] - chunk.first, 0));
    }
    int end_of(const KeyChunk<T>& chunk, int r) const {
        return int(std::min<int64_t>(s.high[r] - chunk.first, chunk.count));
    }

    void soften_row(const KeyChunk<T>& chunk, int r) {
        const int begin = begin_of(chunk, r), end = end_of(chunk, r);
        float* scores = s.scores + r * CHUNK;
        if (begin >= end)
            std::fill(scores, scores + CHUNK, 0.0f);
        else
            soften(scores, begin, end, chunk.count, p.softcap, s.maximum + r, s.total + r,
                   s.output + r * depth, depth);
    }

    void add_packed_values(const KeyChunk<T>& chunk) {
        product(rows, depth, chunk.count, s.scores, CHUNK, s.values, depth, s.output, depth, true);
    }

    // Also where a packed chunk holds NaN or infinity: zero times those would reach every row.
    void add_direct_values(const KeyChunk<T>& chunk) {
        for (int r = 0; r < rows; ++r)
            direct_values(s.scores + r * CHUNK, begin_of(chunk, r), end_of(chunk, r), p.head_dim,
                          chunk, s.output + r * depth);
    }

    void write_output() {
        T* output = static_cast<T*>(p.output);
        for (int r = 0; r < rows; ++r) {
            const int64_t head = t.kv_head * group + r % group;
            T* to = output + ((start + r / group) * p.num_heads + head) * p.head_dim;
            const float inverse = 1.0f / s.total[r];
            for (int64_t d = 0; d < p.head_dim; ++d) narrow(s.output[r * depth + d] * inverse, to + d);
        }
    }
};

// ---------------------------------------------------------------- a whole step of one layer

template <typename T>
void write_token(const Problem& p, int64_t token) {
    const int64_t row = p.num_kv_heads * p.head_dim, slot = p.slots[token] * row;
    const T* key = static_cast<const T*>(p.key) + token * p.key_token;
    const T* value = static_cast<const T*>(p.value) + token * p.value_token;
    T* keys = static_cast<T*>(p.key_pages) + slot;
    T* values = static_cast<T*>(p.value_pages) + slot;
    for (int64_t h = 0; h < p.num_kv_heads; ++h) {
        std::memcpy(keys + h * p.head_dim, key + h * p.key_head, p.head_dim * sizeof(T));
        std::memcpy(values + h * p.head_dim, value + h * p.value_head, p.head_dim * sizeof(T));
    }
}

std::vector<Task> make_tasks(const Problem& p) {
    std::vector<Task> tasks;
    const int32_t tile = int32_t(std::max<int64_t>(1, MAX_TILE_ROWS / p.group()));
    for (int32_t i = 0; i < p.num_sequences; ++i) {
        const int32_t length = p.query_start[i + 1] - p.query_start[i];
        for (int32_t head = 0; head < p.num_kv_heads; ++head)
            for (int32_t first = 0; first < length; first += tile)
                tasks.push_back({i, head, first, std::min(tile, length - first)});
    }
    return tasks;
}

template <typename T>
void run_step(const Problem& p) {
    const int64_t tokens = p.num_tokens();
    const std::vector<Task> tasks = make_tasks(p);
    const int64_t count = int64_t(tasks.size());
#ifdef _OPENMP
    if (p.num_threads > 1) {
#pragma omp parallel num_threads(p.num_threads)
        {
            static thread_local Scratch scratch;
#pragma omp for
            for (int64_t i = 0; i < tokens; ++i) write_token<T>(p, i);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < count; ++i) Attention<T>(p, tasks[i], scratch).run();
        }
        return;
    }
#endif
    static thread_local Scratch scratch;
    for (int64_t i = 0; i < tokens; ++i) write_token<T>(p, i);
    for (int64_t i = 0; i < count; ++i) Attention<T>(p, tasks[i], scratch).run();
}

const char* find_fault(const Problem& p) {
    if (p.num_kv_heads < 1 || p.num_heads % p.num_kv_heads || p.head_dim < 1 || p.block_size < 1)
        return "query heads must be a multiple of key-value heads, and sizes positive";
    const int64_t num_slots = p.num_blocks * p.block_size;
    for (int64_t i = 0; i < p.num_tokens(); ++i)
        if (p.slots[i] < 0 || p.slots[i] >= num_slots) return "slot outside the pages";
    for (int64_t i = 0; i < p.num_sequences; ++i) {
        const int64_t length = p.kv_lens[i], blocks = (length + p.block_size - 1) / p.block_size;
        const int64_t chunk = p.query_start[i + 1] - p.query_start[i];
        if (chunk < 1 || chunk > length) return "a sequence's new tokens must be among its keys";
        for (int64_t b = 0; b < blocks; ++b) {
            const int32_t block = p.block_tables[i * p.table_stride + b];
            if (block < 0 || block >= p.num_blocks) return "block outside the pages";
        }
    }
    return nullptr;
}

// ---------------------------------------------------------------- Python

// Reads the integer arguments one after the other; addresses and sizes alike.
class Arguments {
  public:
    explicit Arguments(PyObject* const* args) : next(args) {}
    int64_t integer() { return PyLong_AsLongLong(*next++); }
    double real() { return PyFloat_AsDouble(*next++); }
    template <typename P>
    P* pointer() { return reinterpret_cast<P*>(integer()); }

  private:
    PyObject* const* next;
};

constexpr Py_ssize_t NUM_ARGUMENTS = 30;

PyObject* paged_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != NUM_ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", NUM_ARGUMENTS, count);
        return nullptr;
    }
    Arguments a(args);
    Problem p;
    p.query = a.pointer<void>(), p.key = a.pointer<void>(), p.value = a.pointer<void>();
    p.output = a.pointer<void>();
    p.key_pages = a.pointer<void>(), p.value_pages = a.pointer<void>();
    p.query_start = a.pointer<int32_t>(), p.kv_lens = a.pointer<int32_t>();
    p.block_tables = a.pointer<int32_t>(), p.slots = a.pointer<int64_t>();
    p.visible_end = a.pointer<int32_t>(), p.sinks = a.pointer<float>();
    p.query_token = a.integer(), p.query_head = a.integer();
    p.key_token = a.integer(), p.key_head = a.integer();
    p.value_token = a.integer(), p.value_head = a.integer();
    p.table_stride = a.integer(), p.num_sequences = a.integer();
    p.num_heads = a.integer(), p.num_kv_heads = a.integer(), p.head_dim = a.integer();
    p.block_size = a.integer(), p.num_blocks = a.integer();
    p.window = a.integer();
    p.scale = float(a.real()), p.softcap = float(a.real());
    p.num_threads = int(a.integer());
    const bool half = a.integer() != 0;
    if (PyErr_Occurred()) return nullptr;
    if (const char* fault = find_fault(p)) {
        PyErr_SetString(PyExc_ValueError, fault);
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS;
    half ? run_step<BFloat16>(p) : run_step<float>(p);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// The file is compiled for the CPU it is built on; elsewhere it must refuse, not crash.
bool runs_here() {
#if defined(__x86_64__) && defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__x86_64__) && defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

PyMethodDef methods[] = {
    {"paged_attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(paged_attention)),
     METH_FASTCALL, "Write new keys and values and attend over the pages; see cpu.py."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_paged", nullptr, 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__paged() {
    if (!runs_here()) {
        PyErr_SetString(PyExc_ImportError, "built for another CPU");
        return nullptr;
    }
    return PyModule_Create(&module);
}
