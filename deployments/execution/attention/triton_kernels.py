"""The Triton kernels of attention over paged keys and values.

One kernel serves decodes and prefill chunks: a program takes a tile of consecutive queries of one
row together with the query heads that share a KV head, and walks the keys they see, a tile of keys
at a time, with a running softmax (Dao et al., FlashAttention, 2022, algorithm 1; Milakov and
Gimelshein, 2018). The heads of a group lie in the tile's rows, so that keys are read once for all
of them:

    tile of 8 rows, a group of 3 heads       keys of the row, in tiles
    q0h0 q0h1 q0h2 q1h0 q1h1 q1h2 -- --      | skipped: left of every window | read | read |

A decode of a long context is one tile and would keep one multiprocessor busy; split over programs,
each takes a share of the keys and the merge kernel combines what they found (Dao et al.,
Flash-Decoding, 2023).

Scores are in base 2, so that the softmax needs exp2 alone. Does not know the sizes of tiles; the
backend chooses them.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_heads(ptr, offsets, is_row, DIM: tl.constexpr, LANES: tl.constexpr):
    """[num_rows, LANES] head vectors at these offsets. What is masked is never read: it may hold
    what others left behind, even NaN.
    """
    lane = tl.arange(0, LANES)
    mask = is_row[:, None] & (lane[None, :] < DIM)
    return tl.load(ptr + offsets[:, None] + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _store_heads(ptr, offsets, is_row, heads, DIM: tl.constexpr, LANES: tl.constexpr):
    """Write head vectors [num_rows, LANES] at these offsets, in the dtype that lies there."""
    lane = tl.arange(0, LANES)
    mask = is_row[:, None] & (lane[None, :] < DIM)
    tl.store(ptr + offsets[:, None] + lane[None, :], heads.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(a, b, accumulator, WIDENS: tl.constexpr):
    """accumulator + a @ b, in fp32."""
    if WIDENS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def _find_span(position, num_queries, num_splits, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The keys of this program: from `first` on, in tiles from `begin` up to `stop`. `position` is
    that of the first of the tile's queries.
    """
    end = position + num_queries
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, position - WINDOW + 1)
    begin = first // TILE_KEYS * TILE_KEYS
    share = tl.cdiv(tl.cdiv(end - begin, TILE_KEYS), num_splits) * TILE_KEYS
    begin = begin + tl.program_id(2) * share
    return first, begin, tl.minimum(end, begin + share)


@triton.jit
def _begin_softmax(sinks_ptr, head, is_query, HAS_SINKS: tl.constexpr):
    """Each query's largest score so far, and the sum of its weights. A sink is a key without a
    value; one split alone counts it.
    """
    nothing = head.to(tl.float32) * 0.0
    best = nothing + float("-inf")
    total = nothing
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_query, other=0.0).to(tl.float32)
        best = tl.where(tl.program_id(2) == 0, sink * _LOG2_E, best)
        total = tl.where(tl.program_id(2) == 0, nothing + 1.0, total)
    return best, total


