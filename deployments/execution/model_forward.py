"""The forward of a model on tensors alone: what one CUDA graph can hold. Knows no requests."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.ragged import RaggedAttention, paged_handler
from deployments.execution.kv_cache import PagedKVCache


def logits_to_keep(model: PreTrainedModel, which: Tensor | int) -> dict[str, Any]:
    """The argument that lets a model's head run on these positions alone (an int: on so many last
    ones), for models that take it; the head is the largest matrix there is.
    """
    takes_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": which} if takes_it else {}


class ModelForward:
    """A model, its attention and its cache.

    Args:
        model: attends through `attention`.
        backend: made the plans that will come.
        cache: written at the slots and read through the plan.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: RaggedAttention,
        backend: AttentionBackend[Any],
        cache: PagedKVCache,
    ) -> None:
        self._model = model
        self._attention = attention
        self._cache = cache
        self._keeps_logits = bool(logits_to_keep(model, 1))
        self.backend = backend

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self._model.device
        return device

    def compute(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, which: Tensor, plan: Any
    ) -> Tensor:
        """Logits [num_kept, vocab_size] of the tokens `which` [num_kept]; the others are
        [num_tokens], all int64.
        """
        handler = paged_handler(self.backend, self._cache, slots, plan)
        with self._attention.handled_by(handler):
            logits: Tensor = self._model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                **({"logits_to_keep": which} if self._keeps_logits else {}),
            ).logits[0]
        return logits if self._keeps_logits else logits[which]
