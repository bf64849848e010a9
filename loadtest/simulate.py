"""A fleet of simulated GPUs serves a trace: the service's own engine, scheduler and KV cache
manager in each replica, its own rule of routing before them, a cost model where the model would be.

Owns what a run is made of and what it says. Time passes in `sim_fleet`, lengths become prompts in
`sim_prompts`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.block_pool import BlockPool
from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelLimits
from deployments.engine.step_budget import FixedBudget, ShrinkingBudget
from deployments.execution.cost_model import CostModel
from deployments.execution.sim_executor import SimExecutor
from loadtest.measures import Distribution, Measures, RequestRecord, Slo, Summary
from loadtest.policies import POLICIES
from loadtest.routing_workload import Arrival, ByChance, ByPrefix, Choice
from loadtest.sim_blocks import UnsharedBlocks
from loadtest.sim_decodes import RunningDecodes
from loadtest.sim_fleet import EndedRequest, Fleet
from loadtest.sim_prompts import VOCAB_SIZE, PromptMaker
from loadtest.sim_replica import SimReplica
from loadtest.sim_watch import (
    BusyTime,
    QueueTrend,
    ReplicaWatch,
    StepSample,
    StepSeries,
    Utilisation,
)
from loadtest.timeline import Timeline, TimelineCounts
from loadtest.trace import HASH_BLOCK_TOKENS, TraceRequest

MAX_TREND_SAMPLES = 2048
ROUTINGS = ("prefix", "two-queues", "random")


class SimulationError(ValueError):
    """A run that cannot be made; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What is simulated."""

    cost_model: CostModel
    num_replicas: int = 1
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Without num_blocks, as many as the cost model's GPU holds."""
    routing: str = "prefix"
    """prefix: the service's rule; two-queues: Ray Serve's own; random."""
    balance_factor: float = 1.25
    """See RoutingConfig."""
    policy: str = "chunked"
    """One of POLICIES."""
    max_model_len: int = 131_072
    hash_block_tokens: int = HASH_BLOCK_TOKENS
    """Tokens that a hash id of the trace stands for."""
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    """Of random and two-queues routing; all else is deterministic."""
    max_step_samples: int = 8192
    joins_decodes: bool = True
    """Whether decodes are booked together: the same result, sooner."""

    @property
    def num_blocks(self) -> int:
        """Of each replica's pool, the null block included."""
        in_gpu = self.cost_model.num_kv_tokens // self.cache.block_size + 1
        return self.cache.num_blocks or in_gpu


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a run came to. `duration_s` is from the first arrival to the last end."""

    summary: Summary
    duration_s: float
    utilisation: Utilisation
    queued: Distribution
    """Seconds from arrival to first step, of each request that had one."""
    timeline: TimelineCounts
    steps: Sequence[StepSample]
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    """Of the requests that were served."""
    num_cached_tokens: int
    """Of those, found in the prefix cache."""
    is_saturated: bool
    """The queue grew to the end, so that the figures tell of the length of the trace."""


def simulate(
    trace: Sequence[TraceRequest],
    config: FleetConfig,
    on_record: Callable[[RequestRecord], None] = lambda record: None,
) -> SimResult:
    """Serve a trace, to the end of its last request.

    Args:
        trace: in any order.
        config: the fleet.
        on_record: is told of each request as it ends.

    Raises:
        SimulationError: the trace is empty, or a setting is unknown.
    """
    _check(trace, config)
    trace = sorted(trace, key=lambda traced: traced.timestamp_s)
    run = _Run(trace, config, on_record)
    with _without_collector():
        end_s = run.fleet.run(run.arrivals())
    return run.result(end_s)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A run makes no cycles, and looking for them takes a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(trace: Sequence[TraceRequest], config: FleetConfig) -> None:
    if not trace:
        raise SimulationError("the trace is empty: give one with at least one request")
    if config.num_replicas < 1:
        raise SimulationError(f"replicas must be at least 1, got {config.num_replicas}")
    for name, value, known in (
        ("policy", config.policy, tuple(POLICIES)),
        ("routing", config.routing, ROUTINGS),
    ):
        if value not in known:
            raise SimulationError(f"no {name} {value}: choose one of {', '.join(known)}")


class _Run:
    """One fleet and the records of its run."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: FleetConfig,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._trace = trace
        self._on_record = on_record
        self._config = config
        # Where no two prompts share anything, a prefix cache finds nothing and costs hashing.
        self._caches = config.cache.enable_prefix_caching and any(t.hash_ids for t in trace)
        self._series = StepSeries(config.max_step_samples)
        self._busy = BusyTime(until_s=trace[-1].timestamp_s)
        self._trend = QueueTrend(config.num_replicas)
        self._measures = Measures(config.slo)
        self._timeline = Timeline(start_s=trace[0].timestamp_s)
        self._queued = Distribution()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._replicas = [self._replica(index) for index in range(config.num_replicas)]
        self.fleet = Fleet(self._replicas, self._choice(), self._end)

    def arrivals(self) -> Iterator[Arrival]:
        """The trace as requests, made as they are needed."""
        looks = self._caches and self._config.routing == "prefix" and self._config.num_replicas > 1
        route_block_tokens = self._config.cache.block_size if looks else None
        maker = PromptMaker(self._config.hash_block_tokens, route_block_tokens)
        stride = -(-len(self._trace) // MAX_TREND_SAMPLES)
        for index, traced in enumerate(self._trace):
            if index % stride == 0:
                self._trend.add(self.fleet.num_waiting())
            yield Arrival(traced.timestamp_s, maker.make(traced))

    def result(self, end_s: float) -> SimResult:
        """What the run came to; call once it has ended."""
        start_s = self._trace[0].timestamp_s
        return SimResult(
            summary=self._measures.summary(end_s - start_s),
            duration_s=end_s - start_s,
            utilisation=self._busy.shares(start_s, self._config.num_replicas),
            queued=self._queued,
            timeline=self._timeline.counts(),
            steps=self._series.samples,
            num_steps=self._series.num_steps,
            num_preemptions=sum(each.num_preemptions for each in self._replicas),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            is_saturated=self._trend.is_growing,
        )

    def _end(self, ended: EndedRequest) -> None:
        self._measures.add(ended.record)
        self._timeline.add(ended.record)
        self._on_record(ended.record)
        if ended.queued_s is not None:
            self._queued.add(ended.queued_s)
            self._num_prompt_tokens += ended.record.num_prompt_tokens
            self._num_cached_tokens += ended.record.num_cached_tokens

    def _choice(self) -> Choice | None:
        config = self._config
        if config.num_replicas == 1:
            return None
        if config.routing == "prefix":
            num_blocks = config.num_blocks - 1 if self._caches else 0
            return ByPrefix(
                config.num_replicas,
                num_blocks,
                config.scheduler.chunk_size,
                config.balance_factor,
                config.cache.block_size,
            )
        num_looked_at = 1 if config.routing == "random" else 2
        return ByChance(config.num_replicas, num_looked_at, random.Random(config.seed))

    def _replica(self, index: int) -> SimReplica:
        config = self._config
        limits = ModelLimits(
            config.max_model_len,
            VOCAB_SIZE,
            config.num_blocks,
            config.cache.block_size,
            eos_token_ids=frozenset(),
        )
        clock = VirtualClock(min(0.0, self._trace[0].timestamp_s))
        pool = (BlockPool if self._caches else UnsharedBlocks)(limits.num_blocks)
        kv = KVCacheManager(pool, limits.block_size, self._caches)
        budget = ShrinkingBudget(FixedBudget(config.scheduler.token_budget))
        scheduler = POLICIES[config.policy](config.scheduler, limits, kv, budget, clock)
        watch = ReplicaWatch(index, config.num_blocks - 1, self._series, self._busy)
        executor = SimExecutor(config.cost_model, limits, clock)
        engine = Engine(scheduler, executor, clock, budget, [watch], num_logged_steps=1)
        decodes = None
        if config.joins_decodes:
            decodes = RunningDecodes(kv, limits.block_size, self._take_tokens)
        return SimReplica(engine, scheduler, clock, config.cost_model, watch, decodes)

    def _take_tokens(self, request_id: str, times_s: Sequence[float]) -> None:
        self.fleet.take_tokens(request_id, times_s)
