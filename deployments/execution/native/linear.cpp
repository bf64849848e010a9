// Linear layers: y[r, o] = sum over k of x[r, k] * weight[o, k], plus bias[o].
//
// The weight lies as the products want it, packed once (compiled_linear.py does it): panels of 16
// outputs, inside a panel input after input. bfloat16 is the upper half of a float32, so a word of two
// of them becomes two floats by a shift and a mask; two inputs of one output share a word.
//
//     float32    panel 0: | w[0..15, k=0]          | w[0..15, k=1]          | ...   64 bytes each
//     bfloat16   panel 0: | w[0..15, k=0 and k=1]  | w[0..15, k=2 and k=3]  | ...
//
// Few rows are bound by reading the weight, which each thread reads from the beginning of its run of
// panels to the end, once; many are bound by multiplying, and a tile of ROWS by 16 outputs keeps its
// sums in registers. Weights stay as narrow as they are stored.
//
//     rows of x, in blocks of up to 6        chunks of 16 blocks     outputs, in panels
//     [ 0 1 2 3 4 | 5 6 7 8 9 | ... ]        [ chunk 0 | chunk 1 ]   [ panel 0 | panel 1 | ... ]
//
//     work, cut into one run per thread:  chunk 0: panel 0, 1, 2, ...  chunk 1: panel 0, 1, 2, ...
//
// Every output is one float32 sum over k in ascending order, whatever the number of rows and threads:
// a row's result does not depend on the rows beside it. (With AVX512_BF16 the sum runs over pairs.)
//
// Portable C++17 with the vector extension of GCC and Clang; the width is that of the machine it is
// compiled on.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "arguments.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 16;
constexpr int VECTORS = PANEL / LANES;
constexpr int MAX_ROWS = 6;           // of a tile: 12 of the 16 registers of AVX2 are its sums
constexpr int CHUNK_BLOCKS = 16;      // so many blocks of rows stay in the second cache
constexpr int64_t CHUNK_INPUTS = 512; // so many inputs of a panel stay in the first
constexpr int PREFETCH_BYTES = 1024;  // measured: 512 and 2048 are slightly worse

typedef Words StoredWords __attribute__((aligned(2), may_alias));

template <int ROWS, int PANELS>
using Sums = Floats[ROWS][PANELS][VECTORS];

// --- how one step of a tile multiplies, by type of weight ----------------------------------------

template <typename Number>
struct Steps;

template <>
struct Steps<float> {
    static constexpr int INPUTS = 1;
    using Wide = float;  // of x, laid out [input][row of the block]

    static void lay_out(const float* x, Wide* to, int64_t rows, int64_t inputs, int64_t) {
        for (int64_t k = 0; k < inputs; ++k)
            for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = x[r * inputs + k];
    }

    template <int ROWS, int PANELS>
    static inline void add(Sums<ROWS, PANELS>& sums, const Wide* x, const float* weight,
                           int64_t panel_stride) {
        Floats columns[PANELS][VECTORS];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                columns[p][v] = *reinterpret_cast<const StoredFloats*>(
                    weight + p * panel_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) sums[r][p][v] += x[r] * columns[p][v];
    }
};

template <int PANELS>
inline void load_words(Words (&words)[PANELS][VECTORS], const BFloat16* weight, int64_t stride) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            words[p][v] =
                *reinterpret_cast<const StoredWords*>(weight + p * stride + v * 2 * LANES);
}

#if defined(__AVX512BF16__)

template <>
struct Steps<BFloat16> {
    static constexpr int INPUTS = 2;
    using Wide = uint16_t;  // of x, as it is, laid out [pair of inputs][row][2]

    static void lay_out(const BFloat16* x, Wide* to, int64_t rows, int64_t inputs, int64_t padded) {
        for (int64_t k = 0; k < padded; ++k)
            for (int64_t r = 0; r < rows; ++r)
                to[(k / 2 * rows + r) * 2 + k % 2] = k < inputs ? x[r * inputs + k].bits : 0;
    }

    template <int ROWS, int PANELS>
    static inline void add(Sums<ROWS, PANELS>& sums, const Wide* x, const BFloat16* weight,
                           int64_t panel_stride) {
        Words words[PANELS][VECTORS];
        load_words<PANELS>(words, weight, panel_stride);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + 2 * r, sizeof pair);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
                sums[r][p][0] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][p][0], row,
                                                         (__m512bh)words[p][0]);
        }
    }
};

#else

template <>
struct Steps<BFloat16> {
    static constexpr int INPUTS = 2;
    using Wide = float;  // of x, laid out [input][row of the block]

    static void lay_out(const BFloat16* x, Wide* to, int64_t rows, int64_t inputs, int64_t padded) {
        for (int64_t k = 0; k < padded; ++k)
            for (int64_t r = 0; r < rows; ++r)
                to[k * rows + r] = k < inputs ? widen(x[r * inputs + k]) : 0.0f;
    }

