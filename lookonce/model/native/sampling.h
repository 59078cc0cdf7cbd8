// Draws one token from the scores of a row: temperature, min-p, top-k and top-p, which keep all
// tokens that are as likely as a threshold, then the inverse of the running sum of what is left. As
// `draw` of logits_processors.py, in one or two passes over the vocabulary.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "../attention/vectors.h"

namespace native {

using namespace paged;

constexpr int64_t DRAW_BLOCK = 256;     // tokens whose weights are added up together
constexpr int64_t FEW_RANKED = 256;     // weights that are sorted rather than added up by their bits
constexpr uint32_t NUM_SUMS = 2048;
constexpr int64_t FAILED_ROW = -1;

struct Draw {
    double temperature;  // 0: the likeliest token
    double top_k;        // at least 1; of more than there are tokens: no limit
    double top_p;
    double min_p;
};

// Of a row: its uniform number is a function of these alone.
struct Place {
    uint64_t seed;
    uint64_t position;
};

// SplitMix64
inline uint64_t mixed(uint64_t state) {
    state += 0x9E3779B97F4A7C15;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
}

// In [0, 1); as `uniforms` of logits_processors.py.
inline double uniform_at(const Place& place) {
    const uint64_t state = mixed(mixed(place.seed) + place.position * 0x9E3779B97F4A7C15);
    return double(state >> 12) * 0x1p-52;
}

// The largest score's index; -1 where a score is NaN, or the largest infinite.
inline int64_t best_of(const float* scores, int64_t count) {
    Vec highest = splat(-INFINITY), nothing = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vec score = load(scores + i);
        highest = max_vec(score, highest);
        nothing += score != score ? splat(1.0f) : splat(0.0f);
    }
    float best = reduce_max(highest), num_nan = reduce_sum(nothing);
    for (; i < count; ++i) best = std::max(best, scores[i]), num_nan += scores[i] != scores[i];
    if (num_nan > 0 || !std::isfinite(best)) return FAILED_ROW;
    return std::find(scores, scores + count, best) - scores;
}

// Draws from one row after another with the same memory.
class Drawing {
  public:
    // A row has `count` scores.
    explicit Drawing(int64_t count)
        : count(count),
          num_blocks((count + DRAW_BLOCK - 1) / DRAW_BLOCK),
          weights(num_blocks * DRAW_BLOCK),
          sums(num_blocks),
          largest(num_blocks) {}

    // The token, or -1 for a row with NaN or infinity.
    int64_t token(const float* scores, const Draw& draw, const Place& place) {
        const int64_t best = best_of(scores, count);
        if (best == FAILED_ROW || draw.temperature == 0) return best;
        weigh(scores, scores[best], float(1 / draw.temperature), float(draw.min_p));
        const float threshold = find_threshold(draw);
        if (threshold > 0) cut(threshold);
        return pick(uniform_at(place), best);
    }

