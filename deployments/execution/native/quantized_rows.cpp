// Linear layers with quantised weights: y[r, o] = sum over k of x[r, k] * weight[o, k], plus bias[o].
//
// A weight is a code of 8 or 4 bits with the scale (and for 4 bits the centre) of its group of 32
// inputs; it becomes a float when it is read, so rows are multiplied as they are, in float32. A few
// rows are bound by reading the weights, once and in order. For more rows a block of weights is
// made floats once, in the nearest cache, and all rows pass by.
//
//     panel: 32 outputs, all inputs      lines of a panel, one after the other    line: 64 bytes
//       |== panel 0 ==|  thread 0          | inputs 0-3 | inputs 4-7 | ...          16 words
//       |== panel 1 ==|  thread 0          (4 bits; with 8 bits a line has two)
//       |== panel 2 ==|  thread 1
//
//     word i of a line, 4 bits a field:  field n is output i + 16 * (n % 2), input n / 2 of the line
//     word i of a line, 8 bits a field:  the same
//
// Each output's sum runs over the inputs in order, however many rows there are and whichever way
// they take, so a row's result does not depend on the rows beside it.
//
// Portable C++17 with the vector extension of GCC and Clang; the width is that of the machine it is
// compiled on.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "vectors.h"

namespace {

constexpr int WORDS = 16;              // of a line
constexpr int PANEL = 2 * WORDS;       // outputs
constexpr int GROUP = 32;              // inputs that share a scale
constexpr int VECTORS = PANEL / LANES; // that hold one number for each output of a panel
constexpr int TILE = 2;                // vectors of outputs that stay in registers
constexpr int WIDTH = TILE * LANES;
constexpr int ROWS = 6;                // rows that do beside them
constexpr int DIRECT = 3;              // up to so many rows the weights are made floats as they come
constexpr int BLOCK = 4 * GROUP;       // inputs whose weights are made floats at once otherwise
constexpr int64_t BATCH = 85 * ROWS;   // rows that stay in the second cache beside them

typedef Words StoredWords __attribute__((aligned(4), may_alias));

// Vector `v` of a panel: outputs [v * LANES, (v + 1) * LANES), which lie in the words from
// first_word(v) on, in the even or the odd fields.
constexpr int first_word(int v) { return v * LANES % WORDS; }
constexpr int parity(int v) { return v * LANES / WORDS; }

// Signed codes of 8 bits: weight = code * scale.
struct Int8 {
    static constexpr int DEPTH = 2;       // inputs of a line
    static constexpr int PARAMETERS = 1;  // of a group

    struct Group {
        Floats scale;
    };

    static Group load_group(const BFloat16* parameters) { return {load(parameters)}; }

    static Floats weights(Words words, int field, const Group& group) {
        const Ints codes = reinterpret_cast<Ints>(words << (24 - 8 * field)) >> 24;
        return __builtin_convertvector(codes, Floats) * group.scale;
    }
};

// Codes of 4 bits, 0 to 15: weight = (code - 8) * scale + centre.
struct Int4 {
    static constexpr int DEPTH = 4;
    static constexpr int PARAMETERS = 2;

    struct Group {
        Floats scale, least;
    };

    static Group load_group(const BFloat16* parameters) {
        const Floats scale = load(parameters);
        return {scale, load(parameters + PANEL) - 8.0f * scale};
    }

    static Floats weights(Words words, int field, const Group& group) {
        const Ints codes = reinterpret_cast<Ints>((words >> (4 * field)) & 15u);
        return __builtin_convertvector(codes, Floats) * group.scale + group.least;
    }
};

// `num_inputs` is a multiple of GROUP: rows and codes end in zeros that fill it.
struct Layer {
    const uint32_t* lines;       // [panels, num_inputs / DEPTH, WORDS]
    const BFloat16* parameters;  // [panels, num_inputs / GROUP, PARAMETERS, PANEL]
    int64_t num_inputs;
    int64_t num_outputs;
};

template <typename Format>
struct Panel {
    const uint32_t* lines;
    const BFloat16* parameters;

    Panel(const Layer& layer, int64_t panel)
        : lines(layer.lines + panel * (layer.num_inputs / Format::DEPTH) * WORDS),
          parameters(layer.parameters +
                     panel * (layer.num_inputs / GROUP) * Format::PARAMETERS * PANEL) {}

    const uint32_t* line(int64_t input) const { return lines + input / Format::DEPTH * WORDS; }

