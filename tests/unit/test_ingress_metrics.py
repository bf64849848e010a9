"""The numbers of an ingress, and the one page with those of all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import httpx
import pytest
from api_doubles import ScriptedBackend
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client.parser import text_string_to_metric_families

from deployments.engine.clock import VirtualClock
from deployments.protocol import ErrorInfo, ErrorKind, FinishReason, ReplicaMetrics
from serve_app.metrics import (
    IngressMetrics,
    PoolMetrics,
    RequestMeter,
    metrics_response,
    route_template,
)
from serve_app.streaming import TextDelta

NAMES = {
    "chunkserve_time_to_first_token_seconds": "histogram",
    "chunkserve_e2e_request_latency_seconds": "histogram",
    "chunkserve_ingress_requests_in_progress": "gauge",
    "chunkserve_ingress_generation_tokens": "counter",
    "chunkserve_ingress_requests_ended": "counter",
    "chunkserve_ingress_requests_rejected": "counter",
    "chunkserve_asyncio_tasks": "gauge",
    "chunkserve_metrics_replicas_missing": "gauge",
}
"""The contract with dashboards and alerts: a name or a type that changes breaks them."""

ROUTE = "/v1/completions"
NO_POOL = PoolMetrics((), 0)
ENGINE_FAILED = ErrorInfo(ErrorKind.ENGINE, "no luck")


def make_metrics(clock: VirtualClock | None = None) -> IngressMetrics:
    now = (clock or VirtualClock()).now
    return IngressMetrics("tiny", ["chat", "batch"], "i1", now)


def started(metrics: IngressMetrics) -> RequestMeter:
    return metrics.start(ROUTE, "chat", metrics.now())


def series_of(page: bytes, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The series of a sample name, by their labels without the ingress' own."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name == name:
                labels = {k: v for k, v in sample.labels.items() if k != "ingress_replica"}
                found[tuple(sorted(labels.items()))] = sample.value
    return found


def total(metrics: IngressMetrics, name: str) -> float:
    """The sum over all series of a name."""
    return sum(series_of(metrics.render(NO_POOL), f"chunkserve_{name}").values())


def ended(metrics: IngressMetrics) -> dict[str, float]:
    """How many ended, by reason."""
    page = metrics.render(NO_POOL)
    series = series_of(page, "chunkserve_ingress_requests_ended_total")
    return {dict(labels)["finished_reason"]: value for labels, value in series.items()}


async def parts_of(
    parts: Sequence[TextDelta], closed: list[bool] | None = None
) -> AsyncGenerator[TextDelta, None]:
    try:
        for part in parts:
            yield part
    finally:
        if closed is not None:
            closed.append(True)


def watched(metrics: IngressMetrics, parts: Sequence[TextDelta]) -> None:
    """Read an answer to its end."""

    async def read() -> None:
        answer = metrics.watch(parts_of(parts), ROUTE, "chat", metrics.now())
        assert [part async for part in answer] == list(parts)

    asyncio.run(read())


def test_names_and_types_are_those_that_dashboards_know() -> None:
    """A metric was renamed, dropped or changed its type."""
    metrics = make_metrics()
    started(metrics)
    metrics.rejected(ROUTE, 400, None)
    families = text_string_to_metric_families(metrics.render(NO_POOL).decode())
    assert {family.name: family.type for family in families} == NAMES


def test_the_documentation_names_them_all() -> None:
    """A metric is there that nobody can look up."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    shown = [f"{name}_total" if kind == "counter" else name for name, kind in NAMES.items()]
    assert [name for name in shown if f"| `{name}` |" not in page] == []


def test_times_run_from_the_arrival_before_tokenising() -> None:
    """B71: a time to first token that starts after tokenising and routing shows 0 s for all."""
    clock = VirtualClock()
    metrics = make_metrics(clock)
    arrived_s = metrics.now()
    clock.advance(0.25)  # tokenising
    meter = metrics.start(ROUTE, "chat", arrived_s)
    clock.advance(0.5)
    meter.saw(1)
    meter.saw(1)
    clock.advance(0.25)
    meter.saw(4)
    meter.ended(FinishReason.LENGTH)
    assert total(metrics, "time_to_first_token_seconds_count") == 1
    assert total(metrics, "time_to_first_token_seconds_sum") == 0.75
    assert total(metrics, "e2e_request_latency_seconds_sum") == 1.0
    assert total(metrics, "ingress_generation_tokens_total") == 4


def test_a_request_ends_once_and_leaves_nothing_in_progress() -> None:
    """An answer that ended is counted once more when what carried it is closed."""
    metrics = make_metrics()
    meters = [started(metrics) for _ in range(3)]
    assert total(metrics, "ingress_requests_in_progress") == 3
    for meter in meters:
        meter.ended(FinishReason.STOP)
        meter.ended(FinishReason.ABORT)
        meter.failed()
    assert total(metrics, "ingress_requests_in_progress") == 0
    assert ended(metrics) == {"stop": 3}


def test_a_watched_answer_is_counted_as_its_client_saw_it() -> None:
    """A stop string or a length is booked as an abort, or tokens are counted twice."""
    metrics = make_metrics()
    stop = TextDelta("b", num_output_tokens=3, finish_reason=FinishReason.STOP)
    watched(metrics, [TextDelta("a", num_output_tokens=2), stop])
    watched(metrics, [TextDelta("", num_output_tokens=1, finish_reason=FinishReason.LENGTH)])
    assert ended(metrics) == {"stop": 1, "length": 1}
    assert total(metrics, "ingress_generation_tokens_total") == 4
    assert total(metrics, "time_to_first_token_seconds_count") == 2


