// Paged attention on the CPU, in place over the KV pages: nothing is gathered or copied.
//
// One call writes the step's keys and values into their slots and attends, for fp32 and bf16 pages,
// accumulating in fp32. The rows of a KV head are its (token, query head of the group) pairs, so
// each key and value is read once for the whole group. Keys come in chunks of CHUNK with an online
// softmax. Few rows (decode) read pages directly; more rows multiply in register blocks: where a unit
// is a float, keys and values as they lie with columns of rows; else, and where rows of a chunk see
// different keys, a chunk that was copied into a transposed buffer first.
//
// A unit of work (Task) of a long chunk is one KV head and a tile of query tokens, over all keys. A
// short chunk has few tiles, and a decode one, however long its context: its keys are split between
// tasks, whose results are merged afterwards by their maxima and totals (flash-decoding: Dao,
// Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023). How keys are split
// depends on their number alone, so results do not change with the number of threads or the batch.
// All KV heads of a key are neighbours in its page: a task takes several heads, chunk by chunk.
//
// Every row sees one interval of keys [low, high): causality, sliding window and bidirectional
// items are all such intervals. What a row does not see cannot reach it, be it NaN: not only is
// its weight zero, it is never multiplied.
//
// No torch headers, so it compiles in seconds; no fast-math, so NaN comes out where NaN went in.

#pragma once

#include <cmath>

#include "chunk.h"
#include "threads.h"

namespace paged {

constexpr int MAX_TILE_ROWS = 96;  // rows of one prefill task

struct KeyRange {
    int64_t begin, end;
};

// The keys that any of a task's tokens sees; `low` and `high` [rows of a head], unless null, are those
// that each row sees.
inline KeyRange find_ranges(const Problem& p, const Task& t, int32_t* low, int32_t* high) {
    const int64_t length = p.kv_lens[t.sequence], group = p.group();
    const int64_t before = length - (p.query_start[t.sequence + 1] - p.query_start[t.sequence]);
    KeyRange seen = {length, 0};
    for (int32_t token = 0; token < t.count; ++token) {
        const int64_t position = before + t.first + token;
        const int64_t row = p.query_start[t.sequence] + t.first + token;
        int64_t end = p.visible_end ? p.visible_end[row] : position + 1;
        end = std::min(std::max(end, position + 1), length);
        const int64_t begin = p.window ? std::max<int64_t>(0, position - p.window + 1) : 0;
        seen = {std::min(seen.begin, begin), std::max(seen.end, end)};
        for (int64_t r = token * group; low && r < (token + 1) * group; ++r)
            low[r] = int32_t(begin), high[r] = int32_t(end);
    }
    return seen;
}

// Floats of one row of a part: its maximum, its total, and its values weighted by that total.
inline int64_t part_width(const Problem& p) { return 2 + p.head_dim; }

// ---------------------------------------------------------------- one task

template <typename T>
class Attention {
  public:
    Attention(const Problem& problem, const Task& task, Scratch& scratch)
        : p(problem), t(task), s(scratch), group(p.group()), rows(int(task.count * group)),
          packed(rows > DIRECT_ROWS<T>), in_units(multiplied_in_units()),
          depth(pad(p.head_dim, LANES)), columns(pad(rows, LANES)),
          by_columns(packed && PER_UNIT == 1 && p.head_dim == depth && 4 * rows >= 3 * columns),
          start(p.query_start[task.sequence] + task.first) {
        s.prepare(t.num_heads, rows, depth, packed, by_columns);
    }

    void run() {
        load_queries();
        const KeyRange seen = find_ranges(p, t, s.low.data(), s.high.data());
        const int64_t begin = std::max(seen.begin, t.key_begin), end = std::min(seen.end, t.key_end);
        seen_by_all = {*std::max_element(s.low.data(), s.low.data() + rows),
                       *std::min_element(s.high.data(), s.high.data() + rows)};
        KeyChunk<T> chunk, next;
        next.count = 0;
        if (begin < end) next.locate(p, t, begin, end);
        for (int64_t key = begin; key < end; key += CHUNK)
            for (int32_t head = 0; head < t.num_heads; ++head) {
                chunk = next;
                if (head + 1 < t.num_heads)
                    next.next_head(p.head_dim);
                else if (key + CHUNK < end)
                    next.locate(p, t, key + CHUNK, end);
                else
                    next.count = 0;
                meet(chunk, next, head);
            }
        if (t.part)
            write_part();
        else
            write_output();
    }

  private:
    using U = typename Arithmetic<T>::U;
    static constexpr int PER_UNIT = U::PER_UNIT;

    const Problem& p;
    const Task& t;
    Scratch& s;
    const int64_t group;
    const int rows;  // of a head
    const bool packed, in_units;
    const int64_t depth, columns;
    const bool by_columns;  // where few of them are padding
    const int64_t start;    // the task's first row of the query tensor
    KeyRange seen_by_all = {0, 0};

