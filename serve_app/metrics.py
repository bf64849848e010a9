"""The ingress' own metrics, and the one page on which it shows them with those of all replicas.

Counts a request as its client sees it: time runs from its arrival here, before tokenising, and a
stop string is an end like any other (a replica, which knows no text, sees an abort). Labels hold
what the service chose and never what a client wrote. `docs/metrics.md` lists all names.

Does not know Ray: a backend brings the pages of its replicas.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi.responses import Response
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from deployments.protocol import FinishReason, ReplicaMetrics

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
OTHER = "other"
"""Stands for every class that is not configured."""
UNMATCHED = "unmatched"
"""Stands for every path without a route."""
_REQUEST_LABELS = ("route", "model_name", "priority_class")


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """The pages of the replicas that answered in time, and how many did not."""

    pages: tuple[ReplicaMetrics, ...]
    num_missing: int


class MetricsSource(Protocol):
    """The part of a backend that metrics need."""

    async def metrics(self) -> PoolMetrics:
        """The pages of all replicas. Never raises for a replica's sake: it is missing then."""
        ...


class AnswerPart(Protocol):
    """The part of a text delta that metrics need; see `streaming.TextDelta`."""

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def error(self) -> object | None: ...


Part = TypeVar("Part", bound=AnswerPart)


