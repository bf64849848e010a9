"""From the flags of a load to its requests: reads the trace, draws the lengths, sets the times.

Owns which dataset name stands for what. Formats of traces are `converters`', mixes `synthetic`'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import repeat

from loadtest.arrivals import scale_lengths, scale_times, spread_ticks
from loadtest.client import Target
from loadtest.converters import open_trace
from loadtest.load_arguments import (
    DEFAULT_NUM_PROMPTS,
    Dataset,
    PaceSettings,
    WorkloadSettings,
)
from loadtest.load_prompts import Prompts, make_prompts
from loadtest.load_workload import RandomLengths, WorkloadError, first_requests, own_times
from loadtest.send_times import ramped_times, steady_times
from loadtest.synthetic import synthesize
from loadtest.trace import TraceRequest


def read_requests(settings: WorkloadSettings) -> Collection[TraceRequest]:
    """The requests of a workload, by time where they have times.

    Raises:
        TraceError: the file is none of a known format, or empty; a scale is not above 0.
        WorkloadError: a number out of range, or more requests than there are.
        OSError: the file cannot be read.
    """
    num_prompts = settings.num_prompts
    match settings.dataset:
        case Dataset.RANDOM:
            return RandomLengths(
                DEFAULT_NUM_PROMPTS if num_prompts is None else num_prompts,
                settings.input_len,
                settings.output_len,
                settings.range_ratio,
                settings.seed,
            )
        case Dataset.SYNTHETIC:
            count = DEFAULT_NUM_PROMPTS if num_prompts is None else num_prompts
            return synthesize(settings.mix, count, math.inf, seed=settings.seed)
        case Dataset.LENGTHS | Dataset.TRACE:
            return _read_file(settings)


def _read_file(settings: WorkloadSettings) -> list[TraceRequest]:
    assert settings.path is not None
    loaded = open_trace(settings.path)
    requests = loaded.requests
    if settings.dataset is Dataset.TRACE:
        if not loaded.has_arrivals:
            raise WorkloadError(
                f"{settings.path} has lengths and no times: say --dataset-name lengths"
            )
        if settings.tick_s is not None:
            requests = spread_ticks(requests, settings.tick_s, settings.seed)
        requests = scale_times(requests, settings.time_scale)
    return scale_lengths(first_requests(requests, settings.num_prompts), settings.length_scale)


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


def prompts_of(settings: WorkloadSettings, target: Target) -> Prompts:
    """What makes the words of the requests.

    Raises:
        TokenizerError: there is no such tokenizer.
        PromptError: it has no words of one token.
    """
    return make_prompts(settings.tokenizer, settings.languages, settings.seed, target.is_chat)
