// Linear layers of a few rows: y[r, o] = sum over k of x[r, k] * weight[o, k], plus bias[o].
//
// So few rows are bound by reading the weights, once and in order. Each thread reads one run of
// outputs from its beginning to its end; a panel of outputs is multiplied with all rows while it
// lies in the nearest cache. Sums are float32, whatever the weights are.
//
//     weight [num_outputs, num_inputs]      x [num_rows, num_inputs], widened to float32
//       |== panel 0 ==|  thread 0             tile: ROWS rows by COLUMNS outputs, its sums in
//       |== panel 1 ==|  thread 0                   registers
//       |== panel 2 ==|  thread 1
//
// bfloat16 is the upper half of a float32. A word of two of them becomes two floats by a shift and a
// mask, so a block of inputs comes apart into those at even and those at odd places; the rows are
// laid out the same way once, before they are multiplied.
//
// Portable C++17 with the vector extension of GCC and Clang; the width is that of the machine it is
// compiled on.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int BLOCK = 2 * LANES;  // inputs taken at once
constexpr int PANEL = 8;          // outputs

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
// As they lie in memory: at any address, and of whatever type the numbers are.
typedef Floats StoredFloats __attribute__((aligned(4), may_alias));
typedef Words StoredWords __attribute__((aligned(2), may_alias));

struct Block {
    Floats first, second;
};

struct BFloat16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) {
    const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

inline Block load_block(const float* from) {
    // Not auto, which would forget the alignment.
    const StoredFloats* stored = reinterpret_cast<const StoredFloats*>(from);
    return {stored[0], stored[1]};
}

inline Block load_block(const BFloat16* from) {
    const Words words = *reinterpret_cast<const StoredWords*>(from);
    return {reinterpret_cast<Floats>(words << 16), reinterpret_cast<Floats>(words & 0xffff0000u)};
}

// Where input `i` of a block lies in the order of `load_block`.
inline int place_in_block(const float*, int i) { return i; }
inline int place_in_block(const BFloat16*, int i) { return i / 2 + (i % 2) * LANES; }

inline void narrow(float value, float* to) { *to = value; }

// To the nearest, ties to even; what is not a number stays so.
inline void narrow(float value, BFloat16* to) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if (value != value) {
        to->bits = static_cast<uint16_t>((word >> 16) | 0x40);
    } else {
        to->bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    }
}

inline float sum_of(Floats lanes) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) sum += lanes[lane];
    return sum;
}

template <typename Number>
struct Layer {
    const Number* weight;
    const Number* bias;  // null: none
    int64_t num_inputs;
    int64_t num_outputs;
};

template <typename Number, int ROWS, int COLUMNS>
void multiply_tile(const Layer<Number>& layer, const float* x, Number* y, int64_t output) {
    const int64_t num_inputs = layer.num_inputs;
    const Number* weight = layer.weight + output * num_inputs;
    Floats sums[ROWS][COLUMNS] = {};
    int64_t k = 0;
    for (; k + BLOCK <= num_inputs; k += BLOCK) {
        Block columns[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) columns[c] = load_block(weight + c * num_inputs + k);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const Block row = load_block(x + r * num_inputs + k);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) {
                sums[r][c] += row.first * columns[c].first;
                sums[r][c] += row.second * columns[c].second;
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) {
            float sum = sum_of(sums[r][c]);
            for (int64_t rest = k; rest < num_inputs; ++rest)
                sum += x[r * num_inputs + rest] * widen(weight[c * num_inputs + rest]);
            if (layer.bias != nullptr) sum += widen(layer.bias[output + c]);
            narrow(sum, y + r * layer.num_outputs + output + c);
        }
    }
}

