// Paged attention on the CPU, in place over the KV pages: nothing is gathered or copied.
//
// One call writes the step's keys and values into their slots and attends, for fp32 and bf16 pages,
// accumulating in fp32. A unit of work (Task) is one KV head of one sequence and a tile of its
// query tokens; the rows of a task are its (token, query head of the group) pairs, so each key and
// value is read once for the whole group. Keys come in chunks of CHUNK with an online softmax. Few
// rows (decode) read pages directly; many rows (prefill) copy a chunk into a transposed buffer
// first and run a register-blocked matrix product.
//
// Every row sees one interval of keys [low, high): causality, sliding window and bidirectional
// items are all such intervals. What a row does not see cannot reach it, be it NaN: not only is
// its weight zero, it is never multiplied.
//
// No torch headers, so it compiles in seconds; no fast-math, so NaN comes out where NaN went in.

#pragma once

#include "chunk.h"
#include "threads.h"

namespace paged {

constexpr int MAX_TILE_ROWS = 96;  // rows of one prefill task

// ---------------------------------------------------------------- one task

template <typename T>
class Attention {
  public:
    Attention(const Problem& problem, const Task& task, Scratch& scratch)
        : p(problem), t(task), s(scratch), group(p.group()), rows(int(task.count * group)),
          packed(rows > DIRECT_ROWS), in_units(multiplied_in_units()), depth(pad(p.head_dim, LANES)),
          start(p.query_start[task.sequence] + task.first) {
        s.prepare(pad(rows, BLOCK_ROWS), depth, packed);
    }

    void run() {
        load_queries();
        find_ranges();
        KeyChunk<T> chunk;
        for (int64_t key = lowest; key < highest; key += CHUNK) {
            chunk.locate(p, t, key, highest);
            score(chunk);
            for (int r = 0; r < rows; ++r) soften_row(chunk, r);
            // Zero times NaN or infinity would reach every row of a packed product.
            if (packed && pack_values(chunk, p.head_dim, depth, s.values))
                add_packed_values(chunk);
            else
                add_direct_values(chunk);
        }
        write_output();
    }

  private:
    using U = typename Arithmetic<T>::U;
    static constexpr int PER_UNIT = U::PER_UNIT;

    const Problem& p;
    const Task& t;
    Scratch& s;
    const int64_t group;
    const int rows;
    const bool packed, in_units;
    const int64_t depth, start;  // start: the task's first row of the query tensor
    int64_t lowest, highest;     // keys that any row sees

    // Queries with keys: packed in whole units, straight from pages in whole vectors of them.
    bool multiplied_in_units() const {
        if (!LIES_IN_UNITS<T>) return false;
        if (packed) return p.head_dim % PER_UNIT == 0;
        return PER_UNIT > 1 && p.head_dim % (LANES * PER_UNIT) == 0;
    }

    // As they are where they are multiplied in units, else as floats; scores are scaled later.
    void load_queries() {
        const int64_t padded = pad(rows, BLOCK_ROWS);
        std::fill(s.query, s.query + padded * depth, 0.0f);
        std::fill(s.output, s.output + padded * depth, 0.0f);
        const T* query = static_cast<const T*>(p.query);
        for (int r = 0; r < rows; ++r) {
            const int64_t head = t.kv_head * group + r % group;
            const T* from = query + (start + r / group) * p.query_token + head * p.query_head;
            float* to = s.query + r * depth;
            if (in_units)
                std::memcpy(to, from, p.head_dim * sizeof(T));
            else
                for (int64_t d = 0; d < p.head_dim; ++d) to[d] = widen(from[d]);
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
        if (packed) return packed_scores(chunk);
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

    void packed_scores(const KeyChunk<T>& chunk) {
        if constexpr (LIES_IN_UNITS<T>)
            if (in_units) return packed_unit_scores(chunk);
        const int64_t dim = p.head_dim, columns = pad(chunk.count, LANES);
        pack_keys(chunk, dim, s.keys,
                  [=](const T* key, int64_t at) { return load_within(key, at, dim); });
        product<Whole>(rows, columns, dim, s.query, depth, s.keys, CHUNK, s.scores, CHUNK, false);
    }

    void packed_unit_scores(const KeyChunk<T>& chunk) {
        const int64_t units = p.head_dim / PER_UNIT, columns = pad(chunk.count, LANES);
        pack_keys(chunk, units, s.keys,
                  [=](const T* key, int64_t at) { return load_units_within(key, at, units); });
        product<U>(rows, columns, units, s.query, depth, s.keys, CHUNK, s.scores, CHUNK, false);
    }

    template <int VECS>
    void direct(const KeyChunk<T>& chunk) {
        if constexpr (LIES_IN_UNITS<T> && PER_UNIT > 1)
            if (in_units)
                return direct_scores<VECS, true>(s.query, rows, p.head_dim, depth, chunk, s.scores);
        direct_scores<VECS, false>(s.query, rows, p.head_dim, depth, chunk, s.scores);
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
            soften<U>(scores, begin, end, chunk.count, p.scale, p.softcap, s.maximum + r,
                      s.total + r, s.output + r * depth, depth);
    }

    void add_packed_values(const KeyChunk<T>& chunk) {
        for (int r = 0; r < rows; ++r) to_units<U>(s.scores + r * CHUNK, chunk.count);
        product<U>(rows, depth, (chunk.count + PER_UNIT - 1) / PER_UNIT, s.scores, CHUNK, s.values,
                   depth, s.output, depth, true);
    }

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
            const float* from = s.output + r * depth;
            const float inverse = 1.0f / s.total[r];
            for (int64_t d = 0; d < p.head_dim; ++d) narrow(from[d] * inverse, to + d);
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

inline std::vector<Task> make_tasks(const Problem& p) {
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
        FirstException caught;
#pragma omp parallel num_threads(p.num_threads)
        {
            static thread_local Scratch scratch;
#pragma omp for
            for (int64_t i = 0; i < tokens; ++i) write_token<T>(p, i);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < count; ++i)
                caught.guard([&] { Attention<T>(p, tasks[i], scratch).run(); });
        }
        caught.rethrow();
        return;
    }
#endif
    static thread_local Scratch scratch;
    for (int64_t i = 0; i < tokens; ++i) write_token<T>(p, i);
    for (int64_t i = 0; i < count; ++i) Attention<T>(p, tasks[i], scratch).run();
}

inline const char* find_fault(const Problem& p) {
    if (p.num_kv_heads < 1 || p.num_heads % p.num_kv_heads || p.head_dim < 1 || p.block_size < 1)
        return "query heads must be a multiple of key-value heads, and sizes positive";
    const int64_t num_slots = p.num_blocks * p.block_size;
    if (p.num_sequences < 0 || p.query_start[0] != 0) return "the first sequence begins at row 0";
    for (int64_t i = 0; i < p.num_tokens(); ++i)
        if (p.slots[i] < 0 || p.slots[i] >= num_slots) return "slot outside the pages";
    for (int64_t i = 0; i < p.num_sequences; ++i) {
        const int64_t length = p.kv_lens[i], blocks = (length + p.block_size - 1) / p.block_size;
        const int64_t chunk = p.query_start[i + 1] - p.query_start[i];
        if (chunk < 1 || chunk > length) return "a sequence's new tokens must be among its keys";
        if (blocks > p.table_columns) return "a sequence has more keys than its block table";
        for (int64_t b = 0; b < blocks; ++b) {
            const int32_t block = p.block_tables[i * p.table_stride + b];
            if (block < 0 || block >= p.num_blocks) return "block outside the pages";
        }
    }
    return nullptr;
}

}  // namespace paged
