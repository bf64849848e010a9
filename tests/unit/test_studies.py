"""What the simulator shows, pinned as far as it is the same on every machine: small runs of the
studies whose results are kept under loadtest/results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest

from deployments.execution.cost_model import CostModel
from loadtest.converters import find_trace, load_trace
from loadtest.simulate import simulate
from loadtest.studies import capacity, fidelity, fleet, prefixes
from loadtest.studies.capacity import RELAXED, STRICT, Setting
from loadtest.trace import HASH_BLOCK_TOKENS, TraceError, TraceRequest

CONVERSATION_5MIN = "mooncake_fast25_conversation_first5min.jsonl"


def needs(name: str) -> pytest.MarkDecorator:
    """Skip where a trace is not there, and say which."""
    try:
        find_trace(name)
    except TraceError:
        return pytest.mark.skipif(True, reason=f"needs the trace {name}")
    return pytest.mark.skipif(False, reason="")


@needs(fidelity.WORKLOAD)
@pytest.mark.parametrize("run", fidelity.RUNS, ids=[run.name for run in fidelity.RUNS])
def test_a_simulated_run_is_close_to_the_measured_one(run: fidelity.MeasuredRun) -> None:
    """What the simulator says of a GPU is not what was measured on it."""
    errors = fidelity.compare(run, enable_prefix_caching=True)["error_pct"]
    assert set(errors) == {"mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"}
    assert max(map(abs, errors.values())) < 5.0


@needs(capacity.LENGTHS)
@pytest.mark.parametrize(
    ("setting", "num_requests", "rate", "gains"),
    [
        (STRICT, 150, 3.5, {"prefill-first": 2.4, "orca": 2.7}),
        (RELAXED, 400, 3.3, {"prefill-first": 1.3, "orca": 1.9}),
    ],
    ids=["strict", "relaxed"],
)
def test_chunking_serves_a_rate_that_others_serve_a_fraction_of(
    setting: Setting, num_requests: int, rate: float, gains: dict[str, float]
) -> None:
    """Chunked prefill gains less than Sarathi-Serve says, or nothing."""
    workload = capacity.sample_workload(load_trace(capacity.LENGTHS), num_requests, seed=0)
    cost_model = CostModel.load("a100-llama3-8b")

    def is_served(policy: str, rate: float) -> bool:
        served_by = capacity.fleet_for(policy, cost_model, setting)
        return capacity.measure(served_by, workload, rate, setting).is_sustained

    assert is_served("chunked", rate)
    assert not any(is_served(policy, rate / gain) for policy, gain in gains.items())


@needs(fleet.CONVERSATIONS)
def test_a_twentieth_of_the_traffic_needs_a_twentieth_of_the_fleet() -> None:
    """The fewest GPUs are not the fewest, or grow otherwise than the traffic."""
    trace = fleet.conversation_mix(load_trace(fleet.CONVERSATIONS), 50.0, 300, seed=0)
    cost_model = CostModel.load("h100-llama3-8b")
    target = fleet.Target(50.0, p99_ttft_s=0.3)
    results = {num: simulate(trace, fleet.fleet_of(cost_model, num)) for num in (1, 3)}
    assert fleet.meets(results[3], target)
    assert not fleet.meets(results[1], target)


def test_the_busiest_second_is_found() -> None:
    """The burst is cut short, or is not the largest."""
    moments = [0.0, 2.0, 2.1, 2.9, 3.0, 3.1, 5.0]
    busiest = fleet.find_busiest([TraceRequest(moment, 10, 1) for moment in moments])
    assert [traced.timestamp_s for traced in busiest] == pytest.approx([0.0, 0.1, 0.9])


@needs(fleet.CODE)
def test_the_burst_of_coding_requests_has_67() -> None:
    """Another burst than the busiest second is sent to the fleet."""
    assert len(fleet.find_busiest(load_trace(fleet.CODE))) == 67


def lru_hit_rate(trace: Sequence[TraceRequest], num_blocks: int) -> float:
    """What an LRU of whole blocks finds, written down once more without any of the engine."""
    held: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for traced in trace:
        # A block that is not full, or holds the last token, is computed again.
        ids = traced.hash_ids[: (traced.input_length - 1) // HASH_BLOCK_TOKENS]
        num_hits = next((i for i, name in enumerate(ids) if name not in held), len(ids))
        num_found += num_hits * HASH_BLOCK_TOKENS
        for name in reversed(traced.hash_ids[: traced.input_length // HASH_BLOCK_TOKENS]):
            held[name] = None
            held.move_to_end(name)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return num_found / sum(traced.input_length for traced in trace)


@needs(CONVERSATION_5MIN)
def test_the_cache_manager_finds_what_an_lru_of_its_size_finds() -> None:
    """The KV cache manager keeps the wrong blocks, or less than its size."""
    trace = load_trace(CONVERSATION_5MIN)
    requests = prefixes.make_requests(trace)
    for num_tokens in (256_000, 1_000_000, None):
        expected = lru_hit_rate(trace, (num_tokens or 10**9) // HASH_BLOCK_TOKENS)
        assert prefixes.token_hit_rate(requests, num_tokens) == pytest.approx(expected, abs=0.003)
    # 20.7 % if also blocks that are not full could be found.
    assert prefixes.token_hit_rate(requests, None) == pytest.approx(0.207, abs=0.01)
