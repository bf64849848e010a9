"""The metrics of one replica: what its engine tells, as families for Prometheus.

Histograms are fed as things happen, on the engine's thread. Everything else is read from the
engine's stats when somebody asks, so that a gauge falls with what it shows even if no step follows.
Names are vLLM's with our prefix where it has the like; the four without a prefix are the
deployment guide's own. `docs/metrics.md` lists all of them.

Does not know Ray, HTTP or tensors.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deployments.engine.clock import Clock
from deployments.engine.stats import EngineObserver, StepStats
from deployments.protocol import EngineStats, FinishReason, RequestTimings

PREFIX = "chunkserve_"
WINDOW_S = 10.0
"""Over which the utilisation of the device is averaged."""
_NUM_WINDOW_PARTS = 1000

STEP_SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
STEP_TOKENS = tuple(float(1 << power) for power in range(15))
REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Tally:
    """A histogram that takes many equal observations at once.

    prometheus_client's takes one at a time, and a step has an equal one for each of its decodes.

    Args:
        bounds: upper bounds of the buckets, inclusive, ascending; what exceeds all has its own.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Observe `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many observations it holds with all below), the last one "+Inf"."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        total, cumulative = 0, []
        for count in self._counts:
            total += count
            cumulative.append(float(total))
        return list(zip(names, cumulative, strict=True))


@dataclass(frozen=True, slots=True)
class BusyShares:
    """Shares of wall time, 0 to 1, that the device spent on each kind of work."""

    prefill: float
    decode: float


@dataclass(slots=True)
class _Work:
    start_s: float
    end_s: float
    prefill_s: float
    decode_s: float


class BusyWindow:
    """How busy the device was within the last `window_s` seconds.

    A step counts once it has ended, with the time its execution took. The time of a mixed step is
    split between prefill and decode by their shares of its tokens.

    Args:
        window_s: how far back it looks.
        started_s: when it began to be fed; a younger window is as long as it is old.
    """

    def __init__(self, window_s: float, started_s: float) -> None:
        self._window_s = window_s
        self._started_s = started_s
        self._work: deque[_Work] = deque()

    def add(self, start_s: float, end_s: float, prefill_share: float) -> None:
        """The device worked from `start_s` to `end_s`; not before what was added last."""
        if end_s <= start_s:
            return
        prefill_s = (end_s - start_s) * prefill_share
        decode_s = end_s - start_s - prefill_s
        last = self._work[-1] if self._work else None
        # Short steps are put together, so that their number is bounded.
        if last is not None and end_s - last.start_s < self._window_s / _NUM_WINDOW_PARTS:
            last.end_s = end_s
            last.prefill_s += prefill_s
            last.decode_s += decode_s
        else:
            self._work.append(_Work(start_s, end_s, prefill_s, decode_s))
        while self._work[0].end_s <= end_s - self._window_s:
            self._work.popleft()

    def shares(self, now: float) -> BusyShares:
        """Of the window that ends now."""
        from_s = max(now - self._window_s, self._started_s)
        if now <= from_s:
            return BusyShares(0.0, 0.0)
        prefill_s = decode_s = 0.0
        for work in self._work:
            if work.end_s > from_s:
                inside = min(1.0, (work.end_s - from_s) / (work.end_s - work.start_s))
                prefill_s += work.prefill_s * inside
                decode_s += work.decode_s * inside
        return BusyShares(prefill_s / (now - from_s), decode_s / (now - from_s))


class EngineMeters(EngineObserver):
    """Takes in what an engine does: a few additions a step, none of them for each token.

    Fed by the engine's thread, read by any other.

    Args:
        clock: the engine's.
    """

    def __init__(self, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._busy = BusyWindow(WINDOW_S, clock.now())
        self._schedule_s = Tally(STEP_SECONDS)
        self._execute_s = Tally(STEP_SECONDS)
        self._update_s = Tally(STEP_SECONDS)
        self._chunk_s = Tally(STEP_SECONDS)
        self._gap_s = Tally(STEP_SECONDS)
        self._step_tokens = Tally(STEP_TOKENS)
        self._first_token_s = Tally(REQUEST_SECONDS)
        self._queued_s = Tally(REQUEST_SECONDS)
        self._prefill_s = Tally(REQUEST_SECONDS)
        self._decode_s = Tally(REQUEST_SECONDS)
        self._prompt_tokens = Tally(REQUEST_TOKENS)
        self._output_tokens = Tally(REQUEST_TOKENS)
        self._num_decodes = 0
        self._num_sampled_tokens = 0
        self._num_looked_up_tokens = 0
        self._num_cached_tokens = 0
        self._num_failed_steps = 0

    def on_step(self, step: StepStats) -> None:
        """See EngineObserver."""
        tokens = step.tokens
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        num_chunks = len(step.prefills)
        executed_s = step.started_s + step.schedule_s
        with self._lock:
            if num_tokens:
                share = step.num_prefill_tokens / num_tokens
                self._busy.add(executed_s, executed_s + step.execute_s, share)
            self._schedule_s.add(step.schedule_s)
            self._execute_s.add(step.execute_s)
            self._update_s.add(step.update_s)
            self._step_tokens.add(num_tokens)
            if num_chunks:
                self._chunk_s.add(step.execute_s, num_chunks)
            for gap_s, count in tokens.gaps_s.items():
                self._gap_s.add(gap_s, count)
            for first_token_s in tokens.first_token_s:
                self._first_token_s.add(first_token_s)
            self._num_decodes = step.num_decode_tokens
            self._num_sampled_tokens += tokens.num_sampled
            self._num_looked_up_tokens += tokens.num_prompt_tokens
            self._num_cached_tokens += tokens.num_cached_tokens

    def on_failed_step(self) -> None:
        """See EngineObserver."""
        with self._lock:
            self._num_failed_steps += 1

    def on_end(self, reason: FinishReason, timings: RequestTimings) -> None:
        """See EngineObserver. The reason is counted by the engine itself."""
        with self._lock:
            self._queued_s.add(timings.queued_s)
            self._prompt_tokens.add(timings.num_prompt_tokens)
            self._output_tokens.add(timings.num_output_tokens)
            if timings.first_token_s is not None:
                self._prefill_s.add(timings.first_token_s - timings.queued_s)
                self._decode_s.add(timings.total_s - timings.first_token_s)

    def families(self, *, is_running: bool, has_prefix_cache: bool) -> list[Metric]:
        """All that was taken in, at one moment.

        Args:
            is_running: whether any request runs now; if none does, no batch is decoded.
            has_prefix_cache: without one there is nothing to hit.
        """
        with self._lock:
            families = [*self._gauges(is_running), *self._counters(), *self._histograms()]
            if has_prefix_cache:
                families += self._cache_counters()
            return families

    def _gauges(self, is_running: bool) -> Iterator[Metric]:
        shares = self._busy.shares(self._clock.now())
        share = f"Share of the last {WINDOW_S:g} s in which the device worked on"
        split = "a mixed step counts by its shares of tokens."
        yield _gauge("gpu_utilization_prefill", f"{share} prefill; {split}", shares.prefill)
        yield _gauge("gpu_utilization_decode", f"{share} decode; {split}", shares.decode)
        num_decodes = self._num_decodes if is_running else 0
        yield _gauge("batch_size_decode", "Decodes in the last step; 0 if none runs.", num_decodes)

    def _counters(self) -> Iterator[Metric]:
        sampled = self._num_sampled_tokens
        yield _counter("generation_tokens", "Tokens sampled.", sampled)
        failed = "Steps that raised; all they held ended with an error."
        yield _counter("failed_steps", failed, self._num_failed_steps)

    def _cache_counters(self) -> Iterator[Metric]:
        looked_up = "Prompt tokens of requests that began, looked up in the prefix cache."
        yield _counter("prefix_cache_queries", looked_up, self._num_looked_up_tokens)
        hit = "Prompt tokens of requests that began, found in the prefix cache."
        yield _counter("prefix_cache_hits", hit, self._num_cached_tokens)

    def _histograms(self) -> Iterator[Metric]:
        step_s = HistogramMetricFamily(
            f"{PREFIX}step_duration_seconds", "Time of a step, by part.", labels=["part"]
        )
        parts = {
            "schedule": self._schedule_s,
            "execute": self._execute_s,
            "update": self._update_s,
        }
        for part, tally in parts.items():
            step_s.add_metric([part], tally.buckets(), tally.sum)
        yield step_s
        for name, documentation, tally in (
            ("iteration_tokens_total", "Tokens in a step.", self._step_tokens),
            (
                "prefill_chunk_duration_seconds",
                "Execution of the step that ran a prompt's chunk, once for each chunk.",
                self._chunk_s,
            ),
            (
                "inter_token_latency_seconds",
                "From a request's token to its next, as sampled.",
                self._gap_s,
            ),
            (
                "engine_time_to_first_token_seconds",
                "From arrival at the replica to the first token, once for each request with one.",
                self._first_token_s,
            ),
            (
                "request_queue_time_seconds",
                "From arrival at the replica to the first step, or to the end if it had none.",
                self._queued_s,
            ),
            (
                "request_prefill_time_seconds",
                "From the first step to the first token.",
                self._prefill_s,
            ),
            (
                "request_decode_time_seconds",
                "From the first token to the end.",
                self._decode_s,
            ),
            ("request_prompt_tokens", "Prompt tokens of an ended request.", self._prompt_tokens),
            (
                "request_generation_tokens",
                "Tokens sampled for an ended request.",
                self._output_tokens,
            ),
        ):
            yield HistogramMetricFamily(
                f"{PREFIX}{name}", documentation, buckets=tally.buckets(), sum_value=tally.sum
            )


class EngineCollector(Collector):
    """All families of a replica, for its registry.

    Args:
        meters: an observer of the engine.
        read_stats: the engine's state now; called at each collection.
        has_prefix_cache: whether prompts are looked up in one.
        find_used_bytes: memory in use on the device; None where there is no such device.
    """

    def __init__(
        self,
        meters: EngineMeters,
        read_stats: Callable[[], EngineStats],
        has_prefix_cache: bool,
        find_used_bytes: Callable[[], int] | None,
    ) -> None:
        self._meters = meters
        self._read_stats = read_stats
        self._has_prefix_cache = has_prefix_cache
        self._find_used_bytes = find_used_bytes

    def collect(self) -> Iterator[Metric]:
        """The families with their values now."""
        stats = self._read_stats()
        yield from _stats_gauges(stats)
        yield from _stats_counters(stats)
        yield from self._meters.families(
            is_running=stats.num_running > 0, has_prefix_cache=self._has_prefix_cache
        )
        if self._find_used_bytes is not None:
            used = "Bytes in use on the device, by all that run on it."
            yield _gauge("gpu_memory_usage", used, self._find_used_bytes())


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", documentation, value=value)


def _stats_gauges(stats: EngineStats) -> Iterator[Metric]:
    used = 1.0 - stats.num_free_blocks / stats.num_blocks
    yield _gauge(f"{PREFIX}num_requests_running", "Requests in the batch.", stats.num_running)
    yield _gauge(f"{PREFIX}num_requests_waiting", "Requests in the queue.", stats.num_waiting)
    in_use = "Share of the KV cache that requests hold, 0 to 1; cached prefixes nobody uses are 0."
    yield _gauge(f"{PREFIX}kv_cache_usage_perc", in_use, used)


def _stats_counters(stats: EngineStats) -> Iterator[Metric]:
    prefill = "Prompt tokens computed: without those from the cache, with those recomputed."
    yield _counter("prompt_tokens", prefill, stats.num_prefill_tokens)
    preempted = "Times a running request lost its blocks to another."
    yield _counter("num_preemptions", preempted, stats.num_preemptions)
    forced = "Chunks that had waited for longer than batch_timeout_ms and so went first."
    yield _counter("forced_chunks", forced, stats.num_forced_chunks)
    ended = CounterMetricFamily(
        f"{PREFIX}request_success",
        "Requests that ended, by reason; abort and error are no successes, the name is vLLM's.",
        labels=["finished_reason"],
    )
    for reason in FinishReason:
        ended.add_metric([reason.value], stats.num_finished.get(reason.value, 0))
    yield ended
