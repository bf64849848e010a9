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
//     rows of x, in blocks of up to 14       chunks of 16 blocks     outputs, in panels
//     [ 0 1 2 3 4 | 5 6 7 8 9 | ... ]        [ chunk 0 | chunk 1 ]   [ panel 0 | panel 1 | ... ]
//
//     work, cut into one run per thread:  chunk 0: panel 0, 1, 2, ...  chunk 1: panel 0, 1, 2, ...
//
// Every output is one float32 sum over k in ascending order, whatever the number of rows and threads:
// a row's result does not depend on the rows beside it. (With AVX512_BF16 the sum runs over pairs.)
// Where vectors have 16 lanes, up to 28 rows are one block, so that the weight is read once.
//
// Portable C++17 with the vector extension of GCC and Clang; the width is that of the machine it is
// compiled on.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "tile_packing.h"

namespace {

constexpr int PANEL = 16;
constexpr int VECTORS = PANEL / LANES;
constexpr int CHUNK_BLOCKS = 16;      // so many blocks of rows stay in the second cache
constexpr int64_t CHUNK_INPUTS = 512; // so many inputs of a panel stay in the first
constexpr int PREFETCH_BYTES = 1024;  // measured: 512 and 2048 are slightly worse

// Rows of a tile of so many panels: their sums take most of the registers.
constexpr int max_rows(int panels) {
    if (LANES == 16) return panels == 4 ? 6 : panels == 2 ? 14 : 28;
    return panels == 4 ? 1 : panels == 2 ? 3 : 6;
}

// Rows of a block, where there are several: a tile meets as few words of x as of the weight.
constexpr int BLOCK_ROWS = LANES == 16 ? 14 : 6;

template <int ROWS, int PANELS>
using Sums = Floats[ROWS][PANELS][VECTORS];

template <typename Number>
constexpr int DEPTH = Packing<Number>::DEPTH;

// --- one step of a tile, by type of weight --------------------------------------------------------

// Words of the weight are multiplied as they are.
template <typename Number, bool ARE_WORDS = sizeof(Number) * DEPTH<Number> == 4>
struct Steps {
    static constexpr int INPUTS = DEPTH<Number>;

    template <int ROWS, int PANELS>
    static INLINE void add(Sums<ROWS, PANELS>& sums, const float* x, const Number* weight,
                           int64_t panel_stride) {
        Floats columns[PANELS][VECTORS];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                columns[p][v] = load(reinterpret_cast<const float*>(weight + p * panel_stride) +
                                     v * LANES);
#pragma GCC unroll 32
        for (int r = 0; r < ROWS; ++r) {
            const Floats row = Packing<Number>::broadcast(x + r);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][p][v] = Packing<Number>::add(sums[r][p][v], row, columns[p][v]);
        }
    }
};

// Words of the weight are two inputs, each of which becomes a float32.
template <>
struct Steps<BFloat16, false> {
    static constexpr int INPUTS = 2;

    template <int ROWS, int PANELS>
    static INLINE void add(Sums<ROWS, PANELS>& sums, const float* x, const BFloat16* weight,
                           int64_t panel_stride) {
        Words words[PANELS][VECTORS];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                words[p][v] = reinterpret_cast<Words>(
                    load(reinterpret_cast<const float*>(weight + p * panel_stride) + v * LANES));
#pragma GCC unroll 32
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][p][v] += x[r] * reinterpret_cast<Floats>(words[p][v] << 16);
#pragma GCC unroll 32
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][p][v] += x[ROWS + r] * reinterpret_cast<Floats>(words[p][v] & 0xffff0000u);
    }
};

// Rows of x become words side by side, [padded / DEPTH][rows]; what is padded are zeros.
template <typename Number>
void lay_out(const Number* x, float* to, int64_t rows, int64_t inputs, int64_t padded) {
    using Pack = Packing<Number>;
    constexpr int STEP = 4 * Pack::DEPTH;
    const int64_t in_fours = rows / 4 * 4, whole = inputs / STEP * STEP;
    for (int64_t r = 0; r < in_fours; r += 4) {
        for (int64_t k = 0; k < whole; k += STEP) {
            Quad quads[4];
            for (int j = 0; j < 4; ++j) quads[j] = Pack::four_words(x + (r + j) * inputs + k);
            transpose(quads);
            for (int j = 0; j < 4; ++j) store_quad(quads[j], to + (k / Pack::DEPTH + j) * rows + r);
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = r < in_fours ? whole : 0; k < padded; k += Pack::DEPTH)
            to[k / Pack::DEPTH * rows + r] =
                k < inputs ? Pack::word(x + r * inputs + k, inputs - k) : 0.0f;
}

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
void multiply_tile(const Layer<Number>& layer, const float* x, Number* y, int64_t panel,
                   const Stretch& stretch) {
    Sums<ROWS, PANELS> sums;
    // Nested, not one loop: what the compiler cannot unroll in full it keeps in memory.
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[r][p][v] =
                    stretch.is_first ? Floats{} : *place<PANELS>(stretch.partial, r, p, v);
    const int64_t panel_stride = layer.padded_inputs * PANEL;
    const Number* weight = layer.weight + panel * panel_stride + stretch.begin * PANEL;
    x += stretch.begin / DEPTH<Number> * ROWS;
    for (int64_t k = stretch.begin; k < stretch.end; k += Steps<Number>::INPUTS) {
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
            __builtin_prefetch(reinterpret_cast<const char*>(weight + p * panel_stride) +
                               PREFETCH_BYTES);
        Steps<Number>::template add<ROWS, PANELS>(sums, x, weight, panel_stride);
        x += Steps<Number>::INPUTS / DEPTH<Number> * ROWS;
        weight += Steps<Number>::INPUTS * PANEL;
    }
    if (stretch.is_last) {
        for (int r = 0; r < ROWS; ++r)
            finish<Number, PANELS>(layer, sums[r], y + r * layer.num_outputs, panel);
        return;
    }
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) *place<PANELS>(stretch.partial, r, p, v) = sums[r][p][v];
}

