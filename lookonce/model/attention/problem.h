// What one call is asked (Problem), how it is divided (Task), and where a stretch of keys lies
// (KeyChunk).

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "units.h"

namespace paged {

constexpr int CHUNK = 64;  // keys per online-softmax step

struct Problem {
    const void *query, *key, *value;  // [T, heads, D], strides below, D contiguous
    void *output;                     // [T, Hq, D], contiguous
    void *key_pages, *value_pages;    // [blocks, block_size, Hkv, D], contiguous
    const int32_t *query_start;       // [B + 1]
    const int32_t *kv_lens;           // [B]
    const int32_t *block_tables;      // [B, table_columns], rows `table_stride` apart
    const int64_t *slots;             // [T]
    const int32_t *visible_end;       // [T] or null
    const float *sinks;               // [Hq] or null
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // in elements
    int64_t table_columns, table_stride, num_sequences;
    int64_t num_heads, num_kv_heads, head_dim, block_size, num_blocks;
    int64_t window;                   // 0: none
    float scale, softcap;             // softcap 0: none
    int num_threads;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t num_tokens() const { return query_start[num_sequences]; }
};

// Some query tokens of one sequence and some KV heads meet some keys.
struct Task {
    int32_t sequence;
    int32_t first_head, num_heads;
    int32_t first, count;         // query tokens within the sequence
    int64_t key_begin, key_end;   // of the keys that the tokens see, those that this task attends to
    float* part;                  // where its result goes if it attends to some of them: see Parts
};

inline int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What one thread needs; grows to the largest task it has met. Queries, outputs, maxima and totals
// are those of all heads of a task, head after head; scores those of one. `columns` are the queries
// once more, [depth][rows padded to whole vectors].
struct Scratch {
    std::vector<float> memory;
    float *query, *scores, *output, *keys, *values, *maximum, *total, *columns;
    std::vector<int32_t> low, high;

    void prepare(int64_t heads, int64_t rows, int64_t depth, bool packed, bool by_columns) {
        const int64_t padded = pad(rows, LANES), chunk_floats = packed ? depth * CHUNK : 0;
        int64_t sizes[] = {heads * rows * depth, padded * CHUNK, heads * rows * depth,
                           chunk_floats,         chunk_floats,   heads * rows,
                           heads * rows,         by_columns ? heads * depth * padded : 0};
        float** parts[] = {&query, &scores, &output, &keys, &values, &maximum, &total, &columns};
        int64_t sum = 0;
        for (int64_t size : sizes) sum += pad(size, LANES);
        if (int64_t(memory.size()) < sum) memory.resize(sum);
        float* next = memory.data();
        for (int i = 0; i < 8; ++i) {
            *parts[i] = next;
            next += pad(sizes[i], LANES);
        }
        if (int64_t(low.size()) < rows) low.resize(rows);
        if (int64_t(high.size()) < rows) high.resize(rows);
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
        for (int i = 0; i < count; ++block, inside = 0) {
            int64_t at = (table[block] * p.block_size + inside) * row +
                         task.first_head * p.head_dim;
            const int stop = int(std::min<int64_t>(count, i + p.block_size - inside));
            for (; i < stop; ++i, at += row) {
                keys[i] = static_cast<const T*>(p.key_pages) + at;
                values[i] = static_cast<const T*>(p.value_pages) + at;
            }
        }
    }

    // The same keys of the next head.
    void next_head(int64_t head_dim) {
        for (int i = 0; i < count; ++i) keys[i] += head_dim, values[i] += head_dim;
    }
};

// Asks for rows [begin, end) before they are needed: the keys of one head are too far apart in the
// pages for the CPU to foresee. None past the last.
template <typename T>
inline void prefetch_rows(const T* const* rows, int begin, int end, int64_t dim) {
    constexpr int64_t LINE = 64;
    for (int i = begin; i < end; ++i) {
        const char* from = reinterpret_cast<const char*>(rows[i]);
        for (int64_t at = 0; at < dim * int64_t(sizeof(T)); at += LINE) __builtin_prefetch(from + at);
    }
}

}  // namespace paged
