// Attention inside windows of patches, in both directions, with rope: what vision towers need.
//
// Everything is kept in units of 32 bits: one float, or two bf16 that one instruction multiplies and
// adds in pairs (twice the arithmetic of fp32). Keys lie as [depth units][keys], values as
// [key units][depth], both packed once per window and head; queries come in tiles of rows that meet
// one chunk of keys after the other with an online softmax in fp32, so a chunk stays in a cache near
// by while all rows of a tile pass.

#pragma once

#include <cmath>
#include <memory>

#include "../attention/chunk.h"
#include "../attention/threads.h"

namespace native {

using namespace paged;

struct Windows {
    const void* qkv;         // [rows][3][heads][dim]
    const float *cos, *sin;  // [rows][dim]
    const int32_t* bounds;   // [count + 1] rows where windows begin, and where the last ends
    void* output;            // [rows][heads][dim]
    int64_t count, heads, dim;
    float scale;
    int num_threads;
};

// T is what the tensors hold, which is multiplied as units U.
template <typename T>
class WindowAttention {
    using U = typename Arithmetic<T>::U;
    static constexpr int KEYS = 256;            // of a chunk
    static constexpr int ROWS = BLOCK_ROWS, GROUP = 96;  // of a register tile, of a task

  public:
    explicit WindowAttention(const Windows& windows)
        : w(windows), units((w.dim + U::PER_UNIT - 1) / U::PER_UNIT), depth(pad(w.dim, LANES)) {
        plan();
    }

    void run() {
        each(int64_t(chunks.size()), [&](int64_t i) { pack(chunks[i]); });
        each(int64_t(tasks.size()), [&](int64_t i) { attend(tasks[i]); });
    }

  private:
    struct Chunk {
        int64_t first, head;
        int count, padded;
        int64_t keys_at, values_at;  // in `packed`
    };
    struct Group {
        int64_t first, head;
        int count;
        size_t chunks_begin, chunks_end;
    };

    const Windows& w;
    const int64_t units, depth;
    std::vector<Chunk> chunks;
    std::vector<Group> tasks;
    std::unique_ptr<uint32_t[]> packed;

    template <typename F>
    void each(int64_t count, F part) const {
        Parallel(w.num_threads).each(count, part);
    }

    void plan() {
        int64_t size = 0;
        for (int64_t i = 0; i < w.count; ++i)
            for (int64_t head = 0; head < w.heads; ++head) {
                const int64_t begin = w.bounds[i], end = w.bounds[i + 1];
                const size_t chunks_begin = chunks.size();
                for (int64_t at = begin; at < end; at += KEYS) {
                    const int count = int(std::min<int64_t>(KEYS, end - at));
                    const int padded = int(pad(count, LANES));
                    chunks.push_back({at, head, count, padded, size, size + units * padded});
                    size += units * padded + padded / U::PER_UNIT * depth;
                }
                for (int64_t at = begin; at < end; at += GROUP) {
                    const int count = int(std::min<int64_t>(GROUP, end - at));
                    tasks.push_back({at, head, count, chunks_begin, chunks.size()});
                }
            }
        packed.reset(new uint32_t[size]);
    }

    const T* row(int64_t token, int part, int64_t head) const {
        return static_cast<const T*>(w.qkv) + ((token * 3 + part) * w.heads + head) * w.dim;
    }

    // A query (part 0) or key (part 1), turned by its position.
    void turned(int64_t token, int part, int64_t head, float factor, float* to) const {
        const T* x = row(token, part, head);
        const int64_t half = w.dim / 2;
        const float *cos = w.cos + token * w.dim, *sin = w.sin + token * w.dim;
        for (int64_t i = 0; i < half; ++i) {
            const float low = widen(x[i]), high = widen(x[i + half]);
            to[i] = (low * cos[i] - high * sin[i]) * factor;
            to[i + half] = (high * cos[i + half] + low * sin[i + half]) * factor;
        }
        to[w.dim] = 0.0f;
    }