    template <int ROWS, int PANELS>
    static inline void add(Sums<ROWS, PANELS>& sums, const Wide* x, const BFloat16* weight,
                           int64_t panel_stride) {
        Words words[PANELS][VECTORS];
        load_words<PANELS>(words, weight, panel_stride);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][p][v] += x[r] * reinterpret_cast<Floats>(words[p][v] << 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][p][v] += x[ROWS + r] * reinterpret_cast<Floats>(words[p][v] & 0xffff0000u);
    }
};

#endif

// --- tiles ----------------------------------------------------------------------------------------

template <typename Number>
struct Layer {
    const Number* weight;  // [num_panels][padded_inputs][PANEL], bfloat16 in pairs of inputs
    const Number* bias;    // null: none
    int64_t num_inputs;
    int64_t padded_inputs;
    int64_t num_outputs;
};

// One stretch of inputs for a tile, whose sums wait in `partial` between stretches.
struct Stretch {
    int64_t begin, end;
    bool is_first, is_last;
    float* partial;
};

template <typename Number, int PANELS>
void finish(const Layer<Number>& layer, const Floats (&sums)[PANELS][VECTORS], Number* y,
            int64_t panel) {
    for (int p = 0; p < PANELS; ++p) {
        const int64_t output = (panel + p) * PANEL;
        const int64_t count = std::min<int64_t>(PANEL, layer.num_outputs - output);
        float bias[PANEL] = {};
        if (layer.bias != nullptr)
            for (int64_t j = 0; j < count; ++j) bias[j] = widen(layer.bias[output + j]);
        Number out[PANEL];
        for (int v = 0; v < VECTORS; ++v)
            store(sums[p][v] + *reinterpret_cast<const StoredFloats*>(bias + v * LANES),
                  out + v * LANES);
        std::memcpy(y + output, out, count * sizeof(Number));
    }
}

// Where a sum of a tile waits.
template <int PANELS>
inline StoredFloats* place(float* partial, int row, int panel, int vector) {
    return reinterpret_cast<StoredFloats*>(partial) + (row * PANELS + panel) * VECTORS + vector;
}

template <typename Number, int ROWS, int PANELS>
void multiply_tile(const Layer<Number>& layer, const typename Steps<Number>::Wide* x, Number* y,
                   int64_t panel, const Stretch& stretch) {
    Sums<ROWS, PANELS> sums;
    // Nested, not one loop: what the compiler cannot unroll in full it keeps in memory.
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[r][p][v] =
                    stretch.is_first ? Floats{} : *place<PANELS>(stretch.partial, r, p, v);
    const int64_t panel_stride = layer.padded_inputs * PANEL;
    const Number* weight = layer.weight + panel * panel_stride + stretch.begin * PANEL;
    x += stretch.begin * ROWS;
    for (int64_t k = stretch.begin; k < stretch.end; k += Steps<Number>::INPUTS) {
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
            __builtin_prefetch(reinterpret_cast<const char*>(weight + p * panel_stride) +
                               PREFETCH_BYTES);
        Steps<Number>::template add<ROWS, PANELS>(sums, x, weight, panel_stride);
        x += Steps<Number>::INPUTS * ROWS;
        weight += Steps<Number>::INPUTS * PANEL;
    }
    if (stretch.is_last) {
        for (int r = 0; r < ROWS; ++r)
            finish<Number, PANELS>(layer, sums[r], y + r * layer.num_outputs, panel);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) *place<PANELS>(stretch.partial, r, p, v) = sums[r][p][v];
}

