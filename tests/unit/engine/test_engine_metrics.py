"""The numbers of a replica: right on schedules that can be counted by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from doubles import FaultyExecutor, make_limits, make_request
from metrics_tools import MeteredEngine, read_page, registry_of
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from thread_tools import GatedExecutor, eventually

from deployments.engine.engine_thread import EngineThread
from deployments.metrics import Tally

NAMES = {
    "chunkserve_num_requests_running": "gauge",
    "chunkserve_num_requests_waiting": "gauge",
    "chunkserve_kv_cache_usage_perc": "gauge",
    "gpu_utilization_prefill": "gauge",
    "gpu_utilization_decode": "gauge",
    "batch_size_decode": "gauge",
    "gpu_memory_usage": "gauge",
    "chunkserve_prompt_tokens": "counter",
    "chunkserve_generation_tokens": "counter",
    "chunkserve_prefix_cache_queries": "counter",
    "chunkserve_prefix_cache_hits": "counter",
    "chunkserve_num_preemptions": "counter",
    "chunkserve_forced_chunks": "counter",
    "chunkserve_request_success": "counter",
    "chunkserve_failed_steps": "counter",
    "chunkserve_step_duration_seconds": "histogram",
    "chunkserve_iteration_tokens_total": "histogram",
    "chunkserve_prefill_chunk_duration_seconds": "histogram",
    "chunkserve_inter_token_latency_seconds": "histogram",
    "chunkserve_engine_time_to_first_token_seconds": "histogram",
    "chunkserve_request_queue_time_seconds": "histogram",
    "chunkserve_request_prefill_time_seconds": "histogram",
    "chunkserve_request_decode_time_seconds": "histogram",
    "chunkserve_request_prompt_tokens": "histogram",
    "chunkserve_request_generation_tokens": "histogram",
}
"""The contract with dashboards and alerts: a name or a type that changes breaks them."""


def names_of(registry: CollectorRegistry) -> dict[str, str]:
    page = generate_latest(registry).decode()
    return {family.name: family.type for family in text_string_to_metric_families(page)}


def test_names_and_types_are_those_that_dashboards_know() -> None:
    """A metric was renamed, dropped or changed its type."""
    metered = MeteredEngine()
    registry = registry_of(metered.meters, metered.engine.stats, find_used_bytes=lambda: 7)
    assert names_of(registry) == NAMES


def test_the_documentation_names_them_all() -> None:
    """A metric is there that nobody can look up."""
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    shown = [f"{name}_total" if kind == "counter" else name for name, kind in NAMES.items()]
    assert [name for name in shown if f"| `{name}` |" not in page] == []


def test_what_cannot_be_measured_is_absent() -> None:
    """Without a GPU its memory is shown as 0 bytes, or hits of a cache that is off as none."""
    metered = MeteredEngine()
    registry = registry_of(metered.meters, metered.engine.stats, has_prefix_cache=False)
    missing = set(NAMES) - set(names_of(registry))
    assert missing == {
        "gpu_memory_usage",
        "chunkserve_prefix_cache_queries",
        "chunkserve_prefix_cache_hits",
    }


def test_numbers_of_one_request_are_those_of_its_schedule() -> None:
    """Two chunks of 8, the second gives the first token, then two decodes; each step 1/8 s."""
    metered = MeteredEngine(chunk_size=8)
    metered.run(make_request(16, max_tokens=3, ignore_eos=True))
    expected = {
        "prompt_tokens_total": 16,
        "generation_tokens_total": 3,
        "iteration_tokens_total_count": 4,
        "iteration_tokens_total_sum": 18,
        "step_duration_seconds_sum{part=execute}": 0.5,
        "step_duration_seconds_count{part=schedule}": 4,
        "step_duration_seconds_count{part=update}": 4,
        "prefill_chunk_duration_seconds_count": 2,
        "prefill_chunk_duration_seconds_sum": 0.25,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.25,
        "engine_time_to_first_token_seconds_count": 1,
        "engine_time_to_first_token_seconds_sum": 0.25,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 0,
        "request_prefill_time_seconds_sum": 0.25,
        "request_decode_time_seconds_sum": 0.25,
        "request_prompt_tokens_sum": 16,
        "request_generation_tokens_sum": 3,
        "request_success_total{finished_reason=length}": 1,
        "request_success_total{finished_reason=abort}": 0,
        "failed_steps_total": 0,
        "num_requests_running": 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: metered[name] for name in expected} == expected


def test_gauges_show_the_batch_while_it_runs_and_nothing_after() -> None:
    """A gauge shows what was, or its share of the cache is not that of the blocks held."""
    metered = MeteredEngine(limits=make_limits(num_blocks=65, block_size=4), max_num_seqs=2)
    for _ in range(3):
        metered.engine.add(make_request(8, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        metered.engine.step()
    assert metered["num_requests_running"] == 2
    assert metered["num_requests_waiting"] == 1
    assert metered["batch_size_decode"] == 2
    held = metered.engine.stats().num_blocks - metered.engine.stats().num_free_blocks
    assert metered["kv_cache_usage_perc"] == held / 64 > 0
    metered.run()
    assert metered["batch_size_decode"] == metered["num_requests_running"] == 0


def test_utilisation_is_split_by_tokens_and_decays_with_time() -> None:
    """A mixed step counts twice or for one kind alone, or an idle device stays busy."""
    metered = MeteredEngine(chunk_size=8)
    metered.engine.add(make_request(8, max_tokens=30, ignore_eos=True))
    metered.engine.step()  # 8 prefill tokens, from 0 to 1/8 s
    metered.engine.add(make_request(3, max_tokens=30, ignore_eos=True))
    metered.engine.step()  # 3 prefill tokens and 1 decode, to 2/8 s
    assert metered["gpu_utilization_prefill"] == (0.125 + 0.75 * 0.125) / 0.25
    assert metered["gpu_utilization_decode"] == 0.25 * 0.125 / 0.25
    metered.clock.advance(9.75)  # now 10 s
    assert metered["gpu_utilization_prefill"] == pytest.approx(0.021875)
    metered.clock.advance(0.125)  # the first step has left the window
    assert metered["gpu_utilization_prefill"] == pytest.approx(0.009375)
    assert metered["gpu_utilization_decode"] == pytest.approx(0.003125)
    metered.clock.advance(0.0625)  # and half of the second
    assert metered["gpu_utilization_prefill"] == pytest.approx(0.0046875)
    metered.clock.advance(1.0)
    assert metered["gpu_utilization_prefill"] == metered["gpu_utilization_decode"] == 0


def test_utilisation_of_many_short_steps_is_their_sum() -> None:
    """Steps that are put together to bound their number lose time, or are not put together."""
    metered = MeteredEngine(step_s=1 / 4096, max_num_seqs=1)
    metered.run(make_request(8, max_tokens=200, ignore_eos=True))
    assert metered["gpu_utilization_decode"] == pytest.approx(199 / 200)
    assert len(metered.meters._busy._work) < 10


def test_only_requests_with_a_first_token_have_a_time_to_it() -> None:
    """B71: times to first token were counted for each chunk, also of requests that ended without
    one, or all as 0 s because waiting in the queue was left out.
    """
    metered = MeteredEngine(chunk_size=8, max_num_seqs=4)
    metered.clock.advance(1.0)
    requests = [make_request(40, max_tokens=2, ignore_eos=True) for _ in range(10)]
    for request in requests:
        metered.engine.add(request)
    metered.engine.step()
    first = metered.executor.steps[0].scheduled[0].request
    assert 0 < first.num_computed_tokens < 40
    metered.engine.abort(first.request_id)  # in the middle of its prefill
    metered.engine.abort(requests[-1].request_id)  # in the queue
    metered.run()
    assert metered["engine_time_to_first_token_seconds_count"] == 8
    num_chunks = sum(
        len(step.scheduled) - step.num_decode_tokens for step in metered.executor.steps
    )
    assert metered["prefill_chunk_duration_seconds_count"] == num_chunks > 8 * 5
    assert metered["request_queue_time_seconds_count"] == 10
    assert metered["engine_time_to_first_token_seconds_bucket{le=0.5}"] == 0
    # The one that was aborted in the queue had waited for one step.
    queued_s = metered["request_queue_time_seconds_sum"] - 0.125
    assert queued_s > 0
    prefill_s = metered["request_prefill_time_seconds_sum"]
    assert metered["engine_time_to_first_token_seconds_sum"] == queued_s + prefill_s


def test_an_abort_in_the_last_step_is_an_abort() -> None:
    """B53: a request aborted while its last chunk ran was booked as a success, and its token was
    counted.
    """
    metered = MeteredEngine()
    request = make_request(8, max_tokens=1)
    metered.engine.add(request)
    metered.engine.step(lambda: metered.engine.abort(request.request_id) and None)
    assert metered["request_success_total{finished_reason=abort}"] == 1
    assert metered["request_success_total{finished_reason=length}"] == 0
    assert metered["request_success_total{finished_reason=stop}"] == 0
    assert metered["generation_tokens_total"] == 0
    assert metered["engine_time_to_first_token_seconds_count"] == 0
    assert metered["request_generation_tokens_count"] == 1


def test_gauges_fall_after_a_mass_cancel_without_new_traffic() -> None:
    """B70: all requests were cancelled at once, and the gauges kept their last busy values until
    the next step, so that a router never sent work there again.
    """
    executor = GatedExecutor(make_limits(num_blocks=64))
    metered = MeteredEngine(executor=executor, max_num_seqs=4)
    thread = EngineThread(metered.engine, metered.clock, stuck_after_s=100.0)
    registry = registry_of(metered.meters, thread.stats)

    def page() -> dict[str, float]:
        return read_page(generate_latest(registry))

    async def main() -> None:
        executor.let_through(3)
        streams = [thread.generate(make_request(8, max_tokens=50)) for _ in range(6)]
        reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await eventually(lambda: page()["chunkserve_num_requests_running"] == 4)
        assert page()["chunkserve_kv_cache_usage_perc"] > 0
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        executor.let_through(1)  # the one that runs; no other follows
        await eventually(lambda: page()["chunkserve_num_requests_running"] == 0)
        await eventually(lambda: page()["chunkserve_num_requests_waiting"] == 0)
        assert page()["chunkserve_kv_cache_usage_perc"] == 0
        assert page()["batch_size_decode"] == 0
        ended = page()["chunkserve_request_success_total{finished_reason=abort}"]
        assert ended == 6

    thread.start()
    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        executor.open()
        thread.stop()


def test_every_accepted_request_is_counted_once() -> None:
    """A request that is preempted, aborted twice or fails is counted twice, or not at all."""
    limits = make_limits(num_blocks=14, block_size=4)
    metered = MeteredEngine(limits=limits, max_num_seqs=4)
    requests = [make_request(8, max_tokens=24, ignore_eos=True) for _ in range(6)]
    for request in requests:
        metered.engine.add(request)
    metered.engine.step()
    for _ in range(2):
        metered.engine.abort(requests[5].request_id)
    metered.run()
    assert metered["num_preemptions_total"] > 0
    reasons = ("stop", "length", "abort", "error")
    ended = [metered[f"request_success_total{{finished_reason={reason}}}"] for reason in reasons]
    assert ended == [0, 5, 1, 0]
    assert metered["request_prompt_tokens_count"] == 6
    assert metered["generation_tokens_total"] == 5 * 24
    # Each token but the first has a gap, and the gaps of a request add up, preempted or not.
    assert metered["inter_token_latency_seconds_count"] == 5 * 23
    gaps_s = metered["inter_token_latency_seconds_sum"]
    assert gaps_s == pytest.approx(metered["request_decode_time_seconds_sum"])


def test_prefix_hits_are_tokens_of_the_prompts_that_began() -> None:
    """Hits are counted in blocks, or at the end of a request, or again at each chunk."""
    metered = MeteredEngine(chunk_size=8)
    prompt = list(range(1, 22))
    metered.run(make_request(prompt, max_tokens=1))
    assert (metered["prefix_cache_queries_total"], metered["prefix_cache_hits_total"]) == (21, 0)
    metered.engine.add(make_request(prompt, max_tokens=30, ignore_eos=True))
    metered.engine.step()
    assert (metered["prefix_cache_queries_total"], metered["prefix_cache_hits_total"]) == (42, 20)
    metered.run()
    assert (metered["prefix_cache_queries_total"], metered["prefix_cache_hits_total"]) == (42, 20)


def test_forced_chunks_and_failed_steps_are_counted() -> None:
    """A chunk that was forced, or a step that raised, leaves no trace."""
    metered = MeteredEngine(chunk_size=8, max_num_seqs=1, batch_timeout_ms=50)
    metered.run(make_request(16), make_request(16))
    assert metered["forced_chunks_total"] == metered.engine.stats().num_forced_chunks > 0

    faulty = MeteredEngine(executor=FaultyExecutor(raise_in={0: RuntimeError("no luck")}))
    faulty.run(make_request(8))
    assert faulty["failed_steps_total"] == 1
    assert faulty["request_success_total{finished_reason=error}"] == 1
    assert faulty["iteration_tokens_total_count"] == 0


@pytest.mark.parametrize("num_decodes", [1, 64])
def test_a_step_costs_as_many_observations_for_one_decode_as_for_many(
    num_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of counting grows with the batch."""
    metered = MeteredEngine(max_num_seqs=64, limits=make_limits(num_blocks=1024))
    for _ in range(num_decodes):
        metered.engine.add(make_request(4, max_tokens=50, ignore_eos=True))
    while metered["batch_size_decode"] < num_decodes:
        metered.engine.step()
    added: list[int] = []
    add = Tally.add

    def counting(self: Tally, value: float, count: int = 1) -> None:
        added.append(count)
        add(self, value, count)

    monkeypatch.setattr(Tally, "add", counting)
    metered.engine.step()
    assert len(metered.executor.steps[-1].scheduled) == num_decodes
    assert len(added) == 5
    assert max(added) == num_decodes


