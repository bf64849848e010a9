// How numbers lie packed for the products of attention: in words of 4 bytes, which hold DEPTH
// neighbours along the depth of a product.
//
//     float32, and bfloat16 where it has to be widened      DEPTH 1   a word: one float32
//     bfloat16 where the machine multiplies pairs of it     DEPTH 2   a word: two bfloat16
//
//     keys, queries: neighbours are places of one key       k[0] k[1] | k[2] k[3] | ...
//     values: the same place of neighbouring keys           v0[d] v1[d] | v0[d+1] v1[d+1] | ...
//     weights: neighbouring keys' weights, rounded to bfloat16, as FlashAttention does
//
// Products are exact and sums float32 either way. Pairs are twice the products per instruction.
// A weight or a place that is missing from a word is a zero.

#pragma once

#include "vectors.h"

namespace {

template <typename Number>
struct Packing {
    static constexpr int DEPTH = 1;

    // One word of a line, in all lanes.
    static INLINE Floats broadcast(const float* word) { return splat(*word); }

    static INLINE Floats add(Floats sum, Floats line, Floats column) { return sum + line * column; }

    // Four words of what lies in memory side by side.
    static INLINE Quad four_words(const Number* from) { return load_quad(from); }

    // One word of the `left` numbers that are left, of which it takes up to DEPTH.
    static INLINE float word(const Number* from, int64_t) { return widen(*from); }

    // LANES words of what lies in memory side by side.
    static INLINE Floats words(const Number* from) { return load(from); }

    // Words of LANES places of DEPTH values, and of one place.
    static INLINE Floats columns(const Number* const* values, int64_t place) {
        return load(values[0] + place);
    }

    static INLINE float column(const Number* const* values, int64_t place) {
        return widen(values[0][place]);
    }

    // The weights of columns [first, last) become words, from place first / DEPTH on.
    static INLINE void pack_weights(float*, int64_t, int64_t) {}
};

#if defined(__AVX512BF16__)

template <>
struct Packing<BFloat16> {
    static constexpr int DEPTH = 2;

    static INLINE float joined(BFloat16 low, BFloat16 high) {
        const uint32_t bits = low.bits | static_cast<uint32_t>(high.bits) << 16;
        float word;
        std::memcpy(&word, &bits, sizeof word);
        return word;
    }

    static INLINE Floats broadcast(const float* word) {
        int32_t bits;  // no arithmetic touches a pair
        std::memcpy(&bits, word, sizeof bits);
        return (Floats)_mm512_set1_epi32(bits);
    }

    static INLINE Floats add(Floats sum, Floats line, Floats column) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)line, (__m512bh)column);
    }

    static INLINE Quad four_words(const BFloat16* from) {
        Quad words;
        std::memcpy(&words, from, sizeof words);
        return words;
    }

    static INLINE float word(const BFloat16* from, int64_t left) {
        return joined(from[0], left > 1 ? from[1] : BFloat16{0});
    }

    static INLINE Floats words(const BFloat16* from) {
        return (Floats)_mm512_loadu_si512(from);
    }

    static INLINE Floats columns(const BFloat16* const* values, int64_t place) {
        return reinterpret_cast<Floats>(halves(values[0] + place) | halves(values[1] + place) << 16);
    }

    static INLINE float column(const BFloat16* const* values, int64_t place) {
        return joined(values[0][place], values[1][place]);
    }

    static INLINE void pack_weights(float* weights, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i += 2 * LANES) {
            const auto pairs = _mm512_cvtne2ps_pbh((__m512)load(weights + i + LANES),
                                                   (__m512)load(weights + i));
            store((Floats)pairs, weights + i / 2);
        }
    }

private:
    static INLINE Words halves(const BFloat16* from) {
        return widened(*reinterpret_cast<const StoredHalves*>(from));
    }
};

#endif

}  // namespace
