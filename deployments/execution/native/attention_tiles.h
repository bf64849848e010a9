// Attention of many lines over the paged cache: tiles of keys and values are packed once, into the
// words of tile_packing.h, and multiplied with all lines of a block in a register-blocked product
// (FlashAttention-2, Dao 2023, on a CPU).
//
//     packed keys    [TILE / PANEL][key_dim / DEPTH][PANEL]      a panel: PANEL keys side by side
//     packed values  [value_dim / PANEL][TILE / DEPTH][PANEL]    a panel: PANEL places of a value
//     packed query   [strips][key_dim / DEPTH][STRIP]            a strip: STRIP lines side by side
//     sums           [strips][value_dim / PANEL][STRIP][PANEL]   float32
//
// A strip meets a tile while both lie in the nearest caches: scores, weights, and the sums of
// weighted values, STRIP lines by PANEL columns at a time in registers.

#pragma once

#include "online_softmax.h"
#include "tile_packing.h"

namespace {

#if defined(__AVX512F__)
constexpr int STRIP = 12, PANEL = 2 * LANES;
#else
constexpr int STRIP = 6, PANEL = LANES == 8 ? 16 : 4 * LANES;
#endif
constexpr int VECTORS = PANEL / LANES;
static_assert(TILE % PANEL == 0, "a tile is whole panels");

typedef Floats Product[STRIP][VECTORS];

INLINE int64_t num_panels(int64_t count) { return (count + PANEL - 1) / PANEL; }

// sums += left * right over `num_words`: STRIP lines by PANEL columns, which stay in registers.
template <typename Number, int LINE_STEP, int WORD_STEP>
INLINE void multiply_add(const float* left, const float* right, int64_t num_words, Product& sums) {
    for (int64_t k = 0; k < num_words; ++k) {
        Floats columns[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) columns[v] = load(right + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < STRIP; ++i) {
            const Floats line = Packing<Number>::broadcast(left + i * LINE_STEP);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[i][v] = Packing<Number>::add(sums[i][v], line, columns[v]);
        }
        left += WORD_STEP;
        right += PANEL;
    }
}

// The two products are functions of their own: within a larger one the compiler runs out of
// registers, and keeps a sum in memory.

// Scores of a strip of queries against a panel of keys: `factor` times their products.
template <typename Number>
__attribute__((noinline)) void multiply_query(const float* query, const float* keys,
                                              int64_t num_words, float factor, float* scores) {
    Product product = {};
    multiply_add<Number, 1, STRIP>(query, keys, num_words, product);
#pragma GCC unroll 16
    for (int i = 0; i < STRIP; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            store(product[i][v] * factor, scores + i * TILE + v * LANES);
}

// Sums of a strip and a panel of value places, corrected, plus weights times values.
template <typename Number>
__attribute__((noinline)) void multiply_weights(const float* weights, const float* values,
                                                int64_t num_words, const float* corrections,
                                                float* sums) {
    Product product;
#pragma GCC unroll 16
    for (int i = 0; i < STRIP; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            product[i][v] = load(sums + i * PANEL + v * LANES) * corrections[i];
    multiply_add<Number, TILE, 1>(weights, values, num_words, product);
#pragma GCC unroll 16
    for (int i = 0; i < STRIP; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(product[i][v], sums + i * PANEL + v * LANES);
}

// Lines [first_line, first_line + num_lines) of one row and KV head, over all keys they see.
// Results do not depend on how lines are put into blocks.
template <typename Number>
class LineBlock {
public:
    // Floats of scratch memory for up to `num_strips` strips.
    static int64_t num_floats(const Layer<Number>& layer, int64_t num_strips) {
        const int64_t width = num_panels(layer.value_dim) * PANEL, key_words = num_words(layer.key_dim);
        return TILE * (key_words + width / DEPTH) + num_strips * STRIP * (key_words + width);
    }

    LineBlock(const Lines<Number>& lines, int64_t first_line, int64_t num_lines, float* scratch)
        : lines_(lines),
          layer_(lines.layer),
          first_line_(first_line),
          num_lines_(num_lines),
          num_strips_((num_lines + STRIP - 1) / STRIP),
          width_(num_panels(layer_.value_dim) * PANEL),
          key_words_(num_words(layer_.key_dim)),
          keys_(scratch),
          values_(keys_ + TILE * key_words_),
          query_(values_ + TILE / DEPTH * width_),
          sums_(query_ + num_strips_ * STRIP * key_words_) {}

    void attend(Running<STRIP>* running) {
        pack_query();
        for (int64_t strip = 0; strip < num_strips_; ++strip) running[strip].reset();
        std::fill(sums_, sums_ + num_strips_ * STRIP * width_, 0.0f);
        const int64_t first = layer_.first_seen(lines_.position(first_line_));
        const int64_t last = lines_.position(first_line_ + num_lines_ - 1) + 1;
        for (int64_t tile = first / TILE * TILE; tile < last; tile += TILE) {
            pack_tile(tile, std::max(tile, first), std::min(tile + TILE, last));
            for (int64_t strip = 0; strip < num_strips_; ++strip)
                attend_tile(strip, tile, running[strip]);
        }
        for (int64_t strip = 0; strip < num_strips_; ++strip) write(strip, running[strip]);
    }

private:
    using Pack = Packing<Number>;
    static constexpr int DEPTH = Pack::DEPTH;

    static int64_t num_words(int64_t depth) { return (depth + DEPTH - 1) / DEPTH; }

    int64_t line_of(int64_t strip, int i) const {
        return std::min(first_line_ + strip * STRIP + i, first_line_ + num_lines_ - 1);
    }

    void pack_query() {
        for (int64_t strip = 0; strip < num_strips_; ++strip) {
            float* to = query_ + strip * STRIP * key_words_;
            for (int i = 0; i < STRIP; ++i) {
                // Places beyond the last line repeat it; nobody reads what they become.
                const Number* from = lines_.query(line_of(strip, i));
                for (int64_t d = 0; d < layer_.key_dim; d += DEPTH)
                    to[d / DEPTH * STRIP + i] = Pack::word(from + d, layer_.key_dim - d);
            }
        }
    }

    // Positions [first, last) of the tile that begins at `tile`. The rest of it are zeros as keys and
    // their neighbours as values: nobody gives them weight.
    void pack_tile(int64_t tile, int64_t first, int64_t last) {
        int64_t slots[TILE];
        lines_.row.find_slots(first, last, slots + (first - tile));
        const int64_t begin = first - tile, end = last - tile;
        for (int64_t i = 0; i < TILE; i += 4) pack_four_keys(slots, i, begin, end);
        for (int64_t i = 0; i < TILE; i += DEPTH) {
            const Number* values[DEPTH];
            for (int j = 0; j < DEPTH; ++j)
                values[j] = lines_.value(slots[std::clamp(i + j, begin, end - 1)]);
            pack_values(values, values_ + i / DEPTH * PANEL);
        }
    }

    void pack_four_keys(const int64_t* slots, int64_t i, int64_t begin, int64_t end) {
        float* to = keys_ + i / PANEL * PANEL * key_words_ + i % PANEL;
        const bool are_all_there = i >= begin && i + 4 <= end;
        int64_t d = 0;
        if (are_all_there) {
            const Number* from[4];
            for (int j = 0; j < 4; ++j) from[j] = lines_.key(slots[i + j]);
            for (; d + 4 * DEPTH <= layer_.key_dim; d += 4 * DEPTH) {
                Quad quads[4];
                for (int j = 0; j < 4; ++j) quads[j] = Pack::four_words(from[j] + d);
                transpose(quads);
                for (int j = 0; j < 4; ++j) store_quad(quads[j], to + (d / DEPTH + j) * PANEL);
            }
        }
        for (; d < layer_.key_dim; d += DEPTH)
            for (int64_t j = i; j < i + 4; ++j)
                to[d / DEPTH * PANEL + j - i] =
                    j >= begin && j < end
                        ? Pack::word(lines_.key(slots[j]) + d, layer_.key_dim - d)
                        : 0.0f;
    }

    void pack_values(const Number* const* values, float* to) {
        constexpr int64_t STEP = TILE / DEPTH;  // words of a place
        int64_t d = 0;
        for (; d + PANEL <= layer_.value_dim; d += PANEL)
            for (int v = 0; v < PANEL; v += LANES)
                store(Pack::columns(values, d + v), to + d * STEP + v);
        if (d == layer_.value_dim) return;
        for (int v = 0; v < PANEL; ++v)
            to[d * STEP + v] = d + v < layer_.value_dim ? Pack::column(values, d + v) : 0.0f;
    }

    void attend_tile(int64_t strip, int64_t tile, Running<STRIP>& running) {
        const int64_t first_position = lines_.position(line_of(strip, 0));
        const int64_t last_position = lines_.position(line_of(strip, STRIP - 1));
        const int64_t begin = std::max<int64_t>(layer_.first_seen(first_position) - tile, 0);
        const int64_t end = std::min<int64_t>(last_position + 1 - tile, TILE);
        if (begin >= end) return;
        const int64_t first = begin / PANEL * PANEL, last = num_panels(end) * PANEL;

        alignas(64) Scores scores[STRIP];
        const float* query = query_ + strip * STRIP * key_words_;
        for (int64_t column = first; column < last; column += PANEL)
            multiply_query<Number>(query, keys_ + column * key_words_, key_words_,
                                   layer_.query_factor(), scores[0] + column);
        if (layer_.softcap > 0)
            for (Scores& line : scores) cap(line, first, last, layer_.softcap);
        const bool hides_late = first_position + 1 < tile + last;
        const bool hides_early = layer_.first_seen(last_position) > tile + first;
        if (hides_late || hides_early) {
            for (int i = 0; i < STRIP; ++i) {
                const int64_t position = lines_.position(line_of(strip, i));
                hide(scores[i], first, last, layer_.first_seen(position) - tile,
                     position + 1 - tile);
            }
        }
        float corrections[STRIP];
        weigh<STRIP>(scores, first, last, running, corrections);
        for (Scores& line : scores) Pack::pack_weights(line, first, last);
        float* sums = sums_ + strip * STRIP * width_;
        const int64_t word = begin / DEPTH, num_tile_words = num_words(end) - word;
        for (int64_t d = 0; d < width_; d += PANEL)
            multiply_weights<Number>(scores[0] + word, values_ + d * (TILE / DEPTH) + word * PANEL,
                                     num_tile_words, corrections, sums + d * STRIP);
    }

    void write(int64_t strip, const Running<STRIP>& running) const {
        const float* sums = sums_ + strip * STRIP * width_;
        const int64_t num_lines = std::min<int64_t>(STRIP, num_lines_ - strip * STRIP);
        for (int i = 0; i < num_lines; ++i) {
            const int64_t line = first_line_ + strip * STRIP + i;
            const float factor = final_factor(layer_, lines_.head(line), running.maxima[i],
                                              sum_of(running.sums[i]));
            Number* to = lines_.out(line);
            for (int64_t d = 0; d < layer_.value_dim; ++d)
                narrow(sums[d / PANEL * STRIP * PANEL + i * PANEL + d % PANEL] * factor, to + d);
        }
    }

    const Lines<Number>& lines_;
    const Layer<Number>& layer_;
    const int64_t first_line_, num_lines_, num_strips_, width_, key_words_;
    float *keys_, *values_, *query_, *sums_;
};

}  // namespace
