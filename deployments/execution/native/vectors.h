// Vectors as wide as the machine this is compiled on, and what the kernels need of them: reading and
// writing float32 and bfloat16 alike, sums across lanes, exp2 and tanh.
//
// Knows no kernel. Portable C++17 with the vector extension of GCC and Clang.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int QUADS = LANES / 4;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInts __attribute__((vector_size(16)));
typedef uint32_t QuadWords __attribute__((vector_size(16)));
typedef uint16_t QuadHalves __attribute__((vector_size(8)));
// As they lie in memory: at any address, and of whatever type the numbers are.
typedef Floats StoredFloats __attribute__((aligned(4), may_alias));
typedef Halves StoredHalves __attribute__((aligned(2), may_alias));
typedef Quad StoredQuad __attribute__((aligned(4), may_alias));
typedef QuadHalves StoredQuadHalves __attribute__((aligned(2), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (QuadInts{i, j, k, l}))
#endif
#define INLINE inline __attribute__((always_inline))

// The upper half of a float32.
struct BFloat16 {
    uint16_t bits;
};

INLINE float widen(float value) { return value; }

INLINE float widen(BFloat16 value) {
    const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

INLINE void narrow(float value, float* to) { *to = value; }

// To the nearest, ties to even; what is not a number stays so.
INLINE void narrow(float value, BFloat16* to) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if (value != value) {
        to->bits = static_cast<uint16_t>((word >> 16) | 0x40);
    } else {
        to->bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    }
}

INLINE Floats splat(float value) { return value - Floats{}; }

INLINE Floats load(const float* from) {
    // Not auto, which would forget the alignment.
    return *reinterpret_cast<const StoredFloats*>(from);
}

// By the instruction there is for it: GCC makes four of the conversion.
INLINE Words widened(Halves halves) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    return __builtin_convertvector(halves, Words);
#endif
}

INLINE Floats load(const BFloat16* from) {
    return reinterpret_cast<Floats>(widened(*reinterpret_cast<const StoredHalves*>(from)) << 16);
}

INLINE void store(Floats values, float* to) { *reinterpret_cast<StoredFloats*>(to) = values; }

INLINE Halves rounded_halves(Floats values) {
    const Words words = reinterpret_cast<Words>(values);
    const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    const Words no_number = (words >> 16) | 0x40;
    const Words is_number = reinterpret_cast<Words>(values == values);
    return __builtin_convertvector((is_number & rounded) | (~is_number & no_number), Halves);
}

// Rounded as `narrow` does it.
INLINE void store(Floats values, BFloat16* to) {
    *reinterpret_cast<StoredHalves*>(to) = rounded_halves(values);
}

INLINE Quad load_quad(const float* from) { return *reinterpret_cast<const StoredQuad*>(from); }

INLINE Quad load_quad(const BFloat16* from) {
    const QuadHalves halves = *reinterpret_cast<const StoredQuadHalves*>(from);
    return reinterpret_cast<Quad>(__builtin_convertvector(halves, QuadWords) << 16);
}

INLINE void store_quad(Quad value, float* to) { *reinterpret_cast<StoredQuad*>(to) = value; }

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

INLINE float largest_of(Floats lanes) {
    Quad quads[QUADS];
    std::memcpy(quads, &lanes, sizeof quads);
    Quad quad = quads[0];
    for (int i = 1; i < QUADS; ++i) quad = quads[i] > quad ? quads[i] : quad;
    const float low = quad[1] > quad[0] ? quad[1] : quad[0];
    const float high = quad[3] > quad[2] ? quad[3] : quad[2];
    return high > low ? high : low;
}

INLINE Quad folded(Floats lanes) {
    Quad quads[QUADS];
    std::memcpy(quads, &lanes, sizeof quads);
    Quad quad = quads[0];
    for (int i = 1; i < QUADS; ++i) quad += quads[i];
    return quad;
}

INLINE float sum_of(Floats lanes) {
    const Quad quad = folded(lanes);
    return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}

// The sums of four vectors, side by side.
INLINE Quad sums_of(Floats a, Floats b, Floats c, Floats d) {
    const Quad first = folded(a), second = folded(b), third = folded(c), fourth = folded(d);
    const Quad left = SHUFFLE(first, second, 0, 4, 1, 5) + SHUFFLE(first, second, 2, 6, 3, 7);
    const Quad right = SHUFFLE(third, fourth, 0, 4, 1, 5) + SHUFFLE(third, fourth, 2, 6, 3, 7);
    return SHUFFLE(left, right, 0, 1, 4, 5) + SHUFFLE(left, right, 2, 3, 6, 7);
}

// Four rows of four become four columns.
INLINE void transpose(Quad (&rows)[4]) {
    const Quad low = SHUFFLE(rows[0], rows[1], 0, 4, 1, 5);
    const Quad high = SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
    const Quad low_next = SHUFFLE(rows[2], rows[3], 0, 4, 1, 5);
    const Quad high_next = SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = SHUFFLE(low, low_next, 0, 1, 4, 5);
    rows[1] = SHUFFLE(low, low_next, 2, 3, 6, 7);
    rows[2] = SHUFFLE(high, high_next, 0, 1, 4, 5);
    rows[3] = SHUFFLE(high, high_next, 2, 3, 6, 7);
}

// x = whole + part with |part| <= 1/2, and 2^part - 1; both exp2 and tanh build on it.
struct Exp2Parts {
    Ints whole_bits;  // whole, shifted to where a float's exponent stands
    Floats rest;      // 2^part - 1
};

// The polynomial is the least-squares fit of (2^part - 1) / part at Chebyshev points; 2^part is off
// by 5e-9 in exact arithmetic and by 9e-8 in float32's.
INLINE Exp2Parts exp2_parts(Floats x) {
    const Floats ROUNDER = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves whole numbers
    const Floats shifted = x + ROUNDER;
    const Floats part = x - (shifted - ROUNDER);
    Floats rest = splat(1.546144777e-4f);
    rest = rest * part + 1.339086681e-3f;
    rest = rest * part + 9.618056938e-3f;
    rest = rest * part + 5.550356954e-2f;
    rest = rest * part + 2.402265072e-1f;
    rest = rest * part + 6.931471825e-1f;
    return {reinterpret_cast<Ints>(shifted) << 23, rest * part};
}

// 2^x for x <= 0, to float32's last place or two; 0 below 2^-125; what is no number stays so.
INLINE Floats exp2_of(Floats x) {
    const Exp2Parts parts = exp2_parts(x);
    const Ints power = reinterpret_cast<Ints>(parts.rest + 1.0f) + parts.whole_bits;
    return reinterpret_cast<Floats>(power & ~(x < splat(-125.0f)));
}

INLINE float exp2_of(float x) { return exp2_of(splat(x))[0]; }

// tanh(x) = (e^2x - 1) / (e^2x + 1), with e^2x - 1 computed as such, so that small x stay exact.
INLINE Floats tanh_of(Floats x) {
    const Floats bound = splat(10.0f);  // where float32's tanh is 1
    Floats bounded = x > bound ? bound : x;
    bounded = bounded < -bound ? -bound : bounded;
    const Exp2Parts parts = exp2_parts(bounded * 2.88539008f);
    const Floats power = reinterpret_cast<Floats>(
        reinterpret_cast<Ints>(splat(1.0f)) + parts.whole_bits);
    const Floats less_one = parts.rest * power + (power - 1.0f);
    return less_one / (less_one + 2.0f);
}

}  // namespace
