"""How much memory a step takes beside the weights: measured by the largest step there can be,
before the KV cache takes what is left.

    device   | weights | largest step, measured |  rest                     |
             | weights | what is held back: the larger of    |  KV blocks   |
             |         | the step and gpu_mem_reserve_gb     |              |

Owns the step and the measuring; how many blocks follow from it is `num_blocks_that_fit`. What it
cannot see: prompt log-probabilities, whose logits are those of whole prompts, and CUDA graphs,
which read the KV cache and so are recorded after it, in what is then left beyond the step. Both are
what a reserve above the step is for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from deployments.config import SchedulerConfig
from deployments.engine.outputs import ChunkReason, ScheduledRequest
from deployments.engine.request import Request
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.ragged import RaggedAttention
from deployments.execution.device_memory import is_out_of_memory, release_unused
from deployments.execution.kv_cache import LayerSpec, OutOfMemory, PagedKVCache
from deployments.execution.packed_forward import PackedForward
from deployments.execution.sampler import Sampler
from deployments.protocol import SamplingParams

logger = logging.getLogger(__name__)

_GB = 1024**3
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)
"""Of every row: the way through the sampler that holds most at once."""


class PeakMeter(Protocol):
    """Measures how much memory is taken at the highest moment between two calls."""

    def start(self) -> None:
        """From now on."""
        ...

    def stop(self) -> int:
        """Bytes at the highest moment, beyond what was taken at `start`. What is free again counts
        as free afterwards, also where an allocator keeps it for later.
        """
        ...


class CudaPeakMeter:
    """By the counters of torch's allocator.

    The larger of two growths counts: what tensors took, and what the allocator took from the
    device for them, which is more, since it takes memory in large pieces.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_allocated = self._num_reserved = 0

    def start(self) -> None:
        """See PeakMeter."""
        release_unused(self._device)
        torch.cuda.synchronize(self._device)
        self._num_allocated = torch.cuda.memory_allocated(self._device)
        self._num_reserved = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> int:
        """See PeakMeter."""
        torch.cuda.synchronize(self._device)
        num_bytes = max(
            torch.cuda.max_memory_allocated(self._device) - self._num_allocated,
            torch.cuda.max_memory_reserved(self._device) - self._num_reserved,
        )
        release_unused(self._device)
        return num_bytes


def find_peak_meter(device: torch.device) -> PeakMeter | None:
    """Of a device; None where its memory is the machine's, which others use and swap too."""
    return CudaPeakMeter(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step a configuration allows.

    Args:
        num_tokens: the budget of a step.
        num_rows: most requests of a step; each samples.
        max_model_len: most tokens of a request.
        block_size: tokens of a block.
    """

    num_tokens: int
    num_rows: int
    max_model_len: int
    block_size: int

    @classmethod
    def of(cls, scheduler: SchedulerConfig, max_model_len: int, block_size: int) -> StepShape:
        """As configured, for requests that are not longer than the model's context."""
        num_rows = scheduler.max_num_seqs
        num_tokens = min(scheduler.token_budget, num_rows * max_model_len)
        return cls(num_tokens, num_rows, max_model_len, block_size)

    def __str__(self) -> str:
        return f"a step of {self.num_tokens} tokens in {self.num_rows} rows"


def largest_step(shape: StepShape) -> list[ScheduledRequest]:
    """Decodes, and as many long chunks as fill the budget; every row samples.

    The first row and the last stand at the end of the longest context. All their blocks are the
    null block, so that a context costs no memory: what is measured is the step alone.
    """
    counts = [1] * shape.num_rows
    left = shape.num_tokens - len(counts)
    for index in reversed(range(len(counts))):
        more = min(left, shape.max_model_len - 1)
        counts[index] += more
        left -= more
    last = len(counts) - 1
    return [
        _row(index, shape, count, is_longest=index in (0, last))
        for index, count in enumerate(counts)
    ]


def _row(index: int, shape: StepShape, num_queries: int, is_longest: bool) -> ScheduledRequest:
    num_context = shape.max_model_len - num_queries if is_longest else 0
    num_tokens = num_context + num_queries
    request = Request(
        request_id=f"largest-step-{index}",
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling_params=_SAMPLING,
        seed=index,
        max_num_tokens=num_tokens + 1,
        arrival_s=0.0,
        arrival_index=index,
    )
    table = [0] * -(-num_tokens // shape.block_size)
    return ScheduledRequest(
        request, num_context, num_queries, table, True, ChunkReason.CONTINUED, False
    )


@dataclass(frozen=True, slots=True)
class StepParts:
    """What computes a step, but for its cache."""

    model: PreTrainedModel
    attention: RaggedAttention
    backend: AttentionBackend[Any]
    specs: Sequence[LayerSpec]
    sampler: Sampler


def measure_largest_step(parts: StepParts, shape: StepShape, meter: PeakMeter) -> int:
    """Compute the largest step, forward and sampling, and return the bytes it took.

    Raises:
        OutOfMemory: it does not even fit while there is no KV cache.
    """
    meter.start()
    try:
        _compute(parts, shape)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{shape} does not fit beside the weights; lower scheduler.max_num_batched_tokens or "
            "scheduler.max_num_seqs, or free memory on the device"
        ) from error
    return meter.stop()


def _compute(parts: StepParts, shape: StepShape) -> None:
    """In a frame of its own, so that nothing of the step is alive when it returns."""
    model = parts.model
    cache = PagedKVCache(parts.specs, 1, shape.block_size, model.dtype, model.device)
    forward = PackedForward(model, parts.attention, parts.backend, parts.specs, cache)
    with torch.inference_mode():
        packed = forward.run(largest_step(shape))
        parts.sampler.sample(packed.logits, [row.request for row in packed.sampled])


def log_reserve(num_step_bytes: int, shape: StepShape, reserve_gb: float) -> None:
    """Say whether gpu_mem_reserve_gb holds back what the largest step took, and by which
    figures.
    """
    step_gb = num_step_bytes / _GB
    if step_gb <= reserve_gb:
        logger.info(
            "%s takes %.2f GB beside the weights; gpu_mem_reserve_gb holds back %g",
            shape,
            step_gb,
            reserve_gb,
        )
        return
    logger.warning(
        "%s takes %.2f GB beside the weights, and gpu_mem_reserve_gb holds back %g: the KV cache "
        "gets %.2f GB less than configured; raise gpu_mem_reserve_gb, or lower "
        "scheduler.max_num_batched_tokens or scheduler.max_num_seqs",
        shape,
        step_gb,
        reserve_gb,
        step_gb - reserve_gb,
    )