def test_a_page_does_not_grow_with_what_was_served() -> None:
    """A series is made for each request, so that a page grows for ever; or a page reads the
    engine's state more than once, and contradicts itself.
    """
    metered = MeteredEngine()
    reads: list[None] = []
    registry = registry_of(metered.meters, lambda: (reads.append(None), metered.engine.stats())[1])
    before = read_page(generate_latest(registry))
    metered.run(*(make_request(8) for _ in range(50)))
    assert read_page(generate_latest(registry)).keys() == before.keys()
    assert len(reads) == 2
    assert len(before) < 400


def test_a_tally_counts_as_the_library_does() -> None:
    """A value on a bound falls into the wrong bucket, or many at once are not as many one by
    one.
    """
    from prometheus_client import Histogram

    bounds = (0.5, 1.0, 2.5)
    registry = CollectorRegistry()
    library, ours = Histogram("x", "x", buckets=bounds, registry=registry), Tally(bounds)
    for value, count in ((0.1, 3), (0.5, 1), (0.6, 2), (1.0, 4), (2.5, 1), (9.0, 2)):
        ours.add(value, count)
        for _ in range(count):
            library.observe(value)
    page = read_page(generate_latest(registry))
    assert {f"x_bucket{{le={name}}}": count for name, count in ours.buckets()} == {
        name: value for name, value in page.items() if name.startswith("x_bucket")
    }
    assert ours.sum == pytest.approx(page["x_sum"])
