"""What a simulated fleet did, kept in bounded memory: a thinned log of its steps, the time its GPUs
were busy by phase, and whether its queue grew to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from deployments.engine.stats import EngineObserver, StepStats
from deployments.protocol import FinishReason, RequestTimings


class StepSample(NamedTuple):
    """One step of one replica, as it began."""

    time_s: float
    replica: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    kv_use: float
    """Share of its KV blocks that requests hold, 0 to 1."""


class StepSeries:
    """Every k-th step of a run; k doubles whenever the samples would exceed their bound.

    Args:
        max_samples: at least 2.
    """

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._stride = 1
        self._num_steps = 0
        self._samples: list[StepSample] = []

    @property
    def num_steps(self) -> int:
        """Steps of all replicas, kept or not."""
        return self._num_steps

    @property
    def samples(self) -> Sequence[StepSample]:
        """What was kept, in order of time."""
        return sorted(self._samples)

    def add(self, num_steps: int, sample_of: Callable[[int], StepSample]) -> None:
        """Take in steps of one replica; `sample_of` tells of one of them, counted from 0."""
        first = self._num_steps
        self._num_steps += num_steps
        while (due := -(-first // self._stride) * self._stride) < self._num_steps:
            self._samples.append(sample_of(num_steps - (self._num_steps - due)))
            first = due + 1
            if len(self._samples) >= self._max_samples:
                del self._samples[1::2]
                self._stride *= 2


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the GPUs' time, 0 to 1, while requests arrived.

    `prefill` and `decode` split each mixed step by its tokens, as the service's own
    `gpu_utilization_*` do, and add up to `busy`. `prefill_active` and `decode_active` count a mixed
    step in full in both.
    """

    busy: float
    prefill: float
    decode: float
    prefill_active: float
    decode_active: float


class SimStep(NamedTuple):
    """What is kept of a step."""

    started_s: float
    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int


class BusyTime:
    """The time that GPUs spent on steps.

    Args:
        until_s: what is later does not count: a fleet that only drains is idle by design.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._prefill_s = self._decode_s = 0.0
        self._prefill_active_s = self._decode_active_s = 0.0

    def add(self, step: SimStep) -> None:
        """Take in a step."""
        duration_s = min(step.duration_s, self._until_s - step.started_s)
        if duration_s <= 0.0:
            return
        num_prefill = step.num_prefill_tokens
        prefill_s = duration_s * num_prefill / (num_prefill + step.num_decode_tokens)
        self._prefill_s += prefill_s
        self._decode_s += duration_s - prefill_s
        if num_prefill:
            self._prefill_active_s += duration_s
        if step.num_decode_tokens:
            self._decode_active_s += duration_s

    def add_decodes(self, start_s: float, ends_s: Sequence[float]) -> None:
        """Take in steps without a chunk, one after the other."""
        duration_s = max(0.0, min(ends_s[-1], self._until_s) - start_s)
        self._decode_s += duration_s
        self._decode_active_s += duration_s

    def shares(self, from_s: float, num_replicas: int) -> Utilisation:
        """Of the time from `from_s` to the last arrival, over all replicas."""
        whole_s = (self._until_s - from_s) * num_replicas
        if whole_s <= 0.0:
            return Utilisation(0.0, 0.0, 0.0, 0.0, 0.0)
        return Utilisation(
            busy=(self._prefill_s + self._decode_s) / whole_s,
            prefill=self._prefill_s / whole_s,
            decode=self._decode_s / whole_s,
            prefill_active=self._prefill_active_s / whole_s,
            decode_active=self._decode_active_s / whole_s,
        )


class QueueTrend:
    """Whether a fleet's queue grew as long as requests arrived.

    Args:
        num_replicas: a queue shorter than one request for each of them is no backlog.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._lengths: list[int] = []

    def add(self, num_waiting: int) -> None:
        """So many wait now; call at moments spread evenly over the arrivals."""
        self._lengths.append(num_waiting)

    @property
    def is_growing(self) -> bool:
        """A queue that grows at a constant rate is 7/3 as long in the last quarter as in the
        second; a steady one is as long in both.
        """
        quarter = len(self._lengths) // 4
        if quarter == 0:
            return False
        second, third, last = (
            mean(self._lengths[begin : begin + quarter])
            for begin in (quarter, 2 * quarter, len(self._lengths) - quarter)
        )
        return last > self._num_replicas and last > 1.5 * second and last > third


@dataclass(frozen=True, slots=True)
class QuietRun:
    """Steps without a chunk, one after the other, each of the same decodes; some of these ended in
    the last one.
    """

    start_s: float
    ends_s: Sequence[float]
    num_decodes: int
    num_ended: int


class ReplicaWatch(EngineObserver):
    """Feeds the fleet's records from one engine.

    Args:
        replica: its number.
        num_blocks: of its pool.
        series: of the fleet.
        busy: of the fleet.
    """

    def __init__(self, replica: int, num_blocks: int, series: StepSeries, busy: BusyTime) -> None:
        self._replica = replica
        self._num_blocks = num_blocks
        self._series = series
        self._busy = busy
        self.num_waiting = 0

    def on_step(self, step: StepStats) -> None:
        """See EngineObserver."""
        self.on_sim_step(
            SimStep(
                step.started_s,
                step.execute_s,
                step.num_prefill_tokens,
                step.num_decode_tokens,
                step.num_running,
                step.num_waiting,
                step.num_free_blocks,
            )
        )

    def on_sim_step(self, step: SimStep) -> None:
        """A step was made, whoever made it."""
        self.num_waiting = step.num_waiting
        kv_use = 1.0 - step.num_free_blocks / self._num_blocks
        self._series.add(
            1,
            lambda _: StepSample(
                step.started_s,
                self._replica,
                step.num_decode_tokens,
                step.num_prefill_tokens,
                step.num_running,
                step.num_waiting,
                kv_use,
            ),
        )
        self._busy.add(step)

    def on_quiet_steps(self, run: QuietRun, num_free_blocks: int) -> None:
        """Steps were booked together; the blocks are those after the last of them."""
        kv_use = 1.0 - num_free_blocks / self._num_blocks

        def sample_of(index: int) -> StepSample:
            is_last = index == len(run.ends_s) - 1
            return StepSample(
                run.ends_s[index - 1] if index else run.start_s,
                self._replica,
                run.num_decodes,
                0,
                run.num_decodes - run.num_ended * is_last,
                self.num_waiting,
                kv_use,
            )

        self._series.add(len(run.ends_s), sample_of)
        self._busy.add_decodes(run.start_s, run.ends_s)

    def on_failed_step(self) -> None:
        """A simulated step never fails."""

    def on_end(self, reason: FinishReason, timings: RequestTimings) -> None:
        """The fleet books ends itself, in the order of time."""
