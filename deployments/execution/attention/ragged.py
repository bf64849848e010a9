"""The one attention function a transformers model calls while we run it, and what stands behind it
meanwhile.

Owns the switch between the model's own attention and ours. transformers looks attention functions
up by name in a registry; ours is an object, and what it does with a call is decided by the context
it is in, not by keyword arguments of the forward (some models do not pass those on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from deployments.execution.attention.backend import AttentionBackend, AttentionCall, PlanT
from deployments.execution.kv_cache import LayerCache, PagedKVCache

LayerHandler = Callable[[int, AttentionCall], Tensor]
"""Takes a layer's index and its call; returns [num_tokens, num_heads, value_dim]."""


class NotInStep(RuntimeError):
    """The model's forward was called outside a step, while our attention was in place."""


class RaggedAttention:
    """Stands in for a model's attention: one row of tokens for all requests, [1, num_tokens].

    Args:
        model: uses this attention from now on, until `restore`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._own_implementation = model.config._attn_implementation
        self._handler: LayerHandler | None = None
        self._name = f"chunkserve_ragged_{id(self)}"
        AttentionInterface.register(self._name, self)
        model.set_attn_implementation(self._name)

    def restore(self) -> None:
        """Give the model its own attention back, and let go of it."""
        self._model.set_attn_implementation(self._own_implementation)
        # transformers offers no way to unregister, and its registry would keep the model alive.
        AttentionInterface._global_mapping.pop(self._name, None)

    @contextmanager
    def own_attention(self, implementation: str) -> Iterator[None]:
        """Let the model attend by one of transformers' own implementations meanwhile."""
        self._model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            self._model.set_attn_implementation(self._name)

    @contextmanager
    def handled_by(self, handler: LayerHandler) -> Iterator[None]:
        """Send each layer's call to `handler` meanwhile."""
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: query [1, num_heads, num_tokens, key_dim], key and
        value likewise.

        Returns ([1, num_tokens, num_heads, value_dim], None).

        Raises:
            NotInStep: no handler is in place.
        """
        if self._handler is None:
            raise NotInStep("this model serves chunkserve steps; call its forward through them")
        scaling = asked.get("scaling")
        call = AttentionCall(
            query=query[0].transpose(0, 1),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=asked.get("sliding_window"),
            softcap=asked.get("softcap"),
            sinks=asked.get("s_aux"),
        )
        return self._handler(int(module.layer_idx), call)[None], None  # type: ignore[arg-type]


def paged_handler(
    backend: AttentionBackend[PlanT], cache: PagedKVCache, slot_mapping: Tensor, plan: PlanT
) -> LayerHandler:
    """The handler of a step: store the step's keys and values, then attend over the pages."""

    def attend(layer_index: int, call: AttentionCall) -> Tensor:
        layer: LayerCache = cache.layers[layer_index]
        layer.write(call.key, call.value, slot_mapping)
        return backend.attend(call, layer, plan)

    return attend
