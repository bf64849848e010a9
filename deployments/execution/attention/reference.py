"""The specification of attention over paged KV, in fp32 and plain loops. Slow; every other
backend must agree with it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.input_batch import BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec


class ReferenceAttention:
    """One query at a time, one key at a time out of the cache."""

    name = "reference"

    def supports(self, spec: LayerSpec) -> bool:
        return True

    def plan(self, batch: InputBatch, windows: Collection[int | None]) -> InputBatch:
        return batch

    def attend(self, call: AttentionCall, cache: LayerCache, plan: InputBatch) -> Tensor:
        num_tokens, num_heads, _ = call.query.shape
        out = call.query.new_zeros(num_tokens, num_heads, call.value.shape[-1])
        for row in plan.rows:
            for index in range(row.num_queries):
                token = row.start + index
                keys, values = _visible(row, row.num_context + index, call.window, cache)
                for head in range(num_heads):
                    out[token, head] = _attend_one(call, token, head, keys, values)
        return out


def _visible(
    row: BatchRow, position: int, window: int | None, cache: LayerCache
) -> tuple[Tensor, Tensor]:
    """Keys and values [num_visible, num_kv_heads, dim] that a query at `position` sees, fp32."""
    first = 0 if window is None else max(0, position - window + 1)
    block_size = cache.keys.shape[1]
    places = [
        (row.block_table[p // block_size], p % block_size) for p in range(first, position + 1)
    ]
    keys = torch.stack([cache.keys[block, offset] for block, offset in places])
    values = torch.stack([cache.values[block, offset] for block, offset in places])
    return keys.float(), values.float()


def _attend_one(call: AttentionCall, token: int, head: int, keys: Tensor, values: Tensor) -> Tensor:
    """[value_dim] of one query head, in the query's dtype."""
    kv_head = head // (call.query.shape[1] // keys.shape[1])
    scores = keys[:, kv_head] @ call.query[token, head].float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.sinks is None:
        weights = torch.softmax(scores, dim=0)
    else:
        with_sink = torch.cat([scores, call.sinks[head].float().reshape(1)])
        weights = torch.softmax(with_sink, dim=0)[:-1]
    return (weights @ values[:, kv_head]).to(call.query.dtype)