    void pack(const Chunk& chunk) {
        std::vector<float> buffer(2 * (depth + 1));
        float *first = buffer.data(), *second = first + depth + 1;
        uint32_t *keys = packed.get() + chunk.keys_at, *values = packed.get() + chunk.values_at;
        for (int i = 0; i < chunk.padded; ++i) {
            turned(chunk.first + std::min(i, chunk.count - 1), 1, chunk.head, 1.0f, first);
            for (int64_t j = 0; j < units; ++j)
                keys[j * chunk.padded + i] =
                    U::unit(first[j * U::PER_UNIT], first[(j + 1) * U::PER_UNIT - 1]);
        }
        for (int i = 0; i < chunk.padded; i += U::PER_UNIT) {
            widen_value(chunk, i, first), widen_value(chunk, i + U::PER_UNIT - 1, second);
            for (int64_t d = 0; d < depth; ++d)
                values[i / U::PER_UNIT * depth + d] = U::unit(first[d], second[d]);
        }
    }

    // A value, zero past the chunk's end and past its own.
    void widen_value(const Chunk& chunk, int i, float* to) const {
        std::fill(to, to + depth, 0.0f);
        if (i >= chunk.count) return;
        const T* from = row(chunk.first + i, 2, chunk.head);
        for (int64_t d = 0; d < w.dim; ++d) to[d] = widen(from[d]);
    }

    struct State {
        std::vector<uint32_t> query, weights;  // [rows][units], [ROWS][KEYS / PER_UNIT]
        std::vector<float> scores, output;     // [ROWS][KEYS], [rows][depth]
        std::vector<float> maximum, total;     // [rows]
    };

    void attend(const Group& group) const {
        static thread_local State s;
        const int rows = int(pad(group.count, ROWS));
        s.query.assign(rows * units, 0), s.weights.resize(ROWS * KEYS);
        s.scores.resize(ROWS * KEYS), s.output.assign(rows * depth, 0.0f);
        s.maximum.assign(rows, -INFINITY), s.total.assign(rows, 0.0f);
        std::vector<float> buffer(depth + 1);
        for (int r = 0; r < group.count; ++r) {
            turned(group.first + r, 0, group.head, w.scale, buffer.data());
            for (int64_t j = 0; j < units; ++j)
                s.query[r * units + j] = U::unit(buffer[j * U::PER_UNIT],
                                                 buffer[(j + 1) * U::PER_UNIT - 1]);
        }
        for (size_t i = group.chunks_begin; i < group.chunks_end; ++i)
            for (int r = 0; r < rows; r += ROWS) meet(s, chunks[i], r);
        for (int r = 0; r < group.count; ++r) {
            T* to = static_cast<T*>(w.output) + ((group.first + r) * w.heads + group.head) * w.dim;
            const float inverse = 1.0f / s.total[r];
            for (int64_t d = 0; d < w.dim; ++d) narrow(s.output[r * depth + d] * inverse, to + d);
        }
    }

    // Rows [first, first + ROWS) meet one chunk of keys.
    void meet(State& s, const Chunk& chunk, int first) const {
        const uint32_t* keys = packed.get() + chunk.keys_at;
        const uint32_t* values = packed.get() + chunk.values_at;
        product<U>(ROWS, chunk.padded, units, s.query.data() + first * units, units, keys,
                   chunk.padded, s.scores.data(), KEYS, false);
        const int64_t stride = KEYS / U::PER_UNIT, inner = chunk.padded / U::PER_UNIT;
        for (int r = 0; r < ROWS; ++r)
            soften(s.scores.data() + r * KEYS, chunk, s.weights.data() + r * stride,
                   s.maximum[first + r], s.total[first + r], s.output.data() + (first + r) * depth);
        product<U>(ROWS, depth, inner, s.weights.data(), stride, values, depth,
                   s.output.data() + first * depth, depth, true);
    }

    // Scores to weights; what was summed so far is scaled to the new maximum.
    void soften(float* scores, const Chunk& chunk, uint32_t* weights, float& maximum, float& total,
                float* output) const {
        std::fill(scores + chunk.count, scores + chunk.padded, -1e30f);
        Vec highest = load(scores);
        for (int i = LANES; i < chunk.padded; i += LANES) highest = max_vec(highest, load(scores + i));
        const float now = reduce_max(highest);
        if (!(now <= maximum)) {
            const float scale = std::exp(maximum - now);
            for (int64_t d = 0; d < depth; d += LANES) store(output + d, load(output + d) * scale);
            total *= scale, maximum = now;
        }
        Vec sum = {};
        for (int i = 0; i < chunk.padded; i += LANES) {
            const Vec weight = U::exp(load(scores + i) - maximum);
            sum += weight;
            U::store_units(weights + i / U::PER_UNIT, weight);
        }
        total += reduce_sum(sum);
    }
};

}  // namespace native
