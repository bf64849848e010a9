// Attention of few lines over the paged cache, as in decode: keys and values are read where they
// lie, once, and all lines of a KV head are multiplied with a key while it is in registers.
//
// A row's keys are taken in pieces, which are added up at the end ("split-KV"; Dao et al.,
// Flash-Decoding, 2023), so that several threads may read one long row. Pieces begin at fixed
// positions, whatever the step.

#pragma once

#include "online_softmax.h"
#include "tile_packing.h"

namespace {

constexpr int PIECE = 256;
constexpr int MAX_LINES = 3;  // at once; with as many vectors of sums as registers allow

// What one piece gives to one line: [maximum, sum of weights, weighted sums of values], the sums
// relative to 2^maximum.
INLINE int64_t num_partial_floats(int64_t value_dim) { return 2 + value_dim; }

// All lines of one row and KV head over the keys of one piece, tile by tile.
template <typename Number>
class FewLines {
public:
    // Floats of scratch memory.
    static int64_t num_floats(const Layer<Number>& layer, int64_t num_lines) {
        return num_lines * num_key_vectors(layer) * LANES;
    }

    // `partials` takes one record of num_partial_floats a line.
    FewLines(const Lines<Number>& lines, float* scratch, float* partials)
        : lines_(lines),
          layer_(lines.layer),
          num_key_vectors_(num_key_vectors(lines.layer)),
          query_(scratch),
          partials_(partials) {}

    // Call once, before the first `attend` of a piece.
    void begin() {
        for (int64_t line = 0; line < lines_.count(); ++line) {
            const Number* from = lines_.query(line);
            float* to = query_ + line * num_key_vectors_ * LANES;
            for (int64_t d = 0; d < num_key_vectors_ * LANES * DEPTH; d += DEPTH)
                *to++ = d < layer_.key_dim ? Pack::word(from + d, layer_.key_dim - d) : 0.0f;
            float* record = partial(line);
            std::fill_n(record, num_partial_floats(layer_.value_dim), 0.0f);
            record[0] = NO_SCORE;
        }
    }

    // Positions [first, last), all within one tile, at `slots`. While a slot is read, the one
    // `ahead` of it (0: none) is fetched from memory: blocks lie anywhere, and no machine guesses
    // where.
    void attend(int64_t first, int64_t last, const int64_t* slots, int64_t ahead) {
        const int64_t count = lines_.count();
        // The first lines have it all fetched.
        for (int64_t line = 0; line < count; ahead = 0) {
            // Four lines are two and two: more at once and the registers overflow.
            const int64_t left = count - line;
            if (left == 3 || left >= 5) {
                attend_lines<3>(line, first, last, slots, ahead);
                line += 3;
            } else if (left >= 2) {
                attend_lines<2>(line, first, last, slots, ahead);
                line += 2;
            } else {
                attend_lines<1>(line, first, last, slots, ahead);
                line += 1;
            }
        }
    }

private:
    using Pack = Packing<Number>;
    static constexpr int DEPTH = Pack::DEPTH;

    // Vectors of a key's words, of which the last one may be filled up with zeros.
    static int64_t num_key_vectors(const Layer<Number>& layer) {
        return (layer.key_dim + LANES * DEPTH - 1) / (LANES * DEPTH);
    }

    float* partial(int64_t line) const {
        return partials_ + line * num_partial_floats(layer_.value_dim);
    }

