// Vectors of the width the CPU has, from the compiler's vector extensions: nothing here is
// specific to one instruction set.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace paged {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));

struct BFloat16 {
    uint16_t bits;
};

inline Vec splat(float x) {  // not as 0 + x, which is an addition because of -0
    Vec v;
    for (int i = 0; i < LANES; ++i) v[i] = x;
    return v;
}

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

inline void store(BFloat16* to, Vec v) {  // the same of whole vectors
    IntVec bits;
    std::memcpy(&bits, &v, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    bits = v != v ? IntVec{} + 0x7fc0 : bits;
    const HalfVec half = __builtin_convertvector(bits, HalfVec);
    std::memcpy(to, &half, sizeof half);
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

// Both transposes below go level by level, each pairing vectors that are HALF apart: low_halves is
// [a.low b.low] within every segment of 2 * HALF lanes, high_halves [a.high b.high].
template <int HALF>
constexpr int low_half(int lane) {
    return (lane / HALF % 2) * LANES + (lane / HALF / 2) * 2 * HALF + lane % HALF;
}

template <int HALF, size_t... LANE>
inline Vec low_halves(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, low_half<HALF>(LANE)...);
}

template <int HALF, size_t... LANE>
inline Vec high_halves(Vec a, Vec b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(a, b, (low_half<HALF>(LANE) + HALF)...);
}

constexpr auto LANE_INDEX = std::make_index_sequence<LANES>();

template <int BY, size_t... LANE>
inline Vec rotated(Vec v, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(v, v, int((LANE + BY) % LANES)...);
}

template <int HALF = LANES / 2>
inline float reduce_max(Vec v) {
    v = max_vec(v, rotated<HALF>(v, LANE_INDEX));
    if constexpr (HALF > 1) return reduce_max<HALF / 2>(v);
    return v[0];
}

template <int HALF = LANES / 2>
inline float reduce_sum(Vec v) {
    v = v + rotated<HALF>(v, LANE_INDEX);
    if constexpr (HALF > 1) return reduce_sum<HALF / 2>(v);
    return v[0];
}

// Lane i of v[j] becomes lane j of v[i].
template <int HALF = LANES / 2>
inline void transpose(Vec* v) {
    for (int base = 0; base < LANES; base += 2 * HALF)
        for (int i = base; i < base + HALF; ++i) {
            const Vec a = v[i], b = v[i + HALF];
            v[i] = low_halves<HALF>(a, b, LANE_INDEX);
            v[i + HALF] = high_halves<HALF>(a, b, LANE_INDEX);
        }
    if constexpr (HALF > 1) transpose<HALF / 2>(v);
}

// Lane i of the result is the sum of the lanes of v[i]; v is spent.
template <int HALF = LANES / 2>
inline Vec transpose_sum(Vec* v) {
    for (int i = 0; i < HALF; ++i)
        v[i] = low_halves<HALF>(v[i], v[i + HALF], LANE_INDEX) +
               high_halves<HALF>(v[i], v[i + HALF], LANE_INDEX);
    if constexpr (HALF > 1) return transpose_sum<HALF / 2>(v);
    return v[0];
}

}  // namespace paged