    // Of vector `v`, for the group that begins at `input`.
    typename Format::Group group(int64_t input, int v) const {
        return Format::load_group(parameters + input / GROUP * Format::PARAMETERS * PANEL +
                                  v * LANES);
    }
};

// A few rows: sums of `COUNT` rows over all outputs of a panel stay in registers. x is
// [num_inputs, COUNT].
template <typename Format, int COUNT>
void multiply_direct(const Panel<Format>& panel, const float* x, float* sums, int64_t num_inputs) {
    Floats sum[COUNT][VECTORS] = {};
    for (int64_t start = 0; start < num_inputs; start += GROUP) {
        typename Format::Group groups[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) groups[v] = panel.group(start, v);
        const uint32_t* line = panel.line(start);
        for (int64_t k = start; k < start + GROUP; k += Format::DEPTH, line += WORDS) {
            const float* row = x + k * COUNT;
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                const Words words =
                    *reinterpret_cast<const StoredWords*>(line + first_word(v));
#pragma GCC unroll 8
                for (int d = 0; d < Format::DEPTH; ++d) {
                    const Floats weight = Format::weights(words, 2 * d + parity(v), groups[v]);
#pragma GCC unroll 8
                    for (int r = 0; r < COUNT; ++r) sum[r][v] += weight * row[d * COUNT + r];
                }
            }
        }
    }
    for (int r = 0; r < COUNT; ++r)
        for (int v = 0; v < VECTORS; ++v) store(sum[r][v], sums + r * PANEL + v * LANES);
}

// The weights of `size` inputs from `start` on, as floats [PANEL / WIDTH, size, WIDTH].
template <typename Format>
void widen_block(const Panel<Format>& panel, int64_t start, int64_t size, float* weights) {
    for (int64_t at = start; at < start + size; at += GROUP) {
        for (int v = 0; v < VECTORS; ++v) {
            const typename Format::Group group = panel.group(at, v);
            float* to = weights + v / TILE * size * WIDTH + v % TILE * LANES;
            const uint32_t* line = panel.line(at) + first_word(v);
            for (int64_t k = at; k < at + GROUP; k += Format::DEPTH, line += WORDS) {
                const Words words = *reinterpret_cast<const StoredWords*>(line);
#pragma GCC unroll 8
                for (int d = 0; d < Format::DEPTH; ++d)
                    store(Format::weights(words, 2 * d + parity(v), group),
                          to + (k + d - start) * WIDTH);
            }
        }
    }
}

// Adds to `sums` [COUNT, PANEL] what `size` inputs contribute. x is [size, COUNT], weights are
// [size, WIDTH].
template <int COUNT>
void multiply_tile(const float* weights, const float* x, float* sums, int64_t size) {
    Floats sum[COUNT][TILE];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < TILE; ++t) sum[r][t] = load(sums + r * PANEL + t * LANES);
    for (int64_t k = 0; k < size; ++k) {
        const Floats first = load(weights + k * WIDTH), second = load(weights + k * WIDTH + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; ++r) {
            sum[r][0] += first * x[k * COUNT + r];
            sum[r][1] += second * x[k * COUNT + r];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < TILE; ++t) store(sum[r][t], sums + r * PANEL + t * LANES);
}

void multiply_tile_of(int64_t count, const float* weights, const float* x, float* sums,
                      int64_t size) {
    switch (count) {
        case 1: return multiply_tile<1>(weights, x, sums, size);
        case 2: return multiply_tile<2>(weights, x, sums, size);
        case 3: return multiply_tile<3>(weights, x, sums, size);
        case 4: return multiply_tile<4>(weights, x, sums, size);
        case 5: return multiply_tile<5>(weights, x, sums, size);
        default: return multiply_tile<6>(weights, x, sums, size);
    }
}