    static void fetch(const Number* from, int64_t count) {
        const auto* begin = reinterpret_cast<const char*>(from);
        for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(Number)); byte += 64)
            __builtin_prefetch(begin + byte);
    }

    template <int LINES>
    void attend_lines(int64_t line, int64_t first, int64_t last, const int64_t* slots,
                      int64_t ahead) {
        const int64_t first_position = lines_.position(line);
        const int64_t last_position = lines_.position(line + LINES - 1);
        const int64_t seen_first = std::max(layer_.first_seen(first_position), first);
        const int64_t seen_last = std::min(last_position + 1, last);
        if (seen_first >= seen_last) return;
        slots += seen_first - first;
        const int64_t num_keys = seen_last - seen_first;
        const int64_t num_columns = (num_keys + LANES * DEPTH - 1) / (LANES * DEPTH) * LANES * DEPTH;

        alignas(64) Scores scores[LINES];
        score<LINES>(line, slots, num_keys, ahead, scores);
        for (int i = 0; i < LINES; ++i) {
            if (layer_.softcap > 0) cap(scores[i], 0, num_columns, layer_.softcap);
            const int64_t position = lines_.position(line + i);
            hide(scores[i], 0, num_columns, layer_.first_seen(position) - seen_first,
                 std::min(position + 1, seen_last) - seen_first);
        }
        Running<LINES> running;
        for (int i = 0; i < LINES; ++i) {
            running.maxima[i] = partial(line + i)[0];
            running.sums[i] = Floats{};
        }
        float corrections[LINES];
        weigh<LINES>(scores, 0, num_columns, running, corrections);
        for (int i = 0; i < LINES; ++i) {
            float* record = partial(line + i);
            record[0] = running.maxima[i];
            record[1] = record[1] * corrections[i] + sum_of(running.sums[i]);
            Pack::pack_weights(scores[i], 0, num_columns);
        }
        add_values<LINES>(line, slots, num_keys, ahead, scores, corrections);
    }

    template <int LINES>
    void score(int64_t line, const int64_t* slots, int64_t num_keys, int64_t ahead,
               Scores* scores) const {
        constexpr int KEYS = LINES == 1 ? 8 : 4;
        const float* query = query_ + line * num_key_vectors_ * LANES;
        for (int64_t key = 0; key < num_keys; key += KEYS) {
            const Number* keys[KEYS];
            // Places beyond the last key repeat it, and are hidden later.
            for (int j = 0; j < KEYS; ++j) {
                const int64_t* slot = slots + std::min(key + j, num_keys - 1);
                keys[j] = lines_.key(*slot);
                if (ahead != 0) fetch(lines_.key(slot[ahead]), layer_.key_dim);
            }
            score_keys<LINES, KEYS>(query, keys, scores[0] + key);
        }
    }

    template <int LINES, int KEYS>
    void score_keys(const float* query, const Number* const* keys, float* scores) const {
        Floats sums[LINES][KEYS] = {};
        const int64_t num_whole = layer_.key_dim / (LANES * DEPTH);
        for (int64_t v = 0; v < num_whole; ++v) {
            Floats columns[KEYS];
#pragma GCC unroll 8
            for (int j = 0; j < KEYS; ++j) columns[j] = Pack::words(keys[j] + v * LANES * DEPTH);
            add_products<LINES, KEYS>(query + v * LANES, columns, sums);
        }
        if (num_whole < num_key_vectors_) {
            Floats columns[KEYS];
            for (int j = 0; j < KEYS; ++j) {
                Number rest[LANES * DEPTH] = {};
                const int64_t first = num_whole * LANES * DEPTH;
                std::copy(keys[j] + first, keys[j] + layer_.key_dim, rest);
                columns[j] = Pack::words(rest);
            }
            add_products<LINES, KEYS>(query + num_whole * LANES, columns, sums);
        }
        const float factor = layer_.query_factor();
#pragma GCC unroll 4
        for (int i = 0; i < LINES; ++i) {
#pragma GCC unroll 2
            for (int j = 0; j < KEYS; j += 4) {
                const Quad quad =
                    sums_of(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
                store_quad(quad * factor, scores + i * TILE + j);
            }
        }
    }

    template <int LINES, int KEYS>
    INLINE void add_products(const float* query, const Floats (&columns)[KEYS],
                             Floats (&sums)[LINES][KEYS]) const {
        Floats some[LINES];
#pragma GCC unroll 4
        for (int i = 0; i < LINES; ++i) some[i] = load(query + i * num_key_vectors_ * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; ++j)
#pragma GCC unroll 4
            for (int i = 0; i < LINES; ++i) sums[i][j] = Pack::add(sums[i][j], some[i], columns[j]);
    }

    template <int LINES>
    void add_values(int64_t line, const int64_t* slots, int64_t num_keys, int64_t ahead,
                    const Scores* weights, const float* corrections) {
        constexpr int WIDE = LINES == 1 ? 8 : 4;  // vectors of a value taken at once
        float* sums = partial(line) + 2;
        int64_t d = 0;
        for (; d + WIDE * LANES <= layer_.value_dim; d += WIDE * LANES)
            add_columns<LINES, WIDE>(sums, d, slots, num_keys, ahead, weights, corrections);
        for (; d + LANES <= layer_.value_dim; d += LANES)
            add_columns<LINES, 1>(sums, d, slots, num_keys, ahead, weights, corrections);
        if (d < layer_.value_dim)
            add_last_columns<LINES>(sums, d, slots, num_keys, weights, corrections);
    }

    // Values at `slots`; behind the last one, which has no weight, it is repeated.
    INLINE void find_values(const int64_t* slots, int64_t j, int64_t num_keys,
                            const Number* (&values)[DEPTH]) const {
        for (int n = 0; n < DEPTH; ++n) values[n] = lines_.value(slots[std::min(j + n, num_keys - 1)]);
    }

    // Of places that fill no vector.
    template <int LINES>
    void add_last_columns(float* sums, int64_t first, const int64_t* slots, int64_t num_keys,
                          const Scores* weights, const float* corrections) const {
        const int64_t stride = num_partial_floats(layer_.value_dim);
        const int64_t num_left = layer_.value_dim - first;
        for (int i = 0; i < LINES; ++i) {
            float some[LANES] = {};
            std::copy_n(sums + i * stride + first, num_left, some);
            Floats sum = load(some) * corrections[i];
            for (int64_t j = 0; j < num_keys; j += DEPTH) {
                const Number* values[DEPTH];
                find_values(slots, j, num_keys, values);
                float words[LANES] = {};
                for (int64_t d = 0; d < num_left; ++d) words[d] = Pack::column(values, first + d);
                sum = Pack::add(sum, Pack::broadcast(weights[i] + j / DEPTH), load(words));
            }
            store(sum, some);
            std::copy_n(some, num_left, sums + i * stride + first);
        }
    }

    template <int LINES, int WIDE>
    void add_columns(float* sums, int64_t d, const int64_t* slots, int64_t num_keys, int64_t ahead,
                     const Scores* weights, const float* corrections) const {
        const int64_t stride = num_partial_floats(layer_.value_dim);
        Floats product[LINES][WIDE];
        for (int i = 0; i < LINES; ++i)
            for (int v = 0; v < WIDE; ++v)
                product[i][v] = load(sums + i * stride + d + v * LANES) * corrections[i];
        for (int64_t j = 0; j < num_keys; j += DEPTH) {
            const Number* values[DEPTH];
            find_values(slots, j, num_keys, values);
            if (ahead != 0)
                for (int n = 0; n < DEPTH; ++n)
                    fetch(lines_.value(slots[std::min(j + n, num_keys - 1) + ahead]) + d,
                          WIDE * LANES);
            Floats weight[LINES];
#pragma GCC unroll 4
            for (int i = 0; i < LINES; ++i) weight[i] = Pack::broadcast(weights[i] + j / DEPTH);
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; ++v) {
                const Floats column = Pack::columns(values, d + v * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < LINES; ++i)
                    product[i][v] = Pack::add(product[i][v], weight[i], column);
            }
        }
        for (int i = 0; i < LINES; ++i)
            for (int v = 0; v < WIDE; ++v)
                store(product[i][v], sums + i * stride + d + v * LANES);
    }

    const Lines<Number>& lines_;
    const Layer<Number>& layer_;
    const int64_t num_key_vectors_;
    float* query_;
    float* partials_;
};