@triton.jit
def _to_base_2(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores whose exp2 is the softmax's numerator."""
    if HAS_SOFTCAP:
        # tanh, by an exponential that may overflow to infinity without harm.
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    return scores * _LOG2_E


@triton.jit
def _sees(key_position, query_position, WINDOW: tl.constexpr):
    """[num_queries, num_keys]"""
    sees = key_position[None, :] <= query_position[:, None]
    if WINDOW > 0:
        sees = sees & (key_position[None, :] > query_position[:, None] - WINDOW)
    return sees


@triton.jit
def _add_scores(best, total, scores):
    """The softmax with these scores in it, their weights, and by what older sums shrink."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A query that has seen no key yet must not subtract infinity from infinity.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    return new_best, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def attend_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]; split: [num_tokens, num_heads, splits, ..] fp32
    lse_ptr,  # split: [num_tokens, num_heads, num_splits], fp32, log2 of the softmax's denominator
    query_ptr,  # [num_tokens, num_heads, KEY_DIM], any strides but the last
    keys_ptr,  # [num_slots, num_kv_heads, KEY_DIM], contiguous
    values_ptr,  # [num_slots, num_kv_heads, VALUE_DIM], contiguous
    sinks_ptr,  # [num_heads]
    tiles_ptr,  # [num_tiles, 4], int32: row, first token, its position, number of queries
    tables_ptr,  # [num_rows, table_stride], int32: block ids
    scaling,
    softcap,
    query_token_stride,
    query_head_stride,
    table_stride,
    num_splits,
    GROUP: tl.constexpr,  # query heads of a KV head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,  # powers of two that hold the two dims
    VALUE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WIDENS: tl.constexpr,  # multiplies in fp32: Triton's interpreter cannot in bfloat16
):
    """A tile of queries (program 0) of a KV head (1), over one split of their keys (2)."""
    tile = tiles_ptr + 4 * tl.program_id(0)
    row, first_position, num_queries = tl.load(tile), tl.load(tile + 2), tl.load(tile + 3)
    lane = tl.arange(0, TILE_ROWS)
    is_query = lane < num_queries * GROUP
    query_position = first_position + lane // GROUP
    token = (tl.load(tile + 1) + lane // GROUP).to(tl.int64)
    head = tl.program_id(1) * GROUP + lane % GROUP
    place = token * query_token_stride + head * query_head_stride
    query = _load_heads(query_ptr, place, is_query, KEY_DIM, KEY_LANES)
    first, begin, stop = _find_span(first_position, num_queries, num_splits, WINDOW, TILE_KEYS)
    best, total = _begin_softmax(sinks_ptr, head, is_query, HAS_SINKS)
    sums = tl.zeros([TILE_ROWS, VALUE_LANES], tl.float32)
    table = tables_ptr + row.to(tl.int64) * table_stride
    for tile_position in range(begin, stop, TILE_KEYS):
        position = tile_position + tl.arange(0, TILE_KEYS)
        is_key = (position >= first) & (position < stop)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        entry = (block * BLOCK_SIZE + position % BLOCK_SIZE) * tl.num_programs(1) + tl.program_id(1)
        keys = _load_heads(keys_ptr, entry * KEY_DIM, is_key, KEY_DIM, KEY_LANES)
        scores = _multiply(query, tl.trans(keys), None, WIDENS) * scaling
        sees = is_key[None, :] & _sees(position, query_position, WINDOW)
        scores = tl.where(sees, _to_base_2(scores, softcap, HAS_SOFTCAP), float("-inf"))
        best, total, weights, shrink = _add_scores(best, total, scores)
        values = _load_heads(values_ptr, entry * VALUE_DIM, is_key, VALUE_DIM, VALUE_LANES)
        sums = _multiply(weights.to(values.dtype), values, sums * shrink[:, None], WIDENS)
    place = (token * (tl.num_programs(1) * GROUP) + head) * num_splits + tl.program_id(2)
    if IS_SPLIT:
        tl.store(lse_ptr + place, best + tl.log2(total), mask=is_query)
    sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    _store_heads(out_ptr, place * VALUE_DIM, is_query, sums, VALUE_DIM, VALUE_LANES)


@triton.jit
def merge_kernel(
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]
    partial_ptr,  # [num_tokens, num_heads, num_splits, VALUE_DIM], fp32, each a softmax of its own
    lse_ptr,  # [num_tokens, num_heads, num_splits], fp32; -inf: the split saw no key
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    SPLIT_LANES: tl.constexpr,
):
    """One token's head out of its splits, each weighed by its share of the whole softmax."""
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    split = tl.arange(0, SPLIT_LANES)
    lane = tl.arange(0, VALUE_LANES)
    is_split = split < num_splits
    lse = tl.load(lse_ptr + place * num_splits + split, mask=is_split, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    partial = tl.load(
        partial_ptr + (place * num_splits + split[:, None]) * VALUE_DIM + lane[None, :],
        mask=is_split[:, None] & (lane[None, :] < VALUE_DIM),
        other=0.0,
    )
    merged = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(
        out_ptr + place * VALUE_DIM + lane,
        merged.to(out_ptr.dtype.element_ty),
        mask=lane < VALUE_DIM,
    )
