"""Attention through torch's scaled_dot_product_attention, laid out for CPUs; it runs on any device.

All rows of one query are one padded batch, in groups of like length; each prefill chunk is a call
of its own. Slot tables and masks are built once a step for each distinct window and shared by all
layers.

    group of decodes        slots                      mask
    A, 3 keys visible     [ 20 21 22  0 ]        [ 0  0  0  -inf ]
    B, 4 keys visible     [ 36 37 48 49 ]        [ 0  0  0   0   ]

Padding reads slot 0, in the null block, never what others left behind in a block.

SDPA knows neither softcap nor sinks; layers with them take the same tables through an explicit
softmax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.input_batch import BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec

MAX_LENGTH_RATIO = 2.0
"""Decodes share a padded batch only while the longest is at most so many times the shortest."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each, padded to the longest."""

    tokens: slice | Tensor
    """Their places in the ragged row: a slice where they lie side by side, else [num_rows]."""
    slots: Tensor
    """[num_rows * num_keys], int64, flat slots of the visible keys, 0 for padding"""
    mask: Tensor | None
    """[num_rows, 1, 1, num_keys], added to the scores: -inf where a slot is padding; None: none
    is"""
    num_rows: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One row of several queries."""

    tokens: slice
    slots: Tensor | None
    """[num_keys], int64; None: the chunk begins the prompt, so its own keys are all there is"""
    mask: Tensor | None
    """[num_queries, num_keys], added to the scores; None: plain causal"""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What layers of one window share."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]


CpuPlan = dict[int | None, WindowPlan]


def _additive(is_hidden: Tensor, like: Tensor) -> Tensor:
    """-inf where hidden, else 0, in the dtype and on the device of `like`."""
    return (
        torch.zeros_like(is_hidden, dtype=like.dtype).masked_fill_(is_hidden, -torch.inf).to(like)
    )


class CpuSdpaAttention:
    """The backend for CPUs.

    Args:
        dtype: of the model's queries, and so of the masks.
        device: of the model; tables and masks are made on the CPU and moved there once a step.
    """

    name = "cpu_sdpa"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._like = torch.empty(0, dtype=dtype, device=device)

    def supports(self, spec: LayerSpec) -> bool:
        return True

    def plan(self, batch: InputBatch, windows: Collection[int | None]) -> CpuPlan:
        return {window: _plan_window(batch, window, self._like) for window in windows}

    def attend(self, call: AttentionCall, cache: LayerCache, plan: CpuPlan) -> Tensor:
        num_tokens, num_heads, _ = call.query.shape
        shared = plan[call.window]
        if len(shared.groups) == 1 and not shared.chunks:
            return _attend_decodes(call, cache, shared.groups[0])
        out = call.query.new_empty(num_tokens, num_heads, call.value.shape[-1])
        for group in shared.groups:
            out[group.tokens] = _attend_decodes(call, cache, group)
        for chunk in shared.chunks:
            out[chunk.tokens] = _attend_chunk(call, cache, chunk)
        return out


# --- the plan of a step ---------------------------------------------------------------------------


def _plan_window(batch: InputBatch, window: int | None, like: Tensor) -> WindowPlan:
    decodes = batch.rows[: batch.num_decodes]
    chunks = batch.rows[batch.num_decodes :]
    return WindowPlan(
        groups=tuple(
            _plan_group(rows, window, batch.block_size, like) for rows in _alike(decodes, window)
        ),
        chunks=tuple(_plan_chunk(row, window, batch.block_size, like) for row in chunks),
    )


def _num_visible(row: BatchRow, window: int | None) -> int:
    """Keys that a row of one query sees."""
    return row.num_keys if window is None else min(row.num_keys, window)


def _alike(rows: Sequence[BatchRow], window: int | None) -> list[list[BatchRow]]:
    """Rows of one query in groups of like length; one group, in the given order, if all are
    alike.
    """
    if not rows:
        return []
    lengths = [_num_visible(row, window) for row in rows]
    if max(lengths) <= MAX_LENGTH_RATIO * min(lengths):
        return [list(rows)]
    groups: list[list[BatchRow]] = []
    shortest = 0
    for length, row in sorted(zip(lengths, rows, strict=True), key=lambda pair: pair[0]):
        if not groups or length > MAX_LENGTH_RATIO * shortest:
            groups.append([])
            shortest = length
        groups[-1].append(row)
    return groups


def _plan_group(
    rows: Sequence[BatchRow], window: int | None, block_size: int, like: Tensor
) -> DecodeGroup:
    visible = torch.tensor([_num_visible(row, window) for row in rows])
    first = torch.tensor([row.num_keys for row in rows]) - visible
    num_blocks = max(-(-row.num_keys // block_size) for row in rows)
    tables = torch.tensor(
        [
            [*row.block_table[:num_blocks], *[0] * (num_blocks - len(row.block_table))]
            for row in rows
        ]
    )
    index = torch.arange(int(visible.max()))
    is_padding = index >= visible[:, None]
    positions = (first[:, None] + index).masked_fill_(is_padding, 0)
    slots = tables.gather(1, positions // block_size) * block_size + positions % block_size
    starts = [row.start for row in rows]
    is_run = starts == list(range(starts[0], starts[0] + len(starts)))
    return DecodeGroup(
        tokens=slice(starts[0], starts[0] + len(starts)) if is_run else torch.tensor(starts),
        slots=slots.masked_fill_(is_padding, 0).flatten().to(like.device),
        mask=_additive(is_padding, like)[:, None, None, :] if is_padding.any() else None,
        num_rows=len(rows),
    )


def _plan_chunk(row: BatchRow, window: int | None, block_size: int, like: Tensor) -> PrefillChunk:
    tokens = slice(row.start, row.start + row.num_queries)
    if row.num_context == 0 and (window is None or row.num_queries <= window):
        return PrefillChunk(tokens, None, None)
    first = 0 if window is None else max(0, row.num_context - window + 1)
    keys = torch.arange(first, row.num_keys)
    queries = torch.arange(row.num_context, row.num_keys)[:, None]
    is_hidden = keys > queries
    if window is not None:
        is_hidden |= keys <= queries - window
    slots = torch.tensor(row.block_table)[keys // block_size] * block_size + keys % block_size
    return PrefillChunk(tokens, slots.to(like.device), _additive(is_hidden, like))


# --- a layer --------------------------------------------------------------------------------------


def _attend_decodes(call: AttentionCall, cache: LayerCache, group: DecodeGroup) -> Tensor:
    """[num_rows, num_heads, value_dim]"""
    num_rows, num_kv_heads = group.num_rows, call.key.shape[1]
    # A query head's group becomes its query length, so that no key is copied per head.
    query = call.query[group.tokens].unflatten(1, (num_kv_heads, -1))
    keys = cache.flat_keys.index_select(0, group.slots).unflatten(0, (num_rows, -1)).transpose(1, 2)
    values = cache.flat_values.index_select(0, group.slots).unflatten(0, (num_rows, -1))
    values = values.transpose(1, 2)
    mask = group.mask
    if call.softcap is None and call.sinks is None:
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=call.scaling)
    else:
        sinks = None if call.sinks is None else call.sinks.view(1, num_kv_heads, -1, 1)
        out = _attend_explicitly(call, query, keys, values, mask, sinks)
    return out.flatten(1, 2)


def _attend_chunk(call: AttentionCall, cache: LayerCache, chunk: PrefillChunk) -> Tensor:
    """[num_queries, num_heads, value_dim]"""
    query = call.query[chunk.tokens].transpose(0, 1)[None]
    if chunk.slots is None:
        keys, values = call.key[chunk.tokens], call.value[chunk.tokens]
    else:
        keys = cache.flat_keys.index_select(0, chunk.slots)
        values = cache.flat_values.index_select(0, chunk.slots)
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if call.softcap is None and call.sinks is None:
        out = scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=call.scaling,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
    return _attend_chunk_explicitly(call, query[0], keys[0], values[0], chunk.mask)


def _attend_chunk_explicitly(
    call: AttentionCall, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """[num_queries, num_heads, value_dim] of one chunk whose layer has a softcap or sinks."""
    num_queries, num_keys = query.shape[1], keys.shape[1]
    if mask is None:
        is_hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(1)
        mask = _additive(is_hidden, query)
    num_groups = query.shape[0] // keys.shape[0]
    sinks = None if call.sinks is None else call.sinks.view(-1, 1, 1)
    out = _attend_explicitly(
        call,
        query,
        keys.repeat_interleave(num_groups, 0),
        values.repeat_interleave(num_groups, 0),
        mask,
        sinks,
    )
    return out.transpose(0, 1)


def _attend_explicitly(
    call: AttentionCall,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention over the last two dimensions, with softcap and with sinks that broadcast
    to [..., 1].
    """
    scores = query @ keys.transpose(-1, -2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = (scores if mask is None else scores + mask).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