// Adds the record of a later piece to `into`.
INLINE void add_piece(const float* piece, float* into, int64_t value_dim) {
    const float maximum = std::max(into[0], piece[0]);
    const float own = exp2_of(into[0] - maximum), others = exp2_of(piece[0] - maximum);
    into[0] = maximum;
    for (int64_t i = 1; i < num_partial_floats(value_dim); ++i)
        into[i] = into[i] * own + piece[i] * others;
}

// Adds up the pieces of all lines, in order, and writes what they attend to. `partials` are those
// of the first piece, and are used up; the next piece's follow after `piece_stride` floats.
template <typename Number>
void merge_pieces(const Lines<Number>& lines, float* partials, int64_t num_pieces,
                  int64_t piece_stride) {
    const int64_t dim = lines.layer.value_dim;
    for (int64_t line = 0; line < lines.count(); ++line) {
        float* record = partials + line * num_partial_floats(dim);
        for (int64_t piece = 1; piece < num_pieces; ++piece)
            add_piece(record + piece * piece_stride, record, dim);
        const float factor = final_factor(lines.layer, lines.head(line), record[0], record[1]);
        Number* to = lines.out(line);
        for (int64_t d = 0; d < dim; ++d) narrow(record[2 + d] * factor, to + d);
    }
}

}  // namespace