// One row by one output: a single stream of weights is what the hardware prefetches best, and four
// sums keep it from waiting for its own additions.
template <typename Number>
void multiply_row(const Layer<Number>& layer, const float* x, Number* y, int64_t output) {
    const int64_t num_inputs = layer.num_inputs;
    const Number* weight = layer.weight + output * num_inputs;
    Floats sums[4] = {};
    int64_t k = 0;
    for (; k + 2 * BLOCK <= num_inputs; k += 2 * BLOCK) {
        const Block column = load_block(weight + k), next_column = load_block(weight + k + BLOCK);
        const Block row = load_block(x + k), next_row = load_block(x + k + BLOCK);
        sums[0] += row.first * column.first;
        sums[1] += row.second * column.second;
        sums[2] += next_row.first * next_column.first;
        sums[3] += next_row.second * next_column.second;
    }
    for (; k + BLOCK <= num_inputs; k += BLOCK) {
        const Block column = load_block(weight + k), row = load_block(x + k);
        sums[0] += row.first * column.first;
        sums[1] += row.second * column.second;
    }
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; k < num_inputs; ++k) sum += x[k] * widen(weight[k]);
    if (layer.bias != nullptr) sum += widen(layer.bias[output]);
    narrow(sum, y + output);
}

template <typename Number, int ROWS, int COLUMNS>
void multiply_panel(
    const Layer<Number>& layer, const float* x, Number* y, int64_t first, int64_t last) {
    int64_t output = first;
    for (; output + COLUMNS <= last; output += COLUMNS)
        multiply_tile<Number, ROWS, COLUMNS>(layer, x, y, output);
    for (; output < last; ++output) multiply_tile<Number, ROWS, 1>(layer, x, y, output);
}

template <typename Number>
void multiply(const Layer<Number>& layer, const float* x, Number* y, int64_t num_rows,
              int64_t first, int64_t last) {
    for (int64_t start = first; start < last; start += PANEL) {
        const int64_t end = std::min(start + PANEL, last);
        for (int64_t row = 0; row < num_rows; row += 4) {
            const float* from = x + row * layer.num_inputs;
            Number* to = y + row * layer.num_outputs;
            switch (num_rows - row) {
                case 1:
                    for (int64_t o = start; o < end; ++o) multiply_row(layer, from, to, o);
                    break;
                case 2: multiply_panel<Number, 2, 2>(layer, from, to, start, end); break;
                case 3: multiply_panel<Number, 3, 2>(layer, from, to, start, end); break;
                default: multiply_panel<Number, 4, 2>(layer, from, to, start, end);
            }
        }
    }
}

// A row of inputs as floats in the order of `load_block`; what fills no block stays in its own.
template <typename Number>
void lay_out(const Number* from, float* to, int64_t num_inputs) {
    int64_t start = 0;
    for (; start + BLOCK <= num_inputs; start += BLOCK)
        for (int i = 0; i < BLOCK; ++i)
            to[start + place_in_block(from, i)] = widen(from[start + i]);
    for (; start < num_inputs; ++start) to[start] = widen(from[start]);
}

template <typename Number>
void linear(const Number* x, const Layer<Number>& layer, Number* y, int64_t num_rows,
            int num_threads) {
    std::vector<float> wide(num_rows * layer.num_inputs);
    for (int64_t row = 0; row < num_rows; ++row)
        lay_out(x + row * layer.num_inputs, wide.data() + row * layer.num_inputs, layer.num_inputs);
    const int64_t num_panels = (layer.num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; ++thread) {
        const int64_t first = num_panels * thread / num_threads * PANEL;
        const int64_t last = num_panels * (thread + 1) / num_threads * PANEL;
        multiply(layer, wide.data(), y, num_rows, first, std::min(last, layer.num_outputs));
    }
}

}  // namespace

extern "C" {

void linear_float32(const float* x, const float* weight, const float* bias, float* y,
                    int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int num_threads) {
    linear<float>(x, {weight, bias, num_inputs, num_outputs}, y, num_rows, num_threads);
}

void linear_bfloat16(const void* x, const void* weight, const void* bias, void* y,
                     int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int num_threads) {
    const auto* weights = static_cast<const BFloat16*>(weight);
    const auto* biases = static_cast<const BFloat16*>(bias);
    linear<BFloat16>(static_cast<const BFloat16*>(x), {weights, biases, num_inputs, num_outputs},
                     static_cast<BFloat16*>(y), num_rows, num_threads);
}
}
