"""One forward of a model over a step: ragged tokens in, logits of the rows that need them out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.ragged import RaggedAttention, paged_handler
from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import LayerSpec, PagedKVCache
from deployments.execution.prompt_logprobs import PromptSpan


def logits_to_keep(model: PreTrainedModel, which: Tensor | int) -> dict[str, Any]:
    """The argument that lets a model's head run on these positions alone (an int: on so many last
    ones), for models that take it; the head is the largest matrix there is.
    """
    takes_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": which} if takes_it else {}


@dataclass(frozen=True, slots=True)
class PackedLogits:
    """Logits of the rows that sample, in the order of `sampled`, and of prompt positions."""

    logits: Tensor
    """[num_samples, vocab_size]"""
    sampled: tuple[ScheduledRequest, ...]
    prompt_logits: Tensor
    """[num_positions, vocab_size], those of one span after those of another"""
    prompt_spans: tuple[PromptSpan, ...]


class PackedForward:
    """A model with its paged cache.

    Args:
        model: attends through `attention`.
        backend: supports all of `specs`.
        specs: one for each layer.
        cache: read and written through the block tables of a step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: RaggedAttention,
        backend: AttentionBackend[Any],
        specs: Sequence[LayerSpec],
        cache: PagedKVCache,
    ) -> None:
        self._model = model
        self._attention = attention
        self._backend = backend
        self._windows = frozenset(spec.window for spec in specs)
        self._cache = cache
        self._keeps_logits = bool(logits_to_keep(model, 1))

    def run(self, scheduled: Sequence[ScheduledRequest]) -> PackedLogits:
        """Compute a step: write its keys and values, and return the logits that are asked
        for.
        """
        batch = InputBatch.build(scheduled, self._cache.block_size, self._model.device)
        plan = self._backend.plan(batch, self._windows)
        handler = paged_handler(self._backend, self._cache, batch.slot_mapping, plan)
        keep = {"logits_to_keep": batch.logits_indices} if self._keeps_logits else {}
        with self._attention.handled_by(handler):
            logits = self._model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **keep,
            ).logits[0]
        if not self._keeps_logits:
            logits = logits[batch.logits_indices]
        num_samples = len(batch.sampled)
        return PackedLogits(
            logits[:num_samples], batch.sampled, logits[num_samples:], batch.prompt_spans
        )
