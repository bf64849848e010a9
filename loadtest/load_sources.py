"""From the flags of a load to its requests: reads the trace, draws the lengths, sets the times.

Owns which dataset name stands for what. Formats of traces are `converters`', mixes `synthetic`'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import repeat

from loadtest.block_scale import ScaledTrace
from loadtest.client import Target
from loadtest.converters import open_trace
from loadtest.load_arguments import (
    DEFAULT_NUM_PROMPTS,
    Dataset,
    PaceSettings,
    WorkloadSettings,
)
from loadtest.load_prompts import Prompts, WordPrompts, sendable_prompts
from loadtest.load_workload import RandomLengths, WorkloadError, own_times
from loadtest.prompts import PromptMaker
from loadtest.send_times import ramped_times, steady_times
from loadtest.synthetic import synthesize
from loadtest.tokenizer_source import load_tokenizer
from loadtest.trace import HASH_BLOCK_TOKENS, TraceRequest
from loadtest.trace_changes import first_requests


def read_requests(settings: WorkloadSettings) -> ScaledTrace:
    """The requests of a workload, by time where they have times.

    Raises:
        TraceError: the file is none of a known format, or empty, or has fewer requests than are
            wanted; a scale is not above 0.
        WorkloadError: a number out of range.
        OSError: the file cannot be read.
    """
    num_prompts = DEFAULT_NUM_PROMPTS if settings.num_prompts is None else settings.num_prompts
    match settings.dataset:
        case Dataset.RANDOM:
            lengths = RandomLengths(
                num_prompts,
                settings.input_len,
                settings.output_len,
                settings.prefix_len,
                settings.range_ratio,
                settings.seed,
            )
            return ScaledTrace(lengths, settings.prefix_len or HASH_BLOCK_TOKENS)
        case Dataset.SYNTHETIC:
            mixed = synthesize(settings.mix, num_prompts, math.inf, seed=settings.seed)
            return ScaledTrace(mixed, HASH_BLOCK_TOKENS)
        case Dataset.LENGTHS | Dataset.TRACE:
            return _read_file(settings)


def _read_file(settings: WorkloadSettings) -> ScaledTrace:
    assert settings.path is not None
    loaded = open_trace(settings.path)
    if settings.dataset is Dataset.TRACE and not loaded.has_arrivals:
        raise WorkloadError(f"{settings.path} has lengths and no times: say --dataset-name lengths")
    return settings.changes.apply(first_requests(loaded.requests, settings.num_prompts))


def due_times(requests: Collection[TraceRequest], pace: PaceSettings) -> Iterator[float | None]:
    """When each request is due, in seconds from the start; None: as soon as there is room.

    Raises:
        SendTimesError: a rate or burstiness that is not above 0.
    """
    if pace.is_self_timed:
        return own_times(requests)
    if pace.ramp_up is not None:
        return ramped_times(len(requests), pace.ramp_up, pace.burstiness, pace.seed)
    if math.isinf(pace.request_rate) and pace.max_concurrency is not None:
        return repeat(None, len(requests))
    return steady_times(len(requests), pace.request_rate, pace.burstiness, pace.seed)


def prompts_of(settings: WorkloadSettings, target: Target, hash_block_tokens: int) -> Prompts:
    """What makes the words of the requests.

    Args:
        settings: of the workload.
        target: that they are sent to.
        hash_block_tokens: tokens that a hash id of the requests stands for.

    Raises:
        TokenizerError: there is no such tokenizer.
        PromptError: it has no words of one token.
    """
    if settings.tokenizer is None:
        return WordPrompts(settings.seed)
    maker = PromptMaker(
        load_tokenizer(settings.tokenizer), settings.languages, settings.seed, hash_block_tokens
    )
    return sendable_prompts(maker, target.is_chat)