    // A chunk of the task's head number `head`; the chunk after it is asked for meanwhile.
    void meet(const KeyChunk<T>& chunk, const KeyChunk<T>& next, int32_t head) {
        const int64_t first = int64_t(head) * rows;
        const float* query = s.query + first * depth;
        float* output = s.output + first * depth;
        if (by_columns && seen_by_all.begin <= chunk.first &&
            chunk.first + chunk.count <= seen_by_all.end)
            return meet_columns(chunk, next, head, output);
        score(chunk, next, query);
        for (int r = 0; r < rows; ++r)
            soften_row(chunk, r, s.maximum + first + r, s.total + first + r, output + r * depth);
        // Zero times NaN or infinity would reach every row of a packed product.
        if (packed && pack_values(chunk, p.head_dim, depth, s.values, asking(next.values, next)))
            add_packed_values(chunk, output);
        else
            add_direct_values(chunk, output);
        if (!packed) asking(next.values, next)(0, CHUNK);
    }

    // The same of a chunk that every row sees.
    void meet_columns(const KeyChunk<T>& chunk, const KeyChunk<T>& next, int32_t head,
                      float* output) {
        const int64_t first = int64_t(head) * rows;
        const float* rows_of[CHUNK];
        widened(chunk.keys, chunk.count, s.keys, rows_of);
        all_column_scores(s.columns + head * depth * columns, columns, depth, rows_of, chunk.count,
                          s.scores, asking(chunk.values, chunk));
        soften_columns<U>(s.scores, columns, rows, chunk.count, p.scale, p.softcap,
                          s.maximum + first, s.total + first, output, depth);
        widened(chunk.values, chunk.count, s.values, rows_of);
        const auto ask = [&next](int key, int64_t at) {
            if (key < next.count) __builtin_prefetch(next.keys[key] + at);
        };
        column_values(s.scores, columns, rows, rows_of, chunk.count, depth, output, depth, ask);
    }

    // Rows of floats: those of the pages, or a copy of them.
    void widened(const T* const* from, int count, float* copy, const float** to) const {
        if constexpr (std::is_same_v<T, float>) {
            std::copy(from, from + count, to);
        } else {
            for (int i = 0; i < count; ++i) {
                to[i] = copy + i * depth;
                for (int64_t d = 0; d < depth; d += LANES)
                    store(copy + i * depth + d, load(from[i] + d));
            }
        }
    }

    // Called with a range of a chunk's keys, asks for the same of the next one's.
    auto asking(const T* const* rows_of_next, const KeyChunk<T>& next) const {
        return [=, count = next.count, dim = p.head_dim](int begin, int end) {
            prefetch_rows(rows_of_next, begin, std::min(end, count), dim);
        };
    }

    // Queries with keys: packed in whole units, straight from pages in whole vectors of them.
    bool multiplied_in_units() const {
        if (!LIES_IN_UNITS<T>) return false;
        if (packed) return p.head_dim % PER_UNIT == 0;
        return PER_UNIT > 1 && p.head_dim % (LANES * PER_UNIT) == 0;
    }

    // As they are where they are multiplied in units, else as floats; scores are scaled later.
    void load_queries() {
        std::fill(s.query, s.query + t.num_heads * rows * depth, 0.0f);
        std::fill(s.output, s.output + t.num_heads * rows * depth, 0.0f);
        if (by_columns) std::fill(s.columns, s.columns + t.num_heads * depth * columns, 0.0f);
        const T* query = static_cast<const T*>(p.query);
        for (int i = 0; i < t.num_heads * rows; ++i) {
            const int r = i % rows;
            const int64_t head = (t.first_head + i / rows) * group + r % group;
            const T* from = query + (start + r / group) * p.query_token + head * p.query_head;
            float* to = s.query + i * depth;
            if (in_units)
                std::memcpy(to, from, p.head_dim * sizeof(T));
            else
                for (int64_t d = 0; d < p.head_dim; ++d) to[d] = widen(from[d]);
            for (int64_t d = 0; by_columns && d < depth; ++d)
                s.columns[(i / rows * depth + d) * columns + r] = widen(from[d]);
            const bool has_sink = p.sinks && !t.part;  // of a part: when it is merged
            s.maximum[i] = has_sink ? p.sinks[head] : LOWEST;
            s.total[i] = has_sink ? 1.0f : 0.0f;
        }
    }

    void score(const KeyChunk<T>& chunk, const KeyChunk<T>& next, const float* query) {
        if (packed) return packed_scores(chunk, next, query);
        asking(next.keys, next)(0, CHUNK);
        if constexpr (LIES_IN_UNITS<T> && PER_UNIT > 1)
            if (in_units)
                return direct_scores<UnitQueries<T>>(query, rows, p.head_dim, depth, chunk, s.scores);
        direct_scores<FloatQueries<T>>(query, rows, p.head_dim, depth, chunk, s.scores);
    }

