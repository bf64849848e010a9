"""An engine with metrics under test: its steps take as long as told, its page is read as
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from doubles import PagedFakeExecutor, make_engine, make_limits
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import ModelLimits, ModelOutput, SchedulerOutput
from deployments.metrics import EngineCollector, EngineMeters
from deployments.protocol import EngineStats, GenerateRequest


class TimedExecutor(PagedFakeExecutor):
    """A step takes `step_s`, and is kept."""

    def __init__(self, clock: VirtualClock, limits: ModelLimits | None, step_s: float) -> None:
        super().__init__(limits or make_limits(num_blocks=256))
        self._clock = clock
        self._step_s = step_s
        self.steps: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        self.steps.append(output)
        result = super().execute(output)
        self._clock.advance(self._step_s)
        return result


def registry_of(
    meters: EngineMeters,
    read_stats: Callable[[], EngineStats],
    has_prefix_cache: bool = True,
    find_used_bytes: Callable[[], int] | None = None,
) -> CollectorRegistry:
    """A registry with one replica's families."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(meters, read_stats, has_prefix_cache, find_used_bytes))
    return registry


def read_page(text: bytes) -> dict[str, float]:
    """The value of each series, under its name as the page spells it: `name` or `name{a=b}`."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = series(sample.name, sample.labels)
            assert key not in values, f"{key} is on the page twice"
            values[key] = sample.value
    return values


def series(name: str, labels: Mapping[str, str]) -> str:
    """The name of a series in `read_page`."""
    written = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{written}}}" if written else name


class MeteredEngine:
    """An engine, its virtual clock and its metrics."""

    def __init__(
        self,
        step_s: float = 0.125,  # sums of it are exact
        limits: ModelLimits | None = None,
        executor: PagedFakeExecutor | None = None,
        **settings: object,
    ) -> None:
        self.clock = VirtualClock()
        self.executor = executor or TimedExecutor(self.clock, limits, step_s)
        self.meters = EngineMeters(self.clock)
        self.engine: Engine = make_engine(
            self.executor, self.clock, observers=[self.meters], **settings
        )
        self.registry = registry_of(self.meters, self.engine.stats)

    def run(self, *requests: GenerateRequest) -> None:
        """Add requests and step until all have ended."""
        for request in requests:
            self.engine.add(request)
        while self.engine.has_requests:
            self.engine.step()
            self.engine.check_integrity()

    def page(self) -> dict[str, float]:
        """See `read_page`."""
        return read_page(generate_latest(self.registry))

    def __getitem__(self, name: str) -> float:
        """One value of the page, without the prefix it may have."""
        page = self.page()
        return page[f"chunkserve_{name}"] if f"chunkserve_{name}" in page else page[name]
