// Vectors of 32-bit units: one float, or two bf16 that one instruction multiplies and adds in pairs.

#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <type_traits>

#include "vectors.h"

namespace paged {

typedef int32_t UnitVec __attribute__((vector_size(LANES * 4)));

// LANES units, wherever they come from.
inline UnitVec load_units(const void* from) {
    UnitVec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// One float a unit.
struct Whole {
    using Element = float;
    static constexpr int PER_UNIT = 1;
    static uint32_t unit(float first, float) {
        uint32_t bits;
        std::memcpy(&bits, &first, sizeof bits);
        return bits;
    }
    static Vec add_product(Vec sum, UnitVec a, UnitVec b) { return sum + (Vec)a * (Vec)b; }
    static Vec units(Vec first, Vec) { return first; }
    static Vec exp(Vec x) { return exp_vec(x); }
    static void store_units(void* to, Vec v) { std::memcpy(to, &v, sizeof v); }
};

#ifdef __AVX512BF16__
// Two bf16 a unit, the first in the low half.
struct Pair {
    using Element = BFloat16;
    static constexpr int PER_UNIT = 2;
    static uint32_t unit(float first, float second) {
        BFloat16 low, high;
        narrow(first, &low), narrow(second, &high);
        return low.bits | uint32_t(high.bits) << 16;
    }
    static Vec add_product(Vec sum, UnitVec a, UnitVec b) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    // e^x to 4e-6 relative, for weights that become bf16 or meet values that are; NaN gives NaN.
    static Vec exp(Vec x) {
        const Vec t = (x < -200.0f ? splat(-200.0f) : x) * 1.44269504088896341f;
        const Vec n = (Vec)_mm512_roundscale_ps((__m512)t, 0);
        const Vec f = t - n;
        Vec p = splat(9.600990e-3f);
        p = p * f + 5.591622e-2f;
        p = p * f + 2.4023707e-1f;
        p = p * f + 6.9312215e-1f;
        p = p * f + 1.0f;
        return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
    }
    // Of values that are bf16 already.
    static Vec units(Vec first, Vec second) {
        IntVec low, high;
        std::memcpy(&low, &first, sizeof low), std::memcpy(&high, &second, sizeof high);
        const IntVec both = low >> 16 | (high & 0xffff0000);
        Vec v;
        std::memcpy(&v, &both, sizeof v);
        return v;
    }
    static void store_units(void* to, Vec v) {
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);
        std::memcpy(to, &halves, sizeof halves);
    }
};
#endif

// What tensors of a type are multiplied as.
template <typename T>
struct Arithmetic {
    using U = Whole;
};

#ifdef __AVX512BF16__
template <>
struct Arithmetic<BFloat16> {
    using U = Pair;
};
#endif

// Whether rows of a type are rows of its units as they lie in memory; others must be widened first.
template <typename T>
constexpr bool LIES_IN_UNITS = std::is_same_v<typename Arithmetic<T>::U::Element, T>;

// Keeps the compiler from loading a value again for each of its uses.
template <typename V>
inline V in_register(V v) {
#ifdef __x86_64__
    asm("" : "+v"(v));
#endif
    return v;
}

}  // namespace paged