// A row alone needs several panels at once, so that its sums do not wait for each other.
constexpr int panels_at_once(int64_t rows) {
    if (LANES == 16) return 4;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// Rows in blocks of up to MAX_ROWS, as even as can be; blocks in chunks likewise.
struct Blocks {
    int64_t num_rows, count, num_chunks;

    explicit Blocks(int64_t rows)
        : num_rows(rows),
          count((rows + MAX_ROWS - 1) / MAX_ROWS),
          num_chunks((count + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS) {}

    int64_t first_row(int64_t block) const { return num_rows * block / count; }
    int64_t first_block(int64_t chunk) const { return count * chunk / num_chunks; }
};

template <typename Number, int PANELS>
void multiply_block(int64_t rows, const Layer<Number>& layer,
                    const typename Steps<Number>::Wide* x, Number* y, int64_t panel,
                    const Stretch& stretch) {
    switch (rows) {
        case 1: multiply_tile<Number, 1, PANELS>(layer, x, y, panel, stretch); break;
        case 2: multiply_tile<Number, 2, PANELS>(layer, x, y, panel, stretch); break;
        case 3: multiply_tile<Number, 3, PANELS>(layer, x, y, panel, stretch); break;
        case 4: multiply_tile<Number, 4, PANELS>(layer, x, y, panel, stretch); break;
        case 5: multiply_tile<Number, 5, PANELS>(layer, x, y, panel, stretch); break;
        default: multiply_tile<Number, 6, PANELS>(layer, x, y, panel, stretch);
    }
}

// PANELS panels by the rows of a chunk; a stretch of the panels stays in the first cache meanwhile.
template <typename Number, int PANELS>
void multiply_panels(const Layer<Number>& layer, const Blocks& blocks, int64_t chunk,
                     const typename Steps<Number>::Wide* x, Number* y, int64_t panel) {
    float partial[CHUNK_BLOCKS * MAX_ROWS * PANELS * PANEL];
    const int64_t first = blocks.first_block(chunk), last = blocks.first_block(chunk + 1);
    const int64_t length = last - first == 1 ? layer.padded_inputs : CHUNK_INPUTS;
    for (int64_t k = 0; k < layer.padded_inputs; k += length) {
        const int64_t end = std::min(k + length, layer.padded_inputs);
        for (int64_t block = first; block < last; ++block) {
            const int64_t row = blocks.first_row(block);
            float* const kept = partial + (block - first) * MAX_ROWS * PANELS * PANEL;
            const Stretch stretch{k, end, k == 0, end == layer.padded_inputs, kept};
            multiply_block<Number, PANELS>(blocks.first_row(block + 1) - row, layer,
                                           x + row * layer.padded_inputs,
                                           y + row * layer.num_outputs, panel, stretch);
        }
    }
}

template <typename Number>
void multiply_run(const Layer<Number>& layer, const Blocks& blocks, int64_t chunk,
                  const typename Steps<Number>::Wide* x, Number* y, int64_t first, int64_t last) {
    const int64_t block = blocks.first_block(chunk);
    const int at_once = panels_at_once(blocks.first_row(block + 1) - blocks.first_row(block));
    int64_t panel = first;
    if (at_once == 4)
        for (; panel + 4 <= last; panel += 4)
            multiply_panels<Number, 4>(layer, blocks, chunk, x, y, panel);
    if (at_once >= 2)
        for (; panel + 2 <= last; panel += 2)
            multiply_panels<Number, 2>(layer, blocks, chunk, x, y, panel);
    for (; panel < last; ++panel) multiply_panels<Number, 1>(layer, blocks, chunk, x, y, panel);
}

template <typename Number>
void linear(const Number* x, const Layer<Number>& layer, Number* y, int64_t num_rows,
            int num_threads) {
    using Wide = typename Steps<Number>::Wide;
    // Kept between calls: memory of this size would be taken from the system and given back each
    // time, a page fault for every 4 KB.
    static thread_local std::vector<Wide> kept;
    if (static_cast<int64_t>(kept.size()) < num_rows * layer.padded_inputs) {
        kept = {};  // before the larger one, so that both are never held
        kept.resize(num_rows * layer.padded_inputs);
    }
    Wide* const wide = kept.data();
    const Blocks blocks(num_rows);
    const int64_t num_panels = (layer.num_outputs + PANEL - 1) / PANEL;
    const int64_t work = blocks.num_chunks * num_panels;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t row = blocks.first_row(block);
            Steps<Number>::lay_out(x + row * layer.num_inputs, wide + row * layer.padded_inputs,
                                   blocks.first_row(block + 1) - row, layer.num_inputs,
                                   layer.padded_inputs);
        }
#pragma omp for schedule(static)
        for (int thread = 0; thread < num_threads; ++thread) {
            int64_t at = work * thread / num_threads;
            const int64_t end = work * (thread + 1) / num_threads;
            while (at < end) {
                const int64_t chunk = at / num_panels, first = at % num_panels;
                const int64_t last = std::min(num_panels, first + end - at);
                multiply_run(layer, blocks, chunk, wide, y, first, last);
                at += last - first;
            }
        }
    }
}

// --- as kernels -----------------------------------------------------------------------------------

// x, weight, bias or null, y; numbers of rows, inputs, outputs and threads.
template <typename Number>
void linear_kernel(Arguments given) {
    const auto* x = given.tensor<const Number>();
    const auto* weight = given.tensor<const Number>();
    const auto* bias = given.tensor<const Number>();
    auto* y = given.tensor<Number>();
    const int64_t num_rows = given.size(), num_inputs = given.size(), num_outputs = given.size();
    constexpr int64_t INPUTS = Steps<Number>::INPUTS;
    const int64_t padded = (num_inputs + INPUTS - 1) / INPUTS * INPUTS;
    linear<Number>(x, {weight, bias, num_inputs, padded, num_outputs}, y, num_rows,
                   static_cast<int>(given.size()));
}

}  // namespace

DEFINE_KERNEL(linear_float32, linear_kernel<float>)
DEFINE_KERNEL(linear_bfloat16, linear_kernel<BFloat16>)
