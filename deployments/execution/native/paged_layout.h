// What a step and a layer of it look like to the attention kernels: plain records that the caller
// fills, and where a token's keys and values lie.
//
//     table of a row      [  5 | 2 | 9  ]       position p of the row is
//     blocks of 4 tokens   0..3 4..7 8..        slot = table[p / 4] * 4 + p % 4
//
//     keys    [num_slots, num_kv_heads, key_dim]
//     values  [num_slots, num_kv_heads, value_dim]

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

// Keys are taken in tiles that begin at multiples of this position, whatever the step: so a query's
// sums are made in the same order beside any neighbours.
constexpr int TILE = 64;

constexpr float LOG2_E = 1.44269504f;
constexpr float NO_SCORE = -1e30f;  // the maximum of no scores: finite, so that differences are
constexpr float HIDDEN = -INFINITY;

// Requests of one step. Arrays have an entry a row.
struct Step {
    int64_t num_rows;
    int64_t block_size;
    const int64_t* starts;        // first token of a row in the ragged batch
    const int64_t* num_queries;
    const int64_t* num_context;   // tokens before the first query
    const int64_t* table_starts;  // where a row's block table begins in `tables`
    const int32_t* tables;
};

template <typename Number>
struct Layer {
    int64_t num_heads, num_kv_heads, key_dim, value_dim;
    int64_t window;  // keys a query sees, itself included; 0: all before it
    float scaling;
    float softcap;  // 0: none
    const float* sinks;  // [num_heads]; null: none
    const Number* query;  // [num_tokens, num_heads, key_dim], at the two strides that follow
    int64_t query_token_stride, query_head_stride;
    const Number* keys;
    const Number* values;
    Number* out;  // [num_tokens, num_heads, value_dim]

    int64_t group() const { return num_heads / num_kv_heads; }

    // Scores leave the product as this times q.k. Softmax is taken in powers of two.
    float query_factor() const { return softcap > 0 ? scaling / softcap : scaling * LOG2_E; }

    float sink(int64_t head) const { return sinks[head] * LOG2_E; }

    // First key that a query at `position` sees.
    int64_t first_seen(int64_t position) const {
        return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    }
};

// One row of a step. Its queries times the heads that share a KV head are "lines": line i is query
// i / group of head i % group, so lines that follow each other see nearly the same keys.
struct Row {
    int64_t start, num_queries, num_context, block_size;
    const int32_t* table;

    Row(const Step& step, int64_t index)
        : start(step.starts[index]),
          num_queries(step.num_queries[index]),
          num_context(step.num_context[index]),
          block_size(step.block_size),
          table(step.tables + step.table_starts[index]) {}

    int64_t num_keys() const { return num_context + num_queries; }

    // Slots of the keys at positions [first, last).
    void find_slots(int64_t first, int64_t last, int64_t* slots) const {
        int64_t block = first / block_size, offset = first % block_size;
        for (int64_t position = first; position < last; ++position) {
            *slots++ = table[block] * block_size + offset;
            if (++offset == block_size) {
                offset = 0;
                ++block;
            }
        }
    }
};

// Lines of one row and KV head.
template <typename Number>
struct Lines {
    const Layer<Number>& layer;
    const Row& row;
    int64_t kv_head;

    int64_t group() const { return layer.group(); }
    int64_t count() const { return row.num_queries * group(); }
    int64_t head(int64_t line) const { return kv_head * group() + line % group(); }
    int64_t position(int64_t line) const { return row.num_context + line / group(); }

    const Number* query(int64_t line) const {
        return layer.query + (row.start + line / group()) * layer.query_token_stride +
               head(line) * layer.query_head_stride;
    }

    Number* out(int64_t line) const {
        return layer.out + ((row.start + line / group()) * layer.num_heads + head(line)) *
                               layer.value_dim;
    }

    const Number* key(int64_t slot) const {
        return layer.keys + (slot * layer.num_kv_heads + kv_head) * layer.key_dim;
    }

    const Number* value(int64_t slot) const {
        return layer.values + (slot * layer.num_kv_heads + kv_head) * layer.value_dim;
    }
};

}  // namespace