  private:
    // Weights relative to the likeliest token's, 0 below `least`, with their sums by block.
    void weigh(const float* scores, float best, float cold, float least) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            Vec sum = {}, highest = {};
            for (int64_t i = block * DRAW_BLOCK; i < (block + 1) * DRAW_BLOCK; i += LANES) {
                Vec weight = exp_vec((within(scores, i) - splat(best)) * splat(cold));
                weight = weight < splat(least) ? splat(0.0f) : weight;
                store(weights.data() + i, weight);
                sum += weight, highest = max_vec(weight, highest);
            }
            sums[block] = reduce_sum(sum), largest[block] = reduce_max(highest);
        }
    }

    Vec within(const float* scores, int64_t at) const {
        if (at + LANES <= count) return load(scores + at);
        float rest[LANES];
        for (int64_t i = 0; i < LANES; ++i) rest[i] = at + i < count ? scores[at + i] : -INFINITY;
        return load(rest);
    }

    // The smallest weight that top-k and top-p keep; 0 if all are kept.
    float find_threshold(const Draw& draw) {
        const bool limited = draw.top_k < double(count);
        if (!limited && draw.top_p >= 1) return 0;
        int64_t most = count;
        double total = 0;
        for (const double sum : sums) total += sum;
        gather(limited ? least_of(int64_t(draw.top_k)) : float(total * (1 - draw.top_p) / count));
        if (limited) {
            most = int64_t(draw.top_k);
            if (most < int64_t(ranked.size()))
                std::nth_element(ranked.begin(), ranked.begin() + most, ranked.end(),
                                 std::greater<float>());
            ranked.resize(std::min<int64_t>(most, ranked.size()));
            total = 0;
            for (const float weight : ranked) total += weight;
            if (draw.top_p >= 1) return *std::min_element(ranked.begin(), ranked.end());
        }
        return nucleus(draw.top_p * total);
    }

    // At least `k` weights are as large as this: the maxima of as many blocks.
    float least_of(int64_t k) {
        if (k > num_blocks) return 0;
        ranked.assign(largest.begin(), largest.end());
        std::nth_element(ranked.begin(), ranked.begin() + k - 1, ranked.end(), std::greater<float>());
        return ranked[k - 1];
    }

    // The positive weights that are as large as `least`. The sum of all smaller ones is less than
    // what top-p leaves out, so none of them is kept.
    void gather(float least) {
        ranked.clear();
        for (int64_t block = 0; block < num_blocks; ++block) {
            if (largest[block] < least) continue;
            const float* from = weights.data() + block * DRAW_BLOCK;
            for (int64_t i = 0; i < DRAW_BLOCK; ++i)
                if (from[i] > 0 && from[i] >= least) ranked.push_back(from[i]);
        }
    }

    // The smallest of the fewest largest weights whose sum reaches `wanted`. Few are sorted; of many,
    // sums by the leading bits of the weights tell where it is, then by the bits after them (the
    // bits of positive floats are in the order of their values).
    float nucleus(double wanted) {
        double running = 0;
        for (const int shift : {21, 10, 0}) {
            if (int64_t(ranked.size()) <= FEW_RANKED) break;
            const uint32_t mask = shift == 0 ? NUM_SUMS / 2 - 1 : NUM_SUMS - 1;
            double by_bits[NUM_SUMS] = {};
            for (const float weight : ranked) by_bits[bits_of(weight) >> shift & mask] += weight;
            uint32_t at = 0;
            for (uint32_t i = NUM_SUMS; i-- > 0;) {
                if (by_bits[i] == 0) continue;
                at = i;
                if (running + by_bits[i] >= wanted) break;
                running += by_bits[i];
            }
            const auto elsewhere = [&](float weight) {
                return (bits_of(weight) >> shift & mask) != at;
            };
            ranked.erase(std::remove_if(ranked.begin(), ranked.end(), elsewhere), ranked.end());
        }
        std::sort(ranked.begin(), ranked.end(), std::greater<float>());
        for (const float weight : ranked) {
            running += weight;
            if (running >= wanted) return weight;
        }
        return ranked.back();
    }

    static uint32_t bits_of(float weight) {
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        return bits;
    }

    // Weights below the threshold become 0.
    void cut(float threshold) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            Vec sum = {};
            if (largest[block] >= threshold)
                for (int64_t i = block * DRAW_BLOCK; i < (block + 1) * DRAW_BLOCK; i += LANES) {
                    Vec weight = load(weights.data() + i);
                    weight = weight < splat(threshold) ? splat(0.0f) : weight;
                    store(weights.data() + i, weight);
                    sum += weight;
                }
            sums[block] = reduce_sum(sum);
        }
    }

    // The token where the running sum, in id order, passes the uniform number's share of it.
    int64_t pick(double uniform, int64_t best) const {
        double total = 0, running = 0;
        for (const double sum : sums) total += sum;
        const double target = uniform * total;
        int64_t found = best;  // rounding may leave the target above every sum
        for (int64_t block = 0; block < num_blocks; ++block) {
            if (running + sums[block] <= target) {
                running += sums[block];
                continue;
            }
            for (int64_t i = block * DRAW_BLOCK; i < (block + 1) * DRAW_BLOCK; ++i) {
                if (weights[i] == 0) continue;
                running += weights[i], found = i;
                if (running > target) return found;
            }
            return found;
        }
        return found;
    }

    int64_t count, num_blocks;
    std::vector<float> weights;
    std::vector<double> sums;
    std::vector<float> largest, ranked;
};

}  // namespace native