class RequestMeter:
    """Takes in one generation: its first token, its tokens, its one end.

    Made by `IngressMetrics.start`. Whatever happens, call `ended` or `refused` at last.
    """

    def __init__(self, metrics: IngressMetrics, labels: tuple[str, ...], arrived_s: float) -> None:
        self._metrics = metrics
        self._labels = labels
        self._arrived_s = arrived_s
        self._num_tokens = 0
        self._is_over = False
        self._token_counter = metrics.tokens.labels(*labels)
        metrics.in_progress.labels(*labels).inc()

    def saw(self, num_tokens: int) -> None:
        """So many tokens have come so far; the first time there are any is the first token."""
        if num_tokens <= self._num_tokens:
            return
        if self._num_tokens == 0:
            self._observe(self._metrics.first_token_s)
        self._token_counter.inc(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def ended(self, reason: FinishReason) -> None:
        """It is over. The first end counts: what closes later adds nothing."""
        if self._leave():
            self._metrics.ended.labels(*self._labels, reason.value).inc()
            self._observe(self._metrics.request_s)

    def failed(self) -> None:
        """It is over with an error: a refusal if no token had come, else an end."""
        if self._num_tokens:
            self.ended(FinishReason.ERROR)
        else:
            self._leave()  # answered with an error status, which `rejected` counts

    def _leave(self) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        self._metrics.in_progress.labels(*self._labels).dec()
        return True

    def _observe(self, histogram: Histogram) -> None:
        histogram.labels(*self._labels).observe(self._metrics.now() - self._arrived_s)


class IngressMetrics:
    """What one ingress process counts, in a registry of its own.

    Args:
        model_name: of the served model.
        priority_classes: the configured ones; any other is shown as "other".
        replica: names this ingress process among its like.
        now: seconds on a monotonic clock.
    """

    def __init__(
        self,
        model_name: str,
        priority_classes: Collection[str],
        replica: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # A time stamp beside each series would double the page.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.now = now
        self._model_name = model_name
        self._priority_classes = frozenset(priority_classes)
        self._replica = replica
        self._registry = registry = CollectorRegistry()
        self.first_token_s = Histogram(
            "chunkserve_time_to_first_token_seconds",
            "From arrival at the ingress, before tokenising, to the first text.",
            _REQUEST_LABELS,
            buckets=FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self.request_s = Histogram(
            "chunkserve_e2e_request_latency_seconds",
            "From arrival at the ingress, before tokenising, to the end.",
            _REQUEST_LABELS,
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.in_progress = Gauge(
            "chunkserve_ingress_requests_in_progress",
            "Generations that have begun and not ended.",
            _REQUEST_LABELS,
            registry=registry,
        )
        self.tokens = Counter(
            "chunkserve_ingress_generation_tokens",
            "Tokens received for clients.",
            _REQUEST_LABELS,
            registry=registry,
        )
        self.ended = Counter(
            "chunkserve_ingress_requests_ended",
            "Generations that ended after they had begun, by reason as the client sees it.",
            (*_REQUEST_LABELS, "finished_reason"),
            registry=registry,
        )
        self._rejected = Counter(
            "chunkserve_ingress_requests_rejected",
            "Requests answered with an error status.",
            ("route", "status", "code"),
            registry=registry,
        )
        self.num_tasks = Gauge(
            "chunkserve_asyncio_tasks",
            "Tasks on the event loop; what is left when nothing runs has leaked.",
            registry=registry,
        )
        self._missing = _missing_gauge(registry)

    def start(self, route: str, priority_class: str, arrived_s: float) -> RequestMeter:
        """A generation begins.

        Args:
            route: the template of its route.
            priority_class: of its pool.
            arrived_s: when the HTTP request arrived, on `now`'s clock.
        """
        known = priority_class in self._priority_classes
        labels = (route, self._model_name, priority_class if known else OTHER)
        return RequestMeter(self, labels, arrived_s)

    def rejected(self, route: str, status: int, code: str | None) -> None:
        """A request is answered with an error status; `code` is the error body's."""
        self._rejected.labels(route, str(status), code or "none").inc()

    async def watch(
        self,
        parts: AsyncGenerator[Part, None],
        route: str,
        priority_class: str,
        arrived_s: float,
    ) -> AsyncGenerator[Part, None]:
        """An answer as it was, taken in on the way. It has begun once it is first read, and is an
        abort if it is closed before its end. Closing this closes `parts`.
        """
        meter = self.start(route, priority_class, arrived_s)
        try:
            async for part in parts:
                meter.saw(part.num_output_tokens)
                if part.error is not None:
                    meter.failed()
                elif part.finish_reason is not None:
                    meter.ended(part.finish_reason)
                yield part
        finally:
            meter.ended(FinishReason.ABORT)
            await parts.aclose()

    def render(self, pool: PoolMetrics) -> bytes:
        """The whole page: own families and the replicas', each series with where it comes from."""
        self._missing.set(pool.num_missing)
        page = _Page()
        page.add(generate_latest(self._registry), {"ingress_replica": self._replica})
        for replica in pool.pages:
            origin = {"deployment": replica.deployment, "replica": replica.replica}
            page.add(replica.text, origin)
        return page.text()


def _missing_gauge(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "chunkserve_metrics_replicas_missing",
        "Replicas that did not answer in time for this page.",
        registry=registry,
    )


class _Page:
    """Pages of several registries put together, each family once.

    Works on lines, as prometheus_client writes them: to parse and write a replica's page again
    takes 14 ms of the interpreter, and an ingress has streams to serve.
    """

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def add(self, text: bytes, origin: Mapping[str, str]) -> None:
        """One more page; each of its series gets the labels of its origin."""
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in origin.items())
        lines: list[str] = []
        is_new = False
        for line in text.decode().split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in self._families
                lines = self._families.setdefault(name, [])
            if line.startswith("#"):
                if is_new:
                    lines.append(line)
            elif line:
                lines.append(_with_labels(line, labels))

    def text(self) -> bytes:
        """The whole page."""
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines).encode()


def _with_labels(line: str, labels: str) -> str:
    # The value of a series without labels holds no brace; what is within braces may hold any.
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{labels},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{labels}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def metrics_response(metrics: IngressMetrics, source: MetricsSource) -> Response:
    """The answer of GET /metrics."""
    metrics.num_tasks.set(len(asyncio.all_tasks()))
    body = metrics.render(await source.metrics())
    return Response(body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def route_template(scope: Mapping[str, Any]) -> str:
    """The template of the route that serves a request, e.g. "/v1/models/{model_id}", never the
    path its client wrote.
    """
    return str(getattr(scope.get("route"), "path", UNMATCHED))
