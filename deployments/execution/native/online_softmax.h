// Softmax over keys that come tile by tile: scores become weights relative to the largest score so
// far, and what was summed before is corrected when that grows (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; as FlashAttention uses it).
//
//     scores of some lines against one tile      columns [first, last) are in use
//     line 0   [ . . s s s s s s . . ]           scores are powers of two: scaling * q.k * log2(e)
//     line 1   [ . . s s s s s H . . ]           H: hidden from this line, minus infinity

#pragma once

#include "paged_layout.h"
#include "vectors.h"

namespace {

typedef float Scores[TILE];

// The softmax of LINES lines so far. Weights are relative to 2^maximum.
template <int LINES>
struct Running {
    float maxima[LINES];
    Floats sums[LINES];  // of the weights, spread over lanes

    void reset() {
        for (int i = 0; i < LINES; ++i) {
            maxima[i] = NO_SCORE;
            sums[i] = Floats{};
        }
    }
};

// Hide the columns of [first, last) outside [seen_first, seen_last).
INLINE void hide(float* scores, int64_t first, int64_t last, int64_t seen_first,
                 int64_t seen_last) {
    for (int64_t i = first; i < std::min(seen_first, last); ++i) scores[i] = HIDDEN;
    for (int64_t i = std::max(seen_last, first); i < last; ++i) scores[i] = HIDDEN;
}

// softcap * tanh(score), as a power of two; scores came divided by softcap.
INLINE void cap(float* scores, int64_t first, int64_t last, float softcap) {
    for (int64_t i = first; i < last; i += LANES)
        store(tanh_of(load(scores + i)) * (softcap * LOG2_E), scores + i);
}

// Scores of columns [first, last), which fill whole vectors, become weights; `corrections` is what
// each line's earlier sums are to be multiplied with.
template <int LINES>
INLINE void weigh(Scores* scores, int64_t first, int64_t last, Running<LINES>& running,
                  float* corrections) {
    for (int line = 0; line < LINES; ++line) {
        Floats maxima = splat(running.maxima[line]);
        for (int64_t i = first; i < last; i += LANES)
            maxima = larger(load(scores[line] + i), maxima);
        const float maximum = largest_of(maxima);
        corrections[line] = running.maxima[line] - maximum;
        running.maxima[line] = maximum;
    }
    for (int line = 0; line < LINES; line += LANES) {
        alignas(sizeof(Floats)) float some[LANES] = {};
        for (int i = 0; i < LANES && line + i < LINES; ++i) some[i] = corrections[line + i];
        const Floats powers = exp2_of(load(some));
        for (int i = 0; i < LANES && line + i < LINES; ++i) corrections[line + i] = powers[i];
    }
    for (int line = 0; line < LINES; ++line) {
        const Floats maximum = splat(running.maxima[line]);
        Floats sum = running.sums[line] * corrections[line];
        for (int64_t i = first; i < last; i += LANES) {
            const Floats weight = exp2_of(load(scores[line] + i) - maximum);
            store(weight, scores[line] + i);
            sum += weight;
        }
        running.sums[line] = sum;
    }
}

// What a line's summed values are to be multiplied with at the end; a sink takes part in the
// softmax without a value.
template <typename Number>
INLINE float final_factor(const Layer<Number>& layer, int64_t head, float maximum, float sum) {
    if (layer.sinks == nullptr) return 1.0f / sum;
    const float sink = layer.sink(head);
    const float larger_one = sink > maximum ? sink : maximum;
    const float weight = exp2_of(maximum - larger_one);
    return weight / (sum * weight + exp2_of(sink - larger_one));
}

}  // namespace