// Sums [num_rows, PANEL] of one panel; x is laid out in tiles.
template <typename Format>
void multiply_panel(const Layer& layer, int64_t index, const float* x, int64_t num_rows,
                    float* sums) {
    const Panel<Format> panel(layer, index);
    const int64_t num_inputs = layer.num_inputs;
    switch (num_rows) {
        case 1: return multiply_direct<Format, 1>(panel, x, sums, num_inputs);
        case 2: return multiply_direct<Format, 2>(panel, x, sums, num_inputs);
        case DIRECT: return multiply_direct<Format, DIRECT>(panel, x, sums, num_inputs);
    }
    alignas(64) float weights[BLOCK * PANEL];
    std::fill(sums, sums + num_rows * PANEL, 0.0f);
    for (int64_t start = 0; start < num_inputs; start += BLOCK) {
        const int64_t size = std::min<int64_t>(BLOCK, num_inputs - start);
        widen_block(panel, start, size, weights);
        for (int64_t row = 0; row < num_rows; row += ROWS) {
            const int64_t count = std::min<int64_t>(ROWS, num_rows - row);
            const float* tile = x + row * num_inputs + start * count;
            for (int part = 0; part < PANEL / WIDTH; ++part)
                multiply_tile_of(count, weights + part * size * WIDTH, tile,
                                 sums + row * PANEL + part * WIDTH, size);
        }
    }
}

// Rows as floats in tiles [num_inputs, up to ROWS rows], filled with zeros to whole groups.
template <typename Number>
void lay_out(const Number* x, int64_t num_rows, int64_t num_inputs, int64_t num_filled, float* to) {
    for (int64_t row = 0; row < num_rows; row += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, num_rows - row);
        float* tile = to + row * num_filled;
        for (int64_t k = 0; k < num_inputs; ++k)
            for (int64_t r = 0; r < count; ++r)
                tile[k * count + r] = widen(x[(row + r) * num_inputs + k]);
        std::fill(tile + num_inputs * count, tile + num_filled * count, 0.0f);
    }
}

template <typename Number>
void write(const float* sums, const Number* bias, int64_t first, int64_t num_rows,
           int64_t num_outputs, Number* y) {
    const int64_t count = std::min<int64_t>(PANEL, num_outputs - first);
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t o = 0; o < count; ++o) {
            const float offset = bias == nullptr ? 0.0f : widen(bias[first + o]);
            narrow(sums[row * PANEL + o] + offset, y + row * num_outputs + first + o);
        }
}

template <typename Format, typename Number>
void linear(const Number* x, const Layer& layer, const Number* bias, Number* y, int64_t num_rows,
            int64_t num_inputs, int num_threads) {
    const int64_t num_filled = layer.num_inputs, num_outputs = layer.num_outputs;
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
    std::vector<float> wide(num_rows * num_filled);
    lay_out(x, num_rows, num_inputs, num_filled, wide.data());
    // Taken out here: what is thrown in a parallel region cannot be caught outside it.
    const int64_t num_sums = std::min(num_rows, BATCH) * PANEL;
    std::vector<float> all_sums(num_threads * num_sums);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int thread = 0; thread < num_threads; ++thread) {
        float* const sums = all_sums.data() + thread * num_sums;
        for (int64_t start = 0; start < num_rows; start += BATCH) {
            const int64_t count = std::min(BATCH, num_rows - start);
            for (int64_t panel = num_panels * thread / num_threads;
                 panel < num_panels * (thread + 1) / num_threads; ++panel) {
                multiply_panel<Format>(layer, panel, wide.data() + start * num_filled, count,
                                       sums);
                write(sums, bias, panel * PANEL, count, num_outputs,
                      y + start * num_outputs);
            }
        }
    }
}

// --- as kernels -----------------------------------------------------------------------------------

// x, lines, parameters, bias or null, y; numbers of rows, inputs, outputs and threads.
template <typename Format, typename Number>
void linear_kernel(Arguments given) {
    const auto* x = given.tensor<const Number>();
    const auto* lines = given.tensor<const uint32_t>();
    const auto* parameters = given.tensor<const BFloat16>();
    const auto* bias = given.tensor<const Number>();
    auto* y = given.tensor<Number>();
    const int64_t num_rows = given.size(), num_inputs = given.size(), num_outputs = given.size();
    const int64_t num_filled = (num_inputs + GROUP - 1) / GROUP * GROUP;
    const Layer layer{lines, parameters, num_filled, num_outputs};
    linear<Format, Number>(x, layer, bias, y, num_rows, num_inputs,
                           static_cast<int>(given.size()));
}

}  // namespace

DEFINE_KERNEL(int8_float32, linear_kernel<Int8, float>)
DEFINE_KERNEL(int8_bfloat16, linear_kernel<Int8, BFloat16>)
DEFINE_KERNEL(int4_float32, linear_kernel<Int4, float>)
DEFINE_KERNEL(int4_bfloat16, linear_kernel<Int4, BFloat16>)