    void packed_scores(const KeyChunk<T>& chunk, const KeyChunk<T>& next, const float* query) {
        const int64_t padded = pad(chunk.count, LANES);
        if constexpr (LIES_IN_UNITS<T>)
            if (in_units) {
                const int64_t units = p.head_dim / PER_UNIT;
                const auto load = [=](const T* key, int64_t at) {
                    return load_units_within(key, at, units);
                };
                pack_keys(chunk, units, s.keys, load, asking(next.keys, next));
                return product<U>(rows, padded, units, query, depth, s.keys, CHUNK, s.scores, CHUNK,
                                  false);
            }
        const int64_t dim = p.head_dim;
        const auto load = [=](const T* key, int64_t at) { return load_within(key, at, dim); };
        pack_keys(chunk, dim, s.keys, load, asking(next.keys, next));
        product<Whole>(rows, padded, dim, query, depth, s.keys, CHUNK, s.scores, CHUNK, false);
    }

    // The keys of the chunk that row r sees: [begin, end), empty where begin >= end.
    int begin_of(const KeyChunk<T>& chunk, int r) const {
        return int(std::max<int64_t>(s.low[r] - chunk.first, 0));
    }
    int end_of(const KeyChunk<T>& chunk, int r) const {
        return int(std::min<int64_t>(s.high[r] - chunk.first, chunk.count));
    }

    void soften_row(const KeyChunk<T>& chunk, int r, float* maximum, float* total, float* output) {
        const int begin = begin_of(chunk, r), end = end_of(chunk, r);
        float* scores = s.scores + r * CHUNK;
        if (begin >= end)
            std::fill(scores, scores + CHUNK, 0.0f);
        else
            soften<U>(scores, begin, end, chunk.count, p.scale, p.softcap, maximum, total, output,
                      depth);
    }

    void add_packed_values(const KeyChunk<T>& chunk, float* output) {
        for (int r = 0; r < rows; ++r) to_units<U>(s.scores + r * CHUNK, chunk.count);
        product<U>(rows, depth, (chunk.count + PER_UNIT - 1) / PER_UNIT, s.scores, CHUNK, s.values,
                   depth, output, depth, true);
    }

    void add_direct_values(const KeyChunk<T>& chunk, float* output) {
        for (int r = 0; r < rows; ++r)
            direct_values(s.scores + r * CHUNK, begin_of(chunk, r), end_of(chunk, r), p.head_dim,
                          chunk, output + r * depth);
    }

    void write_output() {
        T* output = static_cast<T*>(p.output);
        for (int i = 0; i < t.num_heads * rows; ++i) {
            const int r = i % rows;
            const int64_t head = (t.first_head + i / rows) * group + r % group;
            T* to = output + ((start + r / group) * p.num_heads + head) * p.head_dim;
            const float* from = s.output + i * depth;
            const float inverse = 1.0f / s.total[i];
            for (int64_t d = 0; d < p.head_dim; ++d) narrow(from[d] * inverse, to + d);
        }
    }

