// What stands between a model's products, each in one pass over its rows: RMS norm, SiLU gate, rotary
// embedding. Computed in float32 and rounded where the model's own code rounds.
//
//     gate_up [num_rows, 2 n]: | gate | up |  ->  [num_rows, n]: silu(gate) * up
//
// Small rows stay on the calling thread: waking others takes longer than the work.
//
// Portable C++17 with the vector extension of GCC and Clang; the width is that of the machine it is
// compiled on.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "vectors.h"

namespace {

constexpr int64_t ALONE = 32768;  // numbers that one thread computes alone

// As if it had been stored as a Number and read back.
inline Floats round_to(Floats values, const float*) { return values; }

inline Floats round_to(Floats values, const BFloat16*) {
    return reinterpret_cast<Floats>(__builtin_convertvector(rounded_halves(values), Words) << 16);
}

// Fewer numbers than a vector holds, the rest of it zero.
template <typename Number>
inline Floats load_some(const Number* from, int64_t count) {
    if (count >= LANES) return load(from);
    Number some[LANES] = {};
    std::memcpy(some, from, count * sizeof(Number));
    return load(some);
}

template <typename Number>
inline void store_some(Floats values, Number* to, int64_t count) {
    if (count >= LANES) return store(values, to);
    Number some[LANES];
    store(values, some);
    std::memcpy(to, some, count * sizeof(Number));
}

// e^x = 2^n * e^r with |r| <= ln(2) / 2 and e^r by a polynomial (Cephes, expf), exact to two units in
// the last place.
inline Floats exp_of(Floats x) {
    x = x > 88.0f ? Floats{} + 88.0f : x;
    x = x < -87.0f ? Floats{} - 87.0f : x;
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    const Floats whole = shifted - 12582912.0f;
    const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(power) +
                                    (reinterpret_cast<Ints>(shifted) << 23));
}

inline Floats silu_of(Floats x) { return x / (1.0f + exp_of(-x)); }

template <typename Number>
struct Norm {
    const float* weight;  // [size]
    int64_t size;
    float epsilon;
    bool rounds_first;  // before the weight, as well as after
};

template <typename Number>
void norm_row(const Number* x, Number* y, const Norm<Number>& norm) {
    Floats squares = {}, more_squares = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= norm.size; i += 2 * LANES) {
        const Floats first = load(x + i), second = load(x + i + LANES);
        squares += first * first;
        more_squares += second * second;
    }
    for (; i < norm.size; i += LANES) {
        const Floats values = load_some(x + i, norm.size - i);
        squares += values * values;
    }
    const float mean = sum_of(squares + more_squares) / static_cast<float>(norm.size);
    const float scale = 1.0f / std::sqrt(mean + norm.epsilon);
    for (i = 0; i < norm.size; i += LANES) {
        Floats values = load_some(x + i, norm.size - i) * scale;
        if (norm.rounds_first) values = round_to(values, x);
        store_some(values * load_some(norm.weight + i, norm.size - i), y + i, norm.size - i);
    }
}

template <typename Number>
void norm_rows(const Number* x, Number* y, const Norm<Number>& norm, int64_t num_rows,
               int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * norm.size > ALONE)
    for (int64_t row = 0; row < num_rows; ++row)
        norm_row(x + row * norm.size, y + row * norm.size, norm);
}

template <typename Number>
void gate_rows(const Number* gate_up, Number* y, int64_t num_rows, int64_t size, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size > ALONE)
    for (int64_t row = 0; row < num_rows; ++row) {
        const Number *gate = gate_up + 2 * row * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats open = round_to(silu_of(load_some(gate + i, size - i)), gate);
            store_some(open * load_some(up + i, size - i), y + row * size + i, size - i);
        }
    }
}

// The halves of each head turn: (a, b) -> (a cos - b sin, b cos + a sin), each product and sum
// rounded. x [num_rows] at a stride, each [num_heads, 2 half]; cos and sin [num_rows, 2 half].
template <typename Number>
struct Heads {
    const Number* from;
    Number* to;  // [num_rows, num_heads, 2 half]
    int64_t row_stride;
    int64_t num_heads;
};

template <typename Number>
void rotate_row(const Heads<Number>& heads, const Number* cos, const Number* sin, int64_t row,
                int64_t half) {
    for (int64_t head = 0; head < heads.num_heads; ++head) {
        const Number* from = heads.from + row * heads.row_stride + head * 2 * half;
        Number* to = heads.to + (row * heads.num_heads + head) * 2 * half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t left = half - i;
            const Floats a = load_some(from + i, left), b = load_some(from + half + i, left);
            const Floats upper = round_to(a * load_some(cos + i, left), from) -
                                 round_to(b * load_some(sin + i, left), from);
            const Floats lower = round_to(b * load_some(cos + half + i, left), from) +
                                 round_to(a * load_some(sin + half + i, left), from);
            store_some(upper, to + i, left);
            store_some(lower, to + half + i, left);
        }
    }
}

template <typename Number>
void rotate_rows(const Heads<Number>& first, const Heads<Number>& second, const Number* cos,
                 const Number* sin, int64_t num_rows, int64_t half, int num_threads) {
    const int64_t size = num_rows * (first.num_heads + second.num_heads) * 2 * half;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (size > ALONE)
    for (int64_t row = 0; row < num_rows; ++row) {
        rotate_row(first, cos + row * 2 * half, sin + row * 2 * half, row, half);
        rotate_row(second, cos + row * 2 * half, sin + row * 2 * half, row, half);
    }
}

// --- as kernels -----------------------------------------------------------------------------------

template <typename Number>
void rms_norm(Arguments given) {
    const auto* x = given.tensor<const Number>();
    const auto* weight = given.tensor<const float>();
    auto* y = given.tensor<Number>();
    const int64_t num_rows = given.size(), size = given.size();
    const bool rounds_first = given.size() != 0;
    const int num_threads = static_cast<int>(given.size());
    norm_rows<Number>(x, y, {weight, size, given.number(), rounds_first}, num_rows, num_threads);
}

template <typename Number>
void silu_gate(Arguments given) {
    const auto* gate_up = given.tensor<const Number>();
    auto* y = given.tensor<Number>();
    const int64_t num_rows = given.size(), size = given.size();
    gate_rows<Number>(gate_up, y, num_rows, size, static_cast<int>(given.size()));
}

template <typename Number>
Heads<Number> heads(Arguments& given) {
    const auto* from = given.tensor<const Number>();
    auto* to = given.tensor<Number>();
    const int64_t row_stride = given.size();
    return {from, to, row_stride, given.size()};
}

template <typename Number>
void rotate(Arguments given) {
    const auto query = heads<Number>(given), key = heads<Number>(given);
    const auto* cos = given.tensor<const Number>();
    const auto* sin = given.tensor<const Number>();
    const int64_t num_rows = given.size(), half = given.size();
    rotate_rows<Number>(query, key, cos, sin, num_rows, half, static_cast<int>(given.size()));
}

}  // namespace

DEFINE_KERNEL(rms_norm_float32, rms_norm<float>)
DEFINE_KERNEL(rms_norm_bfloat16, rms_norm<BFloat16>)
DEFINE_KERNEL(silu_gate_float32, silu_gate<float>)
DEFINE_KERNEL(silu_gate_bfloat16, silu_gate<BFloat16>)
DEFINE_KERNEL(rotate_float32, rotate<float>)
DEFINE_KERNEL(rotate_bfloat16, rotate<BFloat16>)
