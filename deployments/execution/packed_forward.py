"""One forward of a model over a step: ragged tokens in, logits of the rows that need them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.ragged import RaggedAttention
from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import LayerSpec, PagedKVCache
from deployments.execution.model_forward import ModelForward
from deployments.execution.prompt_logprobs import PromptSpan
from deployments.execution.step_runner import EagerRunner, StepRunner


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
        make_runner: what runs the model's part of a step, given the model's forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: RaggedAttention,
        backend: AttentionBackend[Any],
        specs: Sequence[LayerSpec],
        cache: PagedKVCache,
        make_runner: Callable[[ModelForward], StepRunner] = EagerRunner,
    ) -> None:
        self._device = model.device
        self._backend = backend
        self._windows = frozenset(spec.window for spec in specs)
        self._cache = cache
        self._runner = make_runner(ModelForward(model, attention, backend, cache))

    def prepare(self) -> None:
        """Do ahead what the runner can do before the first step; once."""
        self._runner.prepare()

    def run(self, scheduled: Sequence[ScheduledRequest]) -> PackedLogits:
        """Compute a step: write its keys and values, and return the logits that are asked
        for. The host waits for nothing the device does.
        """
        num_rows = self._runner.num_rows_of(scheduled)
        batch = InputBatch.build(scheduled, self._cache.block_size, self._device, num_rows)
        logits = self._runner.run(batch, self._backend.plan(batch, self._windows))
        num_samples = len(batch.sampled)
        return PackedLogits(
            logits[:num_samples], batch.sampled, logits[num_samples:], batch.prompt_spans
        )
