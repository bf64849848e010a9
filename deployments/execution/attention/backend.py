"""What an attention backend must do, and the records it is given. No arithmetic here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention as the model asks for it; keys and values carry their positions
    already.
    """

    query: Tensor
    """[num_tokens, num_heads, key_dim]"""
    key: Tensor
    """[num_tokens, num_kv_heads, key_dim]"""
    value: Tensor
    """[num_tokens, num_kv_heads, value_dim]"""
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[num_heads]: a logit for each head that takes part in the softmax but has no value
    (gpt-oss).
    """


class AttentionBackend(Protocol, Generic[PlanT]):
    """Attention of ragged queries over paged keys and values.

    Contract of `attend`: query i of a row, at position p, sees the row's keys at positions (p -
    window, p]; out = softmax(softcap(scaling * q.k)) @ v, with softcap(x) = c * tanh(x / c) where
    given, and a sink's exp(sink) added to the softmax's denominator. Query heads share KV heads in
    groups, in order.
    """

    name: str

    def supports(self, spec: LayerSpec) -> bool:
        """Whether it can run such a layer."""
        ...

    def plan(self, batch: InputBatch, windows: Collection[int | None]) -> PlanT:
        """All that layers with these windows share in this step: tables and masks, built once."""
        ...

    def attend(self, call: AttentionCall, cache: LayerCache, plan: PlanT) -> Tensor:
        """[num_tokens, num_heads, value_dim], contiguous. The step's own keys and values are in
        `cache` already.
        """
        ...