def test_an_answer_left_early_is_an_abort_and_closes_what_feeds_it() -> None:
    """B53: a client that left is booked as served, or its tokens are still produced."""
    metrics = make_metrics()
    closed: list[bool] = []

    async def leave() -> None:
        parts = parts_of([TextDelta("a", num_output_tokens=1), TextDelta("b")], closed)
        answer = metrics.watch(parts, ROUTE, "chat", 0.0)
        await anext(answer)
        await answer.aclose()
        assert closed == [True]

    asyncio.run(leave())
    assert ended(metrics) == {"abort": 1}
    assert total(metrics, "ingress_requests_in_progress") == 0


def test_an_answer_that_is_never_read_has_never_begun() -> None:
    """A generator that never started closes nothing, so that its request stays in progress for
    ever.
    """
    metrics = make_metrics()

    async def drop() -> None:
        await metrics.watch(parts_of([]), ROUTE, "chat", 0.0).aclose()

    asyncio.run(drop())
    assert total(metrics, "ingress_requests_in_progress") == 0
    assert ended(metrics) == {}


def test_an_error_before_the_first_token_is_a_refusal_and_after_it_an_end() -> None:
    """A refused request is booked both as rejected and as ended, or a broken one as neither."""
    metrics = make_metrics()
    watched(metrics, [TextDelta(error=ENGINE_FAILED)])
    assert ended(metrics) == {}
    assert total(metrics, "time_to_first_token_seconds_count") == 0
    broken = TextDelta("a", num_output_tokens=1)
    watched(metrics, [broken, TextDelta(num_output_tokens=1, error=ENGINE_FAILED)])
    assert ended(metrics) == {"error": 1}
    assert total(metrics, "ingress_requests_in_progress") == 0


def test_labels_hold_nothing_that_a_client_chose() -> None:
    """A label takes what clients write, so that each of them can add series without end."""
    metrics = make_metrics()
    for index in range(100):
        metrics.start(ROUTE, f"class-{index}", 0.0).ended(FinishReason.STOP)
    page = metrics.render(NO_POOL)
    assert [
        dict(labels)["priority_class"]
        for labels in series_of(page, "chunkserve_ingress_requests_ended_total")
    ] == ["other"]


def make_api(metrics: IngressMetrics) -> FastAPI:
    api = FastAPI()
    backend = ScriptedBackend()

    @api.get("/metrics")
    async def page() -> Response:
        return await metrics_response(metrics, backend)

    @api.get("/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> str:
        return route_template(request.scope)

    @api.exception_handler(404)
    async def missing(request: Request, error: Exception) -> Response:
        return Response(route_template(request.scope))

    return api


def get(metrics: IngressMetrics, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_api(metrics))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_a_route_is_its_template() -> None:
    """The label of a route is the path that a client wrote."""
    metrics = make_metrics()
    assert get(metrics, "/models/a/b").json() == "/models/{model_id:path}"
    assert get(metrics, "/anything").text == "unmatched"


def test_the_page_says_what_it_is() -> None:
    """Prometheus refuses a page whose Content-Type it does not know."""
    answer = get(make_metrics(), "/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


REPLICA_PAGE = b"""# HELP chunkserve_x_total What {happened}.
# TYPE chunkserve_x_total counter
chunkserve_x_total{reason="a b",odd="}{ \\\\ \\"q\\" \\n"} 2.0
# HELP batch_size_decode Decodes.
# TYPE batch_size_decode gauge
batch_size_decode 1e+16
"""


def test_pages_of_replicas_become_one_with_each_family_once() -> None:
    """A family's TYPE is on the page twice, which Prometheus refuses; or two replicas share a
    series; or a label's own braces and quotes are taken for the end of the labels.
    """
    pages = tuple(ReplicaMetrics("engine", name, REPLICA_PAGE) for name in ("r1", 'r"2\\'))
    page = make_metrics().render(PoolMetrics(pages, 0))
    assert page.count(b"# TYPE chunkserve_x_total counter\n") == 1
    assert page.count(b"# HELP chunkserve_x_total ") == 1
    odd = {"reason": "a b", "odd": '}{ \\ "q" \n', "deployment": "engine"}
    expected = [tuple(sorted({**odd, "replica": name}.items())) for name in ("r1", 'r"2\\')]
    assert series_of(page, "chunkserve_x_total") == dict.fromkeys(expected, 2.0)
    gauges = [
        tuple(sorted({"deployment": "engine", "replica": name}.items())) for name in ("r1", 'r"2\\')
    ]
    assert series_of(page, "batch_size_decode") == dict.fromkeys(gauges, 1e16)


def test_own_series_say_which_ingress_they_are_of() -> None:
    """Two ingress replicas behind one address give the same series in turns."""
    metrics = make_metrics()
    started(metrics)
    for family in text_string_to_metric_families(metrics.render(NO_POOL).decode()):
        assert all(sample.labels["ingress_replica"] == "i1" for sample in family.samples)


@pytest.mark.parametrize("num_missing", [0, 2])
def test_a_replica_that_does_not_answer_is_counted(num_missing: int) -> None:
    """A replica is left out of the page and nothing tells."""
    page = make_metrics().render(PoolMetrics((), num_missing))
    assert list(series_of(page, "chunkserve_metrics_replicas_missing").values()) == [num_missing]