// As many as its rows allow: few rows need several, so that their sums do not wait for each other.
constexpr int panels_at_once(int64_t rows) {
    return rows <= max_rows(4) ? 4 : rows <= max_rows(2) ? 2 : 1;
}

// Rows in blocks, as even as can be, of which one alone may be larger; blocks in chunks likewise.
struct Blocks {
    int64_t num_rows, count, num_chunks;

    explicit Blocks(int64_t rows)
        : num_rows(rows),
          count(rows <= max_rows(1) ? 1 : (rows + BLOCK_ROWS - 1) / BLOCK_ROWS),
          num_chunks((count + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS) {}

    int64_t most_rows() const { return (num_rows + count - 1) / count; }
    int64_t first_row(int64_t block) const { return num_rows * block / count; }
    int64_t first_block(int64_t chunk) const { return count * chunk / num_chunks; }
};

// The tile of so many rows, of which ROWS are the most that it may be.
template <typename Number, int PANELS, int ROWS = max_rows(PANELS)>
void multiply_block(int64_t rows, const Layer<Number>& layer, const float* x, Number* y,
                    int64_t panel, const Stretch& stretch) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) {
            multiply_block<Number, PANELS, ROWS - 1>(rows, layer, x, y, panel, stretch);
            return;
        }
    }
    multiply_tile<Number, ROWS, PANELS>(layer, x, y, panel, stretch);
}

// PANELS panels by the rows of a chunk; a stretch of the panels stays in the first cache meanwhile.
template <typename Number, int PANELS>
void multiply_panels(const Layer<Number>& layer, const Blocks& blocks, int64_t chunk,
                     const float* x, Number* y, int64_t panel) {
    float partial[CHUNK_BLOCKS * BLOCK_ROWS * PANELS * PANEL];
    const int64_t first = blocks.first_block(chunk), last = blocks.first_block(chunk + 1);
    const int64_t length = last - first == 1 ? layer.padded_inputs : CHUNK_INPUTS;
    for (int64_t k = 0; k < layer.padded_inputs; k += length) {
        const int64_t end = std::min(k + length, layer.padded_inputs);
        for (int64_t block = first; block < last; ++block) {
            const int64_t row = blocks.first_row(block);
            float* const kept = partial + (block - first) * BLOCK_ROWS * PANELS * PANEL;
            const Stretch stretch{k, end, k == 0, end == layer.padded_inputs, kept};
            multiply_block<Number, PANELS>(blocks.first_row(block + 1) - row, layer,
                                           x + row * (layer.padded_inputs / DEPTH<Number>),
                                           y + row * layer.num_outputs, panel, stretch);
        }
    }
}

template <typename Number>
void multiply_run(const Layer<Number>& layer, const Blocks& blocks, int64_t chunk,
                  const float* x, Number* y, int64_t first, int64_t last) {
    const int at_once = panels_at_once(blocks.most_rows());
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
    const int64_t num_words = layer.padded_inputs / DEPTH<Number>;  // of a row
    // Kept between calls: memory of this size would be taken from the system and given back each
    // time, a page fault for every 4 KB.
    static thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < num_rows * num_words) {
        kept = {};  // before the larger one, so that both are never held
        kept.resize(num_rows * num_words);
    }
    float* const words = kept.data();
    const Blocks blocks(num_rows);
    const int64_t num_panels = (layer.num_outputs + PANEL - 1) / PANEL;
    const int64_t work = blocks.num_chunks * num_panels;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t row = blocks.first_row(block);
            lay_out<Number>(x + row * layer.num_inputs, words + row * num_words,
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
                multiply_run(layer, blocks, chunk, words, y, first, last);
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

// Whether bfloat16 is multiplied as it is, rather than widened.
extern "C" int linear_multiplies_bfloat16() { return DEPTH<BFloat16> == 2; }

DEFINE_KERNEL(linear_float32, linear_kernel<float>)
DEFINE_KERNEL(linear_bfloat16, linear_kernel<BFloat16>)