    void write_part() {
        for (int i = 0; i < t.num_heads * rows; ++i) {
            const int r = i % rows;
            const int64_t head = (t.first_head + i / rows) * group + r % group;
            float* to = t.part + ((r / group) * p.num_heads + head) * part_width(p);
            to[0] = s.maximum[i], to[1] = s.total[i];
            std::memcpy(to + 2, s.output + i * depth, p.head_dim * sizeof(float));
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

// ---------------------------------------------------------------- keys split between tasks

constexpr int64_t MIN_SPLIT_KEYS = 512, MAX_SPLITS = 64;  // of one sequence; whole chunks
constexpr int64_t HEADS_BYTES = 128 << 10;  // of queries and outputs that a task keeps near by

// A sequence whose keys are split. Part i [tokens][query heads][part_width] is what the tokens got of
// the i-th stretch of keys.
struct Split {
    int32_t sequence, tokens;
    int64_t num_parts, part_size;  // in floats
    float* parts;
};

struct Plan {
    std::vector<Task> tasks;
    std::vector<Split> splits;
};

// Keys to a stretch where so many are split.
inline int64_t split_keys(int64_t keys) {
    return std::max(MIN_SPLIT_KEYS, pad((keys + MAX_SPLITS - 1) / MAX_SPLITS, CHUNK));
}

// The tasks of tokens [first, first + count) over the keys that lie in [begin, end).
inline void add_tasks(const Problem& p, Task task, int32_t heads, std::vector<Task>& tasks) {
    for (int32_t head = 0; head < p.num_kv_heads; head += heads) {
        task.first_head = head;
        task.num_heads = std::min<int32_t>(heads, int32_t(p.num_kv_heads) - head);
        tasks.push_back(task);
    }
}

inline Plan make_plan(const Problem& p) {
    Plan plan;
    const int32_t tile = int32_t(std::max<int64_t>(1, MAX_TILE_ROWS / p.group()));
    int64_t floats = 0, stretches = 0;
    for (int32_t i = 0; i < p.num_sequences; ++i) {
        const int32_t length = p.query_start[i + 1] - p.query_start[i];
        if (length > tile) continue;
        const KeyRange seen = find_ranges(p, {i, 0, 0, 0, length, 0, 0, nullptr}, nullptr, nullptr);
        const int64_t keys = split_keys(seen.end - seen.begin);
        const int64_t parts = (seen.end + keys - 1) / keys - seen.begin / keys;
        stretches += parts;
        if (parts < 2) continue;
        const int64_t size = length * p.num_heads * part_width(p);
        plan.splits.push_back({i, length, parts, size, nullptr});
        floats += parts * size;
    }
    static thread_local std::vector<float> memory;  // grows to the largest step it has met
    if (int64_t(memory.size()) < floats) memory.resize(floats);
    float* next = memory.data();
    for (Split& split : plan.splits) {
        split.parts = next;
        next += split.num_parts * split.part_size;
    }
    // Few stretches for the threads: heads are dealt out one by one, too.
    const bool single = p.num_threads > 1 && stretches < 4 * p.num_threads;
    auto split = plan.splits.begin();
    for (int32_t i = 0; i < p.num_sequences; ++i) {
        const int32_t length = p.query_start[i + 1] - p.query_start[i];
        const int64_t all = p.kv_lens[i];
        if (length > tile) {
            for (int32_t first = 0; first < length; first += tile)
                add_tasks(p, {i, 0, 0, first, std::min(tile, length - first), 0, all, nullptr}, 1,
                          plan.tasks);
            continue;
        }
        const int64_t head_bytes = length * p.group() * p.head_dim * 2 * int64_t(sizeof(float));
        const int32_t heads = single ? 1 : int32_t(std::max<int64_t>(1, HEADS_BYTES / head_bytes));
        if (split == plan.splits.end() || split->sequence != i) {
            add_tasks(p, {i, 0, 0, 0, length, 0, all, nullptr}, heads, plan.tasks);
            continue;
        }
        const KeyRange seen = find_ranges(p, {i, 0, 0, 0, length, 0, 0, nullptr}, nullptr, nullptr);
        const int64_t keys = split_keys(seen.end - seen.begin), first = seen.begin / keys;
        for (int64_t part = 0; part < split->num_parts; ++part) {
            const int64_t begin = (first + part) * keys;
            add_tasks(p, {i, 0, 0, 0, length, begin, begin + keys,
                          split->parts + part * split->part_size}, heads, plan.tasks);
        }
        ++split;
    }
    return plan;
}

// One token's outputs from its parts: each is worth e^(its maximum - the highest).
template <typename T>
void merge_token(const Problem& p, const Split& split, int32_t token) {
    T* output = static_cast<T*>(p.output) +
                (p.query_start[split.sequence] + token) * p.num_heads * p.head_dim;
    static thread_local std::vector<float> sum;
    for (int64_t head = 0; head < p.num_heads; ++head) {
        const float* first = split.parts + (token * p.num_heads + head) * part_width(p);
        float highest = p.sinks ? p.sinks[head] : LOWEST;
        for (int64_t i = 0; i < split.num_parts; ++i)
            highest = std::max(highest, first[i * split.part_size]);
        float total = p.sinks ? std::exp(p.sinks[head] - highest) : 0.0f;
        sum.assign(p.head_dim, 0.0f);
        for (int64_t i = 0; i < split.num_parts; ++i) {
            const float* part = first + i * split.part_size;
            const float worth = std::exp(part[0] - highest);
            total += worth * part[1];
            for (int64_t d = 0; d < p.head_dim; ++d) sum[d] += worth * part[2 + d];
        }
        for (int64_t d = 0; d < p.head_dim; ++d)
            narrow(sum[d] / total, output + head * p.head_dim + d);
    }
}

template <typename T>
void run_step(const Problem& p, Parallel& threads) {
    const Plan plan = make_plan(p);
    threads.ranges(p.num_tokens(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) write_token<T>(p, i);
    });
    threads.each(int64_t(plan.tasks.size()), [&](int64_t i) {
        static thread_local Scratch scratch;
        Attention<T>(p, plan.tasks[i], scratch).run();
    });
    for (const Split& split : plan.splits)
        threads.each(split.tokens, [&](int64_t token) { merge_token<T>(p, split, int32_t(token)); });
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
